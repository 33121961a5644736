"""Partitions that were saved: by a run in its partition.json, or under a name of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.data import partition_cache
from fedhet.data.scheme import Partition, Scheme, labels_digest
from fedhet.errors import ConfigError, DataError

_NAME = re.compile(r"\w[\w.+-]*")
_NEEDED = {
    "name": str,
    "hash": str,
    "labels": str,
    "samples": int,
    "settings": dict,
    "owners": list,
    "indices": list,
}


def place(name: str) -> Path:
    """Where the partition that is saved as `name` lies, or would lie."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name}: a name has letters, digits and _ . + - only, and begins with a letter,"
            " a digit or _"
        )
    return partition_cache.folder() / f"{name}.json"


def read(name: str) -> tuple[Path, dict[str, Any]]:
    """The file that `partition.name` means (a saved name, a run's folder or a partition.json) and
    what it holds.

    Raises:
        ConfigError: there is no such partition.
        DataError: the file is damaged, or lacks what a partition needs.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"partition.name={name!r}: give a saved name, a run's folder, or the path of a"
            " partition.json"
        )
    places = [place(name)] if _NAME.fullmatch(name) else []
    places += [Path(name).expanduser() / "partition.json", Path(name).expanduser()]
    path = next((each for each in places if each.is_file()), None)
    if path is None:
        saved = (
            ", ".join(sorted(each.stem for each in partition_cache.folder().glob("*.json")))
            or "none"
        )
        raise ConfigError(
            f"partition.name={name}: neither a run's folder, nor a partition.json, nor a saved"
            f" name; saved are: {saved}"
        )
    try:
        found = json.loads(path.read_text())
        wrong = [key for key, kind in _NEEDED.items() if not isinstance(found.get(key), kind)]
    except (ValueError, AttributeError) as error:  # no JSON, or no mapping
        raise DataError(f"{path} is damaged: expected a partition.json ({error})") from error
    if wrong:
        raise DataError(
            f"{path} is no partition that can be used again: {', '.join(wrong)} missing or of"
            " another kind"
        )
    return path, found


def save(name: str, about: dict[str, Any]) -> Path:
    """Saves partition.json's content as `name`; ConfigError where another partition has that name.
    Concurrent processes may save it."""
    from fedhet.record.run_folder import write_json

    path = place(name)
    if path.exists() and (taken := _identity(read(name)[1])) != (wanted := _identity(about)):
        raise ConfigError(
            f"--name {name}: {path} is another partition, {taken}, not {wanted}; choose another"
            " name or remove it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, about, indent=None)
    return path


def _identity(about: dict[str, Any]) -> str:
    return ", ".join(
        [about["hash"], *(f"{key} {about['settings'].get(key)}" for key in ("split", "noise"))]
    )


@dataclass(frozen=True, kw_only=True)
class Saved(Scheme):
    """A saved partition, of the same data.

    Args: name: what `python -m fedhet.data partition --name` was given, a run's folder, or the path
        of a partition.json. split, noise: None: as they were saved.
    """

    split: Sequence[float] | None  # type: ignore[assignment]
    noise: float | None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        path, found = read(self.name)
        for key in ("split", "noise"):
            if getattr(self, key) is None:
                if key not in found["settings"]:
                    raise DataError(f"{path}: its settings have no {key}; give partition.{key}")
                object.__setattr__(self, key, found["settings"][key])
        super().__post_init__()

    def assign(
        self,
        labels: np.ndarray,
        seed: int,
        owners: np.ndarray | None = None,
        owner_names: Sequence[str] = (),
    ) -> Partition:
        """The saved one, whatever the seed.

        Raises:
            ConfigError: it was made for other data.
            DataError: its indices are not those that were saved.
        """
        path, found = read(self.name)
        if (found["samples"], found["labels"]) != (len(labels), labels_digest(labels)):
            raise ConfigError(
                f"partition.name={self.name}: {path} is of other data, {found['samples']} samples"
                f" with the labels' digest {found['labels']}; these are {len(labels)} with"
                f" {labels_digest(labels)}"
            )
        try:
            partition = Partition(
                found["name"],
                [np.array(each, dtype=np.int64) for each in found["indices"]],
                tuple(found["owners"]),
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"{path} is damaged: its indices are no lists of whole numbers ({error})"
            ) from error
        if partition.hash != found["hash"]:
            raise DataError(
                f"{path} is damaged: its indices have the hash {partition.hash}, not"
                f" {found['hash']}"
            )
        return partition

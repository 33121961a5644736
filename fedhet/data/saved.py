"""Saved partitions: those that a run wrote to its partition.json, and those saved under a name."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.core.check import counted
from fedhet.core.errors import ConfigError, DataError
from fedhet.data.files import cache_root, permitted
from fedhet.data.scheme import Partition, Scheme, labels_digest

_NAME = re.compile(r"\w[\w.+-]*")
_REQUIRED = {
    "name": str,
    "hash": str,
    "labels": str,
    "samples": int,
    "settings": dict,
    "owners": list,
    "indices": list,
}


def path_of(name: str) -> Path:
    """The file of the partition that is or will be saved as `name`.

    Raises:
        ConfigError: the name is not allowed.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name}: a name consists of letters, digits and _ . + - and begins with a"
            " letter, a digit or _"
        )
    return cache_root() / "partitions" / f"{name}.json"


def read(name: str) -> tuple[Path, dict[str, Any]]:
    """The file that `partition.name` refers to, and its content.

    Args:
        name: a saved name, a run folder, or the path of a partition.json.

    Raises:
        ConfigError: there is no such partition.
        DataError: the file is damaged, or lacks something that a partition needs.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"partition.name={name!r}: give a saved name, a run folder, or the path of a"
            " partition.json"
        )
    given = Path(name).expanduser()
    own = [path_of(name)] if _NAME.fullmatch(name) else []
    path = next((path for path in (*own, given / "partition.json", given) if path.is_file()), None)
    if path is None:
        saved = sorted(path.stem for path in (cache_root() / "partitions").glob("*.json"))
        raise ConfigError(
            f"partition.name={name}: neither a run folder, nor a partition.json, nor a saved name;"
            f" saved names are: {', '.join(saved) or 'none'}"
        )
    if path not in own:
        path = permitted(path.absolute())
    try:
        record = json.loads(path.read_text())
        wrong = [key for key, kind in _REQUIRED.items() if not isinstance(record.get(key), kind)]
    except (ValueError, AttributeError) as error:  # not JSON, or not a mapping
        raise DataError(f"{path} is damaged: expected a partition.json ({error})") from error
    if wrong:
        raise DataError(
            f"{path} is not a partition that can be used again: {', '.join(wrong)} missing or of"
            " the wrong type"
        )
    return path, record


def save(name: str, record: dict[str, Any]) -> Path:
    """Save the content of a partition.json as `name`; concurrent processes may do so.

    Raises:
        ConfigError: another partition has that name.
    """
    from fedhet.record.files import write_json

    path = path_of(name)
    if path.exists():
        existing = _identity(read(name)[1])
        wanted = _identity(record)
        if existing != wanted:
            raise ConfigError(
                f"--name {name}: {path} is another partition, {existing}, not {wanted}; choose"
                " another name or remove the file"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record, indent=None)
    return path


def _identity(record: dict[str, Any]) -> str:
    settings = [f"{key} {record['settings'].get(key)}" for key in ("split", "noise")]
    return ", ".join([record["hash"], *settings])


@dataclass(frozen=True, kw_only=True)
class Saved(Scheme):
    """A saved partition of the same data.

    Args:
        name: the name given to `python -m fedhet.data partition --name`, a run folder, or the path
            of a partition.json.
        split, noise: None: as saved.
        pool_test: None, or as saved: it determines which samples the indices mean.
    """

    split: Sequence[float] | None  # type: ignore[assignment]
    noise: float | None  # type: ignore[assignment]
    pool_test: bool | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        path, record = read(self.name)
        for key in ("split", "noise"):
            if getattr(self, key) is None:
                if key not in record["settings"]:
                    raise DataError(f"{path}: its settings have no {key}; give partition.{key}")
                object.__setattr__(self, key, record["settings"][key])
        pooled = record["settings"].get("pool_test", False)
        if self.pool_test not in (None, pooled):
            raise ConfigError(
                f"partition.pool_test={self.pool_test}: {path} was made with {pooled}, and a saved"
                " partition keeps the samples that it shares out"
            )
        object.__setattr__(self, "pool_test", pooled)
        super().__post_init__()

    def drawn(self, labels: np.ndarray, seed: int) -> Partition:
        """The saved partition, whatever the seed.

        Raises:
            ConfigError: it was made for other data.
            DataError: its indices are not those that were saved.
        """
        path, record = read(self.name)
        digest = labels_digest(labels)
        if (record["samples"], record["labels"]) != (len(labels), digest):
            raise ConfigError(
                f"partition.name={self.name}: {path} is of other data,"
                f" {counted(record['samples'], 'sample')} whose labels have the digest"
                f" {record['labels']}; these are {len(labels)} with {digest}"
            )
        try:
            indices = [np.array(each, dtype=np.int64) for each in record["indices"]]
            owner_names = tuple(record["owners"])
            partition = Partition(record["name"], indices, owner_names, bool(self.pool_test))
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"{path} is damaged: its indices are not lists of whole numbers ({error})"
            ) from error
        if partition.hash != record["hash"]:
            raise DataError(
                f"{path} is damaged: its indices have the hash {partition.hash}, not"
                f" {record['hash']}"
            )
        return partition

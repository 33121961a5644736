"""The overrides of a resumed run: the recorded ones, and a few that the user may change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from fedhet.core.errors import ConfigError, DataError
from fedhet.data.forms import plain_text, read_object
from fedhet.runs.config import overrides
from fedhet.runs.config.lines import key_of, refuse_repeated
from fedhet.runs.record.schema import CELL_FILE, resumable

RESUME = "resume"  # the override; in a deployment, the entry of Flower's run config
_OVERRIDE = f"{RESUME}="


def is_resumption(lines: Sequence[str]) -> bool:
    """Whether the overrides name a run to resume."""
    is_list = isinstance(lines, list | tuple)  # else overrides.parse will refuse it
    return is_list and any(str(line).startswith(_OVERRIDE) for line in lines)


def is_cell(folder: Path) -> bool:
    """Whether the folder belongs to a run of an experiment.

    Its cell.json then has the key `code`. In a plain sweep, cell.json only says why the run failed.
    A damaged cell.json counts as one of an experiment.
    """
    try:
        return "code" in read_object(folder / CELL_FILE)
    except FileNotFoundError:
        return False
    except (DataError, NotADirectoryError):
        return True


def continued(lines: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """Return the run folder that `resume=<folder>` names, and all overrides of its run.

    Without `resume`, return None and the overrides themselves.

    Raises:
        ConfigError: the folder holds no run, or an override of a resumed run cannot be changed.
    """
    if not is_resumption(lines):
        return None, lines
    refuse_repeated(lines)
    folders = [line.removeprefix(_OVERRIDE) for line in lines if line.startswith(_OVERRIDE)]
    folder = Path(re.sub(r"^(['\"])(.*)\1$", r"\2", folders[0])).resolve()
    given = [line for line in lines if not line.startswith(_OVERRIDE)]
    new = {override.key_or_group: str(override.input_line) for override in overrides.parse(given)}
    for key, line in new.items():
        if key not in ("rounds", "engine") and not key.startswith("engine."):
            raise ConfigError(
                f"{line!r} with resume={folder}: a resumed run keeps its own settings; only rounds,"
                " engine and engine.* may be changed"
            )
    if "rounds" in new and is_cell(folder):
        raise ConfigError(
            f"{new['rounds']!r} with resume={folder}: the run belongs to an experiment, which sets"
            " its number of rounds; change rounds of the experiment"
        )
    resumable(folder)
    kept = [line for line in _recorded(folder) if not _replaced(line, new)]
    return folder, [*kept, *new.values()]


def _recorded(folder: Path) -> list[str]:
    """Return the recorded overrides of the run in the folder."""
    path = folder / "overrides.yaml"
    if not folder.is_dir():
        raise ConfigError(f"resume={folder}: there is no such folder")
    try:
        lines = yaml.safe_load(plain_text(path))
    except OSError as error:
        raise ConfigError(
            f"resume={folder}: this is not a run folder: {path.name}: {error.strerror}"
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"resume={folder}: {path.name} is damaged") from error
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ConfigError(f"resume={folder}: {path.name} must be a list of overrides, and is not")
    return lines


def _replaced(line: str, new: dict[str, str]) -> bool:
    """Whether a recorded override is replaced by a new value, or by another engine."""
    key = key_of(line)
    return key in new or ("engine" in new and key.partition(".")[0] == "engine")

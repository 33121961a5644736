"""The overrides of a run that goes on: those it began with, and a few that may be given anew."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from fedhet.core.errors import ConfigError, DataError
from fedhet.data.forms import plain_text, read_object
from fedhet.runs.config import overrides
from fedhet.runs.config.lines import key_of, refuse_repeated
from fedhet.runs.record.schema import resumable

RESUME = "resume"  # the override; in a deployment, the entry of Flower's run config
_OVERRIDE = f"{RESUME}="
CELL = "cell.json"  # in the folders of an experiment's runs, and of a sweep's that have failed


def is_resumption(lines: Sequence[str]) -> bool:
    """Whether the overrides name a run to go on with."""
    is_list = isinstance(lines, list | tuple)  # else overrides.parse will refuse it
    return is_list and any(str(line).startswith(_OVERRIDE) for line in lines)


def is_cell(folder: Path) -> bool:
    """Whether a run folder is that of an experiment's cell, whose cell.json names the code.

    That of a run of a plain sweep only says why the run has failed. A damaged one counts as a
    cell's.
    """
    try:
        return "code" in read_object(folder / CELL)
    except FileNotFoundError:
        return False
    except (DataError, NotADirectoryError):
        return True


def continued(lines: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """The run folder that `resume=<folder>` names, and all overrides of its run.

    Without it, None and the overrides themselves.

    Raises:
        ConfigError: the folder holds no run, or an override cannot be given anew.
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
                f"{line!r} with resume={folder}: a run goes on with its own settings; only rounds,"
                " engine and engine.* may be given anew"
            )
    if "rounds" in new and is_cell(folder):
        raise ConfigError(
            f"{new['rounds']!r} with resume={folder}: the run is one of an experiment, to which its"
            " number of rounds belongs; give rounds to the experiment"
        )
    resumable(folder)
    kept = [line for line in _recorded(folder) if not _replaced(line, new)]
    return folder, [*kept, *new.values()]


def _recorded(folder: Path) -> list[str]:
    """The overrides of the run in the folder."""
    path = folder / "overrides.yaml"
    if not folder.is_dir():
        raise ConfigError(f"resume={folder}: there is no such folder")
    try:
        lines = yaml.safe_load(plain_text(path))
    except OSError as error:
        raise ConfigError(
            f"resume={folder}: this is not the folder of a run: {path.name}: {error.strerror}"
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"resume={folder}: {path.name} is damaged") from error
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ConfigError(f"resume={folder}: {path.name} is no list of overrides")
    return lines


def _replaced(line: str, new: dict[str, str]) -> bool:
    """Whether an override of the run gives way: to its new value, or to another engine."""
    key = key_of(line)
    return key in new or ("engine" in new and key.partition(".")[0] == "engine")

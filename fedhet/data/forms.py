"""Reading JSON files, and checking the form of their contents.

A file of a run may come from anyone, so it must be a plain file of at most 64 MB. Data files that
the user names may be links, and larger. A form is one of these:

- a type (float: any number)
- `[form]`: a list
- `{name: form}`: an object; the name `str` stands for all other names
- a function that returns whether a value is valid

An entry of an object that is missing or null always matches.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedhet.core.errors import DataError, clean

LARGEST_FILE = 64_000_000  # bytes; larger files are refused
LARGEST = 10**300  # larger whole numbers may not fit a float
ANY: dict[Any, Any] = {str: object}


def has_form(value: Any, form: Any) -> bool:
    """Whether a value of a JSON file matches a form."""
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            entry is None or has_form(entry, form.get(name, form.get(str, object)))
            for name, entry in value.items()
        )
    if isinstance(form, list):
        return isinstance(value, list) and all(has_form(item, form[0]) for item in value)
    if form is float:
        # NaN and infinity count as numbers; Python's JSON files may contain them.
        return isinstance(value, float) or (has_form(value, int) and abs(value) < LARGEST)
    if form is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, form) if isinstance(form, type) else bool(form(value))


def fault(content: Any, form: Mapping[str, Any], needed: Iterable[str] = ()) -> str | None:
    """Return what is wrong with the content of a JSON file, or None.

    Args:
        content: the content, which must be an object.
        form: name -> the form of the entry.
        needed: the names of required entries.
    """
    if not isinstance(content, dict):
        return f"it is {clean(repr(content), 60)}, and not an object"
    for name, each in form.items():
        if content.get(name) is not None and not has_form(content[name], each):
            return f"{name} is {clean(repr(content[name]), 60)}"
    missing = [name for name in needed if content.get(name) is None]
    return f"{missing[0]} is missing" if missing else None


def plain_file(path: Path, most: float = LARGEST_FILE) -> Path:
    """Return `path` if it is a plain file: a link may lead elsewhere, and a pipe may never end.

    Args:
        path: the file.
        most: the largest allowed number of bytes.

    Raises:
        OSError: the file does not exist.
        ValueError: the path is not a plain file, or the file is too large.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is a link, a folder, a pipe or a device, and not a plain file")
    if status.st_size > most:
        raise ValueError(f"it has {status.st_size} bytes; at most {most} are allowed")
    return path


def plain_text(path: Path) -> str:
    """Return the text of a plain file.

    Raises:
        OSError: as `plain_file`.
        ValueError: as `plain_file`, or the text is not UTF-8.
    """
    return plain_file(path).read_text(encoding="utf-8")


def read_object(
    path: Path, form: Mapping[str, Any] = ANY, needed: Iterable[str] = (), *, given: bool = False
) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Args:
        path: the file.
        form: see `fault`.
        needed: see `fault`.
        given: whether the user has named this file; it may then be a link, and of any size.

    Raises:
        FileNotFoundError: the file does not exist.
        NotADirectoryError: a folder of the path is a file.
        DataError: the file is damaged, or cannot be read.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8") if given else plain_text(path))
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {cause(error)}") from error
    if isinstance(content, dict) and content.get("format") == 1 and "targets" in content:
        content["thresholds"] = content.pop("targets")
    if problem := fault(content, form, needed):
        raise DataError(f"{path} is damaged: {problem}")
    return content  # type: ignore[no-any-return]


def cause(error: Exception) -> object:
    return "it is nested too deeply" if isinstance(error, RecursionError) else error

"""The form of JSON files, and how they are read.

A file may come from anyone. It is read where it is a plain file of at most 64 MB. A form is a type
(float: any number), `[form]` for a list, `{name: form}` for an object, in which `str` stands for
all other names, or a function that says whether a value has it. An entry of an object that is
missing or null has every form.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedhet.core.errors import DataError, clean

LARGEST_FILE = 64_000_000  # bytes of a file that is read as a whole
LARGEST = 10**300  # whole numbers beyond it are no floats
ANY: dict[Any, Any] = {str: object}


def has_form(value: Any, form: Any) -> bool:
    """Whether a value of a JSON file has a form."""
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            entry is None or has_form(entry, form.get(name, form.get(str, object)))
            for name, entry in value.items()
        )
    if isinstance(form, list):
        return isinstance(value, list) and all(has_form(item, form[0]) for item in value)
    if form is float:
        # NaN and infinity, which Python's JSON files may have, are numbers.
        return isinstance(value, float) or (has_form(value, int) and abs(value) < LARGEST)
    if form is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, form) if isinstance(form, type) else bool(form(value))


def fault(content: Any, form: Mapping[str, Any], needed: Iterable[str] = ()) -> str | None:
    """What is wrong with the content of a file that should be an object; None if nothing is.

    Args:
        content: the content.
        form: name -> the form of the entry.
        needed: the names of entries that must be there.
    """
    if not isinstance(content, dict):
        return f"it is {clean(repr(content), 60)}, and no object"
    for name, each in form.items():
        if content.get(name) is not None and not has_form(content[name], each):
            return f"{name} is {clean(repr(content[name]), 60)}"
    missing = [name for name in needed if content.get(name) is None]
    return f"{missing[0]} is missing" if missing else None


def plain_file(path: Path, most: float = LARGEST_FILE) -> Path:
    """Refuse a file of a run folder that would lead elsewhere, or whose reading might not end.

    Args:
        path: the file, which is returned.
        most: how many bytes it may have.

    Raises:
        OSError: there is no such file.
        ValueError: it is no plain file, or larger.
    """
    about = path.lstat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is a link, a folder, a pipe or a device, and no plain file")
    if about.st_size > most:
        raise ValueError(f"it has {about.st_size} bytes; at most {most} are read")
    return path


def plain_text(path: Path) -> str:
    """The text of such a file.

    Raises:
        OSError: as `plain_file`.
        ValueError: also where it is no UTF-8.
    """
    return plain_file(path).read_text(encoding="utf-8")


def read_object(
    path: Path, form: Mapping[str, Any] = ANY, needed: Iterable[str] = (), *, given: bool = False
) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        path: the file.
        form: see `fault`.
        needed: see `fault`.
        given: whether it is a file of data that the user names, which may be a link and large.

    Raises:
        FileNotFoundError: there is no such file.
        NotADirectoryError: nor such a folder.
        DataError: it is damaged, or cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8") if given else plain_text(path)
        content: Any = json.loads(text)
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

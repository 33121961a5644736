"""What a node tells the server of an error: no path of its machine."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

HIDDEN = "<path>"
# A path in quotes may contain spaces; another one ends at a space, without punctuation.
_QUOTED = r"""(?<=')/[^']+(?=')|(?<=")/[^"]+(?=")"""
_REST = r"""[^\s'"]*[^\s'",;:.)\]}]"""
# Neither the // of https:// nor a slash within a relative path or a term such as train/val.
_START = r"(?:(?<=file:)///|(?<![\w.<>*/:])//(?!/)|(?<![\w.<>*/])/(?!/))"


def told(text: str, named: Iterable[Path] = ()) -> str:
    """The text as the server gets it.

    Args:
        text: the message of an error.
        named: paths in the node config, of which the last component is told. Of all other paths,
            and of the folders that the environment names, nothing is.
    """
    for path in sorted(named, key=lambda path: -len(str(path))):
        if not path.name:
            continue
        for form in _forms(str(path)):
            text = text.replace(form, path.name)
        if path.parent.name:  # else it is the root, or the folder in which the node was started
            for form in _forms(f"{path.parent}/"):
                text = text.replace(form, "")
    known = "|".join(
        re.escape(form) for folder in sorted(_folders(), key=len)[::-1] for form in _forms(folder)
    )
    return re.sub(rf"(?:{known})(?!\w)(?:{_REST})?|{_QUOTED}|{_START}{_REST}", HIDDEN, text)


def _forms(path: str) -> set[str]:
    """The path as it is, and as it is within quotes."""
    return {path, repr(path)[1:-1]}


def _folders() -> set[str]:
    """Folders of this machine that may have spaces in their names or be relative."""
    own = {str(Path.home()), tempfile.gettempdir(), str(Path.cwd())}
    return own | {value.rstrip("/") for value in os.environ.values() if "/" in value.strip("/")}

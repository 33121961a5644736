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
            and of what is below any, nothing is.
    """
    names = {str(path): path.name for path in named}
    hidden = _folders() | {str(Path(path).parent) for path in names}
    known = {
        form: short
        for path, short in {**dict.fromkeys(hidden, HIDDEN), **names}.items()
        for form in (path, repr(path)[1:-1])  # as it is, and as it is in quotes
        if "/" in path.strip("/") or path[:1] == "/" != path
    }
    one = rf"({'|'.join(map(re.escape, sorted(known, key=len, reverse=True)))})(?!\w)"
    in_quotes = rf"""(?<='){one}[^']*(?=')|(?<="){one}[^"]*(?=")"""
    pattern = rf"{in_quotes}|{one}(?:{_REST})?|{_QUOTED}|{_START}{_REST}"
    return re.sub(pattern, lambda found: known.get(found[found.lastindex or 0], HIDDEN), text)


def _folders() -> set[str]:
    """Folders of this machine, which may be relative or have spaces in their names."""
    environment = {value for value in os.environ.values() if "/" in value}
    own = {str(Path.home()), tempfile.gettempdir(), str(Path.cwd())}
    return own | environment | {str(Path(value)) for value in environment}

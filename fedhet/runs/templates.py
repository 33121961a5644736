"""Texts of files that fedhet writes, with the parts that vary filled in.

They are in yaml files, because a Flower app bundle takes no plain text files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template

import yaml


def filled(file: Path, name: str, words: Mapping[str, str]) -> str:
    """Return the text of this name in a file `name: text`, with `words` for its $names."""
    texts: dict[str, str] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return Template(texts[name]).substitute(words)

"""Fills in the templates of files that fedhet writes.

The templates are in yaml files, because a Flower app bundle takes no plain text files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template

import yaml


def filled(file: Path, name: str, words: Mapping[str, str]) -> str:
    """Return the template `name` of a file `name: text`, with `words` in place of its $names."""
    return Template(yaml.safe_load(file.read_text(encoding="utf-8"))[name]).substitute(words)

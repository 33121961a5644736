"""Writes JSON files as LEAF does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Users = dict[str, tuple[list[Any], list[Any]]]


def write_leaf(folder: Path, train: Users, test: Users, file: str = "all_data_0.json") -> Path:
    """`folder/{train,test}/<file>` of users -> (x, y); returns the training file."""
    for part, users in (("train", train), ("test", test)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        content = {
            "users": list(users),
            "num_samples": [len(y) for _, y in users.values()],
            "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
        }
        (folder / part / file).write_text(json.dumps(content))
    return folder / "train" / file


def windows(text: str, n: int) -> tuple[list[str], list[str]]:
    """The first n windows of 80 characters, and the character that follows each."""
    text = text * (n // len(text) + 81)
    return [text[i : i + 80] for i in range(n)], [text[i + 80] for i in range(n)]

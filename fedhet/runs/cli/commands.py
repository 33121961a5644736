"""The commands of `python -m fedhet <command>`; without a command, a run starts.

An installed package adds its own by an entry point of the group `fedhet.commands`, such as
`mine = "my_package.command"`; its line in --help is the summary of the package.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import NamedTuple

from fedhet.core.check import did_you_mean
from fedhet.core.errors import ConfigError
from fedhet.runs.config import catalogue
from fedhet.runs.config.lines import refuse_blanks

ENTRY_POINTS = "fedhet.commands"


class Command(NamedTuple):
    """A command.

    Attributes:
        module: the module whose `main(argv) -> exit code` runs it; imported when it is called.
        help: its line in --help.
    """

    module: str
    help: str


def commands(own: Mapping[str, Command]) -> dict[str, Command]:
    """Return fedhet's `own` commands and those of installed packages, which are not imported."""
    found = entry_points(group=ENTRY_POINTS)
    others = {
        point.name: Command(point.module, point.dist.metadata["Summary"])
        for point in found
        if point.dist is not None and point.name not in own
    }
    return {**own, **others}


def is_command(word: str) -> bool:
    """Whether the first word of a command line is a command, known or not."""
    return "=" not in word and not word.startswith(("-", "~"))


def run_command(every: Mapping[str, Command], word: str, argv: Sequence[str]) -> int:
    """Run the command with its own arguments and return its exit code.

    Args:
        every: what `commands` returns.
        word: the name of the command.
        argv: its arguments.

    Raises:
        ConfigError: there is no such command; the message suggests the closest words.
    """
    if word not in every:
        refuse_blanks([word, *argv])
        raise ConfigError(
            f"{word!r} is neither a command nor an override key=value{_closest(word, every)};"
            f" commands: {', '.join(every)}; see python -m fedhet --help"
        )
    code: int = import_module(every[word].module).main(argv)
    return code


def _closest(word: str, every: Collection[str]) -> str:
    """Return the hint with the closest commands and overrides `group=choice`."""
    suggestions = {name: [name] for name in every}
    for group, choices in catalogue.groups().items():
        for choice in choices:
            suggestions.setdefault(choice, []).append(f"{group}={choice}")
    similar = difflib.get_close_matches(word, suggestions, n=1)
    return did_you_mean(word, (), [text for name in similar for text in suggestions[name]])

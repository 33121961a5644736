"""`deploy link`: Flower's SuperLink, whose children end with it, and whose API is not described."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fedhet.core.errors import ConfigError
from fedhet.data.storage import unwritable
from fedhet.flower import private
from fedhet.runs.guard import guard_children


def main(options: Sequence[str]) -> None:
    """Run a SuperLink.

    Args:
        options: the folder below which a relative hydra.run.dir is, and those of flower-superlink.

    Raises:
        ConfigError: the folder is missing.
        WriteError: the folder cannot be used.
    """
    if not options:
        raise ConfigError(
            "the folder is missing: deploy link FOLDER, then flower-superlink's options"
        )
    folder, *options = options
    private.without_docs()
    superlink = private.command("flower-superlink")
    try:
        os.chdir(folder)  # not before fedhet is imported, which may lie in the working directory
    except OSError as error:
        raise unwritable(Path(folder), error) from error
    guard_children()  # they do not notice the end of a SuperLink that nobody has waited for
    sys.argv = ["flower-superlink", *options]
    superlink()

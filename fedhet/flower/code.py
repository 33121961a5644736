"""The digest of an app, by which a site says which code it executes."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from fedhet.core.errors import ConfigError

ANY = "any"  # in place of a digest: whatever reaches the server
ALLOWED = f'the SHA-256 of an app, 64 digits 0-9 a-f, or "{ANY}"'


def digest(app: Path) -> str:
    """SHA-256 of the FAB, Flower's archive of an app, as `flwr run` makes it from a folder.

    It depends on names and contents of the app's files alone: they have one date in the archive,
    and are not compressed.

    Raises:
        ConfigError: the folder is no app.
    """
    from flwr.cli.build import build_fab_from_disk

    if not (app / "pyproject.toml").exists():
        raise ConfigError(
            f"{app} is no app of Flower: it has no pyproject.toml; --app names another folder"
        )
    try:
        return hashlib.sha256(build_fab_from_disk(app)).hexdigest()
    except ValueError as error:
        raise ConfigError(f"{app} is no app of Flower: {error}") from error


def checked(name: str, code: str) -> str:
    """Return what a site says of its code.

    Args:
        name: where it says so.
        code: the digest, or "any".

    Raises:
        ConfigError: it is neither.
    """
    if code != ANY and not re.fullmatch("[0-9a-f]{64}", code):
        raise ConfigError(f"{name}={code!r}: must be {ALLOWED}; `deploy code` prints the digest")
    return code

"""What a site says of the code that it executes."""

from __future__ import annotations

import re

from fedhet.core.errors import ConfigError

ANY = "any"  # in place of a digest: whatever reaches the server
ALLOWED = f'the SHA-256 of an app, 64 digits 0-9 a-f, or "{ANY}"'


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

"""Free ports for tests that start servers."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom

RANGE = range(20_000, 30_000)  # Linux gives connections and port 0 numbers from 32,768 on


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, and that the kernel gives to nobody meanwhile."""
    found: list[int] = []
    for port in SystemRandom().sample(RANGE, len(RANGE)):
        if len(found) == count:
            break
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found

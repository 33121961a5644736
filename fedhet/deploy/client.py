"""The process that serves a run's messages at a site, one after another; node.py starts it.

    python -P client.py <options of flwr-clientapp>

Each line of its stdin is the token of a message, and its end is that of the process. It is a script
that imports nothing of fedhet, because a run brings its own fedhet, which alone may serve it.
"""

from __future__ import annotations

import importlib
import signal
import sys
from functools import lru_cache
from typing import Any

from flwr.supercore.exit.exit_handler import trigger_exit_handlers
from flwr.supernode.cli.flwr_clientapp import flwr_clientapp


def main() -> None:
    """Do for each message what `flwr-clientapp` does, but for the end of the process."""
    module = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    # Flower unpacks and checks the app for each message, which takes longer than a small one.
    install = lru_cache(maxsize=1)(module.install_from_fab)
    vars(module).update(flwr_exit=_end_message, install_from_fab=install)
    options = sys.argv[1:]
    _wait()
    for line in sys.stdin:
        sys.argv = ["flwr-clientapp", *options, "--token", line.strip()]
        flwr_clientapp()


def _end_message(**_: Any) -> None:
    """Report the message's status and close its connection, as Flower does before it exits."""
    for first in (True, False):
        trigger_exit_handlers(run_before_force_exit=first)
    _wait()


def _wait() -> None:
    """Between messages, Ctrl-C is for the SuperNode; other signals end this process at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()

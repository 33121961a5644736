"""The process that serves a run's messages at a site, one after another; node.py starts it.

    python -P app_process.py <digest of the site's app, or any> <options of flwr-clientapp>

Each line of its stdin is the token of a message, and its end is that of the process. It is a script
that imports nothing of fedhet, because a run brings its own fedhet, which alone may serve it. What
it finds of Flower, node.py has checked (fedhet/flower/private.py).
"""

from __future__ import annotations

import hashlib
import signal
import sys
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any


def main() -> None:
    """Do for each message what `flwr-clientapp` does, but for the end of the process."""
    (command, *_) = entry_points(group="console_scripts", name="flwr-clientapp")
    flwr_clientapp = command.load()
    module: dict[str, Any] = flwr_clientapp.__globals__["run_clientapp"].__globals__
    trigger = module["flwr_exit"].__globals__["trigger_exit_handlers"]
    install = module["install_from_fab"]
    app, *options = sys.argv[1:]

    # Flower unpacks and checks the app for each message, which takes longer than a small one.
    @lru_cache(maxsize=1)
    def install_from_fab(fab_file: bytes, *args: Any, **others: Any) -> Any:
        """Flower's, but only of the app that the site executes."""
        found = hashlib.sha256(fab_file).hexdigest()
        if app not in (found, "any"):
            raise PermissionError(
                f"this site executes the app with the SHA-256 {app}, and not {found}; if the site"
                " agrees to that code, `deploy code` writes it into its site.toml"
            )
        return install(fab_file, *args, **others)

    def flwr_exit(*_: Any, **__: Any) -> None:
        """Report the message's status and close its connection, as Flower does before it exits."""
        for first in (True, False):
            trigger(run_before_force_exit=first)
        _wait()

    module.update(flwr_exit=flwr_exit, install_from_fab=install_from_fab)
    _wait()
    for line in sys.stdin:
        sys.argv = ["flwr-clientapp", *options, "--token", line.strip()]
        flwr_clientapp()


def _wait() -> None:
    """Between messages, Ctrl-C is for the SuperNode; other signals end this process at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()

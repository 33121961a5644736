"""The process that serves a run's messages at a site, one after another; node.py starts it.

    python -P app_process.py <digest of the site's app, or any> <options of flwr-clientapp>

Each line of stdin is the token of a message; at the end of stdin the process ends. This script
must not import fedhet: a run brings its own fedhet, and only that one may serve it. node.py has
checked that Flower has the private names used here (fedhet/flower/private.py).
"""

from __future__ import annotations

import hashlib
import signal
import sys
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any


def main() -> None:
    """Do what `flwr-clientapp` does for each message, except that the process does not end."""
    (command, *_) = entry_points(group="console_scripts", name="flwr-clientapp")
    flwr_clientapp = command.load()
    module: dict[str, Any] = flwr_clientapp.__globals__["run_clientapp"].__globals__
    trigger = module["flwr_exit"].__globals__["trigger_exit_handlers"]
    install = module["install_from_fab"]
    app, *options = sys.argv[1:]

    # Cached: Flower would unpack and check the app for each message, which takes longer than a
    # small message itself.
    @lru_cache(maxsize=1)
    def install_from_fab(fab_file: bytes, *args: Any, **others: Any) -> Any:
        """Install the app by Flower's function, if it is the app that the site executes."""
        found = hashlib.sha256(fab_file).hexdigest()
        if app not in (found, "any"):
            raise PermissionError(
                f"this site executes the app with the SHA-256 {app}, and not {found}; if the site"
                " agrees to the new code, it writes the new digest into `code` of its site.toml by"
                " `deploy code`"
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
    """Between messages, ignore Ctrl-C (the SuperNode handles it); let other signals end this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()

"""Flower's SuperLink, which does not describe its API to whoever reaches it.

python -m fedhet.deploy.link <options of flower-superlink>
"""

from __future__ import annotations

import sys

from fedhet.deploy.node.shape import flower_module, without_docs


def main() -> None:
    """Run the SuperLink."""
    command = flower_module(
        "flwr.superlink.cli.flower_superlink", flower_superlink=("create_app(",)
    )
    without_docs("flwr.superlink.main")
    sys.argv[0] = "flower-superlink"
    command.flower_superlink()


if __name__ == "__main__":
    main()

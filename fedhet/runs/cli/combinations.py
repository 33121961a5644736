"""Which plug-ins can be combined with which methods, for `--list`."""

from __future__ import annotations

import sys
from itertools import product

import yaml

from fedhet.runs import process
from fedhet.runs.config import catalogue

# What `refusal` says of the pairs of fedhet's own pieces, so that `--list` need not build each of
# them. `make docs` writes the file, and a test, which builds every pair, compares.
KNOWN = catalogue.CONF / "combinations.yaml"


def compatibility() -> list[tuple[str, str, str | None]]:
    """Return (method, plug-in, reason why they cannot be combined, or None) for every pair."""
    known = yaml.safe_load(KNOWN.read_text(encoding="utf-8"))
    every = product(catalogue.built_in("method"), catalogue.built_in("plugin"))
    ours = {(method, plugin) for method, plugin in every if plugin in known.get(method, {})}
    pairs = list(product(catalogue.choices("method"), catalogue.choices("plugin")))
    if not ours.issuperset(pairs):
        print("building the pieces of your own, to see which fit ...", file=sys.stderr)
    return [(m, p, known[m][p] if (m, p) in ours else refusal(m, p)) for m, p in pairs]


def refusal(method: str, plugin: str) -> str | None:
    """Return why the two cannot be combined, or None where they can.

    They are built on a toy task, so the answer is that of the code itself. A piece of one's own
    that cannot be built with its defaults is combined with nothing; the reason says why.
    """
    with process.imports():
        from fedhet.core.errors import ConfigError
        from fedhet.runs import config
        from fedhet.runs.job import try_settings

    try:
        try_settings(config.compose([f"method={method}", f"plugin=[{plugin}]"]))
    except ConfigError as error:
        return str(error)
    return None

"""Which plug-ins can be combined with which methods, for `--list`."""

from __future__ import annotations

import sys
from itertools import product

from fedhet import process
from fedhet.config import catalogue

_MODEL = "it refers to the received model, and this method's clients receive none"
_STEPS = "it acts on local steps only, and this method's clients take none"
_MODELS = "it compares the models that clients send, and this method's clients send none"
_WEIGHTS = "it changes aggregation weights, which this method ignores"
_GRADIENTS = "it changes the local steps, from which this method recovers gradients"
_ALONE = "it acts on a client's own data and model, and this method has none"
# (method, plug-in) of fedhet's own -> why they cannot be combined, so that `--list` need not import
# torch to ask them. A test, which builds every pair, compares.
REFUSED = {
    **{
        (method, name): _MODEL
        for method in ("fedpcl", "fedproto", "local")
        for name in ("drift", "fedlex", "fedntd", "fedprox", "moon")
    },
    **{(method, "fednorm"): _WEIGHTS for method in ("feddyn", "fedpcl", "fedproto", "local")},
    **{("pooled", name): _ALONE for name in catalogue.built_in("plugin")},
    ("pooled", "fednorm"): _WEIGHTS,
    ("fedsa", "fednorm"): f"{_WEIGHTS}; use method.client_weighting=samples",
    ("fedsgd", "drift"): _MODELS,
    **{("fedsgd", name): _STEPS for name in ("fedntd", "fedprox")},
    ("scaffold", "fedlex"): f"{_GRADIENTS}; use method.control=gradient",
}
REFUSED = {
    (method, plugin): f"method={method} refuses plugin {plugin!r}: {reason}"
    for (method, plugin), reason in REFUSED.items()
}
REFUSED["feddiskab", "feddisk"] = (
    "method=feddiskab is FedAvg with plugin.feddisk.ratio=raw and refuses ratio=sampled; leave"
    " plugin=[feddisk] and its ratio out"
)


def compatibility() -> list[tuple[str, str, str | None]]:
    """Return (method, plug-in, reason why they cannot be combined, or None) for every pair."""
    ours = {*product(catalogue.built_in("method"), catalogue.built_in("plugin"))}
    pairs = list(product(catalogue.choices("method"), catalogue.choices("plugin")))
    if ours.issuperset(pairs):
        return [(*pair, REFUSED.get(pair)) for pair in pairs]
    print("building the pieces of your own, to see which fit ...", file=sys.stderr)
    return [(*pair, REFUSED.get(pair) if pair in ours else refusal(*pair)) for pair in pairs]


def refusal(method: str, plugin: str) -> str | None:
    """Return why the two cannot be combined, or None where they can.

    They are built on a toy task, so the answer is that of the code itself. A piece of one's own
    that cannot be built with its defaults is combined with nothing; the reason says why.
    """
    with process.imports():
        from fedhet import config
        from fedhet.core.errors import ConfigError
        from fedhet.job import try_settings

    try:
        try_settings(config.compose([f"method={method}", f"plugin=[{plugin}]"]))
    except ConfigError as error:
        return str(error)
    return None

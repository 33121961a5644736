"""FedGMM's part of adapter.py: the cases of fedgmm/aggregate and fedgmm/generate_counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedhet.maths import fedgmm as maths
from fedhet.maths.fedgmm import Mixture

Params = dict[str, Any]


def _aggregate(params: Params, x: Tensor | None = None, **parts: Tensor) -> dict[str, Any]:
    mixtures = [
        Mixture(*(parts[f"{name}.{j}"] for name in Mixture._fields)) if f"pi.{j}" in parts else None
        for j in range(params["clients"])
    ]
    found = maths.aggregate(params["counts"], mixtures)
    if found is None:
        return {"none": True}
    mean, variance = maths.moments(found)
    density = {} if x is None else {"logpdf": maths.log_density(found, x)}
    return {**found._asdict(), "mean": mean, "variance": variance, **density}


def _generate_counts(params: Params, counts: Tensor, available: Tensor) -> dict[str, Any]:
    return {"gen": maths.generate_counts(counts, available, params["target"], params["global_max"])}


FUNCTIONS: dict[tuple[str, str], Callable[..., dict[str, Any]]] = {
    ("fedgmm", "aggregate"): _aggregate,
    ("fedgmm", "generate_counts"): _generate_counts,
}

"""FedLEx's functions for adapter.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedhet.core.authors import as_given
from fedhet.core.client.optimizers import SGD
from fedhet.core.messages import LocalSettings
from fedhet.core.trees import Tree
from fedhet.methods.fedlex import contributors, deviation, global_guidance

Params = dict[str, Any]


def _tree(prefix: str, inputs: dict[str, Tensor]) -> Tree:
    """The tensors "<prefix>.<name>" by name."""
    start = f"{prefix}."
    return {name.removeprefix(start): t for name, t in inputs.items() if name.startswith(start)}


def _deviation(params: Params, **inputs: Tensor) -> dict[str, Tensor]:
    deviations = deviation(_tree("W0", inputs), _tree("W1", inputs))
    return {f"D.{name}": d for name, d in deviations.items()}


def _global_guidance(params: Params, **inputs: Tensor) -> dict[str, Tensor]:
    deviations = [_tree(f"D.{i}", inputs) for i in range(params["explorers"])]
    guidance = global_guidance(deviations, scope=params["scope"], order=params["order"])
    return {f"G.{name}": g for name, g in guidance.items()}


def _rounds(params: Params, **inputs: Tensor) -> dict[str, Tensor]:
    explored = {pid: {"": inputs[f"D.{pid}"]} for pid in params["explorers"]}
    guidances: dict[str, Tensor] = {}
    used: list[int] = []
    for step, participants in enumerate(params["participants"], 1):
        used = contributors(
            list(explored), participants, used, refresh=params["refresh"], empty=params["empty"]
        )
        guidances[f"G.{step}"] = global_guidance([explored[pid] for pid in used])[""]
    return guidances


def _sgd_steps(params: Params, W: Tensor, grads: Tensor, G: Tensor) -> dict[str, Tensor]:
    w = W.clone()
    optimizer = SGD([w], LocalSettings(**params))  # type: ignore[list-item]
    for grad in grads:
        optimizer.step([grad * as_given({}, None, {"w": G})["w"]])
    return {"W_new": w}


FUNCTIONS: dict[tuple[str, str], Callable[..., dict[str, Tensor]]] = {
    ("fedlex", "deviation"): _deviation,
    ("fedlex", "global_guidance"): _global_guidance,
    ("fedlex", "rounds"): _rounds,
    ("fedlex", "sgd_steps"): _sgd_steps,
}

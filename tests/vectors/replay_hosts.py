"""The functions of FedNova, SGDM and FedSGD for adapter.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedhet.core import trees
from fedhet.core.client.optimizers import SGD
from fedhet.core.messages import LocalSettings
from fedhet.methods.fednova import combine, normaliser
from fedhet.methods.fedsgd import server_step

Params = dict[str, Any]


def _fednova(params: Params, x: Tensor, W: Tensor, n: Tensor, tau: Tensor) -> dict[str, Any]:
    a = [normaliser(t, momentum=params["momentum"], eta_mu=params["eta_mu"]) for t in tau.tolist()]
    old = {"x": x}
    parts = (
        (trees.Difference({"x": w}, old), float(k), a_i, a_i)
        for w, k, a_i in zip(W, n, a, strict=True)
    )
    change, _ = combine(parts)
    return {"a": a, "x_new": trees.add(change, {"x": x})["x"]}


def _mfl_local(params: Params, w: Tensor, d: Tensor, grads: Tensor) -> dict[str, Any]:
    w, d = w.clone(), d.clone()
    optimizer = SGD([w], LocalSettings(lr=params["lr"], momentum=params["gamma"]), [d])  # type: ignore[list-item]
    for g in grads:
        optimizer.step([g.clone()])
    return {"w_new": w, "d_new": d}


def _fedsgd(params: Params, x: Tensor, grads: Tensor, n: Tensor) -> dict[str, Any]:
    weighted = (({"x": g}, float(k)) for g, k in zip(grads, n, strict=True))
    return {"x_new": server_step({"x": x}, trees.mean(weighted), params["lr"])["x"]}


FUNCTIONS: dict[tuple[str, str], Callable[..., dict[str, Any]]] = {
    ("hosts", "fednova"): _fednova,
    ("hosts", "mfl_local"): _mfl_local,
    ("hosts", "fedsgd"): _fedsgd,
}

"""FedALA's function for adapter.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedhet.methods import fedala


def _ala_step(
    params: dict[str, Any], weight: Tensor, grad: Tensor, w_local: Tensor, w_global: Tensor
) -> dict[str, Any]:
    learned = fedala.step([weight], [grad], [w_local], [w_global], params["eta"])
    return {"weight_new": learned[0], "init": fedala.start([w_local], [w_global], learned)[0]}


FUNCTIONS: dict[tuple[str, str], Callable[..., dict[str, Any]]] = {("hosts", "ala_step"): _ala_step}

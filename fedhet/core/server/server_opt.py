"""Server optimisers. Any method can apply one to the change that its aggregation proposes.

They act on the pseudo-gradient delta = new - old, one tensor at a time, in float64.

FedAvgM: Hsu et al. 2019, "Measuring the effects of non-identical data distribution".
FedAdam, FedYogi, FedAdagrad: Reddi et al. 2021, "Adaptive federated optimization", Algorithm 2,
without bias correction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedhet.core.check import Checked, setting
from fedhet.core.kernel import State
from fedhet.core.trees import AnyTree, Tree


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(Checked):
    """Base of the server optimisers. They get shared trained tensors in float64, never buffers."""

    GROUP = "server_opt"

    def step(self, state: State, old: AnyTree, new: AnyTree) -> tuple[Tree, State]:
        """Return the slot's new tensors, and the new state.

        Args:
            state: the state that the last step returned; {} at first.
            old: the slot's tensors before the round.
            new: the tensors that the method's aggregation proposes.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FedAvgM(ServerOptimizer):
    """Server momentum (Hsu et al. 2019).

        v <- beta v - delta
        x <- x - lr v                    (heavy ball)
        x <- x - lr (-delta + beta v)    (Nesterov)

    beta = 0 with lr = 1 leaves the method unchanged. With beta = 0.9, the asymptotic step is 10 lr.

    Args:
        lr: the server's learning rate, > 0.
        beta: the decay of the momentum, in [0, 1).
        nesterov: whether to use Nesterov momentum.
    """

    lr: float = setting(1.0, open_low=0)
    beta: float = setting(0.9, low=0, open_high=1)
    nesterov: bool = False

    def step(self, state: State, old: AnyTree, new: AnyTree) -> tuple[Tree, State]:
        out, after = {}, dict(state.get("v", {}))
        for name in new:
            x = old[name].double()
            delta = new[name] - x
            v = self.beta * after.get(name, torch.zeros_like(x)) - delta
            out[name] = x - self.lr * (self.beta * v - delta if self.nesterov else v)
            after[name] = v
        return out, {"v": after}


@dataclass(frozen=True, kw_only=True)
class FedOpt(ServerOptimizer):
    """FedAdam, FedYogi and FedAdagrad (Reddi et al. 2021). The first moment m starts at 0.

        m <- beta1 m + (1 - beta1) delta
        v <- beta2 v + (1 - beta2) delta^2                    (adam)
        v <- v - (1 - beta2) delta^2 sign(v - delta^2)        (yogi)
        v <- v + delta^2                                      (adagrad)
        x <- x + lr m / (sqrt v + tau)

    Args:
        kind: "adam", "yogi" or "adagrad".
        lr: the server's learning rate, > 0.
        beta1: the decay of m, in [0, 1). None means 0.9, but 0 for "adagrad", as in the paper's
            experiments.
        beta2: the decay of the second moment v, in [0, 1).
        tau: the degree of adaptivity, > 0.
        v0: the initial v, >= 0. None means tau^2; the paper requires at least tau^2.
    """

    kind: str = setting(allowed=("adam", "yogi", "adagrad"))
    lr: float = setting(0.1, open_low=0)
    beta1: float | None = setting(None, low=0, open_high=1)
    beta2: float = setting(0.99, low=0, open_high=1)
    tau: float = setting(1e-3, open_low=0)
    v0: float | None = setting(None, low=0)

    def step(self, state: State, old: AnyTree, new: AnyTree) -> tuple[Tree, State]:
        beta1 = self.beta1 if self.beta1 is not None else 0.0 if self.kind == "adagrad" else 0.9
        v0 = self.tau**2 if self.v0 is None else self.v0
        out, ms, vs = {}, dict(state.get("m", {})), dict(state.get("v", {}))
        for name in new:
            x = old[name].double()
            m = ms.get(name, torch.zeros_like(x))
            v = vs.get(name, torch.full_like(x, v0))
            delta = new[name] - x
            square = delta * delta
            m = beta1 * m + (1 - beta1) * delta
            if self.kind == "adam":
                v = self.beta2 * v + (1 - self.beta2) * square
            elif self.kind == "yogi":
                v = v - (1 - self.beta2) * square * (v - square).sign()
            else:
                v = v + square
            out[name] = x + self.lr * m / (v.sqrt() + self.tau)
            ms[name], vs[name] = m, v
        return out, {"m": ms, "v": vs}

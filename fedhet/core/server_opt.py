"""Server optimisers, which any method can apply to the change that its aggregation proposes.

They act on the pseudo-gradient delta = new - old, one tensor at a time, in float64.

FedAvgM: Hsu et al. 2019, "Measuring the effects of non-identical data distribution".
FedAdam, FedYogi, FedAdagrad: Reddi et al. 2021, "Adaptive federated optimization", Algorithm 2,
without bias correction.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from fedhet.core import check
from fedhet.core.trees import Tree


class ServerOptimizer:
    """Receives shared trainable tensors in float64 only; buffers never pass through it.

    Attributes:
        memory: the names of the attributes that outlast a step, for checkpoints.
    """

    memory: ClassVar[tuple[str, ...]] = ()

    def step(self, old: Tree, new: Tree) -> Tree:
        """Return the slot's new value.

        Args:
            old: the slot's value before the round.
            new: the value that the method's aggregation proposes.
        """
        raise NotImplementedError


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

    memory = ("v",)

    def __init__(self, *, lr: float = 1.0, beta: float = 0.9, nesterov: bool = False) -> None:
        self.lr = check.number("server_opt.lr", lr, open_low=0)
        self.beta = check.number("server_opt.beta", beta, low=0, open_high=1)
        self.nesterov = check.boolean("server_opt.nesterov", nesterov)
        self.v: Tree = {}

    def step(self, old: Tree, new: Tree) -> Tree:
        out: Tree = {}
        for name in new:
            x = old[name].double()
            delta = new[name] - x
            v = self.beta * self.v.get(name, torch.zeros_like(x)) - delta
            out[name] = x - self.lr * (self.beta * v - delta if self.nesterov else v)
            self.v[name] = v
        return out


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
        beta1: the decay of m, in [0, 1). The default is 0.9, and 0 for "adagrad", as in the
            paper's experiments.
        beta2: the decay of the second moment v, in [0, 1).
        tau: the degree of adaptivity, > 0.
        v0: the initial v, >= 0. The default is tau^2; the paper requires at least tau^2.
    """

    memory = ("m", "v")

    def __init__(
        self,
        *,
        kind: str,
        lr: float = 0.1,
        beta1: float | None = None,
        beta2: float = 0.99,
        tau: float = 1e-3,
        v0: float | None = None,
    ) -> None:
        self.kind = check.one_of("server_opt.kind", kind, ("adam", "yogi", "adagrad"))
        self.lr = check.number("server_opt.lr", lr, open_low=0)
        if beta1 is None:
            beta1 = 0.0 if kind == "adagrad" else 0.9
        self.beta1 = check.number("server_opt.beta1", beta1, low=0, open_high=1)
        self.beta2 = check.number("server_opt.beta2", beta2, low=0, open_high=1)
        self.tau = check.number("server_opt.tau", tau, open_low=0)
        self.v0 = self.tau**2 if v0 is None else check.number("server_opt.v0", v0, low=0)
        self.m: Tree = {}
        self.v: Tree = {}

    def step(self, old: Tree, new: Tree) -> Tree:
        out: Tree = {}
        for name in new:
            x = old[name].double()
            m = self.m.get(name, torch.zeros_like(x))
            v = self.v.get(name, torch.full_like(x, self.v0))
            delta = new[name] - x
            square = delta * delta
            m = self.beta1 * m + (1 - self.beta1) * delta
            if self.kind == "adam":
                v = self.beta2 * v + (1 - self.beta2) * square
            elif self.kind == "yogi":
                v = v - (1 - self.beta2) * square * (v - square).sign()
            else:
                v = v + square
            out[name] = x + self.lr * m / (v.sqrt() + self.tau)
            self.m[name], self.v[name] = m, v
        return out

"""Server optimisers: what any method can let act, last, on the change that its merge proposes."""

from __future__ import annotations

import torch

from fedhet import check
from fedhet.maths import server_opt as maths
from fedhet.trees import Tree


class ServerOptimizer:
    """Sees shared trainable tensors in float64 only: buffers never pass through it."""

    def step(self, old: Tree, new: Tree) -> Tree:
        """The slot's new value, given the one that the method's merge proposes."""
        raise NotImplementedError


class FedAvgM(ServerOptimizer):
    """Server momentum (Hsu et al. 2019). beta = 0 and lr = 1 is the method alone. With beta = .9
    the asymptotic step is 10 lr."""

    def __init__(self, *, lr: float = 1.0, beta: float = 0.9, nesterov: bool = False) -> None:
        self.lr = check.number("server_opt.lr", lr, open_low=0)
        self.beta = check.number("server_opt.beta", beta, low=0, open_high=1)
        self.nesterov = check.boolean("server_opt.nesterov", nesterov)
        self.v: Tree = {}

    def step(self, old: Tree, new: Tree) -> Tree:
        out: Tree = {}
        for name in new:
            x = old[name].double()
            v = self.v.get(name, torch.zeros_like(x))
            out[name], self.v[name] = maths.momentum(
                x, new[name] - x, v, lr=self.lr, beta=self.beta, nesterov=self.nesterov
            )
        return out


class FedOpt(ServerOptimizer):
    """FedAdam, FedYogi, FedAdagrad (Reddi et al. 2021). m starts at 0, v at `v0`, tau^2 by default
    (the paper: at least tau^2).

    beta1 is 0.9 by default, and 0 for Adagrad, as in their experiments.
    """

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
        default = 0.0 if kind == "adagrad" else 0.9
        self.beta1 = check.number(
            "server_opt.beta1", default if beta1 is None else beta1, low=0, open_high=1
        )
        self.beta2 = check.number("server_opt.beta2", beta2, low=0, open_high=1)
        self.tau = check.number("server_opt.tau", tau, open_low=0)
        self.v0 = self.tau**2 if v0 is None else check.number("server_opt.v0", v0, low=0)
        self.m: Tree = {}
        self.v: Tree = {}

    def step(self, old: Tree, new: Tree) -> Tree:
        out: Tree = {}
        for name in new:
            x = old[name].double()
            m, v = (
                self.m.get(name, torch.zeros_like(x)),
                self.v.get(name, torch.full_like(x, self.v0)),
            )
            out[name], self.m[name], self.v[name] = maths.adaptive(
                x,
                new[name] - x,
                m,
                v,
                kind=self.kind,
                lr=self.lr,
                beta1=self.beta1,
                beta2=self.beta2,
                tau=self.tau,
            )
        return out

"""What every strategy is built with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedhet.messages import LocalSettings
from fedhet.plugin import Plugin
from fedhet.server_opt import ServerOptimizer
from fedhet.site import Site


@dataclass
class Setting:
    """What every strategy is built with, so that a method's constructor names only its own options.

    `rounds` are training rounds; `fraction` of the clients take part in each; `lr_decay` multiplies
    local.lr after each training round, and `schedule` is "constant" or "cosine"; `on_failure` is
    "stop" or "skip"; evaluation takes place every `eval_every` rounds and at the end;
    `finetune_epochs` > 0 also evaluates the global model after so many epochs on a client's own
    data. Training stops early after `patience` evaluations in a row without a validation better by
    more than `min_delta`; None: never."""

    site: Site
    local: LocalSettings
    rounds: int = 1
    fraction: float = 1.0
    lr_decay: float = 1.0
    schedule: str = "constant"
    on_failure: str = "stop"
    eval_every: int = 1
    finetune_epochs: int = 0
    patience: int | None = None
    min_delta: float = 0.0
    plugins: Sequence[Plugin] = ()
    server_opt: ServerOptimizer | None = None

    def rate(self, step: int) -> float:
        """The factor on local.lr in training round `step`, which counts from 1; cosine: from 1 in
        the first towards 0 after the last."""
        factor = self.lr_decay ** (step - 1)
        return (
            factor * 0.5 * (1 + math.cos(math.pi * (step - 1) / self.rounds))
            if self.schedule == "cosine"
            else factor
        )

"""When a loss has stopped falling."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass
class EarlyStopping:
    """Tells when a loss has stopped falling.

    Call it with the loss after each round or epoch. It returns true once `patience` calls in a row
    have not been below the best loss by more than `tolerance`.
    """

    patience: int
    tolerance: float = 0.0
    best: float = inf
    stale: int = 0

    def __call__(self, loss: float) -> bool:
        if loss < self.best - self.tolerance:
            self.best = loss
            self.stale = 0
        else:
            self.stale += 1
        return self.stale >= self.patience

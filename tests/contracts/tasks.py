"""Tasks that several files of these tests use."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fedhet.core.task import Task
from fedhet.data.toy import toy_task


def with_dropout() -> Task:
    """The toy federation with a model that draws from torch's global generator while it trains."""

    def model() -> nn.Module:
        made = toy_task().model()
        made.body.append(nn.Dropout(0.3))  # type: ignore[union-attr, operator]
        return made

    return replace(toy_task(6), model=model)

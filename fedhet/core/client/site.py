"""A client's place during one message, as the client half of a method or a plug-in sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedhet.core.client.training import Fitted as Fitted
from fedhet.core.metrics import outputs
from fedhet.core.task import Samples
from fedhet.core.trees import AnyTree

if TYPE_CHECKING:
    from fedhet.core.client.client import FedClient
    from fedhet.core.workspace import Workspace


class Site:
    """The data of one client, and what trains and evaluates models on them.

    Args:
        client: the client that serves the message.

    Attributes:
        fit, gradient, adapt: those of the `Trainer`.
    """

    def __init__(self, client: FedClient) -> None:
        self._client = client
        trainer = client.trainer
        self.fit, self.gradient, self.adapt = trainer.fit, trainer.gradient, trainer.adapt

    @property
    def workspace(self) -> Workspace:
        """The task, the names and initial values of the model, and settings of privacy."""
        return self._client.workspace

    @property
    def data(self) -> Samples:
        """The samples to train on, ready for the model, as the plug-ins have changed them."""
        return self._client.trainer.data

    @property
    def own(self) -> Samples:
        """The client's own training samples, ready for the model."""
        return self.workspace.train_data(self._client.pid)

    def model(self, params: AnyTree) -> nn.Module:
        """The model with these values; another call, and any training, gives it others."""
        return self._client.trainer.holding(params)

    @torch.no_grad()
    def outputs(self, params: AnyTree, x: Tensor, part: str = "forward") -> Iterator[Tensor]:
        """What the model with these values, in eval mode, makes of x (n, ...), in chunks.

        Args:
            params: the values.
            x: inputs that are ready for the model.
            part: the method of the model, such as "features".
        """
        model = self.model(params).eval()
        yield from outputs(model, x, self.workspace.performer, part)

    def stream(self, purpose: str) -> torch.Generator:
        """The random stream of this message and purpose, on the CPU.

        That of "batches" orders the samples of `fit`: torch.randperm(n) for each epoch.
        """
        return self._client.trainer.generator(purpose)

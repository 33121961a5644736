"""A client's place during one message, as the client half of a method or a plug-in sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedhet.core.client.training import Fitted as Fitted
from fedhet.core.kernel import Term
from fedhet.core.metrics import outputs
from fedhet.core.task import Samples
from fedhet.core.trees import AnyTree, Tree

if TYPE_CHECKING:
    from fedhet.core.client.client import FedClient
    from fedhet.core.client.optimizers import Optimizer
    from fedhet.core.workspace import Workspace


class Site:
    """The data of one client, and what trains and evaluates models on them.

    Args:
        client: the client that serves the message.
    """

    def __init__(self, client: FedClient) -> None:
        self._client = client

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

    def fit(
        self,
        start: AnyTree,
        terms: Sequence[Term] = (),
        *,
        data: Samples | None = None,
        loss: Term | None = None,
        epochs: int | None = None,
        patience: int | None = None,
        lr: float | None = None,
        names: Sequence[str] | None = None,
        beside: Mapping[str, nn.Parameter] | None = None,
        momentum: Tree | None = None,
        stream: str = "",
        alone: bool = False,
    ) -> Fitted:
        """Train the model from `start`, by mini-batches.

        Args:
            start: the values with which it begins.
            terms: the method's own.
            data: the samples, ready for the model; None for `data`.
            loss: takes the place of the task's criterion: (B,) losses.
            epochs: how many; None for what the message says, which may be a number of steps.
            patience: stop after so many epochs without a lower mean loss; None for never.
            lr: another rate than the message's.
            names: the parameters to train; None for those of the method's `scope`.
            beside: further parameters, which the terms find in `params`; their gradients are
                clipped by themselves, and terms of other kinds than losses do not see them.
            momentum: the momentum of SGD to begin with, by parameter.
            stream: the name of the random stream of dropout; "" for that of the message.
            alone: without the plug-ins' terms, for training whose result is not sent.
        """
        return self._client.trainer.fit(
            start,
            terms,
            data=data,
            loss=loss,
            epochs=epochs,
            patience=patience,
            lr=lr,
            names=names,
            beside=beside,
            momentum=momentum,
            stream=stream,
            alone=alone,
        )

    def gradient(
        self, params: AnyTree, index: Tensor, chunk: int, *, changed: bool = False
    ) -> tuple[Tree, AnyTree]:
        """(the gradient of the local loss, with the plug-ins' terms; the model's tensors after it).

        Args:
            params: where it is taken.
            index: the samples.
            chunk: how many go through the model at a time.
            changed: whether plug-ins change it as they change the gradient of a step.
        """
        return self._client.trainer.gradient(params, index, chunk, changed=changed)

    def adapt(
        self,
        start: AnyTree,
        names: Sequence[str],
        optimizer: Callable[[list[Tensor]], Optimizer],
        *,
        index: Tensor,
        epochs: int,
        until: Callable[[list[float]], bool],
        stream: str,
    ) -> None:
        """Take steps of another optimiser than the run's, on the loss of the model.

        It is the exception to `fit`, for FedALA, which learns what is no parameter. Neither the
        method's terms, nor plug-ins, nor client.clip change the gradient, the order is the same in
        each epoch, and the model is lost.

        Args:
            start: the values with which the model begins.
            names: the parameters whose gradient it is.
            optimizer: makes it of them; it changes them in place.
            index: the client's own samples in their order.
            epochs: at most so many passes over them.
            until: the mean losses of the epochs so far -> whether it ends.
            stream: the name of the random stream of dropout.
        """
        self._client.trainer.adapt(
            start, names, optimizer, index=index, epochs=epochs, until=until, stream=stream
        )

    def stream(self, purpose: str) -> torch.Generator:
        """The random stream of this message and purpose, on the CPU.

        That of "batches" orders the samples of `fit`: torch.randperm(n) for each epoch.
        """
        return self._client.trainer.generator(purpose)

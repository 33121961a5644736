"""A plug-in adjusts what travels and what is trained; it never aggregates. Every hook defaults to
doing nothing.

One class holds both halves. Each side makes its own object: the server one for the run, a client
one per message, so nothing leaks from one client into the next; what a client must remember goes
through `self.client.state`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fedhet.messages import Broadcast, Update
from fedhet.phases import Phase
from fedhet.trees import Tree

if TYPE_CHECKING:
    from fedhet.client import FedClient
    from fedhet.optimizers import Optimizer
    from fedhet.strategy import FedStrategy
    from fedhet.task import Samples
    from fedhet.training import Batch

Report = dict[str, float | Tensor]


class Plugin:
    """The hooks, in the order in which a step meets them."""

    name: ClassVar[str]
    # `incoming` gets a list of all updates, else an iterator that is read once
    needs_all: bool = False
    server: FedStrategy
    client: FedClient
    settings: Mapping[str, Any] = {}

    @property
    def refuses(self) -> dict[str, str]:
        """Names of methods and plug-ins that it cannot work with -> the reason."""
        return {}

    def digest(self) -> str:
        """Identifies the settings, so that a server and a client that differ notice."""
        return hashlib.sha256(
            json.dumps(dict(self.settings), sort_keys=True, default=str).encode()
        ).hexdigest()[:12]

    # ---- server half
    def setup(self) -> None:
        """Once, when `self.server` is known."""

    def slots(self) -> dict[str, Tree]:
        """Further named weights that its phases send, with their initial values."""
        return {}

    def phases(self) -> list[Phase]:
        """Its own phases, before the training; each is served by the method of the phase's name on
        this class."""
        return []

    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        """Once per step, before sending: add to `msg.extras`, or schedule `msg.local`."""

    def check(self, update: Update) -> None:
        """Refuse a bad extra with a ValueError; it counts as that client's failure."""

    def incoming(
        self, updates: Iterator[Update], old: Tree | None
    ) -> Iterator[Update] | list[Update]:
        """Before the merge: change `update.weight`, or the update."""
        return updates

    def merged(self, new: Tree, old: Tree) -> Tree:
        """After the merge, before the server optimiser; float64, trainable names."""
        return new

    def report(self) -> Report:
        """What this step should record: numbers go to rounds.jsonl, tensors to arrays/."""
        return {}

    # ---- client half
    def received(self, msg: Broadcast) -> None:
        """When the message has arrived, before training."""

    def data(self, raw: Samples) -> Samples:
        """The training set to use; images are still in [0, 1], before normalisation."""
        return raw

    def sample_weights(self, data: Samples) -> Tensor | None:
        """(n,) factors of the per-sample losses."""
        return None

    def optimizer(self, inner: Optimizer, params: list[Tensor]) -> Optimizer:
        """Wrap the local optimiser of the trained parameters, to change what a step does."""
        return inner

    def losses(self, batch: Batch) -> Tensor | None:
        """(B,) terms to add to the per-sample losses."""
        return None

    def penalty(self, batch: Batch) -> Tensor | None:
        """A scalar to add to the batch loss, differentiated by autograd."""
        return None

    def gradient(self, grads: list[Tensor]) -> None:
        """Add, in place, the gradient of a term of the loss; one tensor per trained parameter."""

    def scale(self, grads: list[Tensor]) -> None:
        """Scale the whole gradient in place: after every `gradient`, before clipping, weight decay
        and the step."""

    def sending(self, update: Update) -> None:
        """Before the reply leaves: add to `update.extras` or `update.metrics`."""

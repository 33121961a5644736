"""The hooks of a plug-in, which adjusts what travels and what is trained but never aggregates.

One class holds both halves. Each side makes its own object: the server one for the run, a client
one per message. Nothing can leak from one client into the next: what a client must remember goes
through `self.client.state`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fedhet.core.check import Checked
from fedhet.core.errors import ConfigError
from fedhet.core.messages import Broadcast, Recorded, Update
from fedhet.core.phases import Phase
from fedhet.core.trees import AnyTree, Prepared, Tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from fedhet.core.client import FedClient
    from fedhet.core.kernel import Term
    from fedhet.core.optimizers import Optimizer
    from fedhet.core.strategy import FedStrategy
    from fedhet.core.task import Samples
    from fedhet.core.training import Batch

# What a term of the loss may be: its values alone, or with tensors to record, by name.
Terms = Tensor | tuple[Tensor, Tree]
# The hooks of local training, which methods and plug-ins have in the same form.
STEP_HOOKS = ("draws", "optimizer", "losses", "penalty", "gradient", "scale")


def overrides(obj: object, base: type, hook: str) -> bool:
    """Whether the class of `obj` has a `hook` other than that of `base`."""
    return getattr(type(obj), hook) is not getattr(base, hook)


def check_hooks(cls: type, base: type) -> None:
    """Raise ConfigError where a hook of the class does not take the arguments of that of `base`."""
    for hook in ("prepare", *STEP_HOOKS):
        own = vars(cls).get(hook)
        if not inspect.isfunction(own) or not hasattr(base, hook):
            continue
        expected = list(inspect.signature(getattr(base, hook)).parameters)
        signature = inspect.signature(own)
        try:
            signature.bind(*expected)
        except TypeError as error:
            raise ConfigError(
                f"{cls.__module__}.{cls.__qualname__} has"
                f" {hook}({', '.join(signature.parameters)}), which is called as"
                f" {hook}({', '.join(expected)}); docs/extending.md describes the hooks"
            ) from error


class Plugin(Checked):
    """Every hook does nothing by default. They are grouped by side, server first.

    Its options are the fields of a dataclass, with what `fedhet.core.check.setting` allows, or
    those of a constructor, which checks them and passes them on: `super().__init__(mu=mu)`.

    Attributes:
        name: its name in the configuration, and the prefix of its extras and phases.
        needs_all: whether the merge gets all updates at once, with weights that sum to 1; else it
            reads an iterator once and the weights are relative.
        needs_model: whether it refers to the model that clients receive.
        compares: whether it compares the weights that clients send.
        adds_samples: whether it weighs clients by samples that it adds to their own.
        otherwise: a fact of methods -> its option that does not need it.
        memory: the names of the attributes that outlast a step on the server, for checkpoints.
        releases: the name of a phase of its own, or "train" -> how many floating extras it adds to
            a reply, each of which is a release under privacy.noise.
        public: its extras, or "<extra>.<tensor>", that reveal no more of the data than their
            number, so that they need no noise.
        unsized: what it keeps in the state whose size follows from the counts of classes: with
            privacy.min_count, a client does not count it in the size that it sends.
        settings: the options that server and client must agree on.
        recorded: what the step in progress should record: numbers go to rounds.jsonl, tensors to
            arrays/. It is emptied before each step.
        server: the strategy, once the server has called `setup`.
        client: the client that serves the message, on a client.
    """

    name: ClassVar[str]
    needs_all: ClassVar[bool] = False
    needs_model: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    adds_samples: ClassVar[bool] = False
    otherwise: ClassVar[dict[str, str]] = {}
    memory: ClassVar[tuple[str, ...]] = ()
    releases: ClassVar[dict[str, int]] = {}
    public: ClassVar[tuple[str, ...]] = ()
    unsized: ClassVar[tuple[str, ...]] = ()
    server: FedStrategy
    client: FedClient

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.recorded: Recorded = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        Plugin.__init__(self, **{one.name: getattr(self, one.name) for one in fields(self)})  # type: ignore[arg-type]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls):
            cls.GROUP = f"plugin.{cls.name}"
        check_hooks(cls, Plugin)

    @property
    def refuses(self) -> dict[str, str]:
        """Methods, merges and plug-ins that it cannot be combined with: name -> reason."""
        return {}

    @property
    def refuses_noise(self) -> str:
        """Why its replies cannot be noised (privacy.noise); "" where they can."""
        return ""

    # The facts by which fedhet/core/compatibility.py decides. Their defaults follow from the hooks
    # that a class overrides; one whose options decide, or whose hook does less, says so itself.
    @property
    def changes_gradients(self) -> bool:
        """Whether local steps are others than along the gradient of the local loss.

        A `gradient` that adds exactly the gradient of a term of the loss is none of those.
        """
        return any(overrides(self, Plugin, hook) for hook in ("gradient", "scale", "optimizer"))

    @property
    def changes_optimizer(self) -> bool:
        """Whether local steps are not the optimiser's, up to a factor that all clients share."""
        return overrides(self, Plugin, "optimizer")

    @property
    def changes_weights(self) -> bool:
        """Whether it changes aggregation weights."""
        return overrides(self, Plugin, "incoming")

    @property
    def needs_steps(self) -> bool:
        """Whether it has no effect where clients take no local step, as under FedSGD."""
        return overrides(self, Plugin, "optimizer")

    @property
    def changes_steps(self) -> bool:
        """Whether clients take other numbers of local steps than follow from their samples.

        One whose `data` adds samples does; one that sets `self.client.local` must say so itself.
        """
        return overrides(self, Plugin, "data")

    def digest(self) -> str:
        """Identifies the settings, so that a server and a client that differ notice it."""
        text = json.dumps(self.settings, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    # ---- server
    def setup(self) -> None:
        """Called once, when `self.server` is known."""

    def slots(self) -> dict[str, Tree]:
        """Further named weights that its phases send, with their initial values."""
        return {}

    def phases(self) -> list[Phase]:
        """Its own phases, which come before the training.

        The client half serves each with the method of the phase's name: (Broadcast) -> Update.
        """
        return []

    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        """Called once per step, before sending: add to `msg.extras`, or change `msg.local`."""

    def check(self, update: Update) -> None:
        """Refuse a bad extra of a training step with a ValueError.

        The update then counts as that client's failure. Phases of your own have `Phase.check`.
        """

    def incoming(self, updates: Iterator[Update], old: Tree) -> Iterable[Update]:
        """Called before the merge: change `update.weight`, or the update."""
        return updates

    def merged(self, new: Tree, old: Tree) -> Tree:
        """Called after the merge, before the server optimiser; float64, trained tensors only."""
        return new

    # ---- client
    @property
    def changes_data(self) -> bool:
        """Whether it has other samples than the client's own."""
        return overrides(self, Plugin, "data")

    def served(self, phase: str) -> Callable[[Broadcast], Update] | None:
        """What serves its phase of this name; None for nothing."""
        if phase.startswith("_") or hasattr(Plugin, phase):
            return None
        return (
            getattr(self, phase) if inspect.isfunction(getattr(type(self), phase, None)) else None
        )

    def terms(self, msg: Broadcast) -> list[Term]:
        """None; the hooks below are what it has."""
        return []

    def prepare(self, msg: Broadcast) -> Prepared | None:
        """Called when the message has arrived, before the work of the phase.

        The result is what the hooks of the local steps get as `own`; None for nothing.
        """

    def data(self, raw: Samples) -> Samples:
        """The training set to use; images are in [0, 1], not yet normalised."""
        return raw

    def sample_weights(self, data: Samples) -> Tensor | None:
        """(n,) factors of the per-sample losses; None for no weights."""
        return None

    def optimizer(
        self, inner: Optimizer, params: dict[str, nn.Parameter], own: Prepared
    ) -> Optimizer:
        """Wrap the local optimiser of the trained parameters, to change what a step does."""
        return inner

    # The hooks of a step. They are functions of their arguments and of what all clients have in
    # common: they change nothing but the gradient, and wait for no value of the device.
    def draws(self, n: int) -> Prepared:
        """Random draws for a batch of n samples, which the hooks find in `own`."""
        return {}

    def losses(self, params: AnyTree, batch: Batch, own: Prepared) -> Terms:
        """(B,) terms to add to the per-sample losses."""
        return batch.logits.new_zeros(len(batch.y))

    def penalty(self, params: AnyTree, batch: Batch, own: Prepared) -> Terms:
        """A scalar to add to the batch loss, differentiated by autograd."""
        return batch.logits.new_zeros(())

    def gradient(self, grads: Tree, params: AnyTree, own: Prepared) -> None:
        """Add the gradient of a term of the loss in place, entry by entry."""

    def scale(self, grads: Tree, own: Prepared) -> None:
        """Scale the whole gradient in place, entry by entry.

        It runs after every `gradient`, before clipping, weight decay and the step.
        """

    def finish(self, update: Update) -> None:
        """Called before the reply leaves: add to `update.extras` or `update.metrics`."""

    def released(self, update: Update) -> None:
        """Called after privacy.noise: make the extras what the server accepts, from them alone."""

"""The interface for authors of methods and plug-ins.

A method has a server half and a client half. The server half maps (step, state, weights, updates)
to new weights, a new state and values to record. The client half maps (message, state, ctx) to
a result and a new state. Neither half has attributes that change. Options are the fields of a
frozen dataclass, which the server and the clients both have. A function receives its state and
returns the new one; the run stores it.

A component sees only its own extras and its own state, so their names need no prefix.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

from torch import Tensor, nn

from fedhet.core import messages, trees
from fedhet.core.check import Checked, did_you_mean, one_of
from fedhet.core.groups import LocalSettings
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.core.workspace import Scope, Workspace

if TYPE_CHECKING:
    from fedhet.core.client.context import ClientContext
    from fedhet.core.client.training import Fitted
    from fedhet.core.server.run_setup import RunSetup
    from fedhet.core.task import Samples

State = Mapping[str, Any]  # trees, tensors, numbers, and lists and dicts of these, by name
F = TypeVar("F", bound=Callable[..., Any])


# ---- messages, results and updates, as a component sees them
class HasExtras:
    """Gives access to extras by name: `msg["c"]`, and `"c" in msg`."""

    extras: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.extras[name]

    def __contains__(self, name: str) -> bool:
        return name in self.extras


@dataclass(frozen=True)
class Message(HasExtras):
    """A message from the server to a client. `msg["c"]` is the extra c of the component.

    Attributes:
        phase: the name of the phase as its owner declared it, such as "train" or "explore"; or
            "evaluate".
        step: the number of the step in the phase, from 1.
        round: the number of the step in the run, from 1.
        pid: the client.
        local: the settings of local training in this step.
        weights: the tensors of the slot. If the slot is the model, all of its tensors are here: the
            tensors that the client keeps for itself have the client's values.
        extras: the values that the component's `broadcast` returned.
    """

    phase: str
    step: int
    round: int
    pid: int
    local: LocalSettings
    weights: AnyTree
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The result of a client's work.

    Attributes:
        weights: the tensors of the phase's slot after the work; for the model, all of its tensors.
            The client sends the shared tensors and keeps the others. With {}, it sends nothing and
            keeps nothing.
        extras: the values that `expects` names. None withholds a statistic.
        metrics: numbers to record; they never influence the aggregation.
    """

    weights: AnyTree = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Update(HasExtras):
    """A client's reply that has passed the checks, together with the message that it answers.

    If a computation depends on what the client received (SCAFFOLD's c, the learning rate), read the
    value from `sent`, not from the present state. Then it is also right for a late reply.

    Attributes:
        pid: the client.
        n: the number of its training samples.
        weight: its aggregation weight. In `merge` and `after`, the aggregation weights of a step
            sum to 1 if the method has `needs_all` or a plug-in overrides `weights`. Otherwise, and
            in the plug-ins' `weight` and `weights`, only their ratios matter.
        weights: the slot's tensors that the client sent.
        change: `weights` minus the tensors that the client received, in float64, without buffers.
            It is computed when it is read.
        extras: the values that `expects` names; None for a value that the client withheld.
        metrics: the numbers that the client sent.
        sent: the message that it answers, as the server made it for all clients: `pid` is -1, and
            `weights` has the shared tensors only.
    """

    pid: int
    n: int
    weight: float
    weights: AnyTree
    change: AnyTree
    extras: Mapping[str, Any]
    metrics: Mapping[str, float]
    sent: Message


@dataclass(frozen=True)
class Expected:
    """Describes one extra of a reply.

    The server checks the extra against this description. A client reads from it what to noise, and
    whether to withhold the extra if the client has few samples.

    For a tree, set `like` or `tree`. For a tensor, set `shape`. For a number, set none of the
    three.

    Attributes:
        like: a tree with the expected names, shapes and types.
        tree: whether the extra is a tree of any names, which `check` examines.
        shape: the expected shape; -1 stands for any size, the same in all replies of a step.
        low: the smallest allowed value of each entry; None for any.
        high: the largest allowed value of each entry; None for any.
        whole: whether the values are whole numbers.
        exactly: a function from a client to the only number that the server accepts from this
            client. The function returns None if the server cannot know the number.
        check: (value, update) -> None; a further check, which raises ValueError if the value is
            bad. The update has the extras under their names in messages.
        statistic: whether the extra is a statistic of the client's samples. A client with fewer
            samples than privacy.min_count withholds the extra.
        public: whether the extra reveals nothing of the data except the number of samples, so that
            it needs no noise. For a tree, you may give the names of its public tensors instead.
        repair: (noised value, update) -> a value that the checks accept; called after the value was
            clamped to `low` and `high`. Under noise, such an extra must have floating-point values,
            even if `whole` is true, because whole numbers cannot be noised.
        metric: whether the client sends the value, a number, as the metric "<owner>.<name>" instead
            of as an extra. Under noise, replies have no such metrics.
    """

    like: AnyTree | None = None
    tree: bool = False
    shape: tuple[int, ...] | None = None
    low: float | None = None
    high: float | None = None
    whole: bool = False
    exactly: Callable[[int], int | None] | None = None
    check: Callable[[Any, messages.Upload], object] | None = None
    statistic: bool = False
    public: bool | Sequence[str] = False
    repair: Callable[[Any, messages.Upload], Any] | None = None
    metric: bool = False

    def read(self, name: str, update: messages.Upload) -> Any:
        """Return the value of the extra `name` after all checks, or None if it is withheld.

        Raises:
            ValueError: the value is missing or bad; the message names the extra.
        """
        if self.statistic and is_withheld(update.extras.get(name)):
            return None
        if self.metric:
            if name not in update.metrics:
                raise ValueError(f"the reply lacks the metric {name!r}")
            value: Any = update.metrics[name]
        elif self.tree or self.like is not None:
            value = update.tree(name, self.like)
        elif self.shape is not None:
            value = update.whole(name) if self.whole else update.tensor(name)
            self._check_shape(name, value, self.shape)
        else:
            value = update.integer(name) if self.whole else update.scalar(name)
        self._bounds(name, value)
        only = self.exactly(update.pid) if self.exactly else None
        if only not in (None, value):
            raise ValueError(
                f"extra {name!r} is {value}; {only} is expected, as the server computes it"
            )
        if self.check:
            self.check(value, update)
        return value

    def _check_shape(self, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
        fits = value.ndim == len(shape) and all(
            m in (-1, n) for m, n in zip(shape, value.shape, strict=True)
        )
        if not fits:
            expected = tuple("any" if m < 0 else m for m in shape)
            raise ValueError(
                f"extra {name!r} has the shape {tuple(value.shape)}; expected: {expected}"
            )

    def _bounds(self, name: str, value: Any) -> None:
        if self.low is None and self.high is None:
            return
        for part, t in trees.as_tree(value).items():
            low, high = (t, t) if not isinstance(t, Tensor) else (t.min(), t.max())
            for sign, bound, found, within in (
                (">=", self.low, float(low), operator.ge),
                ("<=", self.high, float(high), operator.le),
            ):
                if bound is not None and not within(found, bound):  # NaN is never within
                    what = "metric" if self.metric else "extra"
                    where = f", tensor {part!r}" if part else ""
                    raise ValueError(
                        f"{what} {name!r}{where} is {found:g}; {sign} {bound:g} is expected"
                    )


def is_withheld(value: object) -> bool:
    """Whether the value is the sign for a withheld value: a floating tensor without entries."""
    return isinstance(value, Tensor) and value.shape == (0,) and value.is_floating_point()


# ---- local training
KINDS = {
    "loss": "a tensor (B,), which is added to the samples' losses",
    "weight": "a tensor (n,), which multiplies the samples' losses",
    "penalty": "a scalar, which is added to the batch's loss",
    "gradient": "a tree, which is added to the gradient, times `factor`",
    "scale": "a tree, which multiplies the gradient after these additions",
    "step": "a tree, which multiplies the step of the optimiser",
}
# A plug-in with a term of the kind "scale" or "step" must put a word of that kind into `breaks`. If
# all clients have the same factors, the last word is enough; otherwise it must put the first.
# fedhet cannot check which of the two is true.
BREAKS = {"scale": ("plain steps",), "step": ("sgd steps", "plain steps")}


@dataclass(frozen=True, eq=False)
class Term:
    """A term that changes the steps of local training.

    `f` is a function of (params, batch, own), the same for all clients. It has no side effects,
    draws no random numbers, and reads no value from the device. Put everything that differs between
    clients into `own`; then fedhet can compute the steps of several clients in one batch (fused).
    `f` must be a function of a module, or a method of the component or of its client half.

    Attributes:
        kind: one of KINDS, which says how the value is used. Only losses and penalties get a batch;
            the others get None. In each step, after the gradient is known, fedhet computes the
            terms "gradient" and "scale". They apply to the parameters that their trees name.
            "weight" and "step" are computed once, before the first step. A loss or a penalty may
            also return (value, tensors to record).
        f: (the trained parameters, the batch, own) -> the value.
        own: tensors in dicts, lists and tuples, nested to any depth.
        factor: the factor of a "gradient" term.
        draws: a function that makes random draws for a batch of n samples: a dict of tensors on the
            CPU. On the device, the draws join `own`. None for no draws.
    """

    kind: str
    f: Callable[..., Any]
    own: Prepared = field(default_factory=dict)
    factor: float = 1.0
    draws: Callable[[int], Prepared] | None = None

    def __post_init__(self) -> None:
        one_of("the kind of a term", self.kind, KINDS)


def as_given(params: AnyTree, batch: None, own: Tree) -> Tree:
    """Return `own`. Use this function as the `f` of a term with a fixed value.

    A fixed value does not depend on the parameters.
    """
    return own


# ---- a step on the server
@dataclass(frozen=True, kw_only=True)
class Step:
    """A step, as the server's functions see it.

    Attributes:
        workspace: the task, the model and its initial values, sizes and settings of privacy.
        phase: the name of the phase as its owner declared it, such as "train".
        number: the number of the step in the phase, from 1.
        round: the number of the step in the run, from 1.
        local: the settings of local training in this step.
        cohort: the clients that take part.
        trains: whether the step trains the model.
        slots: the weights that the server keeps, by slot; the model's slot is "model".
        state: the owner's state on the server; {} on a client, and in `broadcast`.
        mean: (pairs of a tree and its weight) -> their average by the run's `merge`, in float64.
        average: makes an object that averages in the same way, tree by tree, with
            `add(tree, weight)` and `mean()`.
        steps: a function from a client to its number of local steps. The function returns None if
            the server cannot know the number.
        sent: the message of the step, without a client; None before the message is made.
    """

    workspace: Workspace
    phase: str
    number: int
    round: int
    local: LocalSettings
    cohort: Sequence[int] = ()
    trains: bool = False
    slots: Mapping[str, Tree] = field(default_factory=dict)
    state: State = field(default_factory=dict)
    mean: Callable[[Iterable[tuple[AnyTree, float]]], Tree] = trees.mean
    average: Callable[[], Any] = trees.Sum
    steps: Callable[[int], int | None] = lambda pid: None
    sent: Message | None = None


class Merged(NamedTuple):
    """The result of a merge.

    Attributes:
        weights: the new values of the slot's trained tensors; {} leaves them unchanged.
        state: the owner's new state.
        metrics: numbers for rounds.jsonl, and tensors for arrays/.
        slots: new values of further weights, by slot.
    """

    weights: AnyTree
    state: State
    metrics: Mapping[str, Any] = {}
    slots: Mapping[str, AnyTree] = {}


MergeOf = Callable[[Step, State, Tree, Iterator[Update]], Merged]


@dataclass(frozen=True)
class Phase:
    """One kind of step.

    The client's work is done by the function of the same name: in the method's client half, or in
    the plug-in itself.

    Attributes:
        name: the name of the phase, and of the function that serves it on the client. Decorate this
            function with @serves.
        rounds: the largest number of steps.
        merge: (step, state, old weights, updates) -> Merged.
        slot: the slot with the weights that clients receive; "" for none.
        cohort: how many clients take part: None for the run's `fraction`, a float for a share (1.0
            is all), an int for a number (20).
        trains: whether the phase trains the model. Then all plug-ins take part.
        evaluate: whether the model is evaluated after the steps of the phase.
        uploads: whether replies carry the slot's weights.
        until: a function of the owner's state after a step: whether the phase ends with this step.
    """

    name: str
    rounds: int
    merge: MergeOf
    slot: str = "model"
    cohort: int | float | None = None
    trains: bool = False
    evaluate: bool = False
    uploads: bool = True
    until: Callable[[State], bool] | None = None

    @property
    def compared(self) -> bool:
        """Whether the replies change a slot. If so, a step needs enough of them for `merge`."""
        return bool(self.slot and (self.uploads or self.trains))


# ---- words for what a component needs or breaks (fedhet.core.server.compatibility)
WORDS = {
    "model": "clients receive the model",
    "weights": "clients send the model tensors that they have trained",
    "local steps": "clients take local steps",
    "sgd steps": "local steps are SGD's; a factor, the same at all clients, may scale them",
    "plain steps": "local steps are plain SGD's along the gradient of the local loss",
    "used weights": "the merge uses each update's aggregation weight",
    "means": "the merge uses only means of the replies' values",
    "weights alone": "the merge uses the model tensors of the replies, and no extras",
    "sample weights": "an update's aggregation weight is the client's number of samples",
    "noise": "the method can use noised replies",
}


def serves(f: F) -> F:
    """Mark a function of a client half or a plug-in: it serves the phase that has its name."""
    f.serves = True  # type: ignore[attr-defined]
    return f


class Component(Checked):
    """Base of methods and plug-ins. A subclass is checked when it is defined (`check_class`).

    Attributes:
        name: its name in the configuration, and the prefix of its extras in messages.
        needs_all: whether it needs all updates of a step at once: a method for its `merge`, with
            weights that sum to 1; a plug-in for its `after`.
    """

    name: ClassVar[str] = ""
    needs_all: ClassVar[bool] = False
    _hooks: ClassVar[dict[str, Callable[..., Any]]]

    def __init_subclass__(cls, base: bool = False) -> None:
        super().__init_subclass__()
        if base:
            common = ("broadcast", "expects", "setup", "slots")
            cls._hooks = {name: getattr(Component, name) for name in common} | _functions(cls)
            return
        check_class(cls)
        stated: tuple[Any, ...] = cls.needs, cls.breaks
        for words in stated:
            if not isinstance(words, property):
                _check_words(cls, words)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        made = vars(cls).get("__dataclass_params__")
        if made is None or not made.frozen:
            raise TypeError(
                f"{cls.__qualname__} is not a frozen dataclass: write"
                " @dataclass(frozen=True, kw_only=True) before it"
            )
        if not cls.name:
            raise TypeError(
                f"{cls.__qualname__} has no `name`: set the name that its extras and states get"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_words(type(self), {*self.needs, *self.breaks})

    @property
    def needs(self) -> frozenset[str]:
        """The properties of the training (WORDS) that this component needs."""
        return frozenset()

    @property
    def breaks(self) -> Mapping[str, str]:
        """The properties (WORDS) that this component makes untrue, each with the reason."""
        return {}

    def setup(self, setup: RunSetup) -> State:
        """Return the component's initial state on the server.

        Raise an error if the component cannot run with `setup`.
        """
        return {}

    def slots(self, setup: RunSetup) -> dict[str, Tree]:
        """Return the initial values of further weights that the server keeps, by slot."""
        return {}

    def broadcast(self, step: Step, state: State) -> Mapping[str, Any]:
        """Return the component's extras for the message to every client of the step."""
        return {}

    def expects(self, step: Step) -> Mapping[str, Expected]:
        """Return the extras that a reply must have for the component; no others are allowed."""
        return {}

    @property
    def settings(self) -> dict[str, Any]:
        """The options, by name."""
        return {option.name: getattr(self, option.name) for option in fields(self)}  # type: ignore[arg-type]

    # Cached, because each message builds a new FedClient, and the FedClient reads the digest.
    @cached_property
    def digest(self) -> str:
        """A hash of the class name and the options.

        Each client compares it with the server's, to notice that they differ.
        """
        text = json.dumps([type(self).__name__, self.settings], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def overrides(self, hook: str) -> bool:
        """Whether the class overrides the `hook`."""
        return getattr(type(self), hook) is not self._hooks[hook]


def _check_words(cls: type, words: Iterable[str]) -> None:
    """Refuse entries of `needs` or `breaks` that are not in WORDS."""
    for word in words:
        one_of(f"a word in needs or breaks of {cls.__qualname__}", word, WORDS)


def _functions(cls: type) -> dict[str, Callable[..., Any]]:
    """Return the public functions and class methods that the class itself defines."""
    found = {name: getattr(value, "__func__", value) for name, value in vars(cls).items()}
    return {n: f for n, f in found.items() if inspect.isfunction(f) and not n.startswith("_")}


def check_class(cls: Any) -> None:
    """Refuse a class if its functions or options do not fit the hooks.

    Raises:
        TypeError: a public function is not a hook, or has other parameters than the hook; a
            function that serves a phase lacks @serves; or an option has the name of a hook. The
            message names the function or the option.
    """
    for name in vars(cls).get("__annotations__", {}):
        if name in cls._hooks:
            raise TypeError(f"{cls.__qualname__}.{name}: an option cannot have the name of a hook")
    for name, function in _functions(cls).items():
        if getattr(function, "serves", False):
            continue
        if (hook := cls._hooks.get(name)) is None:
            raise TypeError(
                f"{cls.__qualname__}.{name} is no hook{did_you_mean(name, cls._hooks)}; the hooks"
                f" are {', '.join(sorted(cls._hooks))}. Begin the name of a helper with '_', and"
                " mark a phase by @serves"
            )
        own, expected = (list(inspect.signature(f).parameters) for f in (function, hook))
        if own != expected:
            raise TypeError(
                f"{cls.__qualname__}.{name}({', '.join(own)}) must have the parameters of the hook:"
                f" {name}({', '.join(expected)})"
            )
        if getattr(hook, "serves", False):
            raise TypeError(f"{cls.__qualname__}.{name} serves a phase: write @serves before it")


# ---- the three classes that an author derives from
class Client:
    """The client half of a method. Its defaults are FedAvg's.

    Attributes:
        options: the method, with its options.
    """

    _hooks: ClassVar[dict[str, Callable[..., Any]]]

    def __init__(self, options: Any) -> None:
        self.options = options

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_class(cls)

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        """Return the terms that the method adds to the steps of local training."""
        return []

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        """Serve the phase `train`: train from the received weights."""
        return Result(ctx.fit(msg.weights, self.terms(msg, state, ctx)).params), state

    def views(
        self, msg: Message, state: State, ctx: ClientContext
    ) -> dict[str, Callable[[], nn.Module]]:
        """Return a dict from views ("global", "personal") to functions that build their models.

        By default, each view of the method's `evaluates` is the model with the message's weights.
        The message's weights include the tensors that the client keeps for itself.
        """
        return dict.fromkeys(self.options.evaluates(ctx.workspace), lambda: ctx.model(msg.weights))

    @classmethod
    def personal_module(cls, model: nn.Module) -> nn.Module:
        """Return the module of the view "personal" for a model; by default the model itself."""
        return model


Client._hooks = _functions(Client)


class Method(Component, base=True):
    """The server half of a method, and its options. Its defaults are FedAvg's.

    A subclass is a frozen dataclass. Its fields state their allowed values with
    `fedhet.core.check.setting`. A class that overrides `merge` or `weight` must state `breaks`,
    because fedhet cannot find out which values of the replies the class uses, or how it weighs the
    replies.

    Attributes:
        client: the client half.
        requires: the plug-in without which the method would be FedAvg; None for none. It is a
            class, or a functools.partial of the class with its fixed options.
    """

    GROUP = "method"
    client: ClassVar[type[Client]] = Client
    requires: ClassVar[Callable[..., Plugin] | None] = None

    def __init_subclass__(cls, base: bool = False) -> None:
        super().__init_subclass__(base)
        own = [hook for hook in ("merge", "weight") if hook in vars(cls)]
        if own and "breaks" not in vars(cls):
            raise TypeError(
                f"{cls.__qualname__} overrides {own[0]}: state in `breaks` which of these words"
                f" are not true for it, or {{}} for none: {', '.join(map(repr, WORDS))}"
            )

    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        """Return which tensors clients train, and which they share."""
        return Scope()

    def evaluates(self, workspace: Workspace) -> Mapping[str, Sequence[str] | None]:
        """Return a dict: the views that clients evaluate, and the names of each view's own tensors.

        Views are "global" and "personal"; the first one chooses the best round. A view's own
        tensors differ between clients, in addition to the tensors that `scope` keeps; None for all.
        """
        return {"global": ()}

    def local(self, local: LocalSettings) -> LocalSettings:
        """Return the settings of local training, given the configured ones."""
        return local

    def phases(self, setup: RunSetup) -> list[Phase]:
        """Return the phases, in order. The phases of plug-ins come before them."""
        uploads = "weights" not in self.breaks
        return [
            Phase("train", setup.rounds, self.merge, trains=True, evaluate=True, uploads=uploads)
        ]

    def evaluation_extras(self, slots: Mapping[str, Tree], state: State) -> Mapping[str, Any]:
        """Return the extras that clients receive with the weights in order to evaluate."""
        return {}

    def weight(self, step: Step, update: Update) -> float:
        """Return the update's aggregation weight, before plug-ins change it. Only ratios matter."""
        return float(update.n)

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        """Return the new values of the trained tensors in a `Merged`.

        By default, these are old + the average of the changes by the run's `merge`. For merge=mean,
        this average is sum_k w_k change_k / sum_k w_k.

        `updates` can be read only once, one update after the other. The changes have no buffers,
        because the server averages buffers separately.
        """
        change = step.mean((update.change, update.weight) for update in updates)
        return Merged(trees.add(change, old), state)


class Plugin(Component, base=True):
    """A plug-in, which can be added to any method. One frozen dataclass has both halves.

    A class that overrides `weight` or `weights` must state "used weights" in `needs`. With
    `needs_all`, `after` gets the updates with the aggregation weights of the merge. If a plug-in
    overrides `data`, the size of its client state may reveal class counts. With privacy.min_count,
    clients therefore report the size of their state without this plug-in's part.
    """

    def __init_subclass__(cls, base: bool = False) -> None:
        super().__init_subclass__(base)
        if "name" in vars(cls):
            cls.GROUP = f"plugin.{cls.name}"
        own = [hook for hook in ("weight", "weights") if hook in vars(cls)]
        needs: Any = () if cls.needs is Component.needs else cls.needs
        if own and not base and not isinstance(needs, property) and "used weights" not in needs:
            raise TypeError(
                f"{cls.__qualname__} overrides {own[0]}: state 'used weights' in `needs`"
            )

    # ---- server
    def phases(self, setup: RunSetup) -> list[Phase]:
        """Return the plug-in's own phases, which come before the training."""
        return []

    def local(self, step: Step, local: LocalSettings) -> LocalSettings:
        """Return the settings of local training in this step."""
        return local

    def weight(self, step: Step, state: State, update: Update) -> float:
        """Return the aggregation weight of one update, which replaces `update.weight`."""
        return update.weight

    def weights(
        self, step: Step, state: State, updates: Sequence[Update]
    ) -> tuple[Sequence[float], Mapping[str, Any]]:
        """Return (the aggregation weights, values to record).

        If a plug-in overrides this function, the server keeps all updates of a step in memory.
        """
        return [update.weight for update in updates], {}

    def after(
        self, step: Step, state: State, old: Tree, new: Tree, updates: Sequence[Update]
    ) -> Merged:
        """Return the weights to continue with, and the new state.

        Called after the merge of a training step, and before the server optimiser. `old` has the
        weights just before the merge, `new` the merged ones, in float64.
        """
        return Merged(new, state)

    # ---- client
    def data(self, samples: Samples, state: State) -> Samples:
        """Return the training set to use. Images are in [0, 1], not yet normalised."""
        return samples

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        """Return the terms that the plug-in adds to the steps of the method's training."""
        return []

    def finish(
        self, msg: Message, state: State, ctx: ClientContext, fitted: Fitted
    ) -> tuple[Result, State]:
        """Return the plug-in's extras and metrics for the method's reply, and its new state.

        `fitted` is the result of the method's training.
        """
        return Result(), state

"""What the author of a method or a plug-in writes against.

Data flow in one direction. The server half of a method maps (step, state, weights, updates) to new
weights, a new state and what is recorded; its client half maps (message, state, ctx) to a result
and a new state. Neither has an attribute that changes: options are the fields of a frozen
dataclass, which server and clients both have, and what lasts is a state that a function receives
and returns. The run owns all of it.

Every piece sees its own extras and its own state only, so their names need no prefix.
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

State = Mapping[str, Any]  # trees, tensors, numbers, and lists and dicts of them, by name
F = TypeVar("F", bound=Callable[..., Any])


# ---- what travels, as its owner sees it
@dataclass(frozen=True)
class Message:
    """Server to client. `msg["c"]` is the extra c of the piece that reads it.

    Attributes:
        phase: the name of the phase that its owner has declared: "train", "explore"; or "evaluate".
        step: the number of the step in the phase, from 1.
        round: the number of the step in the run, from 1.
        pid: the client.
        local: how clients train in this step.
        weights: the tensors of the slot. Those of the model are complete: what the client keeps
            for itself has the client's values.
        extras: what the owner's `broadcast` has returned.
    """

    phase: str
    step: int
    round: int
    pid: int
    local: LocalSettings
    weights: AnyTree
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.extras[name]

    def __contains__(self, name: str) -> bool:
        return name in self.extras


@dataclass(frozen=True)
class Result:
    """What a client's work returns.

    Attributes:
        weights: the tensors of the phase's slot after the work; of the model all of them. Those
            that clients share are sent, and the others are kept; {} sends and keeps none.
        extras: the values that `expects` names. None withholds a statistic.
        metrics: numbers to record; they never influence the aggregation.
    """

    weights: AnyTree = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """A client's result that has passed the checks, with the message that it answers.

    What depends on what the client was sent (SCAFFOLD's c, the learning rate) is read in `sent`,
    and not in the present state, so that it is right for a reply that comes late, too.

    Attributes:
        pid: the client.
        n: its training samples.
        weight: its aggregation weight. The weights of a step sum to 1 if the method has `needs_all`
            or a plug-in has `weights`; otherwise only their ratios matter.
        weights: the slot's tensors that it has sent.
        change: `weights` minus what was sent, in float64, without buffers. It is computed when it
            is read.
        extras: what `expects` names; None where the client has withheld it.
        metrics: the numbers that it has sent.
        sent: the message that it answers, as all clients were sent it: `pid` is -1, and `weights`
            are those that clients share.
    """

    pid: int
    n: int
    weight: float
    weights: AnyTree
    change: AnyTree
    extras: Mapping[str, Any]
    metrics: Mapping[str, float]
    sent: Message

    def __getitem__(self, name: str) -> Any:
        return self.extras[name]

    def __contains__(self, name: str) -> bool:
        return name in self.extras


@dataclass(frozen=True)
class Expected:
    """What an extra of a reply must be. From it follow the server's check, the noise, and what a
    client with few samples withholds.

    One of `like` or `tree` (a tree), `shape` (a tensor) or none of them (a number).

    Attributes:
        like: a tree with the names, shapes and types.
        tree: whether it is a tree of any names, at which `check` looks.
        shape: the shape; -1 stands for any size, which is the same in all replies of a step.
        low: the least value of each entry; None for any.
        high: the largest; None for any.
        whole: whether it is of whole numbers.
        exactly: client -> the only number that is believed; None where it cannot be known.
        check: (value, update) -> None, raises ValueError where the value is bad all the same. The
            update has the extras under their names in messages.
        statistic: whether it is a statistic of the client's samples, which a client with fewer than
            privacy.min_count withholds.
        public: whether it reveals no more of the data than their number, so that it needs no noise;
            or the names of the tensors of which that is true.
        repair: (noised value, update) -> one that the checks accept, after `low` and `high`. A
            client sends for it what can be noised, and not whole numbers.
        metric: whether the client sends it as the metric "<owner>.<name>", a number, and not as an
            extra. Noised replies have no metrics.
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
        """The value of the extra `name`, after all checks; None where it is withheld.

        Raises:
            ValueError: it is something else; the message names the extra.
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
            raise ValueError(f"extra {name!r} is {value}; {only} would follow from what is known")
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
        tree = value if isinstance(value, dict) else {"": value}
        for part, t in tree.items():
            low, high = (t, t) if not isinstance(t, Tensor) else (t.min(), t.max())
            for sign, bound, found, within in (
                (">=", self.low, float(low), operator.ge),
                ("<=", self.high, float(high), operator.le),
            ):
                if bound is not None and not within(found, bound):  # NaN is not, either
                    what = "metric" if self.metric else "extra"
                    where = f", tensor {part!r}" if part else ""
                    raise ValueError(
                        f"{what} {name!r}{where} is {found:g}; {sign} {bound:g} is expected"
                    )


def is_withheld(value: object) -> bool:
    """Whether this stands for a value that the client withholds: a tensor without entries."""
    return isinstance(value, Tensor) and value.shape == (0,) and value.is_floating_point()


# ---- local training
KINDS = {
    "loss": "(B,) is added to the per-sample losses",
    "weight": "(n,), a factor of each sample's loss",
    "penalty": "a scalar is added to the batch loss",
    "gradient": "a tree, times `factor`, is added to the gradient",
    "scale": "a tree multiplies the gradient, after all that is added",
    "step": "a tree multiplies the step of the optimiser",
}
# A plug-in with a term of such a kind states one of these words in `breaks`. The last word is
# enough if all clients have the same factors, which cannot be checked.
BREAKS = {"scale": ("plain steps",), "step": ("sgd steps", "plain steps")}


@dataclass(frozen=True, eq=False)
class Term:
    """One thing that changes the steps of local training.

    `f` is a function of (params, batch, own), the same for all clients: it has no effect, draws
    nothing, and waits for no value of the device. What differs between clients is in `own`, so that
    the steps of several clients can be computed as one. `f` is a function of a module, or a method
    of the piece or its client half.

    Attributes:
        kind: one of KINDS, which says what becomes of the value. "gradient" and "scale" get no
            batch (None): they are computed once the gradient is known, for those parameters that
            their trees name. "weight" and "step" get none either, and are computed once, before
            the first step. A loss or a penalty may also return (value, tensors to record).
        f: (the trained parameters, the batch, own) -> the value.
        own: a tree of tensors of any depth.
        factor: of a gradient.
        draws: n -> random draws for a batch of n samples, which join `own`; or None.
    """

    kind: str
    f: Callable[..., Any]
    own: Prepared = field(default_factory=dict)
    factor: float = 1.0
    draws: Callable[[int], Prepared] | None = None

    def __post_init__(self) -> None:
        one_of("the kind of a term", self.kind, KINDS)


def as_given(params: AnyTree, batch: None, own: Tree) -> Tree:
    """The `f` of a term whose value is `own` itself, whatever the parameters."""
    return own


# ---- a step on the server
@dataclass(frozen=True, kw_only=True)
class Step:
    """What the server's functions know of a step.

    Attributes:
        workspace: the task, the model and its initial values, sizes and settings of privacy.
        phase: the name of the phase, as its owner has declared it; "train".
        number: the number of the step in the phase, from 1.
        round: the number of the step in the run, from 1.
        local: how clients train in it.
        cohort: the clients that take part.
        trains: whether the step trains the model.
        slots: the weights that the server keeps, by slot; those of the model are "model".
        state: what the server keeps for the owner; {} on a client, and in `broadcast`.
        mean: (pairs of a tree and its weight) -> their average, in float64: the run's `merge`.
        average: makes an object with `add(tree, weight)` and `mean()`, the same one by one.
        steps: client -> the number of local steps that it takes; None where it is not known.
        sent: the message of the step, without a client; None before it is made.
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
    """What a merge returns.

    Attributes:
        weights: the new values of the slot's trained tensors; {} leaves them as they are.
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
    """One kind of step. The client half of its owner serves it with the method of its name.

    Attributes:
        name: of the phase, and of that method, which is marked by `serves`.
        rounds: the largest number of steps.
        merge: (step, state, old weights, updates) -> Merged.
        slot: whose weights travel; "" for none.
        cohort: who takes part: None for the run's `fraction`, 1.0 for all, 20 for a number.
        trains: whether it trains the model, so that all plug-ins take part.
        evaluate: whether the model is evaluated after its steps.
        uploads: whether replies carry the slot's weights.
        until: state -> whether the phase ends with this step.
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
        """Whether the run's `merge` compares the replies: they change a slot."""
        return bool(self.slot and (self.uploads or self.trains))


# ---- what fits together
WORDS = {
    "model": "clients receive the model",
    "weights": "clients send the weights that they have trained",
    "local steps": "clients take local steps",
    "sgd steps": "local steps are SGD's, up to a factor that all clients share",
    "plain steps": "local steps are plain SGD's along the gradient of the local loss",
    "used weights": "the merge uses the weights of the updates",
    "means": "all that the merge takes of replies are means",
    "weights alone": "all that the merge takes of replies are their weights",
    "sample weights": "the weight of an update is the client's number of samples",
    "noise": "noised replies are of use",
}


def serves(f: F) -> F:
    """Mark the method of a client half that serves the phase of its name."""
    f.serves = True  # type: ignore[attr-defined]
    return f


class Component(Checked):
    """A method or a plug-in. Its class is checked when it is made.

    Attributes:
        name: its name in the configuration, and the prefix of its extras in messages.
        needs_all: whether all updates of a step are kept: for a method's `merge`, with weights that
            sum to 1, or for a plug-in's `after`.
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
                f"{cls.__qualname__} is no dataclass that is frozen: write"
                " @dataclass(frozen=True, kw_only=True) before it"
            )
        if not cls.name:
            raise TypeError(
                f"{cls.__qualname__} has no `name`, by which messages and states know it"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_words(type(self), {*self.needs, *self.breaks})

    @property
    def needs(self) -> frozenset[str]:
        """The words of WORDS that must hold for it."""
        return frozenset()

    @property
    def breaks(self) -> Mapping[str, str]:
        """The words that it makes untrue -> why."""
        return {}

    def setup(self, setup: RunSetup) -> State:
        """What the server keeps for it beside the weights. It refuses what it cannot act on."""
        return {}

    def slots(self, setup: RunSetup) -> dict[str, Tree]:
        """Further weights that the server keeps, with their initial values."""
        return {}

    def broadcast(self, step: Step, state: State) -> Mapping[str, Any]:
        """What every client of the step receives for it beside the weights."""
        return {}

    def expects(self, step: Step) -> Mapping[str, Expected]:
        """The extras that a reply must have for it; a reply may have no others."""
        return {}

    @property
    def settings(self) -> dict[str, Any]:
        """The options, by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]

    @cached_property  # a client is made for each message
    def digest(self) -> str:
        """Identifies class and options, so that a server and a client that differ notice it."""
        text = json.dumps([type(self).__name__, self.settings], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def overrides(self, hook: str) -> bool:
        """Whether the class has a `hook` of its own."""
        return getattr(type(self), hook) is not self._hooks[hook]


def _check_words(cls: type, words: Iterable[str]) -> None:
    """Refuse what is in `needs` or `breaks` and is no word."""
    for word in words:
        one_of(f"a word in needs or breaks of {cls.__qualname__}", word, WORDS)


def _functions(cls: type) -> dict[str, Callable[..., Any]]:
    """The public functions that the class itself defines, its class methods among them."""
    found = {name: getattr(value, "__func__", value) for name, value in vars(cls).items()}
    return {n: f for n, f in found.items() if inspect.isfunction(f) and not n.startswith("_")}


def check_class(cls: Any) -> None:
    """Refuse a class with a public function that is no hook, or with another signature.

    Raises:
        TypeError: it names the function, and the nearest hook; or an option with a hook's name.
    """
    for name in vars(cls).get("__annotations__", {}):
        if name in cls._hooks:
            raise TypeError(f"{cls.__qualname__}.{name}: an option cannot have the name of a hook")
    for name, function in _functions(cls).items():
        if getattr(function, "serves", False):
            continue
        if (hook := cls._hooks.get(name)) is None:
            raise TypeError(
                f"{cls.__qualname__}.{name} is no hook{did_you_mean(name, cls._hooks)}; there are"
                f" {', '.join(sorted(cls._hooks))}. The name of a helper begins with '_'; a phase"
                " is marked by @serves"
            )
        own, expected = (list(inspect.signature(f).parameters) for f in (function, hook))
        if own != expected:
            raise TypeError(
                f"{cls.__qualname__}.{name}({', '.join(own)}) is called as"
                f" {name}({', '.join(expected)})"
            )
        if getattr(hook, "serves", False):
            raise TypeError(f"{cls.__qualname__}.{name} serves a phase: write @serves before it")


# ---- the three things that an author writes
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
        """What the method adds to the steps of local training."""
        return []

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        """The phase `train`: train from the received weights."""
        return Result(ctx.fit(msg.weights, self.terms(msg, state, ctx)).params), state

    def views(
        self, msg: Message, state: State, ctx: ClientContext
    ) -> dict[str, Callable[[], nn.Module]]:
        """The models to evaluate, by view ("global", "personal"); each is built when it is due.

        By default each view of the method's `evaluates` is the model with the message's weights,
        among which is what the client keeps.
        """
        return dict.fromkeys(self.options.evaluates(ctx.workspace), lambda: ctx.model(msg.weights))

    @classmethod
    def personal_module(cls, model: nn.Module) -> nn.Module:
        """The module of the view "personal", around any such model; by default the model itself."""
        return model


Client._hooks = _functions(Client)


class Method(Component, base=True):
    """The server half of a method, and its options. Its defaults are FedAvg's.

    A subclass is a frozen dataclass, whose fields say what they allow by `fedhet.core.check.
    setting`. A class that overrides `merge` or `weight` states `breaks`, because nothing else can
    know what the merge takes of the replies, or what weighs them.

    Attributes:
        client: the client half.
        requires: the plug-in without which the method would be FedAvg; None for none. It is a
            class, or a functools.partial of it with the options that are not left open.
    """

    GROUP = "method"
    client: ClassVar[type[Client]] = Client
    requires: ClassVar[Callable[..., Plugin] | None] = None

    def __init_subclass__(cls, base: bool = False) -> None:
        super().__init_subclass__(base)
        own = [hook for hook in ("merge", "weight") if hook in vars(cls)]
        if own and "breaks" not in vars(cls):
            raise TypeError(
                f"{cls.__qualname__} overrides {own[0]}: state in `breaks` which of"
                f" {', '.join(map(repr, WORDS))} are not true of it, or {{}}"
            )

    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        """Which tensors clients train, and which they share."""
        return Scope()

    def evaluates(self, workspace: Workspace) -> Mapping[str, Sequence[str] | None]:
        """The views that clients evaluate: "global", "personal". The first chooses the best round.

        Of each view the names of the tensors in which it differs from client to client, in addition
        to those that `scope` keeps; None for all.
        """
        return {"global": ()}

    def local(self, local: LocalSettings) -> LocalSettings:
        """How clients train, given what the configuration says."""
        return local

    def phases(self, setup: RunSetup) -> list[Phase]:
        """The phases, in order. Those of plug-ins come before them."""
        uploads = "weights" not in self.breaks
        train = Phase(
            "train", setup.rounds, self.merge, trains=True, evaluate=True, uploads=uploads
        )
        return [train]

    def evaluation_extras(self, slots: Mapping[str, Tree], state: State) -> Mapping[str, Any]:
        """What clients receive beside the weights in order to evaluate."""
        return {}

    def weight(self, step: Step, update: Update) -> float:
        """The aggregation weight before plug-ins. Only ratios matter."""
        return float(update.n)

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        """The new values of the trained tensors: old + sum_k w_k change_k / sum_k w_k.

        The updates can be read once, one after the other. Buffers are averaged beside it.
        """
        change = step.mean((update.change, update.weight) for update in updates)
        return Merged(trees.add(change, old), state)


class Plugin(Component, base=True):
    """What any method may have added. One frozen dataclass has both halves.

    A class that overrides `weight` or `weights` states "used weights" in `needs`. With `needs_all`,
    `after` gets the updates with the weights of the merge. The state of a client may tell the
    counts of its classes if the plug-in overrides `data`: with privacy.min_count, its size is not
    sent.
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
        """Phases of its own, which come before the training."""
        return []

    def local(self, step: Step, local: LocalSettings) -> LocalSettings:
        """How clients train in this step."""
        return local

    def weight(self, step: Step, state: State, update: Update) -> float:
        """The aggregation weight of one update, in place of `update.weight`."""
        return update.weight

    def weights(
        self, step: Step, state: State, updates: Sequence[Update]
    ) -> tuple[Sequence[float], Mapping[str, Any]]:
        """(the aggregation weights, what is recorded). Overriding it keeps all updates."""
        return [update.weight for update in updates], {}

    def after(
        self, step: Step, state: State, old: Tree, new: Tree, updates: Sequence[Update]
    ) -> Merged:
        """The weights after a merge of the training, before the server optimiser, in float64."""
        return Merged(new, state)

    # ---- client
    def data(self, samples: Samples, state: State) -> Samples:
        """The training set to use; images are in [0, 1], and not normalised yet."""
        return samples

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        """What it adds to the steps of the host's training."""
        return []

    def finish(
        self, msg: Message, state: State, ctx: ClientContext, fitted: Fitted
    ) -> tuple[Result, State]:
        """What goes with the host's reply: extras and metrics, given what was trained."""
        return Result(), state

"""The settings that core reads, by their groups in the configuration; imports no torch.

Each constructor checks its own values, and names them as a user writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from fedhet.core.check import (
    MOST_EPOCHS,
    MOST_SAMPLES,
    MOST_STEPS,
    boolean,
    each,
    integer,
    number,
    one_of,
    optional,
)
from fedhet.core.errors import ConfigError

DEFAULT_DELTA = 1e-5
# Beyond these, the accountant's squares of the noise multiplier overflow or vanish.
LEAST_NOISE, MOST_NOISE = 1e-6, 1e6


@dataclass(frozen=True)
class LocalSettings:
    """How clients train in one step (conf/client/*.yaml).

    The settings travel with every message, so that a plug-in can schedule them. `steps`, where it
    is not None, replaces `epochs`. A plug-in may set no epochs, or a rate of 0.
    """

    lr: float
    epochs: int = 1
    batch_size: int = 32
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    optimizer: str = "sgd"
    steps: int | None = None

    def __post_init__(self) -> None:
        number("client.lr", self.lr, low=0)
        integer("client.epochs", self.epochs, low=0, high=MOST_EPOCHS)
        integer("client.batch_size", self.batch_size, low=1, high=MOST_SAMPLES)
        number("client.momentum", self.momentum, low=0, open_high=1)
        number("client.weight_decay", self.weight_decay, low=0)
        optional(number, "client.clip", self.clip, open_low=0)
        one_of("client.optimizer", self.optimizer, ("sgd", "adam"))
        optional(integer, "client.steps", self.steps, low=1, high=MOST_STEPS)

    def epoch_sizes(self, n: int, epochs: int | None = None) -> Iterator[int]:
        """How many of n samples each epoch takes: all, unless `steps` end inside the last one.

        Args:
            n: the number of samples that an epoch has.
            epochs: the number of epochs, in place of what the settings say.
        """
        if epochs is not None or self.steps is None:
            yield from repeat(n, self.epochs if epochs is None else epochs)
            return
        whole, rest = divmod(self.steps, -(-n // self.batch_size))
        yield from repeat(n, whole)
        if rest:
            yield rest * self.batch_size


@dataclass(frozen=True)
class ReplyLimits:
    """Which replies are accepted, how long they are awaited, and how many must come (`replies`).

    Attributes:
        deadline: seconds that a client may take for one message; None for no limit.
        grace: seconds that the server waits beyond the deadline, or after `enough`.
        enough: the share of a step's clients after whose replies the server waits no longer than
            `grace` for the others, where Flower carries the messages; None for all, or, with
            `oversample`, for as many as without it.
        oversample: so many more clients take part in a training round, as a share of the cohort.
        least: a step with fewer accepted replies changes nothing.
        bad_steps: the run fails after more than so many such steps in a row.
        max_lost: a run that loses a larger share of its replies is `degraded`.
        join: seconds to wait for nodes at the start.
        min_nodes: after `join` seconds, the run begins if so many nodes have joined; None: all.
        max_jump: a reply whose weights have changed by more than so many times the median of the
            last step is refused, and a first step with such a reply undone; None: any is accepted.
        max_mb: MB of a reply from another process beyond twice those of its message.
    """

    deadline: float | None = None
    grace: float = 10.0
    enough: float | None = None
    oversample: float = 0.0
    least: int = 1
    bad_steps: int = 0
    max_lost: float = 0.1
    join: float = 600.0
    min_nodes: int | None = None
    max_jump: float | None = 1000.0
    max_mb: float = 256.0

    def __post_init__(self) -> None:
        optional(number, "replies.deadline", self.deadline, open_low=0)
        number("replies.grace", self.grace, low=0)
        optional(number, "replies.enough", self.enough, open_low=0, high=1)
        number("replies.oversample", self.oversample, low=0)
        integer("replies.least", self.least, low=1)
        integer("replies.bad_steps", self.bad_steps, low=0)
        number("replies.max_lost", self.max_lost, low=0, high=1)
        number("replies.join", self.join, low=0)
        optional(integer, "replies.min_nodes", self.min_nodes, low=1)
        optional(number, "replies.max_jump", self.max_jump, open_low=1)
        number("replies.max_mb", self.max_mb, open_low=0)

    @property
    def max_bytes(self) -> int:
        """`max_mb` in bytes."""
        return int(self.max_mb * 2**20)

    def enough_of(self, clients: int) -> int | None:
        """How many replies of so many clients are enough; None if all are awaited."""
        if self.enough is None and not self.oversample:
            return None
        share = 1 / (1 + self.oversample) if self.enough is None else self.enough
        return max(1, round(clients * share))


@dataclass(frozen=True)
class Evaluation:
    """When and what a run evaluates (`eval`).

    Attributes:
        every: evaluate every so many rounds, and after the last.
        clients: whether clients evaluate on their own data at all.
        train: whether they do so on their training data too.
        finetune_epochs: if > 0, the global model is also evaluated after so many epochs on a
            client's own data.
        personal: whether a method's own view "personal" is evaluated.
        personal_mb: what the clients' personal models may take in the run folder, in MB; None: any
            size.
        last_k: summary.json has the mean score of the last so many evaluations.
        targets: summary.json has what it took to reach each of these scores.
    """

    every: int = 1
    clients: bool = True
    train: bool = False
    finetune_epochs: int = 0
    personal: bool = True
    personal_mb: float | None = 200.0
    last_k: int = 5
    targets: Sequence[float] = ()

    def __post_init__(self) -> None:
        integer("eval.every", self.every, low=1)
        boolean("eval.clients", self.clients)
        boolean("eval.train", self.train)
        integer("eval.finetune_epochs", self.finetune_epochs, low=0, high=MOST_EPOCHS)
        boolean("eval.personal", self.personal)
        optional(number, "eval.personal_mb", self.personal_mb, low=0)
        integer("eval.last_k", self.last_k, low=1)
        targets = each(number, "eval.targets", self.targets, open_low=0, high=1)
        object.__setattr__(self, "targets", targets)
        if self.train and not self.clients:
            raise ConfigError(
                "eval.train=true needs eval.clients=true, because it is the clients that evaluate"
            )


@dataclass(frozen=True)
class Stopping:
    """When training ends before its last round (`early_stopping`).

    Attributes:
        patience: stop after so many evaluations in a row without a better validation; None: never.
        min_delta: by how much a validation must be better to count.
    """

    patience: int | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        optional(integer, "early_stopping.patience", self.patience, low=1)
        number("early_stopping.min_delta", self.min_delta, low=0)


@dataclass(frozen=True)
class Noise:
    """The noise on clients' replies (`privacy`); it is false while the noise is off.

    Attributes:
        multiplier: the standard deviation of the noise as a multiple of `clip`; 0 for off.
        clip: the largest norm of each kind of value in a reply.
        delta: the probability with which the guarantee may fail.
        budget: the largest epsilon that a client may spend in the run; None for any.
    """

    multiplier: float = 0.0
    clip: float = 1.0
    delta: float = DEFAULT_DELTA
    budget: float | None = None

    def __post_init__(self) -> None:
        noise = number("privacy.noise", self.multiplier, low=0, high=MOST_NOISE)
        if 0 < noise < LEAST_NOISE:
            raise ConfigError(
                f"privacy.noise={noise:g} is not allowed; it must be 0, which is off, or a number"
                f" in [{LEAST_NOISE:g}, {MOST_NOISE:g}]"
            )
        number("privacy.clip", self.clip, open_low=0)
        number("privacy.delta", self.delta, open_low=0, open_high=1)
        optional(number, "privacy.budget", self.budget, open_low=0)
        for name in ("clip", "delta", "budget"):
            if not self and (value := getattr(self, name)) != getattr(Noise, name):
                raise ConfigError(
                    f"privacy.{name}={value} needs privacy.noise > 0, without which it has no"
                    " effect"
                )

    def __bool__(self) -> bool:
        return self.multiplier > 0


OFF = Noise()


@dataclass(frozen=True)
class Speed:
    """How the local steps are computed (conf/engine/*.yaml).

    Each option changes the last bits of the result, so all are off by default.

    Attributes:
        compile: compute the gradient of the batch loss by torch.compile.
        amp: run forward passes in bfloat16 where torch.autocast allows it.
        channels_last: keep images and convolutions in NHWC layout.
    """

    compile: bool = False
    amp: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        boolean("engine.compile", self.compile)
        boolean("engine.amp", self.amp)
        boolean("engine.channels_last", self.channels_last)


@dataclass(frozen=True, kw_only=True)
class Course:
    """What a run does round by round, as every strategy and the configuration have it.

    Attributes:
        rounds: the number of training rounds.
        fraction: the share of the clients that take part in each round.
        lr_decay: multiplies the learning rate after each training round (`client.lr_decay`).
        schedule: "constant" or "cosine", on top of `lr_decay` (`client.schedule`).
        on_failure: what a failed client does to the run: "stop" it, or be left out ("skip").
        on_lost_state: "restart" lets a client whose state is lost begin again without one, in its
            next step; with "stop" that is a failure like others.
        replies: which replies are accepted, and how long they are awaited.
        early_stopping: when training ends before its last round.
        deliver: in the end, let every client keep the final models at its site.
    """

    rounds: int = 1
    fraction: float = 1.0
    lr_decay: float = 1.0
    schedule: str = "constant"
    on_failure: str = "stop"
    on_lost_state: str = "stop"
    replies: ReplyLimits = ReplyLimits()
    early_stopping: Stopping = Stopping()
    deliver: bool = False

    def __post_init__(self) -> None:
        integer("rounds", self.rounds, low=1)
        number("fraction", self.fraction, open_low=0, high=1)
        number("client.lr_decay", self.lr_decay, open_low=0, high=1)
        one_of("client.schedule", self.schedule, ("constant", "cosine"))
        one_of("on_failure", self.on_failure, ("stop", "skip"))
        one_of("on_lost_state", self.on_lost_state, ("stop", "restart"))
        boolean("deliver", self.deliver)

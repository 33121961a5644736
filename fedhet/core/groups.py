"""The settings that core reads, by their groups in the configuration; imports no torch.

Each field says what it allows, and each constructor checks its values, which it names as a user
writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from fedhet.core.check import MOST_EPOCHS, MOST_SAMPLES, MOST_STEPS, Checked, each, number, setting
from fedhet.core.errors import ConfigError

DEFAULT_DELTA = 1e-5
# Beyond these, the accountant's squares of the noise multiplier overflow or vanish.
LEAST_NOISE, MOST_NOISE = 1e-6, 1e6


@dataclass(frozen=True)
class LocalSettings(Checked):
    """How clients train in one step (conf/client/*.yaml).

    The settings travel with every message, so that a plug-in can schedule them. `steps`, where it
    is not None, replaces `epochs`. A plug-in may set no epochs, or a rate of 0.
    """

    GROUP = "client"
    lr: float = setting(low=0)
    epochs: int = setting(1, low=0, high=MOST_EPOCHS)
    batch_size: int = setting(32, low=1, high=MOST_SAMPLES)
    momentum: float = setting(0.0, low=0, open_high=1)
    weight_decay: float = setting(0.0, low=0)
    clip: float | None = setting(None, open_low=0)
    optimizer: str = setting("sgd", allowed=("sgd", "adam"))
    steps: int | None = setting(None, low=1, high=MOST_STEPS)

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
class ReplyLimits(Checked):
    """Which replies are accepted, how long they are awaited, and how many must come (`replies`).

    Attributes:
        deadline: seconds that a client may take for one message; None for no limit.
        grace: seconds that the server waits beyond the deadline, or after `enough`.
        enough: the share of a step's clients after whose replies the server waits no longer than
            `grace` for the others, but under engine=local; None for all, or, with
            `oversample`, for as many as without it.
        oversample: so many more clients take part in a training round, as a share of the cohort.
        least: a step with fewer accepted replies changes nothing.
        bad_steps: the run fails after more than so many such steps in a row.
        max_lost: a run that loses a larger share of its replies is `degraded`.
        join: seconds to wait for nodes at the start.
        min_nodes: after `join` seconds, the run begins if so many nodes have joined; None: all.
        max_jump: a reply whose weights have changed by more than so many times the median of the
            last step is refused; in a phase's first step, more than 30 times its own median, for
            which the step is taken again. None: any is accepted.
        max_mb: MB of a reply from another process beyond twice those of its message.
    """

    GROUP = "replies"
    deadline: float | None = setting(None, open_low=0)
    grace: float = setting(10.0, low=0)
    enough: float | None = setting(None, open_low=0, high=1)
    oversample: float = setting(0.0, low=0)
    least: int = setting(1, low=1)
    bad_steps: int = setting(0, low=0)
    max_lost: float = setting(0.1, low=0, high=1)
    join: float = setting(600.0, low=0)
    min_nodes: int | None = setting(None, low=1)
    max_jump: float | None = setting(1000.0, open_low=1)
    max_mb: float = setting(256.0, open_low=0)

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
class Evaluation(Checked):
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
        thresholds: summary.json has what it took to reach each of these scores.
        scores: "basic", or "all": of classes also AUC, sensitivity, specificity, the calibration
            error and the confusion matrix, for which clients send counts; "auto": what the task
            says (`Task.detailed`).
    """

    GROUP = "eval"
    every: int = setting(1, low=1)
    clients: bool = True
    train: bool = False
    finetune_epochs: int = setting(0, low=0, high=MOST_EPOCHS)
    personal: bool = True
    personal_mb: float | None = setting(200.0, low=0)
    last_k: int = setting(5, low=1)
    thresholds: Sequence[float] = ()
    scores: str = setting("auto", allowed=("auto", "basic", "all"))

    def __post_init__(self) -> None:
        super().__post_init__()
        thresholds = each(number, "eval.thresholds", self.thresholds, open_low=0, high=1)
        object.__setattr__(self, "thresholds", thresholds)
        if self.train and not self.clients:
            raise ConfigError(
                "eval.train=true needs eval.clients=true, because it is the clients that evaluate"
            )


@dataclass(frozen=True)
class Stopping(Checked):
    """When training ends before its last round (`early_stopping`).

    Attributes:
        patience: stop after so many evaluations in a row without a better validation; None: never.
        min_delta: by how much a validation must be better to count.
    """

    GROUP = "early_stopping"
    patience: int | None = setting(None, low=1)
    min_delta: float = setting(0.0, low=0)


@dataclass(frozen=True)
class Noise(Checked):
    """The noise on clients' replies (`privacy`); it is false while the noise is off.

    Attributes:
        multiplier: the standard deviation of the noise as a multiple of `clip`; 0 for off.
        clip: the largest norm of each kind of value in a reply.
        delta: the probability with which the guarantee may fail.
        budget: the largest epsilon that a client may spend in the run; None for any.
    """

    GROUP = "privacy"
    multiplier: float = setting(0.0, name="privacy.noise", low=0, high=MOST_NOISE)
    clip: float = setting(1.0, open_low=0)
    delta: float = setting(DEFAULT_DELTA, open_low=0, open_high=1)
    budget: float | None = setting(None, open_low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.multiplier < LEAST_NOISE:
            raise ConfigError(
                f"privacy.noise={self.multiplier:g} is not allowed; it must be 0, which is off, or"
                f" a number in [{LEAST_NOISE:g}, {MOST_NOISE:g}]"
            )
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
class Speed(Checked):
    """How the local steps are computed (conf/engine/*.yaml).

    Each option changes the last bits of the result, so all are off by default.

    Attributes:
        compile: compute the gradient of the batch loss by torch.compile.
        amp: run forward passes in bfloat16 where torch.autocast allows it.
        channels_last: keep images and convolutions in NHWC layout.
    """

    GROUP = "engine"
    compile: bool = False
    amp: bool = False
    channels_last: bool = False


@dataclass(frozen=True, kw_only=True)
class Course(Checked):
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

    rounds: int = setting(1, low=1)
    fraction: float = setting(1.0, open_low=0, high=1)
    lr_decay: float = setting(1.0, name="client.lr_decay", open_low=0, high=1)
    schedule: str = setting("constant", name="client.schedule", allowed=("constant", "cosine"))
    on_failure: str = setting("stop", allowed=("stop", "skip"))
    on_lost_state: str = setting("stop", allowed=("stop", "restart"))
    replies: ReplyLimits = ReplyLimits()
    early_stopping: Stopping = Stopping()
    deliver: bool = False

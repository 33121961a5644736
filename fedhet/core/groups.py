"""The settings that core reads, by their groups in the configuration; imports no torch.

Each field states its allowed values, and each constructor checks them. Errors name a setting as the
user writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from fedhet.core.check import MOST_EPOCHS, MOST_SAMPLES, MOST_STEPS, Checked, each, number, setting
from fedhet.core.errors import ConfigError

DEFAULT_DELTA = 1e-5
# Outside these bounds, the accountant's squares of the noise multiplier overflow or vanish.
LEAST_NOISE, MOST_NOISE = 1e-6, 1e6


@dataclass(frozen=True)
class LocalSettings(Checked):
    """How clients train in one step (conf/client/*.yaml).

    Every message has these settings, so a plug-in can schedule them. If `steps` is not None, it
    replaces `epochs`. A plug-in may set 0 epochs, or a rate of 0.
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
        """Yield for each epoch how many of n samples it takes.

        This is n, but less for the last epoch if `steps` end inside it.

        Args:
            n: the number of samples.
            epochs: the number of epochs; None uses the settings.
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
    """Which replies the server accepts, how long it waits, and how many it needs (`replies`).

    Attributes:
        deadline: seconds that a client may take for one message; None for no limit.
        grace: seconds that the server waits after the deadline, or after `enough` replies.
        enough: once this share of a step's clients has replied, the server waits only `grace`
            seconds for the others. None waits for all clients; with `oversample`, for as many
            clients as the step has without it. engine=local always waits for all.
        oversample: the share of the cohort by which a training round has more clients.
        least: a step with fewer accepted replies changes nothing.
        bad_steps: the run fails after more than this number of such steps in a row.
        max_lost: a run that loses a larger share of its replies is `degraded`.
        join: seconds to wait for nodes at the start.
        min_nodes: after `join` seconds, the run begins if this number of nodes has joined; None:
            all nodes must join.
        max_jump: the server refuses a reply if the norm of its change exceeds this multiple of the
            median of the phase's last step. In a phase's first step, the server compares with 30
            times the median of the step itself, and repeats the step without the clients above it.
            None: no limit.
        max_mb: a reply from another process may have twice the size of its message, and this number
            of MB in addition.
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
        """Return how many replies are enough from so many clients; None to wait for all."""
        if self.enough is None and not self.oversample:
            return None
        share = 1 / (1 + self.oversample) if self.enough is None else self.enough
        return max(1, round(clients * share))


@dataclass(frozen=True)
class Evaluation(Checked):
    """When a run evaluates, and what (`eval`).

    Attributes:
        every: the number of rounds between evaluations; the last round is always evaluated.
        clients: whether clients evaluate on their own data.
        train: whether clients also evaluate on their training data.
        finetune_epochs: if > 0, clients also evaluate the global model after this number of epochs
            on their own data.
        personal: whether a method's own view "personal" is evaluated.
        personal_mb: the largest size of the clients' personal models in the run folder, in MB;
            None: any size.
        last_k: summary.json has the mean score of this number of last evaluations.
        thresholds: for each of these scores, summary.json has the rounds, bytes and seconds until
            an evaluation reached it.
        scores: "basic"; "all" adds, for classes, AUC, sensitivity, specificity, the calibration
            error and the confusion matrix, for which clients send counts; "auto" follows the task
            (`Task.detailed`).
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
                "eval.train=true needs eval.clients=true, because clients score the training data"
            )


@dataclass(frozen=True)
class Stopping(Checked):
    """When training ends before its last round (`early_stopping`).

    Attributes:
        patience: the number of consecutive evaluations without a better validation score after
            which the training stops; None: never.
        min_delta: the smallest improvement that counts as better.
    """

    GROUP = "early_stopping"
    patience: int | None = setting(None, low=1)
    min_delta: float = setting(0.0, low=0)


@dataclass(frozen=True)
class Noise(Checked):
    """The noise on clients' replies (`privacy`). Its truth value is false if the noise is off.

    Attributes:
        multiplier: the standard deviation of the noise as a multiple of `clip`; 0 for off.
        clip: the norm to which each kind of value in a reply is clipped.
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
                f"privacy.noise={self.multiplier:g} is not allowed; it must be 0 (off) or a number"
                f" in [{LEAST_NOISE:g}, {MOST_NOISE:g}]"
            )
        for name in ("clip", "delta", "budget"):
            if not self and (value := getattr(self, name)) != getattr(Noise, name):
                raise ConfigError(
                    f"privacy.{name}={value} needs privacy.noise > 0; it has no effect without"
                    " noise"
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
        amp: run forward passes in bfloat16 if torch.autocast allows it.
        channels_last: keep images and convolutions in NHWC layout.
    """

    GROUP = "engine"
    compile: bool = False
    amp: bool = False
    channels_last: bool = False


@dataclass(frozen=True, kw_only=True)
class Course(Checked):
    """The settings of the rounds of a run, for the configuration and for every strategy.

    Attributes:
        rounds: the number of training rounds.
        fraction: the share of the clients that take part in each round.
        lr_decay: multiplies the learning rate after each training round (`client.lr_decay`).
        schedule: "constant" or "cosine", in addition to `lr_decay` (`client.schedule`).
        on_failure: if a client fails, "stop" ends the run, and "skip" leaves the client out.
        on_lost_state: if a client has lost its state, "restart" lets it begin again without one in
            its next step; with "stop", the loss is a failure like any other.
        replies: which replies the server accepts, and how long it waits for them.
        early_stopping: when training ends before its last round.
        deliver: whether every client keeps the final models at its site after the run.
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

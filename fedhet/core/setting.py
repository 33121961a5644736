"""What every strategy is built with, and whether its parts fit together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedhet.core.client import FedClient
from fedhet.core.errors import ConfigError
from fedhet.core.merging import Mean
from fedhet.core.messages import LOST, Failure, LocalSettings
from fedhet.core.phases import Phase, cohort_size
from fedhet.core.plugin import Plugin
from fedhet.core.server_opt import ServerOptimizer
from fedhet.core.workspace import Site

if TYPE_CHECKING:
    from fedhet.core.strategy import FedStrategy


@dataclass(frozen=True)
class ReplyLimits:
    """Which replies are accepted, how long they are awaited, and how many must come.

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
            last step is refused; None: any change is accepted.
        max_bytes: bytes of a reply from another process beyond twice those of its message.
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
    max_bytes: int = 2**28

    def enough_of(self, clients: int) -> int | None:
        """How many replies of so many clients are enough; None if all are awaited."""
        if self.enough is None and not self.oversample:
            return None
        share = 1 / (1 + self.oversample) if self.enough is None else self.enough
        return max(1, round(clients * share))

    @classmethod
    def from_config(cls, settings: Mapping[str, Any]) -> ReplyLimits:
        """The limits as the configuration's `replies` states them."""
        limits = {name: value for name, value in settings.items() if name != "max_mb"}
        return cls(**limits, max_bytes=int(settings["max_mb"] * 2**20))


@dataclass
class Setting:
    """What every strategy is built with, so that a method's constructor names only its own options.

    Attributes:
        site: task, model and device.
        local: how clients train; `lr` is the rate of the first round.
        rounds: the number of training rounds.
        fraction: the share of the clients that take part in each round.
        lr_decay: multiplies the learning rate after each training round.
        schedule: "constant" or "cosine", on top of `lr_decay`.
        on_failure: what a failed client does to the run: "stop" it, or be left out ("skip").
        on_lost_state: "restart" lets a client whose state is lost begin again without one, in its
            next step; with "stop" that is a failure like others.
        replies: which replies are accepted, and how long they are awaited.
        eval_every: evaluate every so many rounds, and after the last.
        personal_mb: what the clients' personal models may take in the run folder, in MB; None: any
            size.
        last_k: summary.json has the mean score of the last so many evaluations.
        targets: summary.json has what it took to reach each of these scores.
        patience: stop after so many evaluations in a row without a better validation; None: never.
        min_delta: by how much a validation must be better to count.
        deliver: in the end, let every client keep the final models at its site.
        plugins: the plug-ins, in their order.
        server_opt: the server optimiser, or None.
        merge: how updates become one: their mean, or a merge that resists attackers.
    """

    site: Site
    local: LocalSettings
    rounds: int = 1
    fraction: float = 1.0
    lr_decay: float = 1.0
    schedule: str = "constant"
    on_failure: str = "stop"
    on_lost_state: str = "stop"
    replies: ReplyLimits = ReplyLimits()
    eval_every: int = 1
    personal_mb: float | None = 200.0
    last_k: int = 5
    targets: Sequence[float] = ()
    patience: int | None = None
    deliver: bool = False
    min_delta: float = 0.0
    plugins: Sequence[Plugin] = ()
    server_opt: ServerOptimizer | None = None
    merge: Mean = field(default_factory=Mean)

    def starts_afresh(self, reason: str) -> bool:
        """Whether this is a lost state, and the run lets its client begin again without one."""
        return reason == LOST and self.on_lost_state == "restart"

    def ends_run(self, failure: Failure) -> bool:
        """Whether the run does not go on without the client."""
        return self.on_failure == "stop" and not self.starts_afresh(failure.reason)

    def share(self, phase: Phase) -> float:
        """The share of the clients that take part in a step of the phase, unless it says itself."""
        return self.fraction * (1 + self.replies.oversample if phase.trains else 1)

    def local_in(self, phase: Phase, step: int) -> LocalSettings:
        """How clients train in a step of the phase: the schedule counts training rounds."""
        factor = self.rate(step) if phase.trains else 1.0
        return replace(self.local, lr=self.local.lr * factor)

    def rate(self, step: int) -> float:
        """The factor on local.lr in training round `step`, which counts from 1.

        The cosine falls from 1 in the first round towards 0 after the last.
        """
        factor = self.lr_decay ** (step - 1)
        if self.schedule == "cosine":
            factor *= 0.5 * (1 + math.cos(math.pi * (step - 1) / self.rounds))
        return factor


def check_composition(method: FedStrategy) -> None:
    """Refuse a method with plug-ins or settings that do not fit it.

    Raises:
        ConfigError: it says what refuses what, and why.
    """
    plugins = method.plugins
    names = [plugin.name for plugin in plugins]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(f"the plug-in {twice[0]!r} is in Setting.plugins twice; it acts once")
    if method.requires and method.requires not in names:
        raise ConfigError(
            f"method={method.name} without its plug-in {method.requires!r} would be FedAvg: add the"
            f" plug-in to Setting.plugins, as conf/method/{method.name}.yaml does"
        )
    _check_noise(method)
    refused = {**_unfit(method), **method.refuses}
    for name, reason in refused.items():
        if name in names:
            raise ConfigError(f"method={method.name} refuses plugin {name!r}: {reason}")
    merge = method.setting.merge
    if reason := refused.get(merge.name) or _unfit_merge(method):
        raise ConfigError(f"method={method.name} refuses merge={merge.name}: {reason}")
    epochs = method.site.evaluations.finetune_epochs
    if epochs and "global" not in method.evaluates:
        raise ConfigError(
            f"eval.finetune_epochs={epochs}: method={method.name} has no global model to fine-tune"
        )
    if not method.site.evaluations.personal and "global" not in method.evaluates:
        raise ConfigError(
            f"eval.personal=false: method={method.name} has personal models only; use true"
        )
    target = method.site.task.scoring
    if method.setting.targets and not target.score():
        raise ConfigError(
            f"eval.targets={list(method.setting.targets)}: a task with target={target.name} has no"
            " score that could reach them"
        )
    for plugin in plugins:
        for other, reason in plugin.refuses.items():
            if other in (method.name, merge.name, *names):
                raise ConfigError(f"plugin {plugin.name!r} refuses {other!r}: {reason}")


def check_phases(method: FedStrategy) -> None:
    """Refuse a phase of the method with the name of something else that clients have.

    Raises:
        ConfigError: the client would serve the phase "fit" with Flower's method, for example.
    """
    for phase in (entry.phase for entry in method.timetable if not entry.owner):
        if phase.name != "train" and hasattr(FedClient, phase.name):
            raise ConfigError(
                f"method={method.name}: its phase {phase.name!r} needs another name, because"
                f" FedClient.{phase.name} is something else"
            )


def check_cohorts(method: FedStrategy) -> None:
    """Refuse a merge that needs or keeps more updates than a step can have.

    Raises:
        ConfigError: it says how many clients take part.
    """
    rule = method.setting.merge
    eligible = sum(n > 0 for n in method.sizes)
    for phase in (entry.phase for entry in method.timetable if entry.phase.compared):
        cohort = cohort_size(phase.cohort, method.setting.share(phase), eligible)
        keep = getattr(rule, "keep", None) or 1
        least = rule.needs(method.sent(phase.slot), method.mergeable(phase.slot))
        has = f"a step of the phase {phase.name!r} has {cohort} clients"
        if least > cohort:
            raise ConfigError(f"merge={rule.name} needs {least} updates in a step, and {has}")
        if keep > cohort:
            raise ConfigError(
                f"merge.keep={keep} is not allowed: {has}; choose a whole number from 1 to {cohort}"
            )


def _check_noise(method: FedStrategy) -> None:
    """Refuse privacy.noise where the method or a plug-in sends what noise cannot cover."""
    if not method.site.noise:
        return
    named = [("method=", method.name, method.refuses_noise)]
    named += [("plugin ", plugin.name, plugin.refuses_noise) for plugin in method.plugins]
    for kind, name, reason in named:
        if reason:
            raise ConfigError(
                f"privacy.noise={method.site.noise.multiplier:g} with {kind}{name}: {reason}"
            )


def _unfit(method: FedStrategy) -> dict[str, str]:
    """Plug-ins that would do nothing under the method, or could not do it: name -> reason."""
    reasons = {}
    for plugin in method.plugins:
        if plugin.needs_model and not method.site.mergeable:
            reasons[plugin.name] = (
                "it refers to the received model, and this method's clients receive none"
            )
        elif plugin.changes_weights and not method.weighted:
            reasons[plugin.name] = "it changes aggregation weights, which this method ignores"
    return reasons


def _unfit_merge(method: FedStrategy) -> str:
    """Why the run's `merge` would not do under the method what it promises; "" if it does."""
    rule = method.setting.merge
    own, said = (
        next(cls for cls in type(method).__mro__ if name in vars(cls))
        for name in ("merge", "averages")
    )
    if rule.compares and not method.site.mergeable:
        return "its clients send no weights"
    if (rule.averages or rule.rescales) and not (method.averages and issubclass(said, own)):
        return "its class merges in its own way, and does not say that other means fit (`averages`)"
    for plugin in method.plugins:
        if plugin.changes_weights and not rule.weighted:
            return f"plugin {plugin.name!r} changes the aggregation weights, which it ignores"
    return ""

"""FedStrategy: the server half of a method. Its defaults are FedAvg.

A step has two halves: `plan` decides who gets what, and after the engine has carried the messages,
`settle` turns the replies into the new value of the slot. fedhet/core/loop.py runs both for every
step of the timetable.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from flwr.server.strategy import Strategy
from torch import nn

from fedhet.core import compatibility, trees
from fedhet.core.admission import Outliers, Quorum, checked, forget_lost, registered
from fedhet.core.client import FedClient, evaluated_views
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.hosted import hosted
from fedhet.core.merging import averaging_buffers, normalised
from fedhet.core.messages import Broadcast, Extras, Piece, Recorded, Reply, Update
from fedhet.core.phases import Phase, Step, TimetableEntry, locate, sample_cohort
from fedhet.core.plugin import Plugin
from fedhet.core.setting import Setting
from fedhet.core.trees import Tree
from fedhet.core.workspace import Scope

log = logging.getLogger("fedhet")


class FedStrategy(Strategy):
    """The aggregation of a method; see "what a method overrides" below.

    A constructor checks the method's own options first and calls `super().__init__(setting)` last,
    because that reads everything that the options decide: `refuses`, `slots`, `phases`. What
    needs the workspace, the model or the data goes into `setup`, which runs before these.

    Attributes:
        name: its name in the configuration.
        client_cls: the client half.
        requires: the plug-in without which the method would be FedAvg; None for none.
        fixed: the options of that plug-in that the method does not leave open.
        needs_all: whether `merge` needs all updates at once, with weights that sum to 1; else it
            reads an iterator once and the weights are relative.
        weighted: whether `merge` uses the weights of the updates.
        only_means: whether all that `merge` takes of the replies are means by `setting.merge`; a
            class that overrides it says so.
        only_weights: whether all that it takes of them are weights; likewise.
        enters: what it takes of them where one of these is false.
        takes_steps: whether clients take local steps.
        plain_steps: whether these must be plain SGD's along the gradient of the local loss.
        sgd_steps: whether these must be SGD's, up to a factor that all clients share.
        counts_steps: whether clients send how many they have taken.
        otherwise: one of these facts -> the option with which it does not hold.
        releases: how many floating extras its replies have, each a release under privacy.noise.
        refuses_noise: why its replies cannot be noised; "" where they can.
        evaluates: the views that the method offers; the first one chooses the best round.
        evaluation_extras: extras for clients that evaluate.
        personal_names: what differs from client to client in the personal models, beside what
            `scope` keeps; None for everything.
        memory: the names of further attributes that outlast a step, for checkpoints.
        workspace: task, model and device, shared by the clients of a process.
        sizes, rounds: training samples per client; training rounds.
        run_id: identifies the run; one that goes on has the same.
        weights: slot -> its tensors; "model" has all of the model's.
        timetable: the run's phases in order, those of plug-ins first.
        current: the step in progress.
        active: the plug-ins whose hooks run in it: all where it trains the model, else the owner
            of the phase.
        digests: plug-in -> digest of its settings.
        local: the settings of local training in the step in progress.
        adapter: answers Flower's Server; fedhet.flower.adapter attaches it.
        recorded: what the step in progress should record: numbers go to rounds.jsonl, tensors to
            arrays/. It is emptied before each step.
    """

    name: ClassVar[str] = "fedavg"
    client_cls: ClassVar[type[FedClient]] = FedClient
    requires: ClassVar[type[Plugin] | None] = None
    fixed: ClassVar[dict[str, Any]] = {}
    needs_all: bool = False
    weighted: bool = True
    only_means: bool = True
    only_weights: bool = True
    enters: ClassVar[str] = (
        "sums of its own (the class does not state only_means and only_weights, see"
        " docs/extending.md)"
    )
    takes_steps: bool = True
    plain_steps: bool = False
    sgd_steps: bool = False
    counts_steps: bool = False
    otherwise: ClassVar[dict[str, str]] = {}
    releases: int = 0
    refuses_noise: str = ""
    evaluates: tuple[str, ...] = ("global",)
    personal_names: Sequence[str] | None = None
    memory: ClassVar[tuple[str, ...]] = ("weights", "versions", "state_bytes", "pinned")
    memory += ("quorum", "outliers", "evaluation_extras")
    adapter: Strategy

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "merge" in vars(cls):  # what it takes of the replies is unknown unless it says so
            for fact in {"only_means", "only_weights"} - set(vars(cls)):
                setattr(cls, fact, False)

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.workspace = setting.workspace
        self.sizes = self.workspace.task.sizes
        self.rounds = setting.rounds
        self.plugins = [hosted(plugin) for plugin in setting.plugins]
        self.local = setting.local
        self.evaluation_extras: Extras = {}
        self.recorded: Recorded = {}
        self.versions: dict[int, int] = {}  # pid -> the round whose client state was accepted
        self.state_bytes: dict[int, int] = {}  # pid -> the size of that state
        self.quorum = Quorum(setting)
        self.outliers = Outliers(setting)
        self.pinned: dict[str, dict[int, int]] = {}  # view -> `versions` at its best evaluation
        self.kept_back: dict[int, list[int]] = {}  # pid -> versions that checkpoints need
        self.run_id = secrets.token_hex(16)
        self.current: Step
        self.template: Broadcast  # the message of the step, without a client
        self.active: list[Plugin] = []
        self.weights: dict[str, Tree] = {"model": dict(self.workspace.initial)}
        try:
            self._set_up()
        except AttributeError as error:
            if error.obj is not self:
                raise
            raise AttributeError(
                f"{error}: what setup, refuses, slots and phases read is set before"
                " super().__init__(setting), which calls them"
            ) from error

    def _set_up(self) -> None:
        """Take from the method and its plug-ins everything that their options decide."""
        self.setup()
        compatibility.check(self)
        self.weights |= self.slots()
        for plugin in self.plugins:
            plugin.server = self
            plugin.setup()
            self.weights |= plugin.slots()
        # For clients, which compare them with their own.
        self.digests = {plugin.name: plugin.digest() for plugin in self.plugins}
        phases = [(plugin.name, phase) for plugin in self.plugins for phase in plugin.phases()]
        phases += [("", phase) for phase in self.phases()]
        self.timetable = [TimetableEntry(owner, phase, phase.rounds) for owner, phase in phases]
        compatibility.check_phases(self)

    # ---- what a method overrides
    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        """Which names clients train, and which they share."""
        return Scope()

    @property
    def receives_model(self) -> bool:
        """Whether clients receive parameters of the model."""
        return bool(self.workspace.mergeable)

    @property
    def sends_weights(self) -> bool:
        """Whether clients send the weights that they have trained."""
        return self.receives_model

    @property
    def by_samples(self) -> bool:
        """Whether the aggregation weight of an update is its number of samples."""
        return self.base_weight(Update(0, num_examples=2)) == 2

    @property
    def refuses(self) -> dict[str, str]:
        """Further plug-ins and merges that the method cannot be combined with: name -> reason."""
        return {}

    def setup(self) -> None:
        """Called once, when the attributes above are set, before `refuses`, `slots`, `phases`."""

    def slots(self) -> dict[str, Tree]:
        """Further named weights beside "model", with their initial values."""
        return {}

    def phases(self) -> list[Phase]:
        """The method's phases, which come after those of the plug-ins."""
        train = Phase(
            "train", self.rounds, self.merge, check=self.check, trains=True, evaluate=True
        )
        return [train]

    def base_weight(self, update: Update) -> float:
        """The client's aggregation weight before plug-ins: n_k. Only ratios matter."""
        return float(update.num_examples)

    def begin(self, msg: Broadcast) -> Extras:
        """Begin a step of the method's own, and return the extras of its messages."""
        return self.cohort_extras(self.current.entry.phase, msg.step, self.current.cohort)

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        """Extras for every client of the cohort."""
        return {}

    def client_extras(self, phase: Phase, pid: int) -> Extras:
        """Extras for one client."""
        return {}

    def check(self, update: Update) -> None:
        """Refuse a bad extra with a ValueError; the update counts as that client's failure."""

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        """The new values of the trained tensors: old + sum_k w_k change_k / sum_k w_k, in float64.

        Buffers never come here. `setting.merge` puts other averages in the place of this mean.
        """
        pairs = ((update.change, update.weight) for update in updates)
        return trees.add(self.setting.merge.mean(pairs), old)

    # ---- one step
    def mergeable(self, slot: str) -> list[str]:
        """The names that merges, plug-ins and server optimisers see; buffers never are."""
        if slot == "model":
            return self.workspace.mergeable
        return [name for name, t in self.weights[slot].items() if t.is_floating_point()]

    def sent(self, slot: str) -> Tree:
        """The slot as it travels."""
        weights = self.weights[slot]
        return trees.pick(weights, self.workspace.shared) if slot == "model" else weights

    def plan(self, server_round: int) -> list[Broadcast]:
        """Begin a round, and return its messages in the cohort's order.

        Raises:
            RunFailed: it is past the end of the timetable.
        """
        if (position := locate(self.timetable, server_round)) is None:
            raise RunFailed(f"round {server_round} is past the end of the timetable")
        index, step = position
        entry = self.timetable[index]
        phase, own = entry.phase, not entry.owner
        draw = self.setting.share(phase), self.workspace.seed, entry.name, step
        cohort = sample_cohort(self.sizes, phase.cohort, *draw)
        sent = self.sent(phase.slot) if phase.slot else {}
        old = trees.pick(sent, self.mergeable(phase.slot)) if phase.slot else {}
        about = index, entry, server_round, step, cohort, sent, old
        self.current = current = Step(*about, self.workspace.device, self.setting.ends_run)
        self.active = [one for one in self.plugins if phase.trains or one.name == entry.owner]
        self.forget_recorded()
        msg = Broadcast(
            phase=current.entry.name,
            step=current.step,
            round=server_round,
            local=self.setting.local_in(phase, current.step),
            slot=phase.slot,
            weights=current.sent,
            extras={},
            trains=phase.trains,
            plugins=self.digests,
            deadline=self.setting.replies.deadline,
            run_id=self.run_id,
        )
        if own:
            msg.extras |= self.begin(msg)
        for plugin in self.active:
            plugin.outgoing(msg, current.cohort)
        self.local = msg.local
        self.template = msg
        plan = []
        for pid in current.cohort:
            private = self.client_extras(phase, pid) if own else {}
            # The states that the client must keep: of the best evaluations, and for checkpoints.
            best = [versions[pid] for versions in self.pinned.values() if pid in versions]
            plan.append(
                replace(
                    msg,
                    pid=pid,
                    version=self.versions.get(pid, 0),
                    pinned=sorted({*best, *self.kept_back.get(pid, ())}),
                    extras={**msg.extras, **private} if private else msg.extras,
                )
            )
        return plan

    def settle(
        self, replies: Iterable[Reply], accept: Callable[[Update], None] = lambda update: None
    ) -> None:
        """Aggregate the replies, which come in the cohort's order.

        Nothing is read before the merge needs it: each update passes, one after the other,

            checked                the checks of its form, phase and plug-ins, and base_weight
            outliers.refuse        replies.max_jump
            setting.merge.admit    merge=norm_filter
            quorum                 replies.least, before the first update goes on
            setting.merge.select   merge=krum and norm_clip
            registered             its metrics, bytes and state are noted
            incoming               of the plug-ins, the last one first
            averaging_buffers      buffers are averaged beside the merge
            phase.merge

        Args:
            replies: what the clients returned.
            accept: is called with each update that has passed the checks.

        Raises:
            RunFailed: a client failed and on_failure is "stop", too few clients succeeded, or what
                the merge returns is not finite, or not what it was given.
            TakenAgain: replies were outliers, and the step has to be taken again without them.
        """
        current = self.current
        phase, rule = current.entry.phase, self.setting.merge
        sound = self.outliers.refuse(current, checked(self, replies))
        enough = self.quorum(current, rule.admit(current, sound))
        ended = current.step == current.entry.rounds
        if enough is not None:
            updates: Iterable[Update] = rule.select(current, enough)
            updates = registered(self, updates, accept)
            for plugin in reversed(self.active):
                updates = plugin.incoming(iter(updates), current.old)
            if self.needs_all or any(plugin.needs_all for plugin in self.active):
                updates = normalised(list(updates))
            buffers: Tree = {}
            passing = averaging_buffers(updates, rule.average(), buffers)
            new = phase.merge(passing, current.old)
            for _ in passing:  # a merge may stop early, but every reply is checked and counted
                pass
            for failure in current.failures:  # where every client failed, an error has named them
                log.warning("%s", failure)
            if new:
                self._replace(new, buffers)
            else:
                for plugin in reversed(self.active):
                    plugin.merged({}, current.old)
            ended |= phase.until is not None and phase.until()
        forget_lost(self, current.failures)
        if ended:
            self.end_phase()

    def _replace(self, new: Tree, buffers: Tree) -> None:
        """Put the merged weights into the slot, after plug-ins and the server optimiser.

        Raises:
            RunFailed: a tensor is unknown, or not finite.
        """
        current, optimizer = self.current, self.setting.server_opt
        phase = current.entry.phase
        if unknown := sorted(new.keys() - current.old.keys()):
            raise RunFailed(
                f"phase {current.entry.name!r}: the merge returned {unknown[:3]}; expected the"
                f" names of `old`, {list(current.old)[:3]}{' ...' * (len(current.old) > 3)}"
            )
        for plugin in reversed(self.active):
            new = plugin.merged(new, current.old)
        if optimizer and phase.trains:
            new = optimizer.step(current.old, new)
        values = {**new, **buffers}
        if bad := trees.first_nonfinite(values):
            raise RunFailed(
                f"round {current.round}: the aggregated tensor {bad!r} holds NaN or infinite values"
            )
        slot = self.weights[phase.slot]
        self.weights[phase.slot] = {**slot, **trees.cast(values, slot)}

    def end_phase(self) -> None:
        """End the phase in progress; its timetable entry becomes the number of steps executed."""
        entry = self.current.entry
        self.timetable[self.current.index] = replace(entry, rounds=self.current.step)
        if entry.phase.after:
            entry.phase.after()

    @property
    def num_rounds(self) -> int:
        """The rounds of the run, with those of the phases before the training."""
        return sum(entry.rounds for entry in self.timetable)

    # ---- evaluation
    @property
    def views(self) -> tuple[str, ...]:
        """The views that clients evaluate in this run; the first one chooses the best round.

        They are those of the method, without "global" where the run has no global model, and
        "finetuned" where the run has it.
        """
        views = tuple(evaluated_views(self.evaluates, self.workspace))
        return (*views, "finetuned") if self.workspace.evaluation.finetune_epochs else views

    @property
    def due(self) -> bool:
        """Whether an evaluation follows the step in progress."""
        current = self.current
        last = current.step == self.timetable[current.index].rounds
        due = last or current.step % self.setting.evaluation.every == 0
        return current.entry.phase.evaluate and due

    # ---- what outlasts a step, and what is recorded
    @property
    def parts(self) -> dict[str, object]:
        """What has a `memory` that outlasts a step, by name."""
        optimizer = self.setting.server_opt
        parts: dict[str, object] = {f"plugin.{plugin.name}": plugin for plugin in self.plugins}
        return {"method": self, **parts, **({"server_opt": optimizer} if optimizer else {})}

    def forget_recorded(self) -> None:
        """Empty what method, plug-ins and merge have recorded."""
        pieces: list[Piece] = [self, *self.plugins, self.setting.merge]
        for piece in pieces:
            piece.recorded = {}

    def all_recorded(self) -> dict[str, Recorded]:
        """What method, plug-ins and merge have recorded, by name; what is empty is left out.

        Raises:
            ConfigError: one of them records under the name of earlier versions.
        """
        pieces: list[Piece] = [self, *self.active, self.setting.merge]
        for piece in pieces:
            if "report" in vars(piece):  # else what old ones record would be lost in silence
                raise ConfigError(f"{piece.name} assigns self.report, which is self.recorded now")
        return {piece.name: piece.recorded for piece in pieces if piece.recorded}

    # ---- Flower's methods
    def initialize_parameters(self, client_manager: Any) -> Any:
        return self.adapter.initialize_parameters(client_manager)

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        return self.adapter.configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        return self.adapter.aggregate_fit(server_round, results, failures)

    def configure_evaluate(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        return self.adapter.configure_evaluate(server_round, parameters, client_manager)

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
        return self.adapter.aggregate_evaluate(server_round, results, failures)

    def evaluate(self, server_round: int, parameters: Any) -> Any:
        return self.adapter.evaluate(server_round, parameters)

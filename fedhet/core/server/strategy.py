"""FedStrategy: drives a method on the server, step by step.

A step has two halves. `plan` draws the clients and makes their messages. After the engine has
carried the messages, `finish_step` computes the next state of the run from the replies. `loop.py`
calls both for every step of the timetable.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flwr.server.strategy import Strategy

from fedhet.core import kernel, trees
from fedhet.core.client.client import evaluated_views
from fedhet.core.client.training import usable
from fedhet.core.errors import RunFailed, log
from fedhet.core.kernel import Component, Merged, Method, Plugin, Step
from fedhet.core.messages import STATE_BYTES, Broadcast, LocalSettings, Reply, Upload
from fedhet.core.owners import prefixed, read_update, seen_message
from fedhet.core.server import compatibility
from fedhet.core.server.admission import Outliers, checked, quorum
from fedhet.core.server.merging import Once, averaging_buffers, normalised
from fedhet.core.server.phases import (
    ByClient,
    OpenStep,
    RunState,
    TimetableEntry,
    locate,
    sample_cohort,
)
from fedhet.core.server.run_setup import RunSetup
from fedhet.core.trees import AnyTree, Tree


class FedStrategy(Strategy):
    """The server half of a run.

    Args:
        setup: the settings and objects of the run.
        method: the method.

    Attributes:
        setup, method: as given, but the method may have changed `setup.local`.
        workspace: task, model and device, shared by the clients of a process.
        sizes: the number of training samples of each client.
        plugins: the plug-ins, in their order.
        run: the state of the run after the last step.
        run_id: identifies the run; a resumed run keeps it.
        kept_back: the versions of client states that checkpoints need, by client.
        digests: the digests of the method and the plug-ins; the keys are "method" and the plug-ins'
            names.
        adapter: answers Flower's Server; fedhet.flower.adapter attaches it.
    """

    adapter: Strategy

    def __init__(self, setup: RunSetup, method: Method) -> None:
        self.method = method
        self.setup = replace(setup, local=method.local(setup.local))
        self.workspace = setup.workspace
        self.sizes = self.workspace.task.sizes
        self.plugins: list[Plugin] = list(setup.plugins)
        self.evaluates = tuple(method.evaluates(self.workspace))
        compatibility.check(method, self.setup)
        self.outliers = Outliers(self.setup)
        self.kept_back: dict[int, list[int]] = {}
        self.run_id = secrets.token_hex(16)
        # Clients compare these digests with their own.
        self.digests = {p.name: p.digest for p in self.plugins} | {method.GROUP: method.digest}
        components: list[Method | Plugin] = [method, *self.plugins]
        states = {component.GROUP: component.setup(self.setup) for component in components}
        weights = {"model": dict(self.workspace.initial)}
        for component in components:
            weights |= component.slots(self.setup)
        phases = [(p.name, phase) for p in self.plugins for phase in p.phases(self.setup)]
        phases += [("", phase) for phase in method.phases(self.setup)]
        self.phases = [TimetableEntry(owner, phase, phase.rounds) for owner, phase in phases]
        self.run = RunState(
            weights, states | {"server_opt": {}}, lengths=tuple(e.rounds for e in self.phases)
        )
        compatibility.check_claims(self)

    # ---- properties of the run
    @property
    def name(self) -> str:
        """The method's name."""
        return self.method.name

    @property
    def weights(self) -> dict[str, Tree]:
        """The tensors of each slot; the slot "model" has all tensors of the model."""
        return self.run.weights

    @property
    def timetable(self) -> list[TimetableEntry]:
        """The run's phases in order; the plug-ins' phases come first."""
        pairs = zip(self.phases, self.run.lengths, strict=True)
        return [replace(entry, rounds=rounds) for entry, rounds in pairs]

    @property
    def num_rounds(self) -> int:
        """The number of rounds of the run, including the phases before the training."""
        return sum(self.run.lengths)

    @property
    def step(self) -> int:
        """The number of the last step inside its phase, from 1; 0 before the first step."""
        return (locate(self.timetable, self.run.round) or (0, 0))[1]

    @property
    def views(self) -> tuple[str, ...]:
        """The views that clients evaluate in this run; the first one chooses the best round.

        These are the method's views, without "global" if the run has no global model. "finetuned"
        comes last if the run evaluates it.
        """
        views = tuple(evaluated_views(self.evaluates, self.workspace))
        return (*views, "finetuned") if self.workspace.evaluation.finetune_epochs else views

    def evaluates_after(self, opened: OpenStep) -> bool:
        """Whether an evaluation follows the step."""
        last = opened.step == self.run.lengths[opened.index]
        due = last or opened.step % self.workspace.evaluation.every == 0
        return opened.entry.phase.evaluate and due

    def mergeable(self, slot: str) -> list[str]:
        """Return the names of the slot's tensors that merges may change; these are no buffers.

        Plug-ins and server optimisers see the same tensors.
        """
        if slot == "model":
            return self.workspace.mergeable
        return [name for name, t in self.weights[slot].items() if t.is_floating_point()]

    def mergeable_of(self, slot: str) -> Tree:
        """Return the tensors of the slot that merges may change; {} without a slot."""
        return trees.pick(self.weights[slot], self.mergeable(slot)) if slot else {}

    def sent(self, slot: str) -> Tree:
        """Return the tensors of the slot that clients receive."""
        weights = self.weights[slot]
        return trees.pick(weights, self.workspace.shared) if slot == "model" else weights

    def components(self, entry: TimetableEntry) -> list[Method | Plugin]:
        """Return the components that have extras in the messages of the phase.

        These are the owner of the phase, and all plug-ins if the phase trains the model.
        """
        plugins = [p for p in self.plugins if entry.phase.trains or p.name == entry.owner]
        return [*([] if entry.owner else [self.method]), *plugins]

    def expected(self, entry: TimetableEntry) -> dict[str, Mapping[str, kernel.Expected]]:
        """Return the extras that a reply to the entry's first step must have, by owner."""
        step = self._step(entry, 1, 1, self.setup.local, ())
        return {component.GROUP: component.expects(step) for component in self.components(entry)}

    # ---- one step
    def plan(self, server_round: int) -> OpenStep:
        """Plan a step: draw its cohort, and make the messages in the cohort's order.

        This changes no state of the run, so several steps may be open at a time.

        Raises:
            RunFailed: the round is after the end of the timetable.
        """
        if (position := locate(self.timetable, server_round)) is None:
            raise RunFailed(
                f"round {server_round} is past the end of the timetable, which has"
                f" {self.num_rounds} rounds"
            )
        index, number = position
        entry = self.timetable[index]
        phase, setup, run = entry.phase, self.setup, self.run
        draw = setup.share(phase), self.workspace.seed, entry.name, number
        cohort = sample_cohort(self.sizes, phase.cohort, *draw)
        local = setup.local_in(phase, number)
        step = self._step(entry, number, server_round, local, cohort)
        components = self.components(entry)
        plugins = [
            component for component in components if isinstance(component, Plugin) and phase.trains
        ]
        for plugin in plugins:
            local = plugin.local(replace(step, local=local, state=run.states[plugin.GROUP]), local)
        step = replace(step, local=local, steps=partial(self._local_steps, local))
        sent = self.sent(phase.slot) if phase.slot else {}
        msg = Broadcast(
            phase=entry.name,
            step=number,
            round=server_round,
            local=local,
            slot=phase.slot,
            weights=sent,
            trains=phase.trains,
            plugins=self.digests,
            deadline=setup.replies.deadline,
            run_id=self.run_id,
        )
        seen = {}
        for component in components:
            state = run.states[component.GROUP]
            msg.extras |= prefixed(component.name, component.broadcast(step, state))
            seen[component.GROUP] = replace(
                step, state=state, sent=seen_message(component.name, msg, sent)
            )
        return OpenStep(
            messages=[self._addressed(msg, pid) for pid in cohort],
            components=components,
            plugins=plugins,
            index=index,
            entry=entry,
            round=server_round,
            step=number,
            cohort=cohort,
            sent=sent,
            old=self.mergeable_of(phase.slot),
            local=local,
            seen=seen,
            expected={
                component.GROUP: component.expects(seen[component.GROUP])
                for component in components
            },
            device=self.workspace.device,
            survive=setup.survive,
        )

    def _step(
        self,
        entry: TimetableEntry,
        number: int,
        server_round: int,
        local: LocalSettings,
        cohort: Sequence[int],
    ) -> Step:
        return Step(
            workspace=self.workspace,
            phase=entry.phase.name,
            number=number,
            round=server_round,
            local=local,
            cohort=cohort,
            trains=entry.phase.trains,
            slots=self.weights,
            mean=self.setup.merge.mean,
            average=self.setup.merge.average,
            steps=partial(self._local_steps, local),
        )

    def _local_steps(self, local: LocalSettings, pid: int) -> int | None:
        """Return the client's number of local steps, or None if a plug-in makes it unknown."""
        if local.steps is None and compatibility.changing_data(self.setup):
            return None
        used = usable(self.workspace.model, self.sizes[pid], local.batch_size)
        return sum(-(-size // local.batch_size) for size in local.epoch_sizes(used))

    def _addressed(self, msg: Broadcast, pid: int) -> Broadcast:
        """Return the message to one client."""
        # The client must not delete states that the best evaluations or checkpoints need.
        best = [versions[pid] for versions in self.run.pinned.values() if pid in versions]
        return replace(
            msg,
            pid=pid,
            version=self.run.versions.get(pid, 0),
            pinned=sorted({*best, *self.kept_back.get(pid, ())}),
        )

    def finish_step(
        self,
        opened: OpenStep,
        replies: Iterable[Reply],
        accept: Callable[[Upload], None] = lambda update: None,
        *,
        repeats: bool = False,
    ) -> None:
        """Aggregate the replies, and set `run` to the state after the step.

        Updates pass these functions one by one, unless a component needs all of them at once:

            checked                checks their form and the extras that components expect
            outliers.refuse        applies replies.max_jump
            setup.merge.admit      refuses updates (merge=norm_filter)
            quorum                 waits for replies.least updates before it yields the first
            setup.merge.select     selects or shortens updates (merge=krum, norm_clip)
            _registered            records their metrics and the sizes of clients' states
            _weighted              lets plug-ins change aggregation weights, the last plug-in first
            normalised             only if a component needs all updates at once: collects them, and
                                   scales the aggregation weights to the sum 1
            averaging_buffers      averages buffers, which the merge does not see
            phase.merge

        Args:
            opened: the step.
            replies: the clients' replies, in the cohort's order.
            accept: is called with each update that has passed the checks and that `merge` selects.
            repeats: whether the caller can repeat the step, as `Loop` does.

        Raises:
            RunFailed: a client failed and on_failure is "stop"; too few clients succeeded; or the
                merge returned a tensor that is not finite, or that is unknown.
            TakenAgain: the step has outliers, and must be repeated without their clients.
            TypeError: the merge did not return a Merged, or read the updates twice.
        """
        run, rule = self.run, self.setup.merge
        phase, states = opened.entry.phase, dict(run.states)
        owner = opened.owner
        new_sizes: ByClient = {}
        sound = self.outliers.refuse(
            opened, states, checked(self, opened, replies), repeats=repeats
        )
        enough = quorum(self.setup, opened, states, rule.admit(opened, sound))
        weights = run.weights
        ended = opened.step == opened.entry.rounds
        if enough is not None:
            updates: Iterable[Upload] = rule.select(opened, enough)
            updates = self._registered(opened, updates, accept, new_sizes)
            for plugin in [
                p for p in reversed(opened.plugins) if any(map(p.overrides, ("weight", "weights")))
            ]:
                updates = self._weighted(opened, plugin, iter(updates))
            if self.method.needs_all or any(one.overrides("weights") for one in opened.plugins):
                updates = normalised(list(updates))
            held: list[Upload] = []
            if any(plugin.needs_all for plugin in opened.plugins):
                updates = held = list(updates)
            buffers: Tree = {}
            passing = averaging_buffers(updates, rule.average(), buffers)
            readable = Once(self.read(opened, owner, update) for update in passing)
            step = replace(opened.seen[owner.GROUP], slots=run.weights)
            old = self.mergeable_of(phase.slot)
            merged = phase.merge(step, run.states[owner.GROUP], old, readable)
            if not isinstance(merged, Merged):
                raise TypeError(
                    f"the merge of phase {opened.entry.name!r} returned a {type(merged).__name__};"
                    " it must return a Merged"
                )
            # A merge may stop early; this loop then checks and counts the remaining replies.
            for _ in passing:
                pass
            # If too few clients succeeded, the message of `quorum` has named the failures instead.
            for failure in opened.failures:
                log.warning("%s", failure)
            weights = self._new_weights(opened, owner, merged, buffers, states, held)
            ended |= phase.until is not None and phase.until(states[owner.GROUP])
        self.run = replace(
            run,
            weights=weights,
            states=states,
            versions={**run.versions, **dict.fromkeys(new_sizes, opened.round)},
            state_bytes={**run.state_bytes, **new_sizes},
            round=max(run.round, opened.round),
        )
        self.forget(opened.failures)
        if ended:
            self.end_phase(opened)

    def weight(self, opened: OpenStep, update: Upload) -> float:
        """Return the aggregation weight of an update before plug-ins change it."""
        if opened.entry.owner:
            return float(update.num_examples)
        return self.method.weight(
            opened.seen[self.method.GROUP], self.read(opened, self.method, update)
        )

    def read(self, opened: OpenStep, component: Component, update: Upload) -> kernel.Update:
        """Return an update of the step as a component sees it."""
        expected, step = opened.expected[component.GROUP], opened.seen[component.GROUP]
        return read_update(component.name, expected, step, update)

    def _registered(
        self,
        opened: OpenStep,
        updates: Iterable[Upload],
        accept: Callable[[Upload], None],
        kept: ByClient,
    ) -> Iterator[Upload]:
        """Yield the updates, and record their metrics and the sizes of their clients' states."""
        for update in updates:
            accept(update)
            size = int(update.metrics.pop(STATE_BYTES, 0))
            if update.keeps:
                kept[update.pid] = size
            opened.accepted += 1
            opened.measure(update.metrics)
            yield update

    def _weighted(
        self, opened: OpenStep, plugin: Plugin, updates: Iterator[Upload]
    ) -> Iterator[Upload]:
        """Yield the updates with the aggregation weights that a plug-in gives them."""
        step, state = opened.seen[plugin.GROUP], self.run.states[plugin.GROUP]
        if plugin.overrides("weight"):
            for update in updates:
                update.weight = plugin.weight(step, state, self.read(opened, plugin, update))
                yield update
            return
        received = list(updates)
        seen = [self.read(opened, plugin, update) for update in received]
        weights, recorded = plugin.weights(step, state, seen)
        opened.note(plugin.name, recorded)
        for update, weight in zip(received, weights, strict=True):
            update.weight = weight
            yield update

    def _new_weights(
        self,
        opened: OpenStep,
        owner: Method | Plugin,
        merged: Merged,
        buffers: Tree,
        states: dict[str, kernel.State],
        held: Sequence[Upload],
    ) -> dict[str, Tree]:
        """Return the slots after the merge, the plug-ins and the server optimiser.

        Their new states are written into `states`.

        Raises:
            RunFailed: a tensor is unknown, or not finite.
        """
        optimizer = self.setup.server_opt
        phase, new = opened.entry.phase, merged.weights
        # This is not opened.old, because other steps may have changed the slot since the planning.
        old = self.mergeable_of(phase.slot)
        if unknown := sorted(new.keys() - old.keys()):
            raise RunFailed(
                f"phase {opened.entry.name!r}: the merge returned tensors with the unknown names"
                f" {unknown[:3]}; allowed are the names in `old`: {list(old)[:3]}"
                f"{' ...' * (len(old) > 3)}"
            )
        weights = dict(self.run.weights)
        self._take(opened, owner, merged, states, weights)
        for plugin in reversed(opened.plugins):
            key = plugin.GROUP
            seen = [self.read(opened, plugin, update) for update in held if plugin.needs_all]
            after = plugin.after(opened.seen[key], states[key], old, dict(new), seen)
            self._take(opened, plugin, after, states, weights)
            new = after.weights
        if not new:
            return weights
        if optimizer and phase.trains:
            new, states["server_opt"] = optimizer.step(states["server_opt"], old, new)
        self._put(opened, weights, phase.slot, {**new, **buffers})
        return weights

    def _take(
        self,
        opened: OpenStep,
        component: Component,
        merged: Merged,
        states: dict[str, kernel.State],
        weights: dict[str, Tree],
    ) -> None:
        """Take over a component's new state, its records, and its values of other slots."""
        states[component.GROUP] = merged.state
        opened.note(component.name, merged.metrics)
        for slot, tree in merged.slots.items():
            self._put(opened, weights, slot, tree)

    def _put(self, opened: OpenStep, weights: dict[str, Tree], slot: str, values: AnyTree) -> None:
        """Put new values into a slot, cast to the slot's dtypes."""
        if bad := trees.first_nonfinite(values):
            raise RunFailed(
                f"round {opened.round}: the aggregated tensor {bad!r} holds NaN or infinite values"
            )
        weights[slot] = {**weights[slot], **trees.cast(values, weights[slot])}

    def end_phase(self, opened: OpenStep) -> None:
        """End the phase with this step, even if its planned length is not reached."""
        lengths = list(self.run.lengths)
        lengths[opened.index] = opened.step
        self.run = replace(self.run, lengths=tuple(lengths))

    def forget(self, failures: Iterable[Any]) -> None:
        """With on_lost_state=restart, let each client that lost its state begin again.

        The server then treats the client as if it had never taken part.
        """
        run = self.run
        lost = {failure.pid for failure in failures if self.setup.starts_afresh(failure.reason)}
        if not (gone := lost & run.versions.keys()):
            return
        for pid in sorted(gone):
            log.warning("client %d restarts: its state of round %d is lost", pid, run.versions[pid])

        def left(numbers: ByClient) -> ByClient:
            return {pid: number for pid, number in numbers.items() if pid not in gone}

        self.run = replace(
            run,
            versions=left(run.versions),
            state_bytes=left(run.state_bytes),
            pinned={view: left(versions) for view, versions in run.pinned.items()},
        )

    def pin(self, view: str) -> None:
        """Make clients keep the states of this evaluation, the best one of the view so far."""
        self.run = replace(self.run, pinned={**self.run.pinned, view: self.run.versions})

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

"""Lets the present run drive methods and plug-ins of the new form (kernel.py).

It holds their states, and gives their extras the prefixes under which they travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedhet.core import kernel, messages, trees
from fedhet.core.errors import RunFailed
from fedhet.core.kernel import Expected, Message, Result, State, Step, is_withheld
from fedhet.core.messages import Broadcast, Extras
from fedhet.core.phases import Phase
from fedhet.core.plugin import Plugin
from fedhet.core.site import Site
from fedhet.core.state import UNSHARED
from fedhet.core.training import usable

if TYPE_CHECKING:
    from fedhet.core.client import FedClient
    from fedhet.core.strategy import FedStrategy
    from fedhet.core.task import Samples
    from fedhet.core.trees import AnyTree, Tree

AnyPlugin = Plugin | kernel.Plugin


def hosted(plugin: AnyPlugin) -> Plugin:
    """The plug-in as the run drives it."""
    return Hosted(plugin) if isinstance(plugin, kernel.Plugin) else plugin


# ---- names in messages
def prefixed(owner: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The owner's values under the names that they have in a message."""
    return {f"{owner}.{name}": value for name, value in values.items()}


def own_of(owner: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `prefixed`, of those values that are the owner's."""
    return {
        name.removeprefix(f"{owner}."): value
        for name, value in values.items()
        if name.startswith(f"{owner}.")
    }


def message_of(owner: str, msg: Broadcast, weights: AnyTree) -> Message:
    """The message as the owner sees it."""
    phase = msg.phase.rpartition(".")[2]
    extras = own_of(owner, msg.extras)
    return Message(phase, msg.step, msg.round, msg.pid, msg.local, weights, extras)


# ---- server
def local_steps(strategy: FedStrategy, pid: int) -> int | None:
    """How many local steps follow from a client's samples; None where nobody can know."""
    from fedhet.core.compatibility import unknown_steps

    if unknown_steps(strategy):
        return None
    local = strategy.local
    used = usable(strategy.workspace.model, strategy.sizes[pid], local.batch_size)
    return sum(-(-min(size, used) // local.batch_size) for size in local.epoch_sizes(used))


def step_of(strategy: FedStrategy, owner: str, msg: Broadcast | None = None) -> Step:
    """The step in progress, as a piece sees it."""
    current = strategy.current
    sent = msg or strategy.template
    rule = strategy.setting.merge
    return Step(
        workspace=strategy.workspace,
        phase=current.entry.phase.name,
        number=current.step,
        round=current.round,
        local=strategy.local if msg is None else msg.local,
        cohort=current.cohort,
        trains=current.entry.phase.trains,
        slots=strategy.weights,
        mean=rule.mean,
        average=rule.average,
        steps=partial(local_steps, strategy),
        sent=None if msg is not None else message_of(owner, sent, sent.weights),
    )


def read_update(
    owner: str, step: Step, update: messages.Update, expected: Mapping[str, Expected]
) -> kernel.Update:
    """The update as the owner sees it, with what has been checked."""
    assert step.sent is not None
    extras = {}
    for name in expected:
        value = update.extras.get(f"{owner}.{name}")
        extras[name] = None if expected[name].statistic and is_withheld(value) else value
    return kernel.Update(
        update.pid,
        update.num_examples,
        update.weight,
        update.weights,
        update.change,
        extras,
        update.metrics,
        step.sent,
    )


def check_update(
    owner: str,
    update: messages.Update,
    expected: Mapping[str, Expected],
    shapes: dict[str, tuple[int, ...]],
) -> None:
    """Refuse an update that is not what its owner expects.

    Args:
        owner: the piece.
        update: the update.
        expected: what its extras must be, by name.
        shapes: of the tensors of any size in the step's other updates; one more may be added.

    Raises:
        ValueError: it names the extra.
    """
    for name, what in expected.items():
        value = what.read(f"{owner}.{name}", update)
        if value is not None and what.shape is not None and -1 in what.shape:
            first = shapes.setdefault(name, tuple(value.shape))
            if value.shape != first:
                raise ValueError(
                    f"extra '{owner}.{name}' has the shape {tuple(value.shape)}; that of the first"
                    f" client has {first}"
                )


def releases_in(expected: Mapping[str, Expected]) -> int:
    """How many releases under privacy.noise the extras of a reply are."""

    def is_release(what: Expected) -> bool:
        if what.public is True or what.whole:
            return False
        public = what.public or ()
        like = {"": None} if what.like is None else what.like
        return any(
            name not in public and (t is None or t.is_floating_point()) for name, t in like.items()
        )

    return sum(map(is_release, expected.values()))


def phase_of(phase: kernel.Phase, merge: Any, check: Any, until: Callable[[], bool]) -> Phase:
    """The phase in the form of the run's timetable."""
    own = {one.name: getattr(phase, one.name) for one in fields(phase)}
    own |= {"merge": merge, "check": check, "until": until if phase.until else None}
    return Phase(own.pop("name"), own.pop("rounds"), own.pop("merge"), **own)


class Hosted(Plugin):
    """A plug-in of the new form.

    Args:
        piece: the plug-in.
    """

    memory = ("state",)

    def __init__(self, piece: kernel.Plugin) -> None:
        self.piece = piece
        self.name = piece.name  # type: ignore[misc]
        self.needs_model = "model" in piece.needs  # type: ignore[misc]
        self.compares = "weights" in piece.needs  # type: ignore[misc]
        self.needs_all = piece.overrides("weights")  # type: ignore[misc]
        self._keeps = self.needs_all or piece.keeps_all
        self.unsized = tuple(f"{piece.name}.{name}" for name in piece.unsized)  # type: ignore[misc]
        self.state: State = {}
        super().__init__(**piece.settings)

    @property
    def refuses_noise(self) -> str:
        return self.piece.breaks.get("noise", "")

    @property
    def changes_gradients(self) -> bool:
        return "plain steps" in self.piece.breaks

    @property
    def changes_optimizer(self) -> bool:
        return "sgd steps" in self.piece.breaks

    @property
    def changes_weights(self) -> bool:
        return self.piece.overrides("weights") or self.piece.overrides("weight")

    @property
    def needs_steps(self) -> bool:
        return "local steps" in self.piece.needs

    @property
    def changes_steps(self) -> bool:
        return self.changes_data or "known steps" in self.piece.breaks

    @property
    def changes_data(self) -> bool:
        return self.piece.overrides("data")

    # ---- server
    def setup(self) -> None:
        self.state = self.piece.init(self.server.setting)
        server = self.server
        self.releases = {}  # type: ignore[misc]
        for phase in [*self.piece.phases(server.setting), None]:
            step = Step(
                workspace=server.workspace,
                phase="train" if phase is None else phase.name,
                number=1,
                round=1,
                local=server.local,
                trains=phase is None,
            )
            self.releases[step.phase] = releases_in(self.piece.expects(step))

    def slots(self) -> dict[str, Tree]:
        return self.piece.slots(self.server.setting)

    def phases(self) -> list[Phase]:
        return [
            phase_of(phase, partial(self._merge, phase), self.check, partial(self._ended, phase))
            for phase in self.piece.phases(self.server.setting)
        ]

    def _ended(self, phase: kernel.Phase) -> bool:
        return bool(phase.until and phase.until(self.state))

    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._updates: list[kernel.Update] = []
        if msg.trains:
            msg.local = self.piece.local(step_of(self.server, self.name, msg), msg.local)
        extras = self.piece.broadcast(step_of(self.server, self.name, msg), self.state)
        msg.extras |= prefixed(self.name, extras)

    def check(self, update: messages.Update) -> None:
        expected = self.piece.expects(step_of(self.server, self.name))
        check_update(self.name, update, expected, self._shapes)

    def _take(self, merged: kernel.Merged) -> Tree:
        self.state = merged.state
        self.recorded = {**self.recorded, **merged.metrics}
        replace_slots(self.server, merged.slots)
        return dict(merged.weights)

    def _merge(self, phase: kernel.Phase, updates: Iterator[messages.Update], old: Tree) -> Tree:
        step = step_of(self.server, self.name)
        expected = self.piece.expects(step)
        seen = (read_update(self.name, step, update, expected) for update in updates)
        return self._take(phase.merge(step, self.state, old, seen))

    def incoming(self, updates: Iterator[messages.Update], old: Tree) -> Iterator[messages.Update]:
        if not self.server.current.entry.phase.trains:
            return updates
        if self._keeps:
            return self._reweighted(list(updates))
        return self._weighted(updates) if self.piece.overrides("weight") else updates

    def _weighted(self, updates: Iterator[messages.Update]) -> Iterator[messages.Update]:
        step = step_of(self.server, self.name)
        expected = self.piece.expects(step)
        for update in updates:
            seen = read_update(self.name, step, update, expected)
            update.weight = self.piece.weight(step, self.state, seen)
            yield update

    def _reweighted(self, updates: list[messages.Update]) -> Iterator[messages.Update]:
        step = step_of(self.server, self.name)
        expected = self.piece.expects(step)
        self._updates = [read_update(self.name, step, update, expected) for update in updates]
        if self.piece.overrides("weights"):
            weights, recorded = self.piece.weights(step, self.state, self._updates)
            self.recorded = {**self.recorded, **recorded}
            for update, weight in zip(updates, weights, strict=True):
                update.weight = weight
        return iter(updates)

    def merged(self, new: Tree, old: Tree) -> Tree:
        if not self.server.current.entry.phase.trains:
            return new
        step = step_of(self.server, self.name)
        updates, self._updates = self._updates, []
        return self._take(self.piece.after(step, self.state, old, new, updates))

    # ---- client
    def _seen(self, msg: Broadcast) -> Message:
        return message_of(self.name, msg, self.client.complete(msg))

    def _state(self) -> ClientView:
        return ClientView(self.client, self.name)

    def _site(self, seen: Message) -> Site:
        return Site(self.client, seen)

    def served(self, phase: str) -> Callable[[Broadcast], messages.Update] | None:
        function = getattr(self.piece, phase, None)
        return partial(self._serve, function) if getattr(function, "serves", False) else None

    def _serve(self, function: Any, msg: Broadcast) -> messages.Update:
        return serve(self.client, self.name, function, msg)

    def data(self, raw: Samples) -> Samples:
        return self.piece.data(raw, self._state())  # type: ignore[arg-type]

    def terms(self, msg: Broadcast) -> list[kernel.Term]:
        if not msg.trains:
            return []
        seen = self._seen(msg)
        return self.piece.terms(seen, self._state(), self._site(seen))  # type: ignore[arg-type]

    def finish(self, update: messages.Update) -> None:
        msg = self.client.msg
        if msg.trains:
            seen, state = self._seen(msg), self._state()
            given = seen, state, self._site(seen), self.client.fitted
            result, after = self.piece.finish(*given)  # type: ignore[arg-type]
            state.keep(after)
            update.extras |= sent_extras(self.name, result)
            update.metrics |= result.metrics
        withhold(self.client, self.name, self._expected(), update)

    def _expected(self) -> Mapping[str, Expected]:
        return self.piece.expects(step_at(self.client))

    @property
    def public(self) -> tuple[str, ...]:  # type: ignore[override]
        return public_names(self.name, self._expected())

    def released(self, update: messages.Update) -> None:
        repair(self.name, self._expected(), update)


def replace_slots(strategy: FedStrategy, slots: Mapping[str, AnyTree]) -> None:
    """Put new values into slots, in their types.

    Raises:
        RunFailed: a value is not finite.
    """
    for slot, tree in slots.items():
        if bad := trees.first_nonfinite(tree):
            raise RunFailed(
                f"round {strategy.current.round}: the aggregated tensor {bad!r} holds NaN or"
                " infinite values"
            )
        before = strategy.weights[slot]
        strategy.weights[slot] = {**before, **trees.cast(tree, before)}


# ---- client
class ClientView(Mapping[str, Any]):
    """What a client keeps for one owner, as far as it is read."""

    def __init__(self, client: FedClient, owner: str) -> None:
        self._state = client.state
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        tree = self._state.get(f"{self._owner}.{name}")
        if tree is None:
            raise KeyError(name)
        return tree[""] if list(tree) == [""] else tree

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.keys(self._owner))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def keep(self, after: Mapping[str, Any]) -> None:
        """Put the owner's new state in the place of this one, unless it is this one."""
        if after is self:
            return
        for name, value in after.items():
            tree = {"": value} if isinstance(value, Tensor) else value
            self._state.put(f"{self._owner}.{name}", tree)


def serve(
    client: FedClient, owner: str, function: Any, msg: Broadcast, *, sends: bool = True
) -> messages.Update:
    """The reply of a function (msg, state, site) -> (result, state)."""
    seen = message_of(owner, msg, client.complete(msg))
    state = ClientView(client, owner)
    result, after = function(seen, state, Site(client, seen))
    state.keep(after)
    weights: Tree = dict(result.weights)
    if weights and msg.slot == "model":
        if client.workspace.kept:
            client.state.put(UNSHARED, trees.pick(weights, client.workspace.kept))
        client.holding(result.weights)
        weights = trees.pick(weights, client.workspace.shared) if sends else {}
    update = messages.Update(client.pid, client.num_examples, weights)
    update.extras = sent_extras(owner, result)
    update.metrics = dict(result.metrics)
    return update


def sent_extras(owner: str, result: Result) -> Extras:
    """The extras of a result, under the names in messages; what is withheld is empty."""
    return {
        f"{owner}.{name}": torch.empty(0) if value is None else value
        for name, value in result.extras.items()
    }


def step_at(client: FedClient) -> Step:
    """The step of the message that the client serves."""
    msg = client.msg
    return Step(
        workspace=client.workspace,
        phase=msg.phase.rpartition(".")[2],
        number=msg.step,
        round=msg.round,
        local=msg.local,
        trains=msg.trains,
    )


def withhold(
    client: FedClient, owner: str, expected: Mapping[str, Expected], update: messages.Update
) -> None:
    """Withhold statistics of too few samples."""
    if client.num_examples >= client.workspace.min_count:
        return
    for name, what in expected.items():
        if what.statistic and f"{owner}.{name}" in update.extras:
            update.extras[f"{owner}.{name}"] = torch.empty(0, device=client.workspace.device)


def public_names(owner: str, expected: Mapping[str, Expected]) -> tuple[str, ...]:
    """The names of the extras, and of tensors in them, that need no noise."""
    names = []
    for name, what in expected.items():
        if what.public is True:
            names.append(f"{owner}.{name}")
        elif what.public:
            names += [f"{owner}.{name}.{part}" for part in what.public]
    return tuple(names)


def repair(owner: str, expected: Mapping[str, Expected], update: messages.Update) -> None:
    """Make of noised extras what the server accepts."""
    for name, what in expected.items():
        key = f"{owner}.{name}"
        if key not in update.extras or what.public is True:
            continue
        value: Any = update.extras[key]
        if is_withheld(value) and what.statistic:
            continue
        if what.low is not None or what.high is not None:
            if isinstance(value, dict):
                value = trees.map(partial(torch.clamp, min=what.low, max=what.high), value)
            elif isinstance(value, Tensor):
                value = value.clamp(what.low, what.high)
            else:
                value = float(torch.tensor(value).clamp(what.low, what.high))
        update.extras[key] = what.repair(value, update) if what.repair else value

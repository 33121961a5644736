"""A method of the new form (kernel.py) as the strategy and the clients of the present run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from torch import nn

from fedhet.core import kernel, messages
from fedhet.core.client import FedClient
from fedhet.core.hosted import (
    AnyPlugin,
    ClientView,
    check_update,
    message_of,
    phase_of,
    prefixed,
    public_names,
    read_update,
    releases_in,
    repair,
    replace_slots,
    serve,
    step_at,
    step_of,
    withhold,
)
from fedhet.core.kernel import Expected, Method, State, Step
from fedhet.core.messages import Broadcast, Extras
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.site import Site
from fedhet.core.state import Store
from fedhet.core.strategy import FedStrategy
from fedhet.core.trees import Tree
from fedhet.core.workspace import Workspace

AnyMethod = type[FedStrategy] | Method
# Facts of a strategy, and the words by which a method states them.
FACTS = {
    "takes_steps": "local steps",
    "weighted": "used weights",
    "only_means": "means",
    "only_weights": "weights alone",
    "plain_steps": "plain steps",
    "sgd_steps": "sgd steps",
    "counts_steps": "known steps",
}


def build(cls: Any, setting: Setting, options: Mapping[str, Any]) -> FedStrategy:
    """The strategy of a method, in either form."""
    if issubclass(cls, Method):
        return Bound(setting, cls(**options))
    return cls(setting, **options)  # type: ignore[no-any-return]


def client_of(
    cls: Any,
    options: Mapping[str, Any],
    workspace: Workspace,
    plugins: Sequence[AnyPlugin],
    store: Store | Callable[[str], Store],
    properties: dict[str, Any] | None = None,
) -> FedClient:
    """A client of a method, in either form."""
    if issubclass(cls, Method):
        return BoundClient(cls(**options), workspace, plugins, store, properties)
    return cls.client_cls(workspace, plugins, store, properties)  # type: ignore[no-any-return]


def half_of(cls: Any) -> Any:
    """The class of a method's client half, which has `personal_module`."""
    return cls.client if issubclass(cls, Method) else cls.client_cls


class Bound(FedStrategy):
    """The strategy of a method.

    Args:
        setting: the run.
        method: the method.
    """

    memory = ("state",)

    def __init__(self, setting: Setting, method: Method) -> None:
        self.method = method
        self.name = method.name  # type: ignore[misc]
        self.client_cls = method.client  # type: ignore[misc,assignment]
        self.requires = method.requires  # type: ignore[misc,assignment]
        self.fixed = method.fixed  # type: ignore[misc]
        self.needs_all = method.needs_all
        self.enters = method.breaks.get("means") or method.breaks.get("weights alone", "")  # type: ignore[misc]
        self.refuses_noise = method.breaks.get("noise", "")
        for fact, word in FACTS.items():
            needed = fact in ("plain_steps", "sgd_steps", "counts_steps")
            setattr(self, fact, word in method.needs if needed else word not in method.breaks)
        self.otherwise = {  # type: ignore[misc]
            fact: option for fact, word in FACTS.items() if (option := _without(method, word))
        }
        self.evaluates = method.evaluates(setting.workspace)
        self.personal_names = method.personal(setting.workspace)
        self.state: State = {}
        super().__init__(replace(setting, local=method.local(setting.local)))

    def setup(self) -> None:
        init = self.method.init  # which in FedROD is the name of an option
        self.state = init(self.setting) if callable(init) else {}
        self.releases = releases_in(self.method.expects(self._first_step()))

    @property
    def sends_weights(self) -> bool:
        return self.receives_model and "weights" not in self.method.breaks

    @property
    def evaluation_extras(self) -> Extras:  # type: ignore[override]
        return prefixed(self.name, self.method.shows(self.weights, self.state))

    @evaluation_extras.setter
    def evaluation_extras(self, extras: Extras) -> None:
        """It follows from the state."""

    def slots(self) -> dict[str, Tree]:
        return self.method.slots(self.setting)

    def phases(self) -> list[Phase]:
        return [
            phase_of(phase, partial(self._merge, phase), self.check, partial(self._ended, phase))
            for phase in self.method.phases(self.setting)
        ]

    def _ended(self, phase: kernel.Phase) -> bool:
        return bool(phase.until and phase.until(self.state))

    def base_weight(self, update: messages.Update) -> float:
        if not hasattr(self, "current"):  # a plug-in asks before the run begins
            sent = kernel.Message("train", 1, 1, update.pid, self.local, {})
            return self.method.weight(
                self._first_step(),
                kernel.Update(update.pid, update.num_examples, 0.0, {}, {}, {}, {}, sent),
            )
        step = step_of(self, self.name)
        return self.method.weight(step, self._seen(step, update))

    def _first_step(self) -> Step:
        """The first step of the training, as far as it is known before the run."""
        return Step(
            workspace=self.workspace,
            phase="train",
            number=1,
            round=1,
            local=self.local,
            trains=True,
            slots=self.method.slots(self.setting),
        )

    def _seen(self, step: Step, update: messages.Update) -> kernel.Update:
        return read_update(self.name, step, update, self._expected(step))

    def _expected(self, step: Step) -> Mapping[str, Expected]:
        return self.method.expects(step)

    def begin(self, msg: Broadcast) -> Extras:
        self._shapes: dict[str, tuple[int, ...]] = {}
        step = step_of(self, self.name, msg)
        return prefixed(self.name, self.method.broadcast(step, self.state))

    def check(self, update: messages.Update) -> None:
        check_update(self.name, update, self._expected(step_of(self, self.name)), self._shapes)

    def _merge(self, phase: kernel.Phase, updates: Iterator[messages.Update], old: Tree) -> Tree:
        step = step_of(self, self.name)
        merged = phase.merge(step, self.state, old, (self._seen(step, one) for one in updates))
        self.state = merged.state
        self.recorded = {**self.recorded, **merged.metrics}
        replace_slots(self, merged.slots)
        return dict(merged.weights)


def _without(method: Method, word: str) -> str:
    """The option with which the method does not need, or break, this; "" for none."""
    if word not in {*method.needs, *method.breaks}:
        return ""
    for one in fields(method):  # type: ignore[arg-type]
        for value in one.metadata.get("limits", {}).get("allowed", ()):
            other = replace(method, **{one.name: value})  # type: ignore[type-var]
            if word not in {*other.needs, *other.breaks}:
                return f"method.{one.name}={value}"
    return ""


class BoundClient(FedClient):
    """The client half of a method.

    Args:
        method: the method.
    """

    def __init__(
        self,
        method: Method,
        workspace: Workspace,
        plugins: Sequence[AnyPlugin],
        store: Store | Callable[[str], Store],
        properties: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(workspace, plugins, store, properties)
        self.method = method
        self.half = method.client(method)

    @property
    def identity(self) -> Hashable:
        return type(self.method), self.method.digest()

    def served(self, phase: str) -> Callable[[Broadcast], messages.Update] | None:
        function = getattr(self.half, phase, None)
        return partial(self._serve, function) if getattr(function, "serves", False) else None

    def _serve(self, function: Any, msg: Broadcast) -> messages.Update:
        sends = "weights" not in self.method.breaks
        return serve(self, self.method.name, function, msg, sends=sends)

    def finish(self, update: messages.Update, seconds: float) -> messages.Update:
        if self._own:
            withhold(self, self.method.name, self._expected(), update)
        return super().finish(update, seconds)

    def _expected(self) -> Mapping[str, Expected]:
        return self.method.expects(step_at(self))

    @property
    def public(self) -> tuple[str, ...]:  # type: ignore[override]
        return public_names(self.method.name, self._expected()) if self._own else ()

    @property
    def _own(self) -> bool:
        return "." not in self.msg.phase

    def released(self, update: messages.Update) -> None:
        if self._own:
            repair(self.method.name, self._expected(), update)

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        name = self.method.name
        seen = message_of(name, msg, self.complete(msg))
        return self.half.views(seen, ClientView(self, name), Site(self, seen))  # type: ignore[arg-type]

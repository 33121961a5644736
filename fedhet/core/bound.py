"""A method of the new form (kernel.py) as the strategy and the clients of the present run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
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
    without,
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
    "by_samples": "sample weights",
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
    by_samples = True  # type: ignore[assignment]

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
            fact: option for fact, word in FACTS.items() if (option := without(method, word))
        }
        self.evaluates = method.evaluates(setting.workspace)
        self.personal_names = method.personal(setting.workspace)
        self.state: State = {}
        super().__init__(replace(setting, local=method.local(setting.local)))

    def setup(self) -> None:
        self.state = self.method.init(self.setting)
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
        step = self._step()
        return self.method.weight(step, self._seen(step, update))

    def _step(self, msg: Broadcast | None = None) -> Step:
        return step_of(self, self.name, msg, self.state)

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
            state=self.state,
        )

    def _seen(self, step: Step, update: messages.Update) -> kernel.Update:
        return read_update(self.name, step, update, self._expected(step))

    def _expected(self, step: Step) -> Mapping[str, Expected]:
        return self.method.expects(step)

    def begin(self, msg: Broadcast) -> Extras:
        self._shapes: dict[str, tuple[int, ...]] = {}
        step = self._step(msg)
        return prefixed(self.name, self.method.broadcast(step, self.state))

    def check(self, update: messages.Update) -> None:
        check_update(self.name, update, self._expected(self._step()), self._shapes)

    def _merge(self, phase: kernel.Phase, updates: Iterator[messages.Update], old: Tree) -> Tree:
        step = self._step()
        merged = phase.merge(step, self.state, old, (self._seen(step, one) for one in updates))
        self.state = merged.state
        self.recorded = {**self.recorded, **merged.metrics}
        replace_slots(self, merged.slots)
        return dict(merged.weights)


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

"""Plug-ins: the order of their hooks, the settings that they may change, and what they refuse.

Below are the errors that an author of a piece gets where the class is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedhet.core import kernel
from fedhet.core.check import setting
from fedhet.core.client.context import ClientContext, Fitted
from fedhet.core.client.training import Batch
from fedhet.core.errors import ConfigError
from fedhet.core.kernel import (
    Client,
    Merged,
    Message,
    Method,
    Plugin,
    Result,
    State,
    Step,
    Term,
    Update,
    serves,
)
from fedhet.core.messages import Extras, LocalSettings
from fedhet.core.trees import AnyTree, Tree
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.scaffold import Scaffold

Federation = Callable[..., Any]
ANY = Any  # in the signatures of wrong hooks


def noting(letter: str, notes: list[str]) -> Plugin:
    """A plug-in that notes every call of a hook and changes nothing."""

    @dataclass(frozen=True, kw_only=True)
    class Noting(Plugin):
        name = letter
        needs = frozenset({"used weights"})
        breaks = {"plain steps": "it scales gradients"}

        def _note(self, hook: str) -> None:
            notes.append(f"{hook} {letter}")

        def local(self, step: Step, local: LocalSettings) -> LocalSettings:
            self._note("local")
            return local

        def broadcast(self, step: Step, state: State) -> Extras:
            self._note("broadcast")
            return {}

        def weight(self, step: Step, state: State, update: Update) -> float:
            self._note("weight")
            return update.weight

        def after(
            self, step: Step, state: State, old: Tree, new: Tree, updates: Sequence[Update]
        ) -> Merged:
            self._note("after")
            assert all(t.dtype == torch.float64 for t in new.values())
            return Merged(new, state)

        def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
            self._note("terms")
            return [
                Term("loss", self._loss),
                Term("penalty", self._penalty),
                Term("gradient", self._gradient),
                Term("scale", self._scale),
                Term("weight", self._weight),
            ]

        def _loss(self, params: AnyTree, batch: Batch, own: Tree) -> Tensor:
            self._note("loss")
            return torch.zeros(len(batch.y))

        def _penalty(self, params: AnyTree, batch: Batch, own: Tree) -> Tensor:
            self._note("penalty")
            return torch.zeros(())

        def _gradient(self, params: AnyTree, batch: None, own: Tree) -> Tree:
            self._note("gradient")
            return {}

        def _scale(self, params: AnyTree, batch: None, own: Tree) -> Tree:
            self._note("scale")
            return {"head.bias": torch.ones(2)}

        def _weight(self, params: AnyTree, batch: None, own: Tree) -> Tensor:
            return torch.ones(12)

        def finish(
            self, msg: Message, state: State, ctx: ClientContext, fitted: Fitted
        ) -> tuple[Result, State]:
            self._note("finish")
            return Result(), state

    return Noting()


def test_the_order_of_hooks(federation: Federation) -> None:
    """In order on the way out, reversed on the way back; shared work is done once per step."""
    notes: list[str] = []
    run = federation(
        toy_task(1), FedAvg, plugins=lambda: [noting("a", notes), noting("b", notes)], batch_size=12
    )
    run.step()
    way_out = ["local", "broadcast", "terms", "loss", "penalty", "gradient", "scale"]
    way_back = ["finish", "weight", "after"]
    in_order = [f"{hook} {name}" for hook in way_out for name in "ab"]
    in_reverse = [f"{hook} {name}" for hook in way_back for name in "ba"]
    assert notes == in_order + in_reverse


def test_what_is_done_once_in_a_step_and_what_for_each_client(federation: Federation) -> None:
    notes: list[str] = []
    run = federation(toy_task(3, equal=True), FedAvg, plugins=lambda: [noting("a", notes)])
    run.step()
    counts = {hook: notes.count(f"{hook} a") for hook in ("local", "broadcast", "after")}
    assert set(counts.values()) == {1}
    counts = {hook: notes.count(f"{hook} a") for hook in ("terms", "finish", "weight")}
    assert set(counts.values()) == {3}


def test_hooks_that_change_nothing_change_no_bit(federation: Federation) -> None:
    task = toy_task(equal=True)
    noted = federation(task, FedAvg, plugins=lambda: [noting("a", [])]).run()
    assert noted.sha256 == federation(task, FedAvg).run().sha256


@dataclass(frozen=True, kw_only=True)
class Schedule(Plugin):
    """Halves the learning rate after each round."""

    name = "schedule"

    def local(self, step: Step, local: LocalSettings) -> LocalSettings:
        return replace(local, lr=local.lr * 0.5 ** (step.number - 1))


@pytest.mark.parametrize("cls", [FedAvg, Scaffold])
def test_a_plugin_can_schedule_the_local_settings(federation: Federation, cls: type) -> None:
    """As lr_decay does, on both sides.

    That servers compute with the decayed rate is shown by test_scaffold and test_fednova.
    """
    scheduled = federation(toy_task(), cls, plugins=lambda: [Schedule()], rounds=3).run()
    decayed = federation(toy_task(), cls, rounds=3, lr_decay=0.5).run()
    assert scheduled.sha256 == decayed.sha256


def test_the_cosine_schedule(federation: Federation) -> None:
    """1, .75, .25 of the rate in three rounds, on top of the decay."""
    rates: list[float] = []

    @dataclass(frozen=True, kw_only=True)
    class Watching(Plugin):
        name = "watching"

        def broadcast(self, step: Step, state: State) -> Extras:
            rates.append(step.local.lr)
            return {}

    federation(
        toy_task(),
        FedAvg,
        plugins=lambda: [Watching()],
        rounds=3,
        lr=0.4,
        lr_decay=0.5,
        schedule="cosine",
    ).run()
    assert rates == pytest.approx([0.4, 0.75 * 0.2, 0.25 * 0.1])


# ---- what is wrong is said where the class, the piece or the term is made
BASES = {"method": Method, "derived": FedAvg, "client": Client, "plugin": Plugin}


def made(base: Any, **members: Any) -> Any:
    """A class of this name, as a class statement makes it."""
    return type("Mine", (base,), members)


@pytest.mark.parametrize(
    ("base", "name", "meant"),
    [
        ("method", "broadcats", r" \(did you mean .*broadcast"),
        ("derived", "merged", r" \(did you mean .*merge"),
        ("client", "view", r" \(did you mean .*views"),
        ("client", "term", r" \(did you mean .*terms"),
        ("plugin", "expect", r" \(did you mean .*expects"),
        ("plugin", "xyz", r"; the hooks are after, broadcast, data, expects, .*weight, weights"),
    ],
)
def test_a_misspelt_hook_is_named_with_the_nearest_one(base: str, name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"Mine\.{name} .*hook.*{meant}"):
        made(BASES[base], **{name: lambda self: None})


def test_a_hook_of_the_other_half_is_none_of_this_one() -> None:
    """The client half of a method has no `broadcast`, and its server half no `terms`."""
    for base, name in (("client", "broadcast"), ("method", "terms"), ("plugin", "merge")):
        with pytest.raises(TypeError, match=rf"Mine\.{name} .*hook"):
            made(BASES[base], **{name: lambda self: None})


@pytest.mark.parametrize(
    ("base", "name", "function", "called"),
    [
        ("method", "weight", lambda self, update: 1.0, "self, step, update"),
        ("derived", "setup", lambda self: {}, "self, setup"),
        ("derived", "merge", lambda self, updates, old: {}, "self, step, state, old, updates"),
        ("client", "train", lambda self, msg: None, "self, msg, state, ctx"),
        ("client", "terms", lambda self, msg, ctx, state: [], "self, msg, state, ctx"),
        ("plugin", "weight", lambda self, step, update: 1.0, "self, step, state, update"),
        ("plugin", "local", lambda self, local: local, "self, step, local"),
    ],
)
def test_another_signature_is_refused(
    base: str, name: str, function: Callable[..., Any], called: str
) -> None:
    with pytest.raises(TypeError, match=rf"Mine\.{name}\(self.*\) .* {name}\({called}\)$"):
        made(BASES[base], breaks={}, **{name: function})


def test_class_methods_are_checked_as_well() -> None:
    with pytest.raises(TypeError, match=r"Mine\.scop is no hook \(did you mean scope\?\)"):
        made(Method, scop=classmethod(lambda cls, model: None))
    with pytest.raises(TypeError, match=r"Mine\.scope\(self, model\) .* scope\(cls, m"):
        made(Method, scope=lambda self, model: None)


def test_helpers_phases_and_properties_are_no_hooks() -> None:
    def explore(self: ANY, msg: ANY, state: ANY, ctx: ANY) -> ANY: ...

    made(Client, _helper=lambda self: None, explore=serves(explore))
    made(Plugin, _helper=lambda self: None, rate=property(lambda self: 1.0))
    with pytest.raises(TypeError, match=r"Mine\.explore .*hook.*@serves"):
        made(Client, explore=lambda self, msg, state, ctx: None)
    with pytest.raises(TypeError, match=r"Mine\.train .*@serves"):
        made(Client, train=lambda self, msg, state, ctx: None)


@pytest.mark.parametrize("annotation", [float, "float", float | None, "float | None"], ids=str)
def test_options_are_checked_however_they_are_annotated(annotation: Any) -> None:
    """A module without `from __future__ import annotations` has types in place of text."""
    members = {"name": "mine", "__annotations__": {"eps": annotation}, "eps": setting(1.0, low=0)}
    mine = dataclass(frozen=True, kw_only=True)(made(Plugin, **members))
    assert mine(eps=2).eps == 2.0
    with pytest.raises(ConfigError, match=r"plugin\.mine\.eps=-1 "):
        mine(eps=-1)
    with pytest.raises(ConfigError, match=r"plugin\.mine\.eps=abc "):
        mine(eps="abc")


@pytest.mark.parametrize("base", [FedAvg, Plugin])
@pytest.mark.parametrize("where", ["needs", "breaks"])
def test_an_unknown_word_is_named_with_the_nearest_one(base: Any, where: str) -> None:
    words = {"plain step": "it does"}
    with pytest.raises(ConfigError, match=r"of Mine=plain step is not .*mean plain steps"):
        made(base, **{where: frozenset(words) if where == "needs" else words})


def test_words_that_follow_from_options_are_checked_as_well() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(Plugin):
        name = "mine"
        how: str = setting("well", allowed=("well", "badly"))

        @property
        def needs(self) -> frozenset[str]:
            return frozenset({"modle"} if self.how == "badly" else ())

    Mine()
    with pytest.raises(ConfigError, match=r"modle is not .*\(did you mean model"):
        Mine(how="badly")
    with pytest.raises(ConfigError, match=r"plugin\.mine\.how=bad "):
        Mine(how="bad")


@pytest.mark.parametrize("base", [Method, FedAvg, Plugin])
def test_a_piece_is_a_frozen_dataclass(base: Any) -> None:
    """Else its options would be no options, and its attributes could change."""
    makes = [lambda cls: cls]
    if base is not FedAvg:  # dataclass itself refuses it then
        makes.append(dataclass(kw_only=True))
    for make in makes:
        cls = make(made(base))
        with pytest.raises(TypeError, match=r"Mine .*frozen.*@data"):
            cls()
    component = dataclass(frozen=True, kw_only=True)(made(base, name="mine"))()
    with pytest.raises(AttributeError, match="cannot assign to field 'rate'"):
        component.rate = 1.0


@pytest.mark.parametrize("base", [Method, Plugin])
def test_a_piece_has_a_name(base: Any) -> None:
    """Two without one would share their extras and states. A class to build on needs none."""
    mine = dataclass(frozen=True, kw_only=True)(made(base))
    with pytest.raises(TypeError, match=r"Mine .*`name`"):
        mine()
    assert dataclass(frozen=True, kw_only=True)(made(mine, name="mine"))().name == "mine"


@pytest.mark.parametrize("hook", ["weight", "weights"])
def test_a_plugin_that_changes_weights_says_so(hook: str) -> None:
    """Where it follows from an option, the property decides."""
    function = vars(Plugin)[hook]
    for words in ({}, {"needs": frozenset({"model"})}):
        with pytest.raises(TypeError, match=rf"Mine .*{hook}: .*'used weights' .*`ne"):
            made(Plugin, **{hook: function}, **words)
    made(Plugin, **{hook: function}, needs=frozenset({"model", "used weights"}))
    made(Plugin, **{hook: function}, needs=property(lambda self: frozenset()))


def test_an_unknown_limit_is_refused_where_it_is_written() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'min'"):
        setting(0.5, min=0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("kind", "meant"),
    [
        ("gradients", r" \(did you mean gradient\?\)"),
        ("xyz", r"; choose from: loss, weight, .*"),
    ],
)
def test_an_unknown_kind_of_term_is_named_with_the_nearest_one(kind: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"term={kind} is not allowed{meant}"):
        Term(kind, lambda params, batch, own: None)


def test_the_checks_know_all_kinds() -> None:
    assert [Term(kind, len).kind for kind in kernel.KINDS] == list(kernel.KINDS)

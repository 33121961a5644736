"""docs/extending.md is complete and true: hooks, signatures, their order, attributes, recipes."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.client import NumPyClient
from flwr.server.strategy import Strategy

import fedhet.core.messages
from fedhet.core import trees
from fedhet.core.client import FedClient
from fedhet.core.errors import ConfigError
from fedhet.core.evaluation import evaluation_messages
from fedhet.core.kernel import Phase, Plugin
from fedhet.core.messages import Broadcast, LocalSettings, Message, Update
from fedhet.core.setting import Setting
from fedhet.core.state import ClientState
from fedhet.core.strategy import FedStrategy
from fedhet.core.training import Batch, LocalTraining
from fedhet.core.workspace import Workspace
from fedhet.data.toy import toy_task

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
MANUAL = PAGE[PAGE.index("## What a run calls, in order") : PAGE.index("## Inside or outside")]
TEXT = " ".join(re.sub(r"```.*?```", "", MANUAL, flags=re.DOTALL).replace("\\|", "|").split())
CODE = set(re.findall(r"`([^`]+)`", TEXT))
WORDS = {word for code in CODE for word in re.findall(r"\w+", code)}
AUTHORS = (FedStrategy, FedClient, LocalTraining, Plugin)
# What authors only call, so that its signature is in the manual too.
CALLED = {
    FedStrategy: {"mergeable", "sent"},
    LocalTraining: {
        "train_model",
        "full_gradient",
        "apply_gradient_hooks",
        "recorded",
        "descent",
        "orders",
        "train_mode",
        "generator",
    },
    Message: {"boolean", "text", "scalar", "integer", "tensor", "tree", "counts"},
    ClientState: {"get", "put"},
    Workspace: {name for name, member in vars(Workspace).items() if inspect.isfunction(member)},
}


@cache
def overridable(cls: type) -> list[str]:
    """The public members below the comment "what a method overrides"; all of a plug-in's."""
    if cls is Plugin:
        return [name for name in members(cls) if name not in ("name",)]
    source = inspect.getsource(cls)
    part = source.partition("# ---- what a method overrides\n")[2].partition("\n    # ----")[0]
    return re.findall(r"(?m)^    def ([a-z]\w*)\(", part)


def members(cls: type) -> Iterator[str]:
    """The public functions and properties that the class itself defines."""
    for name, member in vars(cls).items():
        defined = inspect.isfunction(member) or isinstance(member, property | classmethod)
        if not name.startswith("_") and (defined or isinstance(member, cached_property)):
            yield name


def written(cls: type, name: str) -> str:
    """The member as the manual writes it: without self, and with annotations as in the code."""
    member = inspect.getattr_static(cls, name)
    if isinstance(member, property):
        return f"{name}: {inspect.signature(member.fget).return_annotation}"  # type: ignore[arg-type]
    function = member.__func__ if isinstance(member, classmethod) else member
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    text = f"{name}{signature.replace(parameters=parameters)}"
    # Annotations are texts, which inspect puts into quotes.
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def documented() -> Iterator[tuple[type, str]]:
    for cls in AUTHORS:
        for name in overridable(cls):
            yield cls, name
    for cls, names in CALLED.items():
        for name in sorted(names):
            if not name.startswith("_"):
                yield cls, name


def test_the_lists_of_this_test_are_not_empty() -> None:
    assert {"merge", "check", "scope", "refuses"} <= set(overridable(FedStrategy))
    assert {"train", "start", "views"} <= set(overridable(FedClient))
    assert {"losses", "optimizer"} <= set(overridable(LocalTraining))
    assert {"outgoing", "scale", "changes_weights"} <= set(overridable(Plugin))
    assert written(Plugin, "merged") == "merged(new: Tree, old: Tree) -> Tree"
    assert written(FedStrategy, "refuses") == "refuses: dict[str, str]"


def test_every_hook_is_in_the_manual_with_its_signature() -> None:
    """It says when the hook runs, what it may change, and what it returns."""
    lacking = [
        f"{cls.__name__}: {written(cls, name)}"
        for cls, name in documented()
        if not {written(cls, name), f"workspace.{written(cls, name)}"} & CODE
    ]
    assert not lacking


def public_names(cls: type) -> set[str]:
    """Members, fields, and the attributes that the docstring lists."""
    section = (inspect.getdoc(cls) or "").partition("Attributes")[2]
    listed = re.findall(r"(?m)^    ([a-z_, ]+): ", section)
    names = {name.strip() for line in listed for name in line.split(",")} | set(members(cls))
    names |= (
        {field.name for field in fields(cls)} if hasattr(cls, "__dataclass_fields__") else set()
    )
    names -= {"commit"}  # fedhet's own
    names -= {*vars(Strategy), *vars(NumPyClient)}
    return {name for name in names if not name.startswith("_")}


def test_every_public_name_is_in_the_manual() -> None:
    classes = (*AUTHORS, *CALLED, Batch, Broadcast, Update, Phase, Setting)
    assert not [
        f"{cls.__name__}.{name}" for cls in classes for name in sorted(public_names(cls) - WORDS)
    ]


def test_settings_of_local_training_are_listed() -> None:
    assert {field.name for field in fields(LocalSettings)} <= WORDS


def test_no_signature_of_the_manual_is_out_of_date() -> None:
    """What looks like a signature is that of a class."""
    known = {
        prefix + written(cls, name)
        for cls in (*AUTHORS, *CALLED, Setting)
        for name in members(cls)
        if not isinstance(vars(cls)[name], cached_property)
        for prefix in ("", "workspace.")
    }
    signatures = {code for code in CODE if re.fullmatch(r"[\w.]+\(.*\) -> .*", code)}
    assert len(signatures) > 40
    assert signatures <= known, signatures - known


# ---- the order
def documented_order() -> list[tuple[str, str]]:
    """(method or plug-in, hook) in the order of the manual's numbers."""
    items = re.split(r"(?m)^(\d+)\. ", MANUAL.partition("\n## Phases")[0])
    numbers = [int(number) for number in items[1::2]]
    assert numbers == list(range(1, len(numbers) + 1))
    order: list[tuple[str, str]] = []
    for item in items[2::2]:
        owner = ""
        text = " ".join(item.partition("\n\n")[0].split())
        for label, code in re.findall(r"\*\*(Method|Plug-in)\b|`([^`]+)`", text, re.IGNORECASE):
            owner = label.lower() or owner
            if hook := re.fullmatch(r"(\w+)(\(.*\) -> .*|: dict.*)", code):
                order.append((owner, hook[1]))
    return order


def traced(cls: type, owner: str, calls: list[tuple[str, str]], **more: Any) -> type:
    """A subclass that notes each hook that is called on it."""

    def noting(name: str, hook: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((owner, name))
            return hook(self, *args, **kwargs)

        return call

    hooks: dict[str, Any] = {}
    for owner_of_hook, name in documented_order():
        member = inspect.getattr_static(cls, name, None)
        if owner_of_hook != owner or member is None:
            continue
        if isinstance(member, property):
            hooks[name] = property(noting(name, member.fget))
        elif isinstance(member, classmethod):
            hooks[name] = classmethod(noting(name, member.__func__))
        else:
            hooks[name] = noting(name, member)
    return type(f"Traced{cls.__name__}", (cls,), {**hooks, **more})


def test_the_order_is_that_of_a_run(federation: Callable[..., Any]) -> None:
    """Of each hook the first call counts."""
    calls: list[tuple[str, str]] = []
    client = traced(FedClient, "method", calls)
    strategy = traced(FedStrategy, "method", calls, client_cls=client)
    plugin = traced(Plugin, "plug-in", calls, name="traced")
    run = federation(toy_task(), strategy, plugins=lambda: [plugin()], rounds=1)
    run.step()
    for msg in evaluation_messages(run.strategy):
        assert isinstance(run.client().handle(msg), Update)
    assert len(calls) > 40
    assert list(dict.fromkeys(calls)) == documented_order()


# ---- the code
def blocks(heading: str) -> list[str]:
    section = re.split(r"(?m)^##+ ", MANUAL.partition(f"{heading}\n")[2])[0]
    return [
        textwrap.dedent(code) for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    ]


def test_every_block_is_python() -> None:
    for code in re.findall(r" *```python\n(.*?)```", PAGE, re.DOTALL):
        ast.parse(textwrap.dedent(code))


def functions(code: str) -> dict[str, Any]:
    """The functions that a block defines, with the names that the manual uses."""
    names: dict[str, Any] = {**vars(fedhet.core.messages), "trees": trees, "Phase": Phase}
    names |= {"FedClient": FedClient, "FedStrategy": FedStrategy, "super": super}
    names |= {"Iterator": Iterator, "Tree": dict, "AnyTree": dict, "Prepared": dict}
    before = set(names)
    exec(compile(code, "docs/extending.md", "exec"), names)
    return {name: value for name, value in names.items() if name not in before}


def test_the_recipes_work(federation: Callable[..., Any]) -> None:
    """Put together they are one method."""
    (server,) = blocks("### State on the server")
    (steps,) = blocks("### Steps before the training")
    (hooks,) = blocks("### Hooks also run before the training")
    client_part = steps[steps.index("# client") :]
    strategy_part = steps[: steps.index("# client")].replace("super()", "super(Mine, self)")
    mine_client = functions(hooks)["MineClient"]
    client_cls = type("MineClient", (mine_client,), functions(client_part))

    def cohort_extras(self: Any, phase: Phase, step: int, cohort: list[int]) -> Any:
        pull = {
            name: torch.zeros_like(self.workspace.initial[name]) for name in self.workspace.trained
        }
        return {"mine.pull": pull} if phase.trains else {}

    members = {**functions(server), "cohort_extras": cohort_extras, "rate": 0.5}
    own = functions(strategy_part)
    mine = type("Mine", (FedStrategy,), {**members, **own, "client_cls": client_cls})
    own["phases"].__globals__["Mine"] = mine
    run = federation(toy_task(), mine, rounds=2).run()
    assert [entry.name for entry in run.strategy.timetable] == ["survey", "train"]
    largest = max(float(client.train.x.max()) for client in toy_task().clients)
    assert run.strategy.largest == pytest.approx(largest)
    assert any(average.abs().sum() for average in run.strategy.average.values())


def test_a_phase_needs_a_name_of_its_own(federation: Callable[..., Any]) -> None:
    class Fits(FedStrategy):
        name = "fits"

        def phases(self) -> list[Phase]:
            return [Phase("fit", 1, self.merge, slot=""), *super().phases()]

    with pytest.raises(ConfigError, match=r"method=fits: its phase 'fit' .* FedClient\.fit"):
        federation(toy_task(), Fits)

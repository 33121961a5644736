"""docs/extending.md is complete and true: an author's words, signatures, their order, recipes."""

from __future__ import annotations
import __future__

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from fedhet.core import authors, kernel, trees
from fedhet.core.check import setting
from fedhet.core.client.context import ClientContext, Fitted
from fedhet.core.client.training import Batch
from fedhet.core.kernel import (
    KINDS,
    WORDS,
    Client,
    Expected,
    Merged,
    Message,
    Method,
    Phase,
    Plugin,
    Result,
    Step,
    Term,
    Update,
)
from fedhet.core.messages import LocalSettings, Upload
from fedhet.core.server.evaluation import evaluation_messages
from fedhet.core.server.run_setup import RunSetup
from fedhet.core.workspace import Scope, Workspace
from fedhet.data.toy import toy_task
from fedhet.testing import Federation

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
MANUAL = PAGE[PAGE.index("## What a run calls, in order") : PAGE.index("## Inside or outside")]
TEXT = " ".join(re.sub(r"```.*?```", "", MANUAL, flags=re.DOTALL).split())
CODE = set(re.findall(r"`([^`]+)`", TEXT))
ANNOTATIONS = __future__.annotations.compiler_flag
LIMIT = 3943  # words of the page

# What an author of methods and plug-ins has to know: all of it, and nothing else.
HOOKS = {
    Method: (
        "scope",
        "local",
        "evaluates",
        "setup",
        "slots",
        "phases",
        "broadcast",
        "expects",
        "weight",
        "merge",
        "evaluation_extras",
    ),
    Client: ("train", "terms", "views", "personal_module"),
    Plugin: (
        "setup",
        "slots",
        "phases",
        "local",
        "broadcast",
        "expects",
        "data",
        "terms",
        "finish",
        "weight",
        "weights",
        "after",
    ),
}
FACTS = {
    Method: ("name", "needs", "breaks", "client", "requires", "needs_all"),
    Plugin: ("name", "needs", "breaks", "needs_all"),
    Client: ("options",),
}
SITE = ("workspace", "data", "own", "fit", "model", "outputs", "gradient", "adapt", "stream")
VALUES = (Message, Result, Update, Expected, Step, Merged, Fitted, Batch, Phase)
HELPERS = ("Term", "Scope", "serves", "setting", "trees")
# What fedhet calls on a piece, and an author leaves alone.
OURS = {"GROUP", "settings", "digest", "overrides"}


def names(components: dict[Any, tuple[str, ...]]) -> set[str]:
    return {name for of_class in components.values() for name in of_class}


def public(cls: type) -> set[str]:
    """Its fields, functions and properties, with those of fedhet's own bases."""
    bases = [base for base in cls.__mro__ if base not in (object, tuple)]
    found = {name for base in bases for name in (*vars(base), *inspect.get_annotations(base))}
    return {name for name in found if not name.startswith("_")}


def test_the_lists_of_this_test_are_an_authors_words() -> None:
    for cls, hooks in HOOKS.items():
        assert set(cls._hooks) <= set(hooks)  # those that are no class methods
    assert public(Method) == {*HOOKS[Method], *FACTS[Method], *OURS}
    assert public(Plugin) == {*HOOKS[Plugin], *FACTS[Plugin], *OURS}
    assert public(Client) == set(HOOKS[Client])
    assert public(ClientContext) == set(SITE)


def test_one_module_has_all_that_an_author_imports() -> None:
    words = {*(one.__name__ for one in (*VALUES, *HOOKS, ClientContext)), *HELPERS}
    assert words <= set(authors.__all__)
    assert all(hasattr(authors, name) for name in authors.__all__)


def count() -> dict[str, int]:
    return {
        "hooks": len(names(HOOKS)),
        "facts": len(names(FACTS)),
        "of a site": len(SITE),
        "values": len(VALUES),
        "helpers": len(HELPERS),
        "words": len(WORDS),
    }


def test_there_are_no_more_than_there_were() -> None:
    """Who adds one says here for what."""
    assert count() == {
        "hooks": 19,
        "facts": 7,
        "of a site": 9,
        "values": 9,
        "helpers": 5,
        "words": 10,
    }
    assert len(PAGE.split()) <= LIMIT


# ---- what the manual names
def written(cls: type, name: str) -> str:
    """The function as the manual writes it: without self, and with annotations as in the code."""
    member = inspect.getattr_static(cls, name)
    signature = inspect.signature(getattr(member, "__func__", member))
    parameters = list(signature.parameters.values())[1:]
    text = f"{name}{signature.replace(parameters=parameters)}"
    # Annotations are texts, which inspect puts into quotes.
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def test_every_hook_is_in_the_manual_with_its_signature_and_no_other() -> None:
    signatures = {code for code in CODE if re.fullmatch(r"\w+\(.*\) -> .*", code)}
    expected = {written(cls, name) for cls, hooks in HOOKS.items() for name in hooks}
    assert signatures == expected


def listed(title: str) -> list[str]:
    """The names at the beginning of the items of the list that follows a title."""
    items = re.split(r"\n\n(?!- )", MANUAL[MANUAL.index(title) :].partition("\n\n")[2])[0]
    heads = re.findall(r"(?m)^- (`[^:]*?)(?:, of a (?:method|plug-in))?:", items)
    found = [code for head in heads for code in re.findall(r"`([^`]+)`", head)]
    return [re.sub(r"\(.*", "", code) for code in found]


def sorted_names(found: list[str]) -> list[str]:
    assert len(found) == len(set(found)), found
    return sorted(found)


@pytest.mark.parametrize("cls", VALUES, ids=lambda cls: cls.__name__)
def test_the_list_of_a_value_has_all_that_it_holds(cls: type) -> None:
    expected = public(cls) - {"compared", "read"}  # which fedhet reads
    assert sorted_names(listed(f"`{cls.__name__}`")) == sorted(expected)


def test_the_other_lists_are_complete() -> None:
    facts = names(FACTS) - {"options"}
    assert sorted_names(listed("Besides functions, a class sets")) == sorted(facts)
    assert "self.options.trim" in CODE
    assert sorted_names(listed("`ClientContext`, a client's place")) == sorted(SITE)
    assert listed("kind says what `f` returns") == list(KINDS)
    for kind, meaning in KINDS.items():
        assert f"- `{kind}`: {meaning}\n" in MANUAL
    assert listed("if only as {}.") == list(WORDS)
    for word, meaning in WORDS.items():
        assert f"- `{word}`: {meaning}\n" in MANUAL
    assert {f"`{field.name}`" for field in fields(LocalSettings)} <= set(re.findall("`.*?`", TEXT))


def test_signatures_of_values_are_those_of_the_code() -> None:
    assert "Term(kind, f, own={}, factor=1.0, draws=None)" in CODE
    assert [f.name for f in fields(Term)] == ["kind", "f", "own", "factor", "draws"]
    assert "Scope(trained=..., shared=..., why=...)" in CODE
    assert [f.name for f in fields(Scope)] == ["trained", "shared", "why"]
    fit = inspect.signature(ClientContext.fit).parameters
    item = " ".join(MANUAL[MANUAL.index("- `fit(start, terms)`") :].partition("\n- ")[0].split())
    by_name = [name for name, one in fit.items() if one.kind is one.KEYWORD_ONLY]
    assert re.findall(r"`(\w+)(?:=True)?`", item)[1:] == by_name
    of_site = MANUAL[
        MANUAL.index("`ClientContext`, a client's") : MANUAL.index("A **workspace** is what")
    ]
    for name, arguments in re.findall(r"(?m)^- `(\w+)\(([a-z, ]*)\)", of_site):
        function = getattr(ClientContext, name)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert arguments == ", ".join(positional), name


def test_what_the_manual_says_of_trees_and_of_a_federation_exists() -> None:
    section = MANUAL[MANUAL.index("`trees`, from fedhet.core.authors") : MANUAL.index("## State")]
    named = re.findall(r"`(\w+)\(([a-z, ]*)\)`", section)
    assert len(named) == 11
    for name, arguments in named:
        found = [getattr(owner, name) for owner in (trees, trees.Sum) if hasattr(owner, name)]
        known = [[p for p in inspect.signature(f).parameters if p != "self"] for f in found]
        expected = arguments.split(", ") if arguments else []
        assert any(parameters[: len(expected)] == expected for parameters in known), name
    ((arguments, rest),) = re.findall(r"`Federation\((.*?), \.\.\.\)`(.*?)\n\n", PAGE, re.DOTALL)
    given = {
        *inspect.signature(Federation.__init__).parameters,
        *(f.name for f in fields(RunSetup)),
    }
    assert {argument.partition("=")[0] for argument in arguments.split(", ")} <= given
    assert set(re.findall(r"`(\w+)[`(]", rest)) - {"strategy"} <= set(dir(Federation))


def test_what_the_manual_says_of_a_workspace_exists() -> None:
    paragraph = MANUAL[MANUAL.index("A **workspace** is what") :].partition("\n\n")[0]
    of_workspace, _, of_setting = paragraph.partition("A `setup` also has")
    named = set(re.findall(r"`(\w+)(?:\(\w+\))?`", of_workspace)) - {"setup", "step", "ctx"}
    lists = set(listed("workspace then has these lists"))
    attributes = inspect.getdoc(Workspace) or ""
    for name in named | lists:
        assert hasattr(Workspace, name) or re.search(rf"(?m)^    {name}: ", attributes), name
    for name in re.findall(r"`(\w+)`", of_setting):
        assert name in public(RunSetup), name


# ---- the order
def documented_order() -> list[tuple[str, str]]:
    """(method, client or plug-in; hook) in the order of the manual's numbers."""
    items = re.split(r"(?m)^(\d+)\. ", MANUAL.partition("\n## What the functions")[0])
    numbers = [int(number) for number in items[1::2]]
    assert numbers == list(range(1, len(numbers) + 1))
    order: list[tuple[str, str]] = []
    for item in items[2::2]:
        owners: list[str] = []
        text = " ".join(item.partition("\n\n")[0].split())
        for label, code in re.findall(r"\*\*(Method|Plug-in|Client)\b|`([^`]+)`", text, re.I):
            if label:
                owners.append(label.lower())
            elif hook := re.fullmatch(r"(\w+)(\(.*\) -> .*)", code):
                order += [(owner, hook[1]) for owner in owners]
                owners = []
    return order


def traced(cls: Any, owner: str, calls: list[tuple[str, str]], **more: Any) -> Any:
    """A subclass that notes each hook that is called on it."""

    def noting(name: str, hook: Any) -> Any:
        @wraps(hook)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((owner, name))
            return hook(self, *args, **kwargs)

        return call

    hooks: dict[str, Any] = {}
    for owner_of_hook, name in documented_order():
        member = inspect.getattr_static(cls, name, None)
        if owner_of_hook != owner or member is None or name in more:
            continue
        if isinstance(member, classmethod):
            hooks[name] = classmethod(noting(name, member.__func__))
        else:
            hooks[name] = noting(name, member)
    more = {name: value for name, value in more.items() if value is not None}
    return type(f"Traced{cls.__name__}", (cls,), {**hooks, **more})


def test_the_order_is_that_of_a_run(federation: Callable[..., Any]) -> None:
    """Of each hook the first call counts."""
    calls: list[tuple[str, str]] = []
    frozen = dataclass(frozen=True, kw_only=True)
    client = traced(Client, "client", calls)
    method = frozen(traced(Method, "method", calls, client=client, breaks={}, name="traced"))
    # A plug-in has `weight` or `weights`; the last one is asked first.
    weighs: Any = {"needs": frozenset({"used weights"})}
    one = frozen(traced(Plugin, "plug-in", calls, name="one", weight=None, **weighs))
    other = frozen(traced(Plugin, "plug-in", calls, name="other", weights=None, **weighs))
    run = federation(toy_task(), method, plugins=lambda: [one(), other()], rounds=1)
    run.step()
    for msg in evaluation_messages(run.strategy):
        assert isinstance(run.client().handle(msg), Upload)
    assert len(calls) > 40
    first = list(dict.fromkeys(calls))
    assert first == documented_order()


# ---- the code
def test_every_block_is_python() -> None:
    for code in re.findall(r" *```python\n(.*?)```", PAGE, re.DOTALL):
        ast.parse(textwrap.dedent(code))


def test_the_method_with_a_state_and_a_phase_works(federation: Callable[..., Any]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", MANUAL, re.DOTALL)
    given: dict[str, Any] = {**vars(kernel), "trees": trees, "setting": setting}
    given |= {
        "Iterator": Iterator,
        "ClientContext": ClientContext,
        "RunSetup": RunSetup,
        "dataclass": dataclass,
    }
    given |= {"__name__": __name__}
    exec(compile(code, "docs/extending.md", "exec", dont_inherit=True, flags=ANNOTATIONS), given)
    run = federation(toy_task(), given["Mine"], rounds=2).run()
    assert [entry.name for entry in run.strategy.timetable] == ["survey", "train"]
    largest = max(float(client.train.x.max()) for client in toy_task().clients)
    state = run.strategy.run.states["method"]
    assert state["largest"] == pytest.approx(largest)
    assert any(average.abs().sum() for average in state["average"].values())

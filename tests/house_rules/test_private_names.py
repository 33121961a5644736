"""What fedhet uses of Flower is documented, or stands in the table of private names."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from types import FunctionType, ModuleType

import pytest
from house_rules.source import PACKAGE, imports, modules

from fedhet.core.errors import RunFailed
from fedhet.flower import private

MODULES = modules(PACKAGE)
MOST = 10
DOCUMENTED = ("app", "client", "clientapp", "common", "server", "serverapp", "simulation")
TABLE = {part for name in private.NAMES for part in name.partition(":")[2].split(".")}


def documented() -> Iterator[str]:
    """All that Flower's documented packages export, and what the packages among that export."""
    for package in DOCUMENTED:
        module = importlib.import_module(f"flwr.{package}")
        for name in module.__all__:
            yield f"flwr.{package}.{name}"
            if isinstance(found := getattr(module, name), ModuleType):
                yield from (f"flwr.{package}.{name}.{one}" for one in getattr(found, "__all__", ()))


def undocumented(tree: ast.Module) -> set[str]:
    """What a module imports of Flower, or names in a text, without a promise."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    named = {text for text in texts if isinstance(text, str) and text.startswith("flwr.")}
    used = {name for name in imports(tree) if name.startswith("flwr.")}
    return (used | named) - set(documented()) - private.NAMES.keys()


def looked_up(tree: ast.Module) -> Iterator[str]:
    """The names that a module reads or replaces among the variables of Flower's modules."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Attribute(attr="__globals__"), slice=ast.Constant(name)):
                yield str(name)
            case ast.Subscript(value=ast.Name("module"), slice=ast.Constant(name)):
                yield str(name)
            case ast.Call(func=ast.Attribute(attr="update"), keywords=keywords):
                yield from (str(keyword.arg) for keyword in keywords)


def test_what_is_used_of_flower_is_documented_or_in_the_table() -> None:
    found = {name: undocumented(tree) for name, tree in MODULES.items()}
    assert not {name: names for name, names in found.items() if names}
    assert len(private.NAMES) <= MOST


def test_the_table_has_what_node_and_its_processes_replace() -> None:
    found = {
        name
        for part in ("node", "app_process")
        for name in looked_up(MODULES[f"fedhet.deploy.{part}"])
    }
    assert found <= TABLE
    assert TABLE - found == {"NodeState", "get_tasks", "claim_task"}


def test_the_rules_find_what_breaks_them() -> None:
    source = """
from flwr.supercore import log
from flwr.server import Server
from flwr.server.strategy import FedAvg
client["x"]
command.__globals__["hidden"] = module["other"]
loop.__globals__.update(third=1)
module = "flwr.supernode.main"
"""
    tree = ast.parse(source)
    assert undocumented(tree) == {"flwr.supercore.log", "flwr.supernode.main"}
    assert set(looked_up(tree)) == {"hidden", "other", "third"}


# ---- what is said without a name; tests/deploy/test_node.py and tests/engines/test_grid.py have
# what happens then
@pytest.mark.parametrize("name", private.NAMES)
def test_a_name_with_other_parameters_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    private.private(name)
    monkeypatch.setitem(private.NAMES, name, "colour")
    with pytest.raises(
        RunFailed,
        match=rf"^fedhet needs Flower's {name} with colour, which flwr \d.* does not have$",
    ):
        private.private(name)


def test_a_command_that_is_gone_is_a_missing_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private, "entry_points", lambda **_: [])
    for name in private.OF_NODES:
        with pytest.raises(RunFailed, match=r"needs Flower's command fl.*, which flwr"):
            private.private(name)
    with pytest.raises(RunFailed, match="command flower-superlink"):
        private.command("flower-superlink")


def test_a_name_is_there_if_its_module_has_and_uses_it() -> None:
    """Otherwise what takes its place would never be called."""
    module: dict[str, object] = {"unused": 1, "used": 2, "Class": ModuleType}
    start = FunctionType(compile("used", "", "eval"), module)
    assert private._part(start, "used") is None  # no function of its module uses it
    module["function"] = start
    assert private._part(start, "used") == 2
    assert private._part(start, "unused") is None and private._part(start, "none") is None
    assert private._part(start, "Class") is ModuleType
    assert private._part(ModuleType, "__name__") == "module"
    assert private._part(ModuleType, "none") is None

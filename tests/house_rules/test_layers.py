"""fedhet/core knows nothing of fedhet but itself, and of Flower two abstract classes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from house_rules.source import PACKAGE, SIZE, imports

MODULES = SIZE["modules"](PACKAGE)
CORE = {
    module: tree
    for module, tree in MODULES.items()
    if module == "fedhet.core" or module.startswith("fedhet.core.")
}
LIBRARIES = {*sys.stdlib_module_names, "numpy", "torch"}
FLOWERS = {"flwr.server.strategy.Strategy", "flwr.client.NumPyClient"}
# What has a type of its own.
HALVES = {"strategy", "method", "client", "server", "workspace", "plugin"}


def foreign(tree: ast.Module) -> set[str]:
    """What a module of core imports, for type checkers too, but must not."""
    names = {name for name in imports(tree) if name.partition(".")[0] not in LIBRARIES}
    modules = {one if one in MODULES else one.rpartition(".")[0] or one for one in names - FLOWERS}
    return modules - CORE.keys()


def test_core_imports_only_itself_and_two_classes_of_flower() -> None:
    found = {module.removeprefix("fedhet.core."): foreign(tree) for module, tree in CORE.items()}
    assert not {module: names for module, names in found.items() if names}


def anything(tree: ast.AST) -> Iterator[str]:
    """The names of parameters and attributes whose type is Any."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            if "Any" in ast.unparse(node.annotation).split(" | "):
                yield name.rpartition(".")[2]


def test_any_stands_for_no_half_of_a_method() -> None:
    assert not [
        f"{module}: {name}: Any"
        for module, tree in CORE.items()
        for name in anything(tree)
        if name in HALVES
    ]


def test_both_rules_find_what_breaks_them() -> None:
    source = """
if TYPE_CHECKING:
    from fedhet.record.run_folder import Recorder
    from flwr.common import Parameters
    from flwr.server.strategy import Strategy
class Loop:
    workspace: Any
    def __init__(self, strategy: Any | None, tree: Any) -> None:
        self.client: Any = strategy
        import omegaconf
"""
    tree = ast.parse(source)
    assert foreign(tree) == {"fedhet.record.run_folder", "flwr.common", "omegaconf"}
    assert {*anything(tree)} & HALVES == {"workspace", "strategy", "client"}

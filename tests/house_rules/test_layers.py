"""What each package of fedhet may import; core imports two abstract classes of Flower as well."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from house_rules.source import PACKAGE, ROOT, circles, graph, imports, modules

MODULES = modules(PACKAGE)
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
    from fedhet.runs.record.run_folder import Recorder
    from flwr.common import Parameters
    from flwr.server.strategy import Strategy
class Loop:
    workspace: Any
    def __init__(self, strategy: Any | None, tree: Any) -> None:
        self.client: Any = strategy
        import omegaconf
"""
    tree = ast.parse(source)
    assert foreign(tree) == {"fedhet.runs.record.run_folder", "flwr.common", "omegaconf"}
    assert {*anything(tree)} & HALVES == {"workspace", "strategy", "client"}


# ---- packages
TOP = {"fedhet", "fedhet.__main__", "fedhet.api"}
SENTENCE = re.compile(r"^It may import (.+)\.$", re.MULTILINE)
PACKAGES = {module.split(".")[1] for module in MODULES.keys() - TOP}


def imported(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """The packages, and the modules at the top, that each package imports or names in a text."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, others in graph(trees).items():
        texts = {
            str(node.value) for node in ast.walk(trees[module]) if isinstance(node, ast.Constant)
        }
        named = {text if text in trees else text.rpartition(".")[0] for text in texts}
        if module not in TOP:
            every = (others | named & trees.keys() - TOP) - {module}
            packages = {other if other in TOP else other.split(".")[1] for other in every}
            found[module.split(".")[1]] |= packages - {module.split(".")[1]}
    return found


def allowed(package: str) -> set[str]:
    """The packages that the docstring of a package allows it."""
    (words,) = SENTENCE.findall(ast.get_docstring(MODULES[f"fedhet.{package}"]) or "")
    return set() if words == "no other package" else set(re.split(", | and ", words))


def test_a_package_imports_what_its_docstring_says_and_no_package_in_a_circle() -> None:
    rules = {package: allowed(package) for package in PACKAGES}
    assert imported(MODULES) == rules
    assert not circles(rules)
    assert not {"study", "deploy", "handover"} & set().union(*rules.values())
    assert len(PACKAGES) <= 11
    assert {module for module in MODULES if module.count(".") < 2} == TOP | {
        f"fedhet.{package}" for package in PACKAGES
    }


def test_the_architecture_has_the_same_table() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Packages")[2].partition("## Modules")[0]
    rows = dict(re.findall(r"^\| `(\w+)/` \|.*\| ([^|]+) \|$", table, re.MULTILINE))
    (found,) = {len(rows), len(PACKAGES)}
    assert found and all(
        f"It may import {rows[package]}." in (ast.get_docstring(MODULES[f"fedhet.{package}"]) or "")
        for package in PACKAGES
    )


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert not {name: count for name, count in names.items() if count > 1}


def test_a_package_that_imports_another_one_is_found() -> None:
    sources = {
        "fedhet": "",
        "fedhet.core.one": "def function():\n    from fedhet.study.two import name",
        "fedhet.study.two": "import_module('fedhet.data.three')\nfrom fedhet import api",
        "fedhet.data.three": "import fedhet.data.three",
        "fedhet.api": "import fedhet.study.two",
    }
    assert imported({name: ast.parse(source) for name, source in sources.items()}) == {
        "core": {"study"},
        "study": {"data", "fedhet.api"},
        "data": set(),
    }

"""What may import what, and what is not loaded at all: docs/architecture.md says why."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from house_rules.source import (
    FILES,
    METHODS,
    PACKAGE,
    ROOT,
    calls,
    imported,
    imported_packages,
    imports,
    name,
    tree,
)

MATHS = sorted((PACKAGE / "maths").glob("*.py"))

# Libraries of pure arithmetic, and what fedhet/maths needs of the standard library.
PURE = {
    "__future__",
    "collections",
    "dataclasses",
    "enum",
    "fedhet",
    "functools",
    "itertools",
    "math",
    "numpy",
    "sklearn",
    "threadpoolctl",
    "torch",
    "typing",
    "warnings",
}
PURE_OF_OURS = ("fedhet.maths", "fedhet.trees", "fedhet.check", "fedhet.errors")
READS_OR_WRITES = {
    "open",
    "print",
    "input",
    "torch.save",
    "torch.load",
    "numpy.save",
    "numpy.load",
    "np.save",
    "np.load",
}
# What executes code from a file or a message.
UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
}
UNSAFE_CALLS = {"eval", "exec", "compile", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_unsafe_is_loaded_or_evaluated(path: Path) -> None:
    module = tree(path)
    assert not imported_packages(module) & UNSAFE_MODULES
    for called, call in calls(module):
        line = f"{name(path)}, line {call.lineno}: {called}"
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert called not in UNSAFE_CALLS, line
        assert called != "torch.load" or options.get("weights_only") == "True", line
        assert options.get("allow_pickle", "False") == "False", f"{line}(allow_pickle)"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_bare_except(path: Path) -> None:
    handlers = [node for node in ast.walk(tree(path)) if isinstance(node, ast.ExceptHandler)]
    assert not [handler.lineno for handler in handlers if handler.type is None]


@pytest.mark.parametrize("path", MATHS, ids=name)
def test_maths_is_pure(path: Path) -> None:
    module = tree(path)
    for dotted in imports(module):
        assert dotted.partition(".")[0] in PURE, (
            f"{name(path)} imports {dotted}. fedhet/maths holds algebra on tensors; if this is a"
            f" library of pure arithmetic, add it to PURE in {name(Path(__file__))}"
        )
        assert not dotted.startswith("fedhet") or dotted.startswith(PURE_OF_OURS), (
            f"{name(path)} imports {dotted}. fedhet/maths knows neither Flower nor Hydra nor"
            f" clients; of fedhet it may import {', '.join(PURE_OF_OURS)}"
        )
    assert not {called for called, _ in calls(module)} & READS_OR_WRITES


@pytest.mark.parametrize("path", METHODS, ids=name)
def test_methods_import_neither_flower_nor_hydra(path: Path) -> None:
    module = tree(path)
    assert not imported_packages(module) & {"flwr", "hydra", "omegaconf"}
    assert "fedhet.flower.wire" not in imports(module)


# ---- circles
def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def executed_imports(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """What is imported while the file is executed: not in functions, nor for type checkers."""
    for node in statements:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node)
        elif isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from executed_imports(node.body)
            yield from executed_imports(node.orelse)
        elif isinstance(node, ast.With | ast.Try | ast.ClassDef):
            yield from executed_imports(node.body)


def needed_modules(path: Path) -> set[str]:
    """fedhet's modules that a file imports while it is executed."""
    dotted = set(executed_imports(tree(path).body))
    # `from fedhet.messages import Update` names a module and an attribute.
    return {d if d in MODULES else d.rpartition(".")[0] for d in dotted} & set(MODULES)


def test_no_module_imports_itself_in_a_circle() -> None:
    needed = {module: needed_modules(path) for module, path in MODULES.items()}
    try:
        TopologicalSorter(needed).prepare()
    except CycleError as error:
        circle = " <- ".join(error.args[1])
        pytest.fail(f"modules import each other: {circle}; move what both need to a third one")


# ---- what a process loads
def output(code: str, cwd: Path) -> str:
    """The last line that the program prints, in a Python without the caller's environment."""
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()[-1]


def test_importing_the_package_loads_nothing(tmp_path: Path) -> None:
    code = "import sys, fedhet; print(sorted({'torch', 'flwr', 'hydra'} & set(sys.modules)))"
    assert output(code, tmp_path) == "[]"


IN_PROCESS_RUN = """
import sys
import fedhet.engines.local
import fedhet
from fedhet.data.toy import toy_task

lines = ["method=scaffold", "plugin=[fednorm]", "rounds=1", "hydra.run.dir=here"]
run = fedhet.run(lines, task=toy_task())
assert run.summary["status"] == "ok"
heavy = {"ray", "flwr_datasets", "datasets", "torchvision", "sympy"}
print(sorted(heavy & set(sys.modules)))
"""


def test_a_run_in_process_loads_neither_ray_nor_flwr_datasets(tmp_path: Path) -> None:
    """It leaves nothing in the working directory but its run folder."""
    assert output(IN_PROCESS_RUN, tmp_path) == "[]"
    assert [path.name for path in tmp_path.iterdir()] == ["here"]

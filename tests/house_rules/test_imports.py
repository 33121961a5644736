"""What may import what, and what is not loaded at all: docs/architecture.md says why."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from house_rules.source import (
    FILES,
    METHODS,
    PACKAGE,
    ROOT,
    calls,
    circles,
    graph,
    imported_packages,
    imports,
    modules,
    name,
    tree,
)

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


def test_nothing_unsafe_is_loaded_or_evaluated() -> None:
    offenders = []
    for path in FILES:
        module = tree(path)
        offenders += [f"{name(path)}: {one}" for one in imported_packages(module) & UNSAFE_MODULES]
        for called, call in calls(module):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            unsafe = called in UNSAFE_CALLS or options.get("allow_pickle", "False") != "False"
            if unsafe or (called == "torch.load" and options.get("weights_only") != "True"):
                offenders.append(f"{name(path)}, line {call.lineno}: {ast.unparse(call)}")
    assert not offenders


def test_no_bare_except() -> None:
    assert not [
        f"{name(path)}, line {node.lineno}"
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]


def test_methods_import_neither_flower_nor_hydra() -> None:
    forbidden = ("flwr", "hydra", "omegaconf", "fedhet.flower.wire")
    assert not [
        f"{name(path)} imports {dotted}"
        for path in METHODS
        for dotted in imports(tree(path))
        if dotted.startswith(forbidden)
    ]


# ---- circles
def test_no_module_imports_itself_in_a_circle() -> None:
    executed = graph(modules(PACKAGE), executed=True)
    assert not circles(executed), "move what both need to a third one"


def circles_of(executed: bool, **files: str) -> list[list[str]]:
    trees = {name: ast.parse(source) for name, source in files.items()}
    return circles(graph(trees, executed))


def test_circles_by_all_imports_and_by_those_that_are_executed() -> None:
    files = {
        "a": "from b import function",
        "b": "import typing\nif typing.TYPE_CHECKING:\n    import c\nelse:\n    import os",
        "c": "def function():\n    import a",
        "d": "import a, d_e",
    }
    assert circles_of(False, **files) == [["a", "b", "c"]]
    assert circles_of(True, **files) == []
    files["b"] = "try:\n    from a import x\nexcept ImportError:\n    pass"
    assert circles_of(True, **files) == [["a", "b"]]


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
import fedhet.engines.in_process
import fedhet
from fedhet.data.toy import toy_task

lines = ["method=scaffold", "plugin=[fednorm]", "rounds=1", "hydra.run.dir=here"]
run = fedhet.run(lines, task=toy_task())
assert run.summary["status"] == "ok"
heavy = {"ray", "datasets", "torchvision", "sympy"}
print(sorted(heavy & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_run_in_process_loads_neither_ray_nor_datasets(tmp_path: Path) -> None:
    """It leaves nothing in the working directory but its run folder."""
    assert output(IN_PROCESS_RUN, tmp_path) == "[]"
    assert [path.name for path in tmp_path.iterdir()] == ["here"]

"""Rules of the architecture, read from the source: docs/architecture.md says why."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fedhet
from fedhet.config import catalogue

PACKAGE = Path(fedhet.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
METHOD_FOLDER = PACKAGE / "methods"
METHODS = [
    path for path in sorted(METHOD_FOLDER.rglob("*.py")) if path != METHOD_FOLDER / "__init__.py"
]
# What describes a method is its file, or the __init__.py of its folder.
METHOD_HEADS = [
    path for path in METHODS if path.parent == METHOD_FOLDER or path.name == "__init__.py"
]
MATHS = sorted((PACKAGE / "maths").glob("*.py"))

FLOWERS = {
    "initialize_parameters",
    "configure_fit",
    "aggregate_fit",
    "configure_evaluate",
    "aggregate_evaluate",
    "evaluate",
    "fit",
    "get_parameters",
    "set_parameters",
    "get_properties",
}
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
PURE_OF_OURS = (
    "fedhet.maths",
    "fedhet.trees",
    "fedhet.check",
    "fedhet.errors",
)  # algebra and checks: no Flower, no Hydra
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


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(module: ast.Module) -> Iterator[str]:
    """The dotted names of all that is imported, anywhere in the file."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(module: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """(dotted name as written, call)."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 300


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_unsafe_is_loaded_or_evaluated(path: Path) -> None:
    module = tree(path)
    assert not {dotted.partition(".")[0] for dotted in imports(module)} & UNSAFE_MODULES
    for called, call in calls(module):
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert called not in (
            "eval",
            "exec",
            "compile",
            "yaml.load",
            "yaml.unsafe_load",
            "yaml.full_load",
        ), f"line {call.lineno}: {called}"
        assert called != "torch.load" or options.get("weights_only") == "True", (
            f"line {call.lineno}: torch.load"
        )
        assert options.get("allow_pickle", "False") == "False", f"line {call.lineno}: allow_pickle"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_bare_except(path: Path) -> None:
    assert not [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]


@pytest.mark.parametrize("path", MATHS, ids=name)
def test_maths_is_pure(path: Path) -> None:
    module = tree(path)
    for dotted in imports(module):
        assert dotted.partition(".")[0] in PURE and (
            not dotted.startswith("fedhet") or dotted.startswith(PURE_OF_OURS)
        ), dotted
    io = {
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
    assert not {called for called, _ in calls(module)} & io


@pytest.mark.parametrize("path", METHODS, ids=name)
def test_methods_do_not_speak_flower(path: Path) -> None:
    module = tree(path)
    assert not {dotted.partition(".")[0] for dotted in imports(module)} & {
        "flwr",
        "hydra",
        "omegaconf",
    }
    assert "fedhet.flower.wire" not in imports(module)
    for node in ast.walk(module):
        # A plug-in is none of Flower's classes: what its phases are called is its own affair.
        if isinstance(node, ast.ClassDef) and not any(
            ast.unparse(base) == "Plugin" for base in node.bases
        ):
            assert (
                not {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
                & FLOWERS
            )


@pytest.mark.parametrize("path", METHOD_HEADS, ids=name)
def test_methods_begin_with_their_message_table(path: Path) -> None:
    said = ast.get_docstring(tree(path)) or ""
    places = [said.find(f"{entry}:") for entry in ("down", "up", "client keeps", "server keeps")]
    assert -1 not in places and places == sorted(places)


@pytest.mark.parametrize("method", catalogue.choices("method"))
def test_a_method_is_a_pair_of_direct_subclasses_in_one_file(method: str) -> None:
    """No method inherits from another."""
    from omegaconf import OmegaConf

    from fedhet.client import FedClient
    from fedhet.config.targets import find_target
    from fedhet.strategy import FedStrategy

    node = OmegaConf.load(catalogue.CONF / "method" / f"{method}.yaml")
    cls = find_target(node.get("method", node))
    assert cls.__bases__ == (FedStrategy,) and cls.client_cls.__bases__ == (FedClient,)
    assert cls.__module__ == cls.client_cls.__module__ and cls.__module__.startswith(
        "fedhet.methods."
    )


def python(code: str, cwd: Path) -> str:
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        env={"PATH": "", "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()[-1]


def test_every_method_is_benchmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """scripts/bench says what each method's own arithmetic is."""
    monkeypatch.syspath_prepend(PACKAGE.parent / "scripts" / "bench")
    costs = importlib.import_module("method_cells").OWN_ARITHMETIC
    assert {"fedavg", *costs} == set(catalogue.choices("method"))


def test_importing_the_package_loads_nothing(tmp_path: Path) -> None:
    assert (
        python(
            "import sys, fedhet; print(sorted({'torch', 'flwr', 'hydra'} & set(sys.modules)))",
            tmp_path,
        )
        == "[]"
    )


def test_a_run_in_process_loads_neither_ray_nor_flwr_datasets(tmp_path: Path) -> None:
    """And leaves nothing in the working directory but its run folder."""
    code = (
        "import sys, fedhet.engines.local, fedhet; from fedhet.data.toy import toy_task;run ="
        " fedhet.run(['method=scaffold', 'plugin=[fednorm]', 'rounds=1', 'hydra.run.dir=here'],"
        " task=toy_task());heavy = {'ray', 'flwr_datasets', 'datasets', 'torchvision',"
        " 'sympy'};assert run.summary['status'] == 'ok'; print(sorted(heavy & set(sys.modules)))"
    )
    assert python(code, tmp_path) == "[]"
    assert [path.name for path in tmp_path.iterdir()] == ["here"]

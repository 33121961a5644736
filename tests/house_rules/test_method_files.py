"""What belongs to a method: a pair of classes or a preset, a message table, tests, a benchmark."""

from __future__ import annotations

import ast
import importlib
from typing import Any

import pytest
from house_rules.source import METHOD_FOLDER, METHODS, ROOT, name, tree
from omegaconf import OmegaConf

from fedhet.config import catalogue
from fedhet.config.targets import find_target
from fedhet.core.client import FedClient
from fedhet.core.strategy import FedStrategy
from fedhet.methods.fedavg import FedAvg

# What describes a method is its file, or the __init__.py of its folder.
HEADS = [path for path in METHODS if path.parent == METHOD_FOLDER or path.name == "__init__.py"]
CHOICES = catalogue.choices("method")
FLOWERS_METHODS = {
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


def settings(method: str) -> Any:
    """What conf/method/<method>.yaml says about the group `method`."""
    node = OmegaConf.load(catalogue.CONF / "method" / f"{method}.yaml")
    return node.get("method", node)


def is_a_server_optimiser(method: str) -> bool:
    """Whether it is FedAvg with a server optimiser, so that it has no class and no tests."""
    choices = OmegaConf.load(catalogue.CONF / "method" / f"{method}.yaml").get("defaults", [])
    presets_optimiser = any("server_opt" in str(choice) for choice in choices)
    return presets_optimiser and settings(method)._target_ == settings("fedavg")._target_


def test_methods_override_none_of_flowers_methods() -> None:
    """A plug-in's class is none of Flower's, so its phases may have any name."""
    assert not [
        f"{name(path)}: {node.name}.{inner.name}"
        for path in METHODS
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
        and not any(ast.unparse(base).endswith(("Plugin", "Options")) for base in node.bases)
        for inner in node.body
        if isinstance(inner, ast.FunctionDef) and inner.name in FLOWERS_METHODS
    ]


def test_methods_begin_with_their_message_table() -> None:
    """What travels and what is kept, in this order."""
    entries = ("down", "up", "client keeps", "server keeps")
    offenders = []
    for path in HEADS:
        docstring = ast.get_docstring(tree(path)) or ""
        places = [docstring.find(f"{entry}:") for entry in entries]
        if -1 in places or places != sorted(places):
            offenders.append(name(path))
    assert not offenders, f"each docstring has a table with {entries}, as other methods do"


def test_a_method_is_a_pair_of_direct_subclasses_in_one_file() -> None:
    """No method inherits from another, and each has a client class of its own.

    Those that are FedAvg with a plug-in are presets, without a class in their file.
    """
    for method in CHOICES:
        cls = find_target(settings(method))
        assert cls.__module__.startswith("fedhet.methods."), method
        if cls.requires:
            assert (cls.__bases__, cls.client_cls) == ((FedAvg,), FedAvg.client_cls), method
            continue
        assert cls.__bases__ == (FedStrategy,), method
        assert cls.client_cls.__bases__ == (FedClient,), method
        assert cls.__module__ == cls.client_cls.__module__, method


def test_a_method_has_tests() -> None:
    folder = ROOT / "tests" / "methods"
    lacking = [
        f"tests/methods/test_{method}.py"
        for method in CHOICES
        if not is_a_server_optimiser(method)
        and not [*folder.glob(f"test_{method}.py"), *folder.glob(f"test_{method}_*.py")]
    ]
    assert not lacking, "tests/methods/by_hand.py helps to write them"


def test_every_method_is_benchmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """scripts/bench says what each method's own arithmetic is."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "bench")
    described = {"fedavg", *importlib.import_module("method_cells").OWN_ARITHMETIC}
    table = "OWN_ARITHMETIC in scripts/bench/method_cells.py"
    problems = [
        *(f"add {method!r} to {table}" for method in sorted(set(CHOICES) - described)),
        *(f"remove {method!r} from {table}" for method in sorted(described - set(CHOICES))),
    ]
    assert not problems, "\n".join(problems)

"""What belongs to a method: a pair of classes or a preset, a message table, tests, a benchmark."""

from __future__ import annotations

import ast
import importlib
from dataclasses import is_dataclass
from typing import Any

import pytest
from house_rules.source import METHOD_FOLDER, METHODS, ROOT, name, tree
from omegaconf import OmegaConf

from fedhet.core.kernel import Client, Method
from fedhet.methods.fedavg import FedAvg
from fedhet.runs.config import catalogue
from fedhet.runs.config.instantiation import find_target

# What describes a method is its file, or the __init__.py of its folder.
HEADS = [path for path in METHODS if path.parent == METHOD_FOLDER or path.name == "__init__.py"]
CHOICES = catalogue.choices("method")


def settings(method: str) -> Any:
    """What conf/method/<method>.yaml says about the group `method`."""
    node = OmegaConf.load(catalogue.CONF / "method" / f"{method}.yaml")
    return node.get("method", node)


def is_a_server_optimiser(method: str) -> bool:
    """Whether it is FedAvg with a server optimiser, so that it has no class and no tests."""
    choices = OmegaConf.load(catalogue.CONF / "method" / f"{method}.yaml").get("defaults", [])
    presets_optimiser = any("server_opt" in str(choice) for choice in choices)
    return presets_optimiser and settings(method)._target_ == settings("fedavg")._target_


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
    """No method inherits from another, and each has a client half of its own, or FedAvg's.

    Those that are FedAvg with a plug-in are presets, subclasses of FedAvg with no half of their
    own.
    """
    for method in CHOICES:
        cls = find_target(settings(method))
        assert cls.__module__.startswith("fedhet.methods."), method
        assert is_dataclass(cls), method
        if cls.requires:
            assert (cls.__bases__, cls.client) == ((FedAvg,), FedAvg.client), method
            continue
        assert cls.__bases__ == (Method,), method
        if cls.client is Client:  # which is FedAvg's
            continue
        assert cls.client.__bases__ == (Client,), method
        assert cls.__module__ == cls.client.__module__, method


def test_a_method_has_tests() -> None:
    folder = ROOT / "tests" / "methods"
    lacking = [
        f"tests/methods/test_{method}.py"
        for method in CHOICES
        if not is_a_server_optimiser(method)
        and not [*folder.glob(f"test_{method}.py"), *folder.glob(f"test_{method}_*.py")]
    ]
    assert not lacking, "tests/methods/by_hand.py helps to write them"


def test_what_is_benchmarked_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """scripts/bench says what the own arithmetic of methods is, for which they may take time."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "bench")
    described = importlib.import_module("method_cells").OWN_ARITHMETIC
    assert not [name for name in described if name not in CHOICES]

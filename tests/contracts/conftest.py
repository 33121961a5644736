"""What the contracts of every method share: its configuration, composed once."""

from __future__ import annotations

import importlib

import pytest
from composing import composed

from fedhet.config import Config, catalogue


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    """Import what takes seconds here, so that it is not the cost of the test that needs it first.

    torch imports its compiler when the first of its own optimisers is made.
    """
    importlib.import_module("torch._dynamo")
    importlib.import_module("fedhet.job")


@pytest.fixture(scope="session")
def methods() -> dict[str, Config]:
    """Every method of conf/ with its own settings; composing the first one of each takes long."""
    return {name: composed(f"method={name}") for name in catalogue.choices("method")}

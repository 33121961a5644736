"""What the contracts of every method share: its configuration, composed once."""

from __future__ import annotations

import pytest
from composing import composed

from fedhet.runs.config import Config, catalogue


@pytest.fixture(scope="session")
def methods() -> dict[str, Config]:
    """Every method of conf/ with its own settings; composing the first one of each takes long."""
    return {name: composed(f"method={name}") for name in catalogue.choices("method")}

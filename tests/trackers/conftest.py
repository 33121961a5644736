from __future__ import annotations

from typing import Any

import pytest
from trackers.following import LINES

import fedhet


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run of LINES without a tracker, and without figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedhet.runs.record.figures.draw", lambda *args: [])
        return fedhet.run([*LINES, f"hydra.run.dir={tmp_path_factory.mktemp('plain') / 'run'}"])

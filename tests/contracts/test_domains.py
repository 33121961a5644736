"""Every extra that a client sends has a domain, which docs/promises.md states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.short import shortened

from fedhet.core.messages import Upload
from fedhet.core.server import admission as gate
from fedhet.data.toy import toy_task
from fedhet.engines.dispatch import run_job
from fedhet.runs.config import catalogue

PAGE = (Path(__file__).parents[2] / "docs" / "promises.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_has_every_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: set[str] = set()
    complete = gate._complete

    def noting(step: Any, update: Upload, *others: Any) -> None:
        sent.update(update.extras)
        complete(step, update, *others)

    monkeypatch.setattr(gate, "_complete", noting)
    monkeypatch.setattr("fedhet.runs.record.figures.draw", lambda *args: [])
    for method in catalogue.choices("method"):
        run_dir = str(tmp_path / method)
        settings = replace(shortened(method, None), run_dir=run_dir, run_dir_given=True)
        run_job(settings, toy_task(4))
    assert len(sent) > 8
    assert not [name for name in sorted(sent) if f"`{name}`" not in PAGE]


def test_counts_sum_to_what_is_known() -> None:
    """What their sum lacks is withheld, and so no fewer samples than may be told."""

    def accepted(*counts: int, least: int = 0, total: int = 20) -> bool:
        update = Upload(0, total, extras={"x": torch.tensor(counts)})
        try:
            update.counts("x", total, len(counts), least)
        except ValueError:
            return False
        return True

    assert accepted(20, 0) and accepted(12, 8) and accepted(12, 3)
    assert not accepted(21, 0) and not accepted(21, -1)
    most = 2**63 - 1
    assert not accepted(*[2**62] * 4)  # whose sum in int64 is 0
    assert not accepted(most, most, 10, 12, least=8)  # whose sum in int64 is 20
    assert accepted(10, 5, least=5) and not accepted(10, 6, least=5)
    assert not accepted(16, 4, least=5) and accepted(0, 0, least=50)

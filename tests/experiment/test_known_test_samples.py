"""Where trials have trained on samples by which the runs are judged, the report says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from experiment.mine import run

from fedhet.experiment.folder import TEST_KNOWN

QUICK = """
rounds: 1
model: {hidden: [8]}
client: {epochs: 1}
partition: {clients: 3}
axes: {method: [fedavg, fedsgd], seed: [0]}
tune: {space: {client.lr: [0.1]}}
"""


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize(
    "line, known",
    [
        ("report.metric=last", False),
        ("report.metric=worst", True),
        ("partition.pool_test=true", True),
        ("partition.pool_test=True", True),
    ],
)
def test_the_report_says_what_the_trials_knew(
    write: Callable[..., None], line: str, known: bool
) -> None:
    write(QUICK)
    assert run(line) == 0
    record = json.loads(Path("experiments/mine/experiment.json").read_text())
    assert (TEST_KNOWN in record["report"]["notes"]) == known
    page = Path("experiments/mine/report/index.html").read_text()
    assert ("training or validation data of the trials" in page) == known

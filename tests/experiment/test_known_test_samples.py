"""Where trials have trained on samples by which the runs are judged, the report says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from experiment.finished import Finished
from experiment.mine import run
from experiment.pretend import Pretend

from fedhet.study.folder import TEST_KNOWN

QUICK = """
rounds: 1
model: {hidden: [8]}
client: {epochs: 1}
partition: {clients: 3}
axes: {method: [fedavg], seed: [0]}
tune: {seeds: [1000], space: {client.lr: [0.1]}}
"""
ON_THE_PAGE = "training or validation data of the trials"
pytestmark = pytest.mark.usefixtures("own_process")


@pytest.mark.parametrize(
    "line, known",
    [
        ("report.metric=last", False),
        ("report.metric=worst", True),
        ("partition.pool_test=True", True),
    ],
)
def test_the_record_says_what_the_trials_knew(
    write: Callable[..., None], pretend: Pretend, line: str, known: bool
) -> None:
    write(QUICK)
    assert pretend.run(line) == 0
    assert (TEST_KNOWN in pretend.record()["report"]["notes"]) == known


def test_a_file_that_pools_the_test_parts_counts_too(
    write: Callable[..., None], pretend: Pretend
) -> None:
    pooled = QUICK.replace("clients: 3", "clients: 3, pool_test: true")
    write(pooled)
    assert pretend.run() == 0
    assert TEST_KNOWN in pretend.record()["report"]["notes"]
    write(pooled.partition("tune:")[0])  # without trials
    assert pretend.run() == 0
    assert TEST_KNOWN not in pretend.record()["report"]["notes"]


def test_a_report_of_trials_that_knew_none(finished: Finished) -> None:
    assert TEST_KNOWN not in finished.record["report"]["notes"]
    assert ON_THE_PAGE not in (finished.folder / "report" / "index.html").read_text()


@pytest.mark.slow
def test_the_report_says_what_the_trials_knew(write: Callable[..., None]) -> None:
    write(QUICK)
    assert run("report.metric=worst") == 0
    assert ON_THE_PAGE in Path("experiments/mine/report/index.html").read_text()

"""A site's own word on what it tells, in a run whose messages its real clients serve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from own_sites import RUN, Deployment, Node, Sites

from fedhet.core.messages import Upload
from fedhet.core.server.evaluation import evaluation_messages
from fedhet.data.local.description import Agreement
from fedhet.runs import config
from fedhet.runs.job import Job
from fedhet.runs.local_data import LocalData


def test_each_site_decides_which_scores_leave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One evaluates nothing, one has too few samples, and the third tells its accuracy."""
    sites = Sites(tmp_path, monkeypatch, "privacy.min_count=0", "method=fedavg", "rounds=1")
    limits = [{"evaluate": False}, {"min-test": 15}, {"min-test": 20}]
    for node, own in zip(sites.deployment.members.nodes.values(), limits, strict=True):
        node.context.node_config.update(own)  # type: ignore[attr-defined]
    summary = sites.run()
    assert (summary["status"], summary["failures"]) == ("ok", [])
    told = pandas.read_parquet(tmp_path / "run" / "clients")
    assert set(told.client) == {1} and set(told.split) == {"val", "test"}
    assert set(told.metric) == {"n", "accuracy"}
    steps = told[told.metric == "accuracy"].value * 15 / 5
    assert (steps.round(6) % 1 == 0).all()  # in steps of the site's min-count, not of the run's


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_node_without_data_of_its_own_has_the_limits_of_its_operator(evaluates: bool) -> None:
    lines = ["dataset=digits", "partition.clients=2", "privacy.min_count=0"]
    job = Job(config.compose(lines), engine="flwr")
    job.strategy.run = replace(job.strategy.run, round=1)
    msg = evaluation_messages(job.strategy)[0]
    folder = Path()
    node = Node(folder, 1, lines, partition_id=0, num_partitions=2, evaluate=evaluates, min_test=1)
    reply = node.serve(msg)
    assert isinstance(reply, Upload)
    assert bool(reply.metrics) == evaluates
    assert not [name for name in reply.metrics if name.endswith("loss")]


def moments_of(folder: Path, *overrides: str, **rare: list[int]) -> tuple[Any, Agreement]:
    """What three sites tell of a table, and what they agree on.

    Args:
        rare: of each site, the values of its second column that are not 0.
    """
    for site in "abc":
        values = rare.get(site, []) + [0] * (40 - len(rare.get(site, [])))
        x = np.array([range(40), values], np.float32).T
        np.savez(folder / f"{site}.npz", x_train=x, y_train=np.arange(40) % 10)
    deployment = Deployment(folder, "dataset.shape=[2]", "partition.split=[1,0,0]", *overrides)
    agreed = deployment.agree()
    return [one and one.moments["x"] for one in agreed.descriptions], agreed


def test_the_moments_of_a_rare_column_are_not_told(tmp_path: Path) -> None:
    """Count x mean was the exact number of the patients that have it; a run cannot ask for it."""
    run = ["privacy.min_count=0"]
    found, agreed = moments_of(tmp_path, *run, a=[1] * 3, b=[1] * 10, c=[1, 7, 9])
    assert [one["mean"] for one in found] == [[19.5, None], [19.5, 0.25], [19.5, None]]
    assert [one["squares"][1] for one in found] == [None, 7.5, None]
    assert agreed.statistics["mean"] == [19.5, 0.25]
    assert agreed.statistics["std"][1] == pytest.approx((7.5 / 40) ** 0.5)


def test_a_column_that_no_site_tells_has_mean_0_and_std_1(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, agreed = moments_of(tmp_path, a=[1] * 3)
    assert agreed.statistics["mean"][1] == 0 and agreed.statistics["std"][1] == 1
    assert "no site reports mean and std of the columns or channels [1]" in caplog.text
    files = "dataset.files={a: a.npz, b: b.npz, c: c.npz}"
    lines = ["dataset.shape=[2]", "partition.split=[1,0,0]", files, f"data_dir={tmp_path}"]
    simulated = LocalData.simulated(config.compose([*RUN, *lines]).cfg, "local")
    assert simulated.agreed and simulated.agreed.statistics == agreed.statistics

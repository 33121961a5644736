"""A site's own word on what it tells, in a run whose messages its real clients serve."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest
from own_sites import Node, Sites, as_sent

from fedhet import config
from fedhet.evaluation import evaluation_messages
from fedhet.flower import wire
from fedhet.job import Job
from fedhet.messages import Update


def test_each_site_decides_which_scores_leave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One evaluates nothing, one has too few samples, and the third tells its accuracy."""
    sites = Sites(tmp_path, monkeypatch, "privacy.min_count=0", "method=fedavg", "rounds=1")
    limits = [{"evaluate": False}, {"min-test": 15}, {"min-test": 20}]
    for node, own in zip(sites.deployment.manager.clients.values(), limits, strict=True):
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
    job.strategy.begin(1)
    msg = evaluation_messages(job.strategy)[0]
    folder = Path()
    node = Node(folder, 1, lines, partition_id=0, num_partitions=2, evaluate=evaluates, min_test=1)
    reply = wire.read_reply(msg, node.client.fit(*as_sent(msg, None)))
    assert isinstance(reply, Update)
    assert bool(reply.metrics) == evaluates
    assert not [name for name in reply.metrics if name.endswith("loss")]

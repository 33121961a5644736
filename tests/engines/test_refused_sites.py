"""Which nodes may not join a run on the sites' own data, and with what reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from composing import composed
from own_sites import RUN, Deployment, Joined, Node, telling, write_sites
from sklearn.datasets import load_digits

from fedhet.core.errors import ConfigError, RunFailed
from fedhet.flower import apps
from fedhet.flower.nodes import Nodes
from fedhet.flower.sites import OwnData
from fedhet.runs.job import Job
from fedhet.runs.local_data import LocalData


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sites(tmp_path)


def test_a_site_that_is_not_declared(folder: Path) -> None:
    deployment = Deployment(folder)
    (folder / "d.npz").write_bytes((folder / "a.npz").read_bytes())
    deployment.join("d", 4)
    assert "the site 'd', which the run does not declare" in deployment.refusal()


def test_a_site_that_joins_twice(folder: Path) -> None:
    deployment = Deployment(folder)
    deployment.join("a", 4)
    reason = deployment.refusal()
    assert reason.startswith("node 4: ") and "site 'a'" in reason and "node 1" in reason


def test_a_node_that_is_not_the_one_named_for_the_site(folder: Path) -> None:
    deployment = Deployment(folder, "dataset.nodes={b:7}")
    assert "it claims to be site 'b', but that site is node 7" in deployment.refusal()


def test_a_site_whose_owner_demands_noise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHET_MIN_NOISE", "1")
    assert "FEDHET_MIN_NOISE=1" in Deployment(folder).refusal()


NOISE = ["privacy.noise=1", "eval.clients=false", "method=fedavg"]


def test_a_site_tells_nothing_exact_under_noise(folder: Path) -> None:
    """Neither statistics that the run asks for, nor counts that its operator shares otherwise."""
    asks = Deployment(folder, *NOISE)
    assert "privacy.noise=1: a site's statistics" in (reason := asks.refusal())
    assert "give mean and std as numbers" in reason
    given = [*NOISE, "dataset.mean=[5]", "dataset.std=[6]"]
    shares = Deployment(folder, *given, sites="bc")
    shares.join("a", 1, share_counts=True)
    assert "share-counts=true" in shares.refusal()
    assert Deployment(folder, *given).agree()


def test_a_site_that_is_missing_is_named(folder: Path) -> None:
    assert "waited 0 s for the sites ['c']; 2 of 3" in Deployment(folder, sites="ab").refusal()


def test_a_run_may_begin_without_a_site(folder: Path) -> None:
    deployment = Deployment(folder, sites="ac", min_nodes=2)
    agreed = deployment.agree()
    data = LocalData.agreed_on(deployment.cfg, agreed)
    assert data.clients.sizes == [80, 0, 40]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.zeros((100, 63))}, "shape (63,); the run declares (64,)"),
        ({"x_train": np.zeros((100, 1, 8, 8))}, "shape (1, 8, 8); the run declares (64,)"),
        ({"classes": np.array(list("abcdefghij"))}, "'classes' is ['a', 'b'"),
        ({"y_train": np.full(100, 10)}, "10"),
    ],
    ids=["columns", "images", "names", "labels"],
)
def test_a_site_whose_data_do_not_fit(
    folder: Path, change: dict[str, np.ndarray], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    arrays = dict(np.load(folder / "a.npz")) | change
    np.savez(folder / "a.npz", **arrays)
    assert "site 'a' cannot serve this run: DataError" in Deployment(folder).refusal()
    assert message in caplog.text


def test_a_site_without_its_file(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "b.npz").unlink()
    assert "site 'b' cannot serve this run: DataError" in Deployment(folder).refusal()
    assert "no such file" in caplog.text


def test_a_node_without_data_of_its_own(folder: Path) -> None:
    deployment = Deployment(folder, sites="ab")
    node = Node(folder, 3, deployment.overrides, partition_id=2, num_partitions=3)
    deployment.members.nodes["3"] = node
    assert "this node has no data of its own" in deployment.refusal()


def test_a_run_that_names_paths_of_sites(folder: Path) -> None:
    deployment = Deployment(folder, "dataset.files={a:/etc/passwd}")
    assert "a deployed run names no paths of sites" in deployment.refusal()


def test_a_run_that_would_cut_a_site_s_file_into_shares(folder: Path) -> None:
    """The node says so, whatever the run's data set is."""
    deployment = Deployment(folder)
    node = deployment.join("a", 1)
    for line in (["dataset=digits"], [*RUN, "partition=iid"]):
        node.run = tuple(line)
        assert "shares" in node.problem


@pytest.mark.parametrize(
    "given",
    [
        {"data": "/data"},
        {"site": "a"},
        {"site": "a", "data": "here.npz"},
        {"site": "a", "data": "/data", "share-counts": "yes"},
        {"site": "a", "data": "/data", "min-count": -1},
        {"site": "a", "data": "/data", "min-test": "all"},
        {"site": "a", "data": "/data", "evaluate": 1},
        {"site": 1, "data": "/data"},
    ],
)
def test_an_incomplete_node_config_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="node config"):
        OwnData.of(given)


MOMENTS = {"count": 80 * 1, "mean": [0.0] * 64, "squares": [0.0] * 64}


REPORTS = [
    lambda properties: {},
    lambda properties: {**properties, "description": 3},
    lambda properties: {**properties, "description": "{"},
    lambda properties: {**properties, "description": "[" * 100_000},
    lambda properties: {**properties, "description": "{}"},
    telling({"site": "z"}),
    telling({"site": ["a"]}),
    telling({"digest": "0" * 16}),
    telling({"sizes": [80, 10]}),
    telling({"sizes": [-1, 10, 10]}),
    telling({"sizes": [0, 10, 10]}),
    telling({"sizes": [True, 10, 10]}),
    telling({"sizes": [10**15, 10, 10]}),
    telling({"counts": [1] * 9}),
    telling({"counts": [101] + [0] * 9}),
    telling({"counts": "none"}),
    telling({"moments": {}}),
    telling({"moments": {"x": {**MOMENTS, "count": 81}}}),
    telling({"moments": {"x": {**MOMENTS, "mean": [0.0] * 63}}}),
    telling({"moments": {"x": {**MOMENTS, "mean": [float("nan")] * 64}}}),
    telling({"moments": {"x": {**MOMENTS, "squares": [-1.0] * 64}}}),
    telling({"moments": {"x": {**MOMENTS, "squares": ["1"] * 64}}}),
    telling({"moments": {"x": {**MOMENTS, "mean": [None] * 64}}}),
    telling({"moments": {"x": {**MOMENTS, "mean": None, "squares": None}}}),
    telling({"more": 1}),
]


def test_a_report_that_is_none_ends_the_run_before_it_begins(folder: Path) -> None:
    deployment = Deployment(folder, sites="bc")
    hostile = deployment.join("a", 1)
    nodes: Any = deployment.members.nodes.values()
    for node in nodes:
        node.told = node.who()
    offenders = []
    for number, alter in enumerate(REPORTS):
        deployment.forget()
        hostile.alter = alter
        try:
            deployment.agree()
            offenders.append((number, "is accepted"))
        except RunFailed as refused:
            if not refused.reason.startswith("node 1: ") or len(refused.reason) >= 1100:
                offenders.append((number, refused.reason))
    assert not offenders


def test_the_moments_that_are_refused_differ_from_good_ones_in_one_place(folder: Path) -> None:
    deployment = Deployment(folder)
    deployment.join("a", 1).alter = telling({"moments": {"x": MOMENTS}})
    deployment.agree()


def test_a_site_that_comes_back_is_known_again_and_no_other_node_takes_its_place(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = Deployment(folder)
    deployment.agree()
    node = deployment.members.nodes.pop("2")
    assert deployment.host(1) is None
    deployment.join("b", 9)
    assert deployment.host(1) is None
    assert "site 'b', but that site is node 2" in caplog.text
    deployment.members.nodes["2"] = node
    assert deployment.host(1) is node
    del deployment.members.nodes["2"]
    assert deployment.host(1) is None
    x, y = load_digits(return_X_y=True)
    np.savez(folder / "b.npz", x_train=x[:30], y_train=y[:30])
    apps._cached_site.cache_clear()  # its process has ended
    deployment.members.nodes["2"] = node
    assert deployment.host(1) is None
    assert "the data of site 'b' have changed" in caplog.text


@pytest.mark.parametrize("found", ["0" * 16, None, 3], ids=["other", "none", "number"])
def test_a_node_with_other_data_than_the_server_in_a_run_that_shares_out_one_set(
    folder: Path, found: Any
) -> None:
    """Each node would train on a share of a file of its own."""
    job = Job(composed("dataset=digits", "partition.clients=2"), engine="flwr")
    server = Nodes(job.config.run.replies, job.data_digest)
    members = Joined()
    lines = ["dataset=digits", "partition.clients=2"]
    nodes = [Node(folder, 1 + p, lines, partition_id=p, num_partitions=2) for p in (0, 1)]
    members.nodes.update({node.cid: node for node in nodes})
    assert server.hosts([1], members) == {1: nodes[1].cid}
    assert nodes[1].who()["data"] == job.data_digest
    other = Nodes(job.config.run.replies, job.data_digest)
    nodes[1].alter = lambda properties: {**properties, "data": found}
    with pytest.raises(RunFailed, match=r"node 2: .*samples.*sites .*dataset=local"):
        other.hosts([1], members)


def test_the_digest_of_the_data_follows_labels_and_shares(folder: Path) -> None:
    def digest(*lines: str) -> str:
        return Job(composed("dataset=digits", *lines), engine="flwr").data_digest

    assert digest() == digest("method=fedavg", "dataset.mean=[.5]")
    assert len({digest(), digest("seed=1"), digest("partition=iid")}) == 3
    arrays = dict(np.load(folder / "a.npz"))
    lines = ["dataset=npz", f"data_dir={folder}", "dataset.file=one.npz", "partition=iid"]
    found = set()
    for wrong in (0, 1):
        y = arrays["y_train"].copy()
        y[0] = (y[0] + wrong) % 10
        test = {"x_test": arrays["x_train"][:5], "y_test": arrays["y_train"][:5]}
        np.savez(folder / "one.npz", **arrays | test | {"y_train": y})
        found.add(digest(*lines))
    assert len(found) == 2


def test_values_and_folders_of_a_site_stay_in_its_own_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arrays = dict(np.load(folder / "a.npz"))
    x = arrays["x_train"].copy()
    x[7, 3] = np.inf
    np.savez(folder / "a.npz", **arrays | {"x_train": x})
    reason = Deployment(folder).refusal()
    assert reason.endswith(
        "site 'a' cannot serve this run: DataError; the log on that node has the details"
    )
    assert "row 7" in caplog.text and "inf" in caplog.text

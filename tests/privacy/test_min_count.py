"""With privacy.min_count=5, a client sends nothing that describes four samples or fewer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from privacy.few import COUNTS, LEAST, few

from fedhet.core import trees
from fedhet.core.errors import RunFailed
from fedhet.core.messages import Reply, Upload
from fedhet.core.server.phases import locate
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.feddisk import FedDiskPlugin
from fedhet.methods.fedgen import FedGen
from fedhet.methods.fedgmm import COUNTS as SAMPLES
from fedhet.methods.fedgmm import PER_COMPONENT, FedGMMPlugin
from fedhet.methods.fedgmm.mixtures import MIXTURES
from fedhet.methods.fednorm import FedNormPlugin, contribution
from fedhet.methods.fedpcl import FedPCL
from fedhet.methods.fedproto import FedProto

Make = Callable[..., Any]
SMALL = {"noise_dim": 2, "hidden": 3, "server_steps": 2}


def replies_of(run: Any) -> dict[int, Upload]:
    """One step of a run, which must succeed, and its replies by client."""
    sent: dict[int, Upload] = {}

    def look(plan: list[Any], replies: list[Reply]) -> Iterable[Reply]:
        for reply in replies:
            assert isinstance(reply, Upload), reply
            sent[reply.pid] = reply
        return replies

    run.step(alter=look)
    return dict(sorted(sent.items()))


# ---- FedPCL
def test_prototypes(federation: Make) -> None:
    run = federation(few(), FedPCL, min_count=LEAST, rounds=2)
    literal = replies_of(federation(few(), FedPCL, rounds=2))
    for _ in range(3):  # `collect`, and two rounds
        for pid, reply in replies_of(run).items():
            told = reply.extras["fedpcl.prototypes"]
            assert told["has"].tolist() == [n >= LEAST for n in COUNTS[pid]]
            assert not told["mean"][~told["has"]].any()
            assert told["mean"][told["has"]].any(1).all()
            own = run.store.load(pid, run.strategy.run.versions[pid])
            assert own["fedpcl.own/has"].all()  # it predicts with all of its own
    for pid, reply in literal.items():
        assert reply.extras["fedpcl.prototypes"]["has"].all(), pid


def test_a_class_that_nobody_may_tell_of(federation: Make, caplog: Any) -> None:
    """Its samples have the loss 0, which must not spoil the gradient."""
    run = federation(few([(4, 9, 9), (2, 6, 6)]), FedPCL, min_count=LEAST, rounds=2)
    none = federation(few([(4, 3, 1), (2, 2, 2)]), FedPCL, min_count=LEAST, rounds=2)
    with caplog.at_level(logging.WARNING, logger="fedhet"):
        run.run()
        none.run()
    lines = [record.getMessage() for record in caplog.records]
    assert sum("no client has sent a prototype of the classes [0] " in line for line in lines) == 1
    assert sum("of the classes [0, 1, 2] " in line for line in lines) == 1
    for one in (run, none):
        for pid in (0, 1):
            state = one.store.load(pid, one.strategy.run.versions[pid])
            assert all(torch.isfinite(t).all() for t in state.values())


# ---- FedGMM
def fedgmm(federation: Make, task: Any, min_count: int) -> Any:
    return federation(task, FedAvg, plugins=lambda: [FedGMMPlugin()], min_count=min_count, rounds=1)


def test_mixtures(federation: Make) -> None:
    run = fedgmm(federation, few(), LEAST)
    told = replies_of(run)
    # Client 0 has a single count below 5, which would follow from the others.
    expected = [[0, 0, 9], [0, 0, 0], [0, 0, 0], [8, 8, 8]]
    expected[1] = [5, 0, 0]
    for pid, reply in told.items():
        assert reply.extras[SAMPLES].tolist() == expected[pid]
        label = reply.extras[MIXTURES]["label"].tolist()
        assert label == [c for c in range(3) if expected[pid][c]]  # one component each
    run.run()
    literal = replies_of(fedgmm(federation, few(), 0))
    assert [r.extras[SAMPLES].tolist() for r in literal.values()] == [list(n) for n in COUNTS]
    assert literal[0].extras[MIXTURES]["label"].tolist() == [0, 0, 1, 1, 2, 2, 2, 2]


def test_what_is_drawn_tells_no_count_that_is_not_told(federation: Make) -> None:
    """Neither the number of samples that a client draws, nor the size of what it keeps."""
    exact = [3 * max(n) - sum(n) for n in COUNTS]
    # Of clients 0 and 1 the largest counts are told, and the others as 0; of client 2 none.
    for least, told in ((0, exact), (LEAST, [18, 10, 0, 0])):
        run = fedgmm(federation, few(), least)
        run.step()
        replies = replies_of(run).values()
        assert [reply.extras["fedgmm.generated"] for reply in replies] == told
        for pid, version in run.strategy.run.versions.items():
            kept = run.store.load(pid, version)
            assert len(kept["fedgmm.samples/y"]) == exact[pid]
            size = 0 if least else trees.nbytes(kept)
            assert run.strategy.run.state_bytes[pid] == size


def test_small_components_are_merged(federation: Make) -> None:
    """Three groups far apart, of 22, 25 and 3 samples: EM finds them, and the third is not sent."""
    task = few([(50, 0, 0)])
    x = task.clients[0].train.x
    x.mul_(0.01)
    x[22:47] += 0.5
    x[47:] += 0.9
    mixture = replies_of(fedgmm(federation, task, LEAST))[0].extras[MIXTURES]
    masses = (50 * mixture["pi"]).tolist()
    assert len(masses) == 2 and min(masses) >= PER_COMPONENT * LEAST - 1e-3
    mean = (mixture["pi"][:, None] * mixture["mu"]).sum(0)
    spread = (mixture["pi"][:, None] * (mixture["var"] + (mixture["mu"] - mean) ** 2)).sum(0)
    torch.testing.assert_close(mean, x.mean(0))
    torch.testing.assert_close(spread, x.var(0, correction=0) + 1e-6, rtol=1e-4, atol=1e-5)
    literal = replies_of(fedgmm(federation, task, 0))[0].extras[MIXTURES]
    assert (50 * literal["pi"]).min() < LEAST


# ---- FedNorm
def fednorm(federation: Make, task: Any, min_count: int) -> Any:
    plugins: Callable[[], list[Any]] = lambda: [FedNormPlugin()]  # noqa: E731
    return federation(task, FedAvg, plugins=plugins, min_count=min_count, rounds=1)


def test_latents(federation: Make) -> None:
    """Who withholds its latent keeps its weight; the others' weights are theirs among them."""
    run = fednorm(federation, few(), LEAST)
    updates = replies_of(run)
    assert {pid: len(reply.extras["fednorm.z"]) for pid, reply in updates.items()} == {
        0: 3,
        1: 3,
        2: 0,
        3: 3,
    }
    at_13 = replies_of(fednorm(federation, few(), 13))  # client 1 has 13 samples
    assert [len(reply.extras["fednorm.z"]) for reply in at_13.values()] == [3, 3, 0, 3]
    recorded = run.current.recorded["fednorm"]
    assert recorded["withheld"] == 1 and sorted(recorded["pids"].tolist()) == [0, 1, 3]
    assert "withheld" not in report_of_all(federation)

    sizes = {pid: float(sum(COUNTS[pid])) for pid in updates}
    compared = [0, 1, 3]
    z = torch.stack([updates[pid].extras["fednorm.z"] for pid in compared])
    nu = torch.tensor([sizes[pid] for pid in compared], dtype=torch.float64)
    shares = contribution(z, nu, 0.5).weights * float(nu.sum())
    weights = dict(zip(compared, shares.tolist(), strict=True)) | {2: sizes[2]}
    total = sum(weights.values())
    used = [weights[pid] / total for pid in recorded["pids"].tolist()]
    assert recorded["weights"].tolist() == pytest.approx(used)
    assert recorded["weight_max"] == pytest.approx(max(used))
    for name, value in run.model.items():
        mean = sum(updates[pid].weights[name].double() * weights[pid] / total for pid in weights)
        torch.testing.assert_close(value.double(), mean, rtol=1e-5, atol=1e-6)


def report_of_all(federation: Make) -> dict[str, Any]:
    run = fednorm(federation, few(), 0)
    run.run()
    return dict(run.current.recorded["fednorm"])


def test_where_all_latents_are_withheld_it_is_the_host(federation: Make) -> None:
    host = federation(few(), FedAvg, rounds=1).run().sha256
    assert fednorm(federation, few(), 99).run().sha256 == host
    assert fednorm(federation, few(), LEAST).run().sha256 != host


# ---- FedGen
def test_label_counts(federation: Make) -> None:
    run = federation(few(), FedGen, options=SMALL, min_count=LEAST, rounds=2)
    told = [reply.extras["fedgen.counts"].tolist() for reply in replies_of(run).values()]
    assert told == [[0, 0, 9], [5, 0, 0], [0, 0, 0], [8, 8, 8]]
    run.run()


def test_without_any_count_there_is_no_generator(federation: Make, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="fedhet"):
        run = federation(few(), FedGen, options=SMALL, min_count=99, rounds=2).run()
    assert sum("the generator stays" in record.getMessage() for record in caplog.records) == 2
    host = federation(few(), FedAvg, rounds=2).run()
    assert trees.sha256({"model": run.model}) == host.sha256


# ---- FedDisk
VAL = "feddisk.val"


def feddisk(federation: Make, min_count: int) -> Any:
    options = {"min_samples": 2, "hidden": 4, "made_max_rounds": 2, "local_max_epochs": 2}
    plugins: Callable[[], list[Any]] = lambda: [FedDiskPlugin(**options)]  # noqa: E731
    return federation(
        few([(40, 20, 0), (3, 0, 1)]), FedAvg, plugins=plugins, min_count=min_count, rounds=1
    )


def test_densities(federation: Make) -> None:
    run = feddisk(federation, LEAST)
    told = replies_of(run)
    before = feddisk(federation, LEAST).strategy.weights["density"]
    assert isinstance(told[0].extras[VAL], float)  # of the 6 samples held out
    assert not len(told[1].extras[VAL]) and "feddisk.nll" not in told[1].metrics
    assert all(torch.equal(told[1].weights[name], before[name]) for name in before)
    assert not all(torch.equal(told[0].weights[name], before[name]) for name in before)
    run.run()
    # The loss of 6 held-out samples is told, but not where it must be of 7.
    assert isinstance(replies_of(feddisk(federation, 6))[0].extras[VAL], float)
    assert not len(replies_of(feddisk(federation, 7))[0].extras[VAL])
    assert all(
        isinstance(r.extras[VAL], float) for r in replies_of(feddisk(federation, 0)).values()
    )


@pytest.mark.parametrize("value", [torch.zeros(2), torch.empty(0, 3), torch.empty(0).long()])
def test_what_is_neither_a_loss_nor_withheld_is_refused(federation: Make, value: Any) -> None:
    def falsify(plan: list[Any], replies: list[Any]) -> list[Any]:
        replies[0].extras[VAL] = value
        return replies

    with pytest.raises(RunFailed, match=r"client 0 failed.*feddisk\.val"):
        feddisk(federation, LEAST).step(alter=falsify)


# ---- the server
@pytest.mark.parametrize(
    "cls,plugin,options",
    [
        (FedPCL, None, {}),
        (FedProto, None, {}),
        (FedGen, None, SMALL),
        (FedAvg, FedGMMPlugin, {}),
        (FedAvg, FedNormPlugin, {}),
        (FedAvg, FedDiskPlugin, {"hidden": 4, "made_max_rounds": 2, "local_max_epochs": 2}),
    ],
)
def test_a_server_accepts_clients_that_tell_less_than_the_run_allows(
    federation: Make, cls: Any, plugin: Any, options: dict[str, Any]
) -> None:
    """The machine of the clients has a floor of its own, and the server knows nothing of it."""

    def there(plan: list[Any], replies: list[Any]) -> list[Any]:
        run.workspace.min_count = 0
        assert all(isinstance(reply, Upload) for reply in replies), replies
        return replies

    def make() -> list[Any]:
        return [plugin(**options)] if plugin else []

    run = federation(
        few(), cls, plugins=make, options={} if plugin else options, rounds=2, on_failure="stop"
    )
    while locate(run.strategy.timetable, run.round + 1):
        run.workspace.min_count = 10
        run.step(alter=there)
    literal = federation(few(), cls, plugins=make, options={} if plugin else options, rounds=2)
    assert run.sha256 != literal.run().sha256

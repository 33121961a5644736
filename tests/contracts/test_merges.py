"""The choices of the group `merge`: what takes effect, and what resists attacks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedhet import trees
from fedhet.data.toy import toy_task
from fedhet.errors import RunFailed
from fedhet.evaluation import global_scores
from fedhet.merging.coordinates import Median, TrimmedMean
from fedhet.merging.krum import Krum
from fedhet.merging.mean import Mean
from fedhet.merging.norms import NormClip, NormFilter
from fedhet.messages import Broadcast, Update
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedbn import FedBN
from fedhet.methods.fedsgd import FedSGD
from fedhet.methods.scaffold import Scaffold
from fedhet.methods.sgdm import SGDM
from fedhet.trees import Tree

Federation = Callable[..., Any]
Alter = Callable[[list[Broadcast], list[Any]], list[Any]]


def after_a_step(
    federation: Federation, cls: type = FedAvg, *, alter: Any = None, **given: Any
) -> Any:
    """A federation after one step; with `merge`, `clients` and `norm` for the toy task."""
    task = toy_task(given.pop("clients", 7), norm=given.pop("norm", False))
    run = federation(task, cls, rounds=2, **given)
    run.step(alter or (lambda plan, replies: replies))
    return run


def sending(values: dict[int, float]) -> Alter:
    """Each client's weights and buffers are what it received, plus a number of its own."""

    def alter(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        for msg, reply in zip(plan, replies, strict=True):
            for name, t in msg.weights.items():
                if t.is_floating_point():
                    reply.weights[name] = t + values[reply.pid]
        return replies

    return alter


def scaling(factors: dict[int, float]) -> Alter:
    """The changes of some clients, and their buffers', are multiplied."""

    def alter(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        for msg, reply in zip(plan, replies, strict=True):
            change = trees.Difference(reply.weights, msg.weights)
            new = trees.add(trees.map(lambda t: t, msg.weights), change, factors.get(reply.pid, 1))
            reply.weights = trees.cast(new, msg.weights)
        return replies

    return alter


def moved(run: Any, name: str = "head.bias") -> float:
    """By how much the step has moved a tensor, all of whose entries moved by as much."""
    change = run.model[name].double() - run.site.initial[name].double()
    torch.testing.assert_close(change, change.flatten()[0].expand_as(change), rtol=0, atol=1e-6)
    return float(change.flatten()[0])


# ---- what takes effect
VALUES = {0: 0.5, 1: -2.0, 2: 1.0, 3: 0.25, 4: 900.0, 5: 0.75, 6: 2.0}


@pytest.mark.parametrize("name", ["head.bias", "body.0.weight", "body.1.running_mean"])
@pytest.mark.parametrize(
    ("merge", "expected"),
    [
        (Median(), 0.75),
        (TrimmedMean(share=0.2), (0.25 + 0.5 + 0.75 + 1 + 2) / 5),
        (TrimmedMean(share=0.45), 0.75),
    ],
)
def test_each_entry_by_itself(
    federation: Federation, merge: Mean, expected: float, name: str
) -> None:
    """Of seven clients, without their weights; the averaged buffers too."""
    run = after_a_step(federation, merge=merge, alter=sending(VALUES), norm=True)
    assert moved(run, name) == pytest.approx(expected, abs=1e-6)


def test_an_even_number_of_clients(federation: Federation) -> None:
    run = after_a_step(federation, merge=Median(), alter=sending(VALUES), clients=4)
    assert moved(run) == pytest.approx((0.25 + 0.5) / 2, abs=1e-6)


def test_krum_takes_the_nearest(federation: Federation) -> None:
    """With two attackers, the scores are those of the three nearest of the other six.

    0: .0625 (3, 5) + .25 (2); 1: 5.0625 (3) + 6.25 (0) + 7.5625 (5); 2: .0625 (5) + .25 (0) + .5625
    (3); 3: .0625 (0) + .25 (5) + .5625 (2); 5: .0625 (0, 2) + .25 (3); 6: 1 + 1.5625 + 2.25.
    So 5 and 0 are best (.375), then 2 and 3, then 6; 1 and 4 are left out.
    """
    run = after_a_step(federation, merge=Krum(attackers=2), alter=sending(VALUES))
    sizes = run.strategy.sizes
    kept = (0, 2, 3, 5, 6)
    mean = sum(sizes[pid] * VALUES[pid] for pid in kept) / sum(sizes[pid] for pid in kept)
    assert moved(run) == pytest.approx(mean, abs=1e-6)
    report = run.strategy.reports()["krum"]
    assert sorted(report["left_out"].tolist()) == [1, 4] and report["kept"] == 5
    assert not run.strategy.current.failures and run.strategy.current.accepted == 5
    one = after_a_step(federation, merge=Krum(attackers=2, keep=1), alter=sending(VALUES))
    nearest = min((VALUES[0], VALUES[5]), key=lambda value: abs(value - moved(one)))
    assert moved(one) == pytest.approx(nearest, abs=1e-6)


def test_krum_sees_buffers(federation: Federation) -> None:
    """An update that is honest but for its batch statistics is far from the others."""

    def poison(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        next(reply for reply in replies if reply.pid == 4).weights["body.1.running_var"] += 1e3
        return replies

    run = after_a_step(federation, merge=Krum(attackers=1), alter=poison, norm=True)
    assert run.strategy.reports()["krum"]["left_out"].tolist() == [4]


@pytest.mark.parametrize("norm", [False, True])
def test_clipped_to_the_median(federation: Federation, norm: bool) -> None:
    """The norms are in proportion to the numbers sent, whose absolute values have the median 1."""
    merge = NormClip(factor=1.0)
    run = after_a_step(federation, merge=merge, alter=sending(VALUES), norm=norm)
    sizes = run.strategy.sizes
    bounded = {pid: max(-1.0, min(1.0, value)) for pid, value in VALUES.items()}
    mean = sum(sizes[pid] * bounded[pid] for pid in bounded) / sum(sizes)
    for name in ["head.bias", *(["body.1.running_mean"] if norm else [])]:
        assert moved(run, name) == pytest.approx(mean, abs=1e-5)
    assert run.strategy.reports()["norm_clip"]["clipped_pids"].tolist() == [1, 4, 6]


def test_clipped_to_a_fixed_norm(federation: Federation) -> None:
    run = after_a_step(federation, merge=NormClip(norm=1e-3), clients=1)
    change = trees.Difference(run.model, run.site.initial)
    assert trees.norm(change) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("piece", ["weights", "scaffold.c_plus", "body.1.running_mean"])
def test_the_norm_filter_leaves_out_what_is_far_too_large(
    federation: Federation, piece: str
) -> None:
    """The others are merged as without that client, whose state does not advance."""

    def grow(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        reply = replies[2]
        tree = reply.extras.get(piece) or reply.weights
        for name in [piece] if piece in tree else tree:
            if tree[name].is_floating_point():
                tree[name] = tree[name] * 1e4
        return replies

    def absent(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        return replies[:2] + replies[3:]

    settings = {"norm": True, "on_failure": "skip"}
    run = after_a_step(federation, Scaffold, merge=NormFilter(factor=10.0), alter=grow, **settings)
    (failure,) = run.strategy.current.failures
    assert failure.reason == "outlier" and "times the median" in failure.cause
    assert run.sha256 == after_a_step(federation, Scaffold, alter=absent, **settings).sha256
    assert failure.pid not in run.strategy.versions
    with pytest.raises(RunFailed, match="times the median"):
        after_a_step(federation, Scaffold, merge=NormFilter(factor=10.0), alter=grow, norm=True)


def test_a_client_that_was_not_selected_keeps_its_earlier_state(federation: Federation) -> None:
    """SCAFFOLD's sum of control variates must stay that of the clients."""
    run = after_a_step(federation, Scaffold, merge=Krum(attackers=2), alter=scaling({4: 50.0}))
    assert 4 not in run.strategy.versions and len(run.strategy.versions) == 5
    controls = run.strategy._controls
    kept = [run.store.load(pid, 1) for pid in run.strategy.versions]
    for name, total in controls._total.items():
        of_clients = torch.stack([state[f"scaffold.c_i/{name}"] for state in kept])
        torch.testing.assert_close(total, of_clients.double().sum(0), rtol=1e-5, atol=1e-6)
    run.step()
    assert run.strategy.current.accepted == 5


@pytest.mark.parametrize("merge", [NormClip(factor=1.0), NormFilter(factor=3.0)])
def test_clients_that_change_nothing_have_no_say_about_norms(
    federation: Federation, merge: Mean
) -> None:
    """Four of seven send what they received; the median is that of the others, 1."""
    values = dict.fromkeys(range(4), 0.0) | {4: 0.5, 5: 1.0, 6: 900.0}
    run = after_a_step(federation, merge=merge, alter=sending(values), on_failure="skip")
    sizes = run.strategy.sizes
    refuses = merge.name == "norm_filter"
    bounded = values | {6: 1.0}
    present = [pid for pid in values if not (refuses and pid == 6)]
    mean = sum(sizes[pid] * bounded[pid] for pid in present) / sum(sizes[pid] for pid in present)
    assert moved(run) == pytest.approx(mean, abs=1e-5)
    assert [failure.pid for failure in run.strategy.current.failures] == [6] * refuses


def test_nobody_changes_anything(federation: Federation) -> None:
    for merge in (NormClip(), NormFilter()):
        run = after_a_step(federation, merge=merge, alter=sending(dict.fromkeys(range(7), 0.0)))
        assert moved(run) == 0 and not run.strategy.current.failures


def test_the_norm_filter_compares_three_and_keeps_two(federation: Federation) -> None:
    merge, values = NormFilter(), {0: 1.0, 1: 1.0, 2: 900.0}
    given = {"clients": 3, "on_failure": "skip"}
    run = after_a_step(federation, merge=merge, alter=sending(values), **given)
    assert moved(run) == pytest.approx(1.0, abs=1e-5)


# ---- reductions
@pytest.mark.parametrize("cls", [FedAvg, FedBN])
@pytest.mark.parametrize(
    "merge",
    [
        Krum(attackers=0, keep=7),
        Krum(attackers=2, keep=7),
        NormClip(factor=1e6),
        NormFilter(factor=1e6),
    ],
)
def test_generous_limits_are_the_mean_bit_for_bit(
    federation: Federation, cls: type, merge: Mean
) -> None:
    run = after_a_step(federation, cls, merge=merge, norm=True)
    assert run.sha256 == after_a_step(federation, cls, norm=True).sha256


@pytest.mark.parametrize("cls", [FedAvg, SGDM, FedSGD])
def test_nothing_trimmed_is_the_mean_without_weights(federation: Federation, cls: type) -> None:
    class Uniform(cls):  # type: ignore[misc, valid-type]
        def base_weight(self, update: Update) -> float:
            return 1.0

    trimmed = after_a_step(federation, cls, merge=TrimmedMean(share=0.0))
    mean = after_a_step(federation, Uniform)
    for name, t in mean.model.items():
        torch.testing.assert_close(trimmed.model[name], t, rtol=1e-6, atol=1e-7)
    assert trimmed.sha256 != after_a_step(federation, cls).sha256


@pytest.mark.parametrize("merge", [Median, TrimmedMean, Krum, NormClip])
def test_the_order_of_replies_does_not_matter(
    federation: Federation, merge: Callable[[], Mean]
) -> None:
    """Replies come in the order of the cohort; where they are equal, numbers decide."""
    updates = [
        Update(pid, 1, weights={"a": torch.tensor([float(pid % 3), 1.0])}) for pid in range(7)
    ]
    run = after_a_step(federation, merge=merge())
    step, old = run.strategy.current, {"a": torch.tensor([0.5, 0.25])}
    step.sent = step.old = old

    def merged(order: list[int]) -> tuple[set[int], Tree]:
        rule = merge()
        received = []
        for pid in order:
            update = Update(pid, 1, weights=dict(updates[pid].weights))
            update.change = trees.Difference(update.weights, old)
            received.append(update)
        selected = list(rule.select(step, iter(received)))
        mean = rule.mean((update.change, 1.0) for update in sorted(selected, key=lambda u: u.pid))
        return {update.pid for update in selected}, mean

    first, mean = merged(list(range(7)))
    for seed in range(5):
        order = random.Random(seed).sample(range(7), 7)
        again, same = merged(order)
        assert again == first and torch.equal(same["a"], mean["a"])


# ---- under attack
@pytest.mark.parametrize("merge", [Median(), Krum(attackers=2), NormClip(), NormFilter()])
def test_two_attackers_of_seven(federation: Federation, merge: Mean) -> None:
    """They send the opposite of what they have learned, tenfold: the mean learns nothing."""

    def accuracy(rule: Mean) -> float:
        run = federation(toy_task(7), FedAvg, merge=rule, rounds=10, lr=0.5, on_failure="skip")
        run.run(alter=scaling({0: -10.0, 5: -10.0}))
        return global_scores(run.strategy)["accuracy"]

    assert accuracy(Mean()) < 0.6
    assert accuracy(merge) > 0.9

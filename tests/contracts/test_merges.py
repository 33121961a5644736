"""The choices of the group `merge`: what takes effect, and what resists attacks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from contracts.short import slow
from contracts.steps import VALUES, Federation, after_a_step, moved, scaling, sending

from fedhet.core import kernel, trees
from fedhet.core.messages import Broadcast, Upload
from fedhet.core.server.evaluation import global_scores
from fedhet.core.server.merging import Krum, Mean, Median, NormClip, NormFilter, TrimmedMean
from fedhet.core.trees import Tree
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedbn import FedBN
from fedhet.methods.fedsgd import FedSGD
from fedhet.methods.scaffold import Scaffold
from fedhet.methods.sgdm import SGDM


# ---- what takes effect
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
    recorded = run.current.recorded["krum"]
    assert sorted(recorded["left_out"].tolist()) == [1, 4] and recorded["kept"] == 5
    assert not run.current.failures and run.current.accepted == 5
    one = after_a_step(federation, merge=Krum(attackers=2, keep=1), alter=sending(VALUES))
    nearest = min((VALUES[0], VALUES[5]), key=lambda value: abs(value - moved(one)))
    assert moved(one) == pytest.approx(nearest, abs=1e-6)


def test_krum_sees_buffers(federation: Federation) -> None:
    """An update that is honest but for its batch statistics is far from the others."""

    def poison(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        next(reply for reply in replies if reply.pid == 4).weights["body.1.running_var"] += 1e3
        return replies

    run = after_a_step(federation, merge=Krum(attackers=1), alter=poison, norm=True)
    assert run.current.recorded["krum"]["left_out"].tolist() == [4]


def test_a_client_that_was_not_selected_keeps_its_earlier_state(federation: Federation) -> None:
    """SCAFFOLD's sum of control variates must stay that of the clients."""
    run = after_a_step(federation, Scaffold, merge=Krum(attackers=2), alter=scaling({4: 50.0}))
    assert 4 not in run.strategy.run.versions and len(run.strategy.run.versions) == 5
    kept = [run.store.load(pid, 1) for pid in run.strategy.run.versions]
    for name, total in run.strategy.run.states["method"]["total"].items():
        of_clients = torch.stack([state[f"scaffold.c_i/{name}"] for state in kept])
        torch.testing.assert_close(total, of_clients.double().sum(0), rtol=1e-5, atol=1e-6)
    run.step()
    assert run.current.accepted == 5


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
    @dataclass(frozen=True, kw_only=True)
    class Uniform(cls):  # type: ignore[misc, valid-type]
        breaks = {}

        def weight(self, step: kernel.Step, update: kernel.Update) -> float:
            return 1.0

    trimmed = after_a_step(federation, cls, merge=TrimmedMean(share=0.0))
    mean = after_a_step(federation, Uniform)
    for name, t in mean.model.items():
        torch.testing.assert_close(trimmed.model[name], t, rtol=1e-6, atol=1e-7)
    assert trimmed.sha256 != after_a_step(federation, cls).sha256


@pytest.mark.parametrize(
    "merge", [Median, TrimmedMean, Krum, NormClip, lambda: NormFilter(factor=1)]
)
def test_the_order_of_replies_does_not_matter(
    federation: Federation, merge: Callable[[], Mean]
) -> None:
    """Replies come in the order of the cohort; where they are equal, numbers decide."""
    updates = [
        Upload(pid, 1, weights={"a": torch.tensor([float(pid % 3), 1.0])}) for pid in range(7)
    ]
    run = after_a_step(federation, merge=merge(), on_failure="skip")
    step, old = run.current, {"a": torch.tensor([0.5, 0.25])}
    step.sent = step.old = old

    def merged(order: list[int]) -> tuple[set[int], Tree]:
        rule = merge()
        received = []
        for pid in order:
            update = Upload(pid, 1, weights=dict(updates[pid].weights))
            update.change = trees.Difference(update.weights, old)
            received.append(update)
        admitted = rule.admit(step, iter(received))
        selected = list(rule.select(step, admitted))
        mean = rule.mean((update.change, 1.0) for update in sorted(selected, key=lambda u: u.pid))
        return {update.pid for update in selected}, mean

    first, mean = merged(list(range(7)))
    for seed in range(5):
        order = random.Random(seed).sample(range(7), 7)
        again, same = merged(order)
        assert again == first and torch.equal(same["a"], mean["a"])


# ---- under attack
@pytest.mark.parametrize(
    "merge",
    [TrimmedMean(share=0.3), Krum(attackers=2), NormClip(), *slow(Median(), NormFilter())],
)
def test_two_attackers_of_seven(federation: Federation, merge: Mean) -> None:
    """They send the opposite of what they have learned, tenfold: the mean learns nothing."""

    def accuracy(rule: Mean) -> float:
        run = federation(toy_task(7), FedAvg, merge=rule, rounds=10, lr=0.5, on_failure="skip")
        run.run(alter=scaling({0: -10.0, 5: -10.0}))
        return global_scores(run.strategy)["accuracy"]

    assert accuracy(Mean()) < 0.6
    assert accuracy(merge) > 0.9

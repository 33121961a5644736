"""Numbers that a reply claims and the server multiplies with: they must follow from its samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from contracts.steps import Federation, after_a_step

from fedhet.core.errors import ConfigError
from fedhet.core.groups import Noise
from fedhet.core.messages import Broadcast
from fedhet.core.server.merging import Krum, Mean, NormFilter
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedgmm import FedGMMPlugin
from fedhet.methods.fednova import FedNova
from fedhet.methods.moon import Moon, MoonPlugin
from fedhet.methods.scaffold import Scaffold

LIAR = 1
MERGES = [Mean(), NormFilter(), Krum(attackers=1)]


def claiming(**extras: Any) -> Callable[[list[Broadcast], list[Any]], list[Any]]:
    def alter(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        liar = next(reply for reply in replies if reply.pid == LIAR)
        liar.extras |= {name.replace("__", "."): value for name, value in extras.items()}
        return replies

    return alter


@pytest.mark.parametrize("merge", MERGES, ids=lambda merge: merge.name)
@pytest.mark.parametrize("steps", [1, 10**12])
@pytest.mark.parametrize("method", [Scaffold, FedNova])
def test_local_steps(federation: Federation, method: type, steps: int, merge: Mean) -> None:
    """Without the check one such reply moves the model by 10^9 at once, or a bit more each time."""
    run = federation(toy_task(7), method, merge=merge, batch_size=2, on_failure="skip")
    run.step(claiming(**{f"{method.name}__steps": steps}))
    [failure] = run.current.failures
    assert failure.pid == LIAR and failure.reason == "refused"
    assert f"'{method.name}.steps' is {steps}" in failure.cause
    assert "as the server computes it" in failure.cause


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("local", [{"epochs": 3}, {"local": {"steps": 7}}])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_honest_numbers_of_steps_are_expected(
    federation: Federation, batch_size: int, local: dict[str, Any], norm: bool
) -> None:
    """Batch norm leaves a single last sample out."""
    task = toy_task(7, norm=norm)
    run = federation(task, FedNova, batch_size=batch_size, **local)
    run.step()
    assert run.current.accepted == 7


def test_where_samples_are_added_the_merges_that_bound_are_refused(federation: Federation) -> None:
    for merge in (NormFilter(), Krum()):
        with pytest.raises(ConfigError, match=rf"{merge.name}.* local steps"):
            federation(toy_task(7), FedNova, merge=merge, plugins=lambda: [FedGMMPlugin()])
    federation(
        toy_task(7),
        FedNova,
        merge=NormFilter(),
        plugins=lambda: [FedGMMPlugin()],
        local={"steps": 4},
    )


def test_where_samples_are_added_noise_is_refused(federation: Federation) -> None:
    """The number of steps needs no noise because it follows from the samples: here it does not."""
    noise = Noise(multiplier=1.0, clip=1.0, delta=0.01)
    federation(toy_task(7), FedNova, noise=noise)
    with pytest.raises(ConfigError, match=r"privacy\.noise.*'fedgmm'"):
        federation(toy_task(7), FedNova, noise=noise, plugins=[FedGMMPlugin()])


def test_drawn_samples(federation: Federation) -> None:
    """They weigh a client with agg_count=augmented, and follow from the counts that it has sent."""

    def plugins() -> list[FedGMMPlugin]:
        return [FedGMMPlugin(agg_count="augmented", components=1)]

    run = federation(toy_task(7), FedAvg, plugins=plugins, on_failure="skip")
    run.step()
    run.step(claiming(fedgmm__generated=10**15))
    [failure] = run.current.failures
    assert failure.pid == LIAR
    assert "as the server computes it" in failure.cause


def test_a_missing_reply_does_not_let_an_attacker_in(federation: Federation) -> None:
    """Of ten updates krum keeps eight, and of nine seven."""

    def attack(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        for reply in replies:
            if reply.pid in (0, 1):
                for name, weights in reply.weights.items():
                    sent = plan[0].weights[name]
                    reply.weights[name] = sent - 100 * (weights - sent)
        return [reply for reply in replies if reply.pid != 5]

    merge = Krum(attackers=3, keep=8)
    run = federation(toy_task(10), FedAvg, merge=merge, on_failure="skip")
    run.step(attack)
    assert sorted(run.current.recorded["krum"]["left_out"].tolist()) == [0, 1]


def test_counters_are_bounded(federation: Federation) -> None:
    def overflow(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        liar = next(reply for reply in replies if reply.pid == LIAR)
        liar.weights["body.1.num_batches_tracked"] = torch.tensor(2**63 - 1)
        return replies

    run = after_a_step(federation, merge=Mean(), alter=overflow, norm=True, on_failure="skip")
    [failure] = run.current.failures
    assert "'body.1.num_batches_tracked'" in failure.cause


def test_the_term_of_fewer_samples_than_min_count_is_not_told(federation: Federation) -> None:
    told = {}
    for steps in (4, 5):
        run = federation(
            toy_task(3),
            Moon,
            plugins=lambda: [MoonPlugin()],
            local={"steps": steps},
            batch_size=1,
            min_count=5,
        )
        run.step()
        told[steps] = "moon.term" in run.current.metrics
    assert told == {4: False, 5: True}

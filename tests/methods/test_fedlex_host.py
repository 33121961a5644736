"""FedLEx: it is the host where the mask is one, and something else where it is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from convergence.quadratic import quadratic
from methods.test_draws import batches
from torch import Tensor, nn

from fedhet.core.kernel import Plugin
from fedhet.core.messages import Broadcast, Reply
from fedhet.core.server.server_opt import FedAvgM, FedOpt
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedlex import FedLExPlugin
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.methods.fedsgd import FedSGD

Make = Callable[..., Any]

D = "fedlex.D"
G = "fedlex.G"


def still(plan: list[Broadcast], replies: list[Any]) -> list[Reply]:
    """As if no explorer had moved."""
    for reply in replies:
        if D in reply.extras:
            reply.extras[D] = {name: torch.zeros_like(t) for name, t in reply.extras[D].items()}
    return replies


# name -> method, other plug-ins, server optimiser
HOSTS: dict[str, tuple[type, Callable[[], list[Plugin]], Callable[[], Any]]] = {
    "fedavg": (FedAvg, list, lambda: None),
    "fedsgd": (FedSGD, list, lambda: None),
    "fedprox": (FedAvg, lambda: [FedProxPlugin(mu=0.5)], lambda: None),
    "fednorm": (FedAvg, lambda: [FedNormPlugin(temperature=0.01)], lambda: None),
    "fedavgm": (FedAvg, list, FedAvgM),
    "fedadam": (FedAvg, list, lambda: FedOpt(kind="adam")),
    "fedyogi": (FedAvg, list, lambda: FedOpt(kind="yogi")),
    "fedadagrad": (FedAvg, list, lambda: FedOpt(kind="adagrad")),
}
# FedSGD takes no local step, so it refuses apply_to=update.
MANNERS = [
    (host, apply_to)
    for host in HOSTS
    for apply_to in ("gradient", "update")
    if (host, apply_to) != ("fedsgd", "update")
]
BUFFERS = ["average", "local", "frozen"]
# FedAvg with every policy for buffers, the other hosts with one each.
CASES = [
    pytest.param(
        host,
        apply_to,
        buffers,
        marks=[] if host in ("fedavg", "fedsgd", "fednorm", "fedadam") else pytest.mark.slow,
    )
    for i, (host, apply_to) in enumerate(MANNERS)
    for buffers in (BUFFERS if host == "fedavg" else [BUFFERS[i % 3]])
]


@pytest.mark.parametrize(("host", "apply_to", "buffers"), CASES)
def test_a_mask_of_one_is_the_host(
    federation: Make, host: str, apply_to: str, buffers: str
) -> None:
    """Bit for bit, buffers included: whatever the exploration did to its copy is gone."""
    cls, others, server_opt = HOSTS[host]
    local = {"momentum": 0.0 if cls is FedSGD else 0.5, "weight_decay": 0.01}

    def with_mask() -> list[Plugin]:
        return [*others(), FedLExPlugin(c_exp=2, e_exp=3, apply_to=apply_to)]

    def run(plugins: Callable[[], list[Plugin]]) -> Any:
        run = federation(
            toy_task(norm=True),
            cls,
            plugins=plugins,
            rounds=3,
            fraction=0.5,
            epochs=2,
            buffers=buffers,
            server_opt=server_opt(),
            local=local,
        )
        return run.run(alter=still)

    def states(run: Any) -> dict[int, dict[str, Tensor]]:
        return {pid: run.store.load(pid, v) for pid, v in run.strategy.run.versions.items()}

    masked = run(with_mask)
    plain = run(others)
    assert masked.sha256 == plain.sha256
    # The exploration takes a round of its own, so every state is committed one round later.
    versions = {pid: version - 1 for pid, version in masked.strategy.run.versions.items()}
    assert versions == plain.strategy.run.versions
    expected = states(plain)
    for pid, state in states(masked).items():
        assert all(torch.equal(t, expected[pid][name]) for name, t in state.items())


class Unused(nn.Module):
    """A parameter that no forward pass reads: nothing moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def test_an_unused_parameter_survives_rescaling_over_the_whole_model(federation: Make) -> None:
    task = dataclasses.replace(toy_task(), model=Unused)

    def plugins() -> list[Plugin]:
        return [FedLExPlugin(c_exp=2, e_exp=2, scope="model", rescale="mean1")]

    run = federation(task, FedAvg, plugins=plugins, rounds=2)
    run.step()
    assert run.step()[0].extras[G]["spare"].tolist() == [1.0, 1.0]
    run.run()
    assert run.model["spare"].tolist() == [1.0, 1.0]
    assert not torch.equal(run.model["head.weight"], run.workspace.initial["head.weight"])


def test_a_model_of_one_number_has_a_mask_of_one(federation: Make) -> None:
    """A single entry is constant, so two clients of one quadratic each end where the host ends."""
    masked, plain = (
        federation(
            quadratic([1.0, 4.0], [1.0, -1.0]),
            FedAvg,
            plugins=plugins,
            lr=0.05,
            epochs=5,
            batch_size=1,
            rounds=4,
        ).run()
        for plugins in (lambda: [FedLExPlugin(e_exp=5)], list)
    )
    assert masked.model["w"] == plain.model["w"] != 0


@pytest.mark.parametrize(
    "lines",
    [
        ["method=fedavg", "plugin=[fedlex]"],
        pytest.param(["method=fedlex", "engine.workers=2"], marks=pytest.mark.slow),
    ],
    ids=["plugin", "workers"],
)
def test_the_method_is_fedavg_with_the_plugin(launch: Make, lines: list[str]) -> None:
    common = ["rounds=2", "fraction=0.5", "eval.clients=false", "plugin.fedlex.e_exp=4"]
    one, other = (launch(*common, *of, task=toy_task()) for of in (["method=fedlex"], lines))
    assert one.summary["weights_sha256"] == other.summary["weights_sha256"]


def test_every_option_changes_the_result(federation: Make) -> None:
    """And none of the results is FedAvg's."""
    changes: list[dict[str, Any]] = [
        {},
        {"scope": "model"},
        {"order": "mean_then_normalise"},
        {"minmax": "all"},
        {"refresh": "all"},
        {"rescale": "mean1"},
        {"rescale": "sum"},
        {"lr_exp": 0.5},
        {"g_min": 0.5},
        {"e_exp": 5},
        {"c_exp": 2},
        {"c_exp": 1},
    ]
    how = {"rounds": 2, "fraction": 0.5, "batch_size": 5, "seed": 3}
    sha256 = {federation(toy_task(), FedAvg, **how).run().sha256}
    for change in changes:
        options = {"e_exp": 4, **change}
        run = federation(
            toy_task(),
            FedAvg,
            plugins=lambda options=options: [FedLExPlugin(**options)],
            **how,
        )
        sha256.add(run.run().sha256)
    assert len(sha256) == len(changes) + 1


def test_an_exploration_has_the_rate_that_it_is_given(federation: Make) -> None:
    """Its D are those of a client with that rate; the training keeps its own."""

    def run(lr: float, **options: Any) -> Any:
        def plugins() -> list[FedLExPlugin]:
            return [FedLExPlugin(c_exp=2, e_exp=3, **options)]

        made = federation(toy_task(), FedAvg, plugins=plugins, lr=lr, rounds=1)
        made.step()
        return made

    one, other, same = run(0.1, lr_exp=0.3), run(0.3), run(0.1, lr_exp=0.1)
    explored = [made.strategy.run.states["plugin.fedlex"]["deviations"] for made in (one, other)]
    assert explored[0].keys() == explored[1].keys()
    for pid, d in explored[0].items():
        assert all(torch.equal(t, explored[1][pid][name]) for name, t in d.items())
    for made in (one, same):
        assert {msg.local.lr for msg in made.step()} == {0.1}
    assert same.sha256 == run(0.1).run().sha256 != one.sha256


def test_cohorts_and_batches_are_the_hosts(federation: Make) -> None:
    masked = batches(federation, FedAvg, (lambda: FedLExPlugin(e_exp=2),))
    assert masked == batches(federation, FedAvg)

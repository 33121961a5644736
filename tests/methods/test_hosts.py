"""FedNova, SGDM, FedBABU, FedSGD and SCAFFOLD under each plug-in, through the whole application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedhet.client import FedClient
from fedhet.data.toy import toy_task
from fedhet.messages import Broadcast, Update
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedbabu import FedBABU
from fedhet.methods.fednova import FedNova
from fedhet.methods.fedsgd import FedSGD
from fedhet.methods.scaffold import Scaffold
from fedhet.methods.sgdm import SGDM
from fedhet.phases import Phase
from fedhet.plugin import Plugin

HOSTS = {
    "fednova": ["method=fednova"],
    "fednova-momentum": ["method=fednova", "client.momentum=0.9"],
    "sgdm": ["method=sgdm"],
    "fedbabu": ["method=fedbabu", "method.finetune_epochs=1"],
    "fedsgd": ["method=fedsgd"],
    "fedsgd-one": ["method=fedsgd", "method.batches=1"],
    "scaffold-gradient": ["method=scaffold", "method.control=gradient", "client.momentum=0.5"],
}
COMMON = [
    "seed=1",
    "rounds=3",
    "fraction=0.75",
    "client.epochs=2",
    "client.batch_size=5",
    "client.lr=0.1",
    "eval.every=3",
]


FEWER = [pytest.param(names, marks=pytest.mark.matrix) for names in ([], ["fednorm"], ["fedprox"])]


@pytest.mark.parametrize(
    "plugins", [*FEWER, ["fednorm", "fedprox"]], ids=lambda names: "+".join(names) or "alone"
)
@pytest.mark.parametrize("host", HOSTS)
def test_same_bytes_with_one_worker_and_two(
    launch: Callable[..., Any], host: str, plugins: list[str]
) -> None:
    """Finite, repeatable, and what travels and what clients keep survives the wire; batch norm
    included."""
    lines = [*HOSTS[host], f"plugin=[{','.join(plugins)}]"]
    if host == "fednova-momentum" and "fedprox" in plugins:
        lines.append("plugin.fedprox.mu=0")  # refused otherwise
    runs = [
        launch(*COMMON, *lines, f"engine.workers={workers}", task=toy_task(norm=True))
        for workers in (1, 2)
    ]
    assert (
        runs[0].summary["weights_sha256"] == runs[1].summary["weights_sha256"]
        and runs[0].summary["status"] == "ok"
    )
    assert all(torch.isfinite(t).all() for t in runs[0].weights.values())


@pytest.mark.matrix
def test_no_two_are_the_same(launch: Callable[..., Any]) -> None:
    """So that equal bytes are not those of a setting that nothing reads; fednorm acts on each."""
    lines = [
        *HOSTS.values(),
        ["method=fedavg"],
        ["method=scaffold"],
        ["method=sgdm", "method.momentum_state=reset"],
        ["method=fednova", "plugin=[fedprox]", "plugin.fedprox.mu=2"],
        ["method=fednova", "plugin=[fedprox]", "plugin.fedprox.mu=2", "method.tau_eff=mean_steps"],
        *(
            [*host, "plugin=[fednorm]", "plugin.fednorm.temperature=0.01"]
            for host in HOSTS.values()
        ),
    ]
    hashes = [
        launch(*COMMON, *run, "eval.clients=false", task=toy_task(5, norm=True)).summary[
            "weights_sha256"
        ]
        for run in lines
    ]
    assert len(set(hashes)) == len(lines)


@pytest.mark.parametrize("host", ["fednova", "sgdm", "fedbabu", "fedsgd"])
def test_server_momentum_comes_last(launch: Callable[..., Any], host: str) -> None:
    """beta = 0 at rate 1 is the host alone; else it changes what the host proposes."""
    found = [
        launch(*COMMON, *HOSTS[host], "eval.clients=false", *lines, task=toy_task()).summary[
            "weights_sha256"
        ]
        for lines in ([], ["server_opt=fedavgm", "server_opt.beta=0"], ["server_opt=fedavgm"])
    ]
    assert found[0] == found[1] != found[2]


class Explore(Plugin):
    """A phase of its own, in which clients train as the host does, from a fresh optimiser, and send
    the end as an extra."""

    name = "explore"

    def phases(self) -> list[Phase]:
        return [
            Phase(
                "walk",
                1,
                lambda updates, old: self.ends.extend(u.extras["explore.end"] for u in updates),
                cohort=1.0,
                uploads=False,
            )
        ]

    def __init__(self, ends: list[Any]) -> None:
        super().__init__()
        self.ends = ends

    def walk(self, msg: Broadcast) -> Update:
        client: FedClient = self.client
        client.train_model(client.site.load(client.start(msg)), client.data, epochs=2, hooks=False)
        return Update(
            client.pid,
            client.num_examples,
            extras={"explore.end": client.site.read(client.site.shared)},
        )


@pytest.mark.parametrize(
    "host", [FedNova, SGDM, FedBABU, FedSGD, Scaffold], ids=lambda cls: cls.name
)
def test_plugins_can_train_in_a_phase_of_their_own(
    federation: Callable[..., Any], host: type
) -> None:
    """Without what only the host's own phase sends: FedAvg's training, with the host's momentum and
    scope. Its rounds stay the same."""
    ends: dict[type, list[Any]] = {host: [], FedAvg: []}
    momentum = {"momentum": 0.9} if host is SGDM else {}
    runs = {
        cls: (
            federation(
                toy_task(norm=True),
                cls,
                plugins=lambda cls=cls: [Explore(ends[cls])],
                rounds=2,
                local=momentum if cls is FedAvg else {},
            ).run()
        )
        for cls in ends
    }
    assert runs[host].sha256 == federation(toy_task(norm=True), host, rounds=2).run().sha256
    equal = [
        all(torch.equal(t, b[name]) for name, t in a.items())
        for a, b in zip(ends[host], ends[FedAvg], strict=True)
    ]
    assert len(equal) == 4 and all(equal) is (host is not FedBABU)  # whose head stays

"""What every method that owns an aggregation must do with the plug-ins it hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused.fusing import LINES
from maths.cases import named_case
from methods.plugs import explore
from omegaconf import OmegaConf

from fedhet.core import trees
from fedhet.core.errors import ConfigError
from fedhet.core.server.server_opt import FedAvgM
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedbabu import FedBABU
from fedhet.methods.feddisk import FedDiskAb
from fedhet.methods.fednorm import FedNorm, FedNormPlugin
from fedhet.methods.fednova import FedNova
from fedhet.methods.fedsgd import FedSGD
from fedhet.methods.scaffold import Scaffold
from fedhet.methods.sgdm import SGDM
from fedhet.runs.config import catalogue
from fedhet.runs.config.instantiation import find_target

HOSTS = {
    "fednova": ["method=fednova"],
    "fednova-momentum": ["method=fednova", "client.momentum=0.9"],
    "sgdm": ["method=sgdm"],
    "fedbabu": ["method=fedbabu", "method.finetune_epochs=1"],
    "fedsgd": ["method=fedsgd"],
    "fedsgd-one": ["method=fedsgd", "method.batches=1"],
    "scaffold-gradient": ["method=scaffold", "method.control=gradient", "client.momentum=0.5"],
}
SMALLER = [
    pytest.param(names, marks=pytest.mark.matrix) for names in ([], ["fednorm"], ["fedprox"])
]


@pytest.mark.parametrize(
    "plugins", [*SMALLER, ["fednorm", "fedprox"]], ids=lambda names: "+".join(names) or "alone"
)
@pytest.mark.parametrize(
    "host",
    [pytest.param(host, marks=[] if host == "sgdm" else pytest.mark.slow) for host in HOSTS],
)
def test_same_bytes_with_one_worker_and_two(
    launch: Callable[..., Any], host: str, plugins: list[str]
) -> None:
    """Messages and client state survive the way to another process, batch norm included."""
    if host.startswith("fedsgd"):  # which refuses it: its clients take no local step
        plugins = [name for name in plugins if name != "fedprox"]
    lines = [*HOSTS[host], f"plugin=[{','.join(plugins)}]"]
    if host == "fednova-momentum" and "fedprox" in plugins:
        lines.append("plugin.fedprox.mu=0")  # refused otherwise
    one, two = (
        launch(*LINES, *lines, f"engine.workers={workers}", task=toy_task(norm=True))
        for workers in (1, 2)
    )
    assert one.summary["weights_sha256"] == two.summary["weights_sha256"]
    assert one.summary["status"] == "ok"
    assert all(torch.isfinite(t).all() for t in one.weights.values())


@pytest.mark.matrix
def test_no_two_are_the_same(launch: Callable[..., Any]) -> None:
    """So that equal bytes are not those of a setting that nothing reads; FedNorm acts on each."""
    mu = ["plugin=[fedprox]", "plugin.fedprox.mu=2"]
    normed = ["plugin=[fednorm]", "plugin.fednorm.temperature=0.01"]
    lines = [
        *HOSTS.values(),
        ["method=fedavg"],
        ["method=scaffold"],
        ["method=sgdm", "method.momentum_state=reset"],
        ["method=fednova", *mu],
        ["method=fednova", *mu, "method.tau_eff=mean_steps"],
        *([*host, *normed] for host in HOSTS.values()),
    ]
    hashes = set()
    for overrides in lines:
        task = toy_task(5, norm=True)
        run = launch(*LINES, *overrides, "eval.clients=false", task=task)
        hashes.add(run.summary["weights_sha256"])
    assert len(hashes) == len(lines)


def test_server_momentum_comes_last(federation: Callable[..., Any]) -> None:
    """beta = 0 at rate 1 is the host alone; otherwise it changes what the host proposes."""
    how = {"rounds": 3, "fraction": 0.75, "epochs": 2, "batch_size": 5}
    for host in (FedNova, SGDM, FedBABU, FedSGD):
        with named_case(host.name):
            alone, without_momentum, with_momentum = (
                trees.sha256({"": federation(toy_task(), host, server_opt=opt, **how).run().model})
                for opt in (None, FedAvgM(beta=0), FedAvgM())
            )
            assert alone == without_momentum != with_momentum


@pytest.mark.parametrize(
    "host", [FedNova, SGDM, FedBABU, FedSGD, Scaffold], ids=lambda cls: cls.name
)
def test_plugins_can_train_in_a_phase_of_their_own(
    federation: Callable[..., Any], host: type
) -> None:
    """There they train as in FedAvg, with the momentum and the scope of the host.

    What only the host's own phase sends is missing there. The host's rounds stay the same.
    """
    ends: dict[type, list[Any]] = {host: [], FedAvg: []}
    momentum = {"momentum": 0.9} if host is SGDM else {}
    runs = {}
    for cls in ends:
        run = federation(
            toy_task(norm=True),
            cls,
            plugins=lambda cls=cls: [explore(ends[cls])],
            rounds=2,
            local=momentum if cls is FedAvg else {},
        )
        runs[cls] = run.run()
    assert runs[host].sha256 == federation(toy_task(norm=True), host, rounds=2).run().sha256
    equal = [
        all(torch.equal(t, b[name]) for name, t in a.items())
        for a, b in zip(ends[host], ends[FedAvg], strict=True)
    ]
    assert len(equal) == 4
    assert all(equal) is (host is not FedBABU)  # whose head is not trained


CONFIGURATIONS = {
    name: OmegaConf.load(catalogue.CONF / "method" / f"{name}.yaml")
    for name in catalogue.choices("method")
}
METHODS = {name: find_target(node.get("method", node)) for name, node in CONFIGURATIONS.items()}
WRAPPERS = [cls for cls in METHODS.values() if cls.requires]


def test_a_method_requires_the_plugin_that_its_configuration_lists() -> None:
    for name in METHODS:
        with named_case(name):
            defaults = CONFIGURATIONS[name].get("defaults", [])
            required = METHODS[name].requires
            assert required is None or f"/plugin/{required().name}" in defaults
            assert sum(str(entry).startswith("/plugin/") for entry in defaults) == bool(required)


def test_a_method_without_its_plugin_is_refused(federation: Callable[..., Any]) -> None:
    """It would be FedAvg; the error names the plug-in and the file that lists it."""
    for cls in WRAPPERS:
        with named_case(cls.name):
            message = rf"method={cls.name} .*'{cls.requires().name}'.*conf/method/{cls.name}\.yaml"
            with pytest.raises(ConfigError, match=message):
                federation(toy_task(), cls, plugins=list)


def test_a_preset_is_fedavg_with_its_plugin(federation: Callable[..., Any]) -> None:
    """It can be used as it is imported, without a configuration."""
    preset = federation(toy_task(), FedNorm).run()
    assert preset.strategy.name == "fednorm"
    assert preset.sha256 != federation(toy_task(), FedAvg).run().sha256
    assert (
        preset.sha256
        == federation(toy_task(), FedAvg, plugins=lambda: [FedNormPlugin()]).run().sha256
    )
    assert federation(toy_task(), FedDiskAb).strategy.plugins[0].settings["ratio"] == "raw"

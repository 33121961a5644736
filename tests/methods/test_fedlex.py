"""FedLEx: the host where the mask is one, its messages and record, and what is told about bad
input."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_draws import batches
from torch import Tensor, nn
from vectors.adapter import replay

from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError, RunFailed
from fedhet.messages import Broadcast, LocalSettings, Reply, Update
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedlex import D, FedLExPlugin, G
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.methods.fedsgd import FedSGD
from fedhet.methods.scaffold import Scaffold
from fedhet.server_opt import FedAvgM, FedOpt

Make = Callable[..., Any]


# ---- the host where the mask is one


def still(plan: list[Broadcast], replies: list[Any]) -> list[Reply]:
    """As if no explorer had moved."""
    for reply in replies:
        if D in reply.extras:
            reply.extras[D] = {name: torch.zeros_like(t) for name, t in reply.extras[D].items()}
    return replies


HOSTS: dict[str, tuple[type, Callable[[], list[Any]], Callable[[], Any]]] = {
    "fedavg": (FedAvg, list, lambda: None),
    "fedsgd": (FedSGD, list, lambda: None),
    "fedprox": (FedAvg, lambda: [FedProxPlugin(mu=0.5)], lambda: None),
    "fednorm": (FedAvg, lambda: [FedNormPlugin(temperature=0.01)], lambda: None),
    "fedavgm": (FedAvg, list, FedAvgM),
    "fedadam": (FedAvg, list, lambda: FedOpt(kind="adam")),
    "fedyogi": (FedAvg, list, lambda: FedOpt(kind="yogi")),
    "fedadagrad": (FedAvg, list, lambda: FedOpt(kind="adagrad")),
}


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
@pytest.mark.parametrize(
    ("host", "apply_to"),
    [
        (host, how)
        for host in HOSTS
        for how in ("gradient", "update")
        if (host, how) != ("fedsgd", "update")
    ],
)  # refused: no local step
def test_a_mask_of_one_is_the_host(
    federation: Make, host: str, apply_to: str, buffers: str
) -> None:
    """Bit for bit, buffers included: whatever the exploration did to its copy is gone."""
    cls, others, server_opt = HOSTS[host]

    def run(mask: bool) -> Any:
        def plugins() -> list[Any]:
            return [
                *others(),
                *([FedLExPlugin(c_exp=2, e_exp=3, apply_to=apply_to)] if mask else []),
            ]

        made = federation(
            toy_task(norm=True),
            cls,
            plugins=plugins,
            rounds=3,
            fraction=0.5,
            buffers=buffers,
            server_opt=server_opt(),
        )
        made.strategy.setting.local = LocalSettings(
            lr=0.1, epochs=2, batch_size=4, momentum=0.5, weight_decay=0.01
        )
        return made.run(alter=still)

    masked, plain = run(True), run(False)
    assert masked.sha256 == plain.sha256
    assert {
        pid: version - 1 for pid, version in masked.strategy.versions.items()
    } == plain.strategy.versions
    kept, expected = (
        {pid: r.store.load(pid, v) for pid, v in r.strategy.versions.items()}
        for r in (masked, plain)
    )
    assert all(
        torch.equal(t, expected[pid][name])
        for pid, tree in kept.items()
        for name, t in tree.items()
    )


class Unused(nn.Module):
    """A parameter that no forward pass reads: nothing moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.head = nn.Parameter(torch.ones(2)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def test_an_unused_parameter_survives_rescaling_over_the_whole_model(federation: Make) -> None:
    task = dataclasses.replace(toy_task(), model=Unused)
    run = federation(
        task,
        FedAvg,
        plugins=lambda: [FedLExPlugin(c_exp=2, e_exp=2, scope="model", rescale="mean1")],
        rounds=2,
    )
    run.step()
    assert run.step()[0].extras[G]["spare"].tolist() == [1.0, 1.0]
    assert run.run().model["spare"].tolist() == [1.0, 1.0] and not torch.equal(
        run.model["head.weight"], run.site.initial["head.weight"]
    )


def test_a_model_of_one_number_has_a_mask_of_one() -> None:
    """A single entry is constant, so two clients of one quadratic each end where the host ends."""
    params = {
        "a": [1.0, 4.0],
        "b": [1.0, -1.0],
        "steps": 5,
        "lr": 0.05,
        "rounds": 20,
        "method": "fedavg",
    }
    assert replay("convergence", "quadratic", {**params, "plugins": ["fedlex"]}, {}) == replay(
        "convergence", "quadratic", params, {}
    )


def test_the_mask_does_something_and_the_method_is_fedavg_with_it(launch: Make) -> None:
    common = [
        "rounds=2",
        "fraction=0.5",
        "client.batch_size=5",
        "eval.clients=false",
        "plugin.fedlex.e_exp=4",
        "seed=3",
    ]
    runs = [
        ["method=fedlex"],
        ["method=fedavg", "plugin=[fedlex]"],
        ["method=fedlex", "engine.workers=2"],
        *(
            ["method=fedlex", f"plugin.fedlex.{option}"]
            for option in (
                "scope=model",
                "order=mean_then_normalise",
                "refresh=all",
                "rescale=mean1",
                "g_min=0.5",
                "e_exp=5",
                "c_exp=2",
                "c_exp=1",
            )
        ),
    ]
    hashes = [launch(*common, *lines, task=toy_task()).summary["weights_sha256"] for lines in runs]
    hashes.append(
        launch(*common[:4], "seed=3", "method=fedavg", task=toy_task()).summary["weights_sha256"]
    )
    assert len(set(hashes[:3])) == 1 and len(set(hashes[2:])) == len(hashes) - 2


def test_cohorts_and_batches_are_the_hosts(federation: Make) -> None:
    assert batches(federation, FedAvg, (lambda: FedLExPlugin(e_exp=2),)) == batches(
        federation, FedAvg
    )


# ---- phases, messages, record


@pytest.mark.parametrize(
    ("c_exp", "clients", "expected"),
    [
        (1, 4, 1),
        (3, 4, 3),
        (20, 4, 4),
        (1.0, 4, 4),
        (0.3, 4, 2),
        (0.1, 30, 3),
        (1e-9, 4, 1),
        (1e-11, 4, 1),
    ],
)
def test_how_many_explore(
    federation: Make, caplog: pytest.LogCaptureFixture, c_exp: float, clients: int, expected: int
) -> None:
    """A share is rounded up; what is too many is capped, and said."""
    run = federation(
        toy_task(clients),
        FedAvg,
        plugins=lambda: [FedLExPlugin(c_exp=c_exp)],
        rounds=1,
        fraction=0.5,
    )
    with caplog.at_level(logging.WARNING, "fedhet"):
        assert len(run.strategy.plan(1)) == expected
    assert [r.getMessage() for r in caplog.records] == (
        ["plugin.fedlex.c_exp=20, but only 4 clients have data: all of them explore"]
        if c_exp == 20
        else []
    )


def test_an_adaptive_optimiser_is_warned_of(
    federation: Make, caplog: pytest.LogCaptureFixture
) -> None:
    for optimizer, apply_to, said in (
        ("sgd", "gradient", 0),
        ("adam", "update", 0),
        ("adam", "gradient", 1),
    ):
        run = federation(
            toy_task(),
            FedAvg,
            plugins=lambda how=apply_to: [FedLExPlugin(c_exp=2, e_exp=1, apply_to=how)],
            rounds=2,
        )
        run.strategy.setting.local = LocalSettings(lr=0.1, optimizer=optimizer)
        caplog.clear()
        run.run()
        told = [r.getMessage() for r in caplog.records]
        assert len(told) == said and all(
            "client.optimizer=adam" in line and "nearly inactive" in line for line in told
        )


def test_messages_and_report(federation: Make) -> None:
    run = federation(
        toy_task(norm=True),
        FedAvg,
        plugins=lambda: [FedLExPlugin(c_exp=2, e_exp=2)],
        rounds=4,
        fraction=0.5,
    )
    model = sum(t.nbytes for t in run.model.values())
    guided = [name for name, _ in run.site.model.named_parameters()]
    mask = sum(run.model[name].nbytes for name in guided)
    explorers = {msg.pid for msg in run.step()}
    assert run.strategy.current.bytes == {"down": {"model": 2 * model}, "up": {D: 2 * mask}}
    assert (
        run.strategy.current.metrics["fedlex.steps"] > 0
        and run.strategy.reports() == {}
        and run.strategy.versions == {}
    )
    last = None
    for step in range(1, 5):
        plan = run.step()
        guidance, cohort = plan[0].extras[G], {msg.pid for msg in plan}
        report = run.strategy.reports()["fedlex"]
        assert run.strategy.current.bytes == {
            "down": {"model": 2 * model, G: 2 * mask},
            "up": {"model": 2 * model},
        }
        assert list(guidance) == guided and all(t.dtype == torch.float32 for t in guidance.values())
        expected = explorers if step == 1 else cohort & explorers or set(last["pids"].tolist())
        assert (
            set(report["pids"].tolist()) == expected
            and report["explorers"] == len(cohort & explorers) / 2
        )
        assert report["median"] == float(
            torch.cat([t.flatten() for t in guidance.values()]).median()
        )
        assert report["medians"].tolist() == [float(t.median()) for t in guidance.values()]
        torch.testing.assert_close(
            report["means"], torch.tensor([float(t.mean()) for t in guidance.values()])
        )
        last = dict(report)


def test_patience_ends_the_exploration(federation: Make) -> None:
    """With a rate of 0 the loss never falls, but for the rounding of its sum."""
    steps = []
    for patience in (None, 3):
        run = federation(
            toy_task(1),
            FedAvg,
            plugins=lambda p=patience: [FedLExPlugin(c_exp=1, e_exp=100, patience=p)],
            lr=0.0,
        )
        run.step()
        steps.append(run.strategy.current.metrics["fedlex.steps"])
    assert steps[0] == 100 * 3 and steps[1] < 60


# ---- bad input


def damaged(
    pid: int, change: Callable[[Update], Any]
) -> Callable[[list[Broadcast], list[Any]], list[Any]]:
    def alter(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        for reply in replies:
            if reply.pid == pid and D in reply.extras:
                change(reply)
        return replies

    return alter


BAD: dict[str, tuple[Callable[[Update], Any], str]] = {
    "nan": (lambda u: u.extras[D]["head.bias"].fill_(float("nan")), "head.bias.*NaN or infinite"),
    "negative": (lambda u: u.extras[D]["head.bias"][1:].fill_(-1e-9), r"head.bias.*negative.*>= 0"),
    "dtype": (
        lambda u: u.extras[D].update({"head.bias": torch.zeros(2, dtype=torch.float64)}),
        r"head.bias.*float64.*expected.*float32",
    ),
    "shape": (
        lambda u: u.extras[D].update({"head.bias": torch.zeros(3)}),
        r"head.bias.*\(3,\); expected.*\(2,\)",
    ),
    "lacking": (lambda u: u.extras[D].pop("head.bias"), "missing.*head.bias"),
    "none": (lambda u: u.extras.pop(D), f"'{D}' is missing"),
    "no tree": (lambda u: u.extras.update({D: torch.zeros(3)}), "a tree of 4 tensors is expected"),
}


@pytest.mark.parametrize(("change", "said"), BAD.values(), ids=BAD)
def test_a_bad_deviation(federation: Make, change: Callable[[Update], Any], said: str) -> None:
    def plugins() -> list[FedLExPlugin]:
        return [FedLExPlugin(e_exp=2)]

    with pytest.raises(
        RunFailed, match=rf"client 2 failed in phase 'fedlex.explore', step 1: .*{said}"
    ):
        federation(toy_task(), FedAvg, plugins=plugins).step(damaged(2, change))
    run = federation(toy_task(), FedAvg, plugins=plugins, on_failure="skip", rounds=2)
    run.step(damaged(2, change))
    assert [(f.pid, f.phase) for f in run.strategy.current.failures] == [(2, "fedlex.explore")]
    run.step()
    assert run.strategy.reports()["fedlex"]["pids"].tolist() == [3, 1, 0]


def test_a_diverged_exploration_names_its_client(federation: Make) -> None:
    with pytest.raises(
        RunFailed,
        match=(
            r"client 3 failed in phase 'fedlex.explore', step 1: ValueError: .*tensor '.*diverged"
        ),
    ):
        federation(toy_task(), FedAvg, plugins=lambda: [FedLExPlugin(e_exp=2)], lr=1e30).step()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"c_exp": 0}, ">= 1"),
        ({"c_exp": 1.5}, "<= 1"),
        ({"c_exp": 0.0}, "> 0"),
        ({"c_exp": True}, "whole number"),
        ({"e_exp": 0}, ">= 1"),
        ({"patience": 0}, "null"),
        ({"scope": "layer"}, "tensor, model"),
        ({"order": "x"}, "normalise_then_mean"),
        ({"empty": "x"}, "previous"),
        ({"refresh": "x"}, "participants"),
        ({"apply_to": "x"}, "gradient, update"),
        ({"rescale": "x"}, "mean1"),
        ({"g_min": 1.0}, "< 1"),
    ],
    ids=str,
)
def test_bad_options_are_named(option: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"plugin\.fedlex\.{next(iter(option))}=.*{said}"):
        FedLExPlugin(**option)


def test_refusals(federation: Make) -> None:
    with pytest.raises(
        ConfigError, match="method=scaffold refuses plugin 'fedlex': its mask scales the steps"
    ):
        federation(toy_task(), Scaffold, plugins=lambda: [FedLExPlugin()])
    assert (
        "fedsgd" in FedLExPlugin(apply_to="update").refuses
        and "fedsgd" not in FedLExPlugin().refuses
    )

"""Every method and plug-in either runs under privacy.noise, or is refused and says why."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from composing import composed
from contracts.short import STATED, shortened
from omegaconf import OmegaConf

from fedhet.core import trees
from fedhet.core.errors import ConfigError
from fedhet.core.groups import Noise
from fedhet.core.messages import Upload
from fedhet.core.noise import allowed_here
from fedhet.core.server.loop import Loop
from fedhet.core.server.phases import locate
from fedhet.data.toy import toy_task
from fedhet.runs.config import Config, catalogue
from fedhet.runs.job import Job
from fedhet.runs.privacy.account import RELEASES, SPENT, Account, planned_releases, releases_of
from fedhet.runs.stores import MemoryStore

METHODS = catalogue.choices("method")
PLUGINS = catalogue.choices("plugin")
REFUSED = {
    "feddiskab": "plugin feddisk: ratio=raw",
    "feddyn": "method=feddyn: .*changes would add up",
    "fedgen": "method=fedgen: .*label counts",
    "fedproto": "method=fedproto: .*label counts",
    "local": "method=local: its clients send nothing",
    "pooled": "method=pooled: pools the clients' raw data",
    "scaffold": "method=scaffold: .*control variates",
}


def noised(settings: Config) -> Config:
    cfg = settings.cfg.copy()
    OmegaConf.set_readonly(cfg, False)
    cfg.privacy.noise = 0.5
    cfg.eval.clients = False
    return replace(settings, cfg=cfg)


class Noised(NamedTuple):
    """A run whose replies were noised."""

    job: Job
    account: Account


def run(settings: Config, norm: bool = False, clients: int = 4, attacker: int = -1) -> Noised:
    """Run all steps, and compare what the clients count with what the server expects.

    The attacker sends a thousand times its noised change.
    """
    job = Job(noised(settings), toy_task(clients, norm=norm))
    strategy = job.strategy
    account = Account(job.workspace.noise)
    loop = Loop(strategy, [account])
    store = MemoryStore()
    number = 1
    while locate(strategy.timetable, number):
        step = strategy.plan(number)
        loop.begin(step)
        plan = step.messages
        replies = [job.client(store).handle(msg) for msg in plan]
        for msg, reply in zip(plan, replies, strict=True):
            assert isinstance(reply, Upload), reply
            entry = step.entry
            assert reply.metrics[SPENT] - msg.extras[SPENT] == msg.extras[RELEASES], entry.name
            assert set(reply.metrics) == {SPENT, "seconds.train", "seconds.extras"}
            if msg.pid == attacker:
                change = trees.Difference(reply.weights, msg.weights)
                reply.weights = trees.add(trees.cast(msg.weights, msg.weights), change, 1000)
                reply.weights = trees.cast(reply.weights, msg.weights)
                for name in job.workspace.variances:
                    reply.weights[name].abs_()
        strategy.finish_step(step, replies, loop.accept)
        number += 1
    for slot, weights in strategy.weights.items():
        assert trees.first_nonfinite(weights) is None, slot
    return Noised(job, account)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_composes_or_is_refused(method: str) -> None:
    settings = shortened(method, None)
    if method in REFUSED:
        with pytest.raises(ConfigError, match=rf"privacy\.noise=0\.5 .*{REFUSED[method]}"):
            run(settings)
        return
    try:
        job, account = run(settings, norm=True)
    except ConfigError:
        assert method not in STATED
        return
    strategy = job.strategy
    trained = sum(entry.rounds * releases_of(strategy, entry) for entry in strategy.timetable)
    assert 0 < max(account.releases.values()) <= trained


@pytest.mark.parametrize("plugin", PLUGINS)
def test_every_plugin_composes(plugin: str) -> None:
    run(shortened("fedavg", plugin))


@pytest.mark.parametrize(
    "merge",
    [
        pytest.param(name, marks=() if name in ("mean", "median") else pytest.mark.slow)
        for name in catalogue.choices("merge")
    ],
)
def test_every_merge_composes(merge: str) -> None:
    """It works on what has been noised, so it costs no epsilon, and still bounds an attacker."""
    lines = ["method=fedavg", "rounds=2", "client.epochs=1", "on_failure=skip", f"merge={merge}"]
    lines += ["replies.max_jump=null"]  # which bounds the mean, too
    job, account = run(composed(*lines), norm=True, clients=7, attacker=3)
    (releases,) = set(account.releases.values())
    assert releases == planned_releases(job.strategy)
    change = trees.Difference(job.strategy.weights["model"], job.workspace.initial)
    far = max(float(change[name].abs().max()) for name in job.workspace.mergeable)
    assert (far > 100) == (merge == "mean")


def test_refusals_by_option() -> None:
    augmented = composed("method=fedgmm", "plugin.fedgmm.agg_count=augmented")
    with pytest.raises(ConfigError, match=r"agg_count=augmented .*original"):
        run(augmented)
    with pytest.raises(ConfigError, match=r"samples plugin 'fedgmm' .*added"):
        run(composed("method=fednova", "plugin=[fedgmm]"))


@pytest.mark.parametrize(
    "lines",
    [
        ["method=fedbn", "method.server_bn=average"],
        ["method=sgdm", "method.momentum_state=reset"],
        ["method=fedpcl", "method.renormalise=true"],
        ["method=fedsgd", "buffers=frozen"],
        ["method=fedprox", "plugin=[fednorm,fedgmm]"],
        ["method=fedpcl", "plugin=[fedgmm]"],
    ],
    ids=" ".join,
)
def test_options_that_change_what_is_sent(lines: list[str]) -> None:
    run(composed(*lines, "rounds=2", "client.epochs=1"), norm=True)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["eval.clients=true"], r"privacy\.noise=1 .*eval\.clients=false: "),
        (
            ["eval.clients=false", "eval.finetune_epochs=1"],
            r"eval\.finetune_epochs=1 .*privacy\.noise=1: ",
        ),
        (["eval.clients=false", "early_stopping.patience=2"], r"early_stopping\.patience=2 "),
    ],
)
def test_evaluations_by_clients_are_refused(lines: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        composed("privacy.noise=1", *lines)


def test_a_missing_accountant_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    settings = composed("method=fedavg", "privacy.noise=1", "eval.clients=false")
    with pytest.raises(ConfigError, match=r"=1 .*opacus,.*-e '\.\[privacy\]'"):
        _ = Job(settings, toy_task()).strategy
    assert Job(composed("method=fedavg"), toy_task()).strategy


def test_prototypes_do_not_tell_which_classes_a_client_has() -> None:
    job = Job(noised(shortened("fedpcl", None)), toy_task())
    labels = job.task.clients[0].train.y
    labels.zero_()  # a client without the class 1
    step = job.strategy.plan(1)
    Loop(job.strategy, [Account(job.workspace.noise)]).begin(step)
    plan = step.messages
    (msg,) = [msg for msg in plan if msg.pid == 0]
    update = job.client(MemoryStore()).handle(msg)
    assert isinstance(update, Upload)
    sent = update.tree("fedpcl.prototypes")
    assert bool(sent["has"].all())
    assert bool((sent["mean"].abs() > torch.finfo().tiny).all())


@pytest.mark.parametrize(
    ("variable", "value", "served", "refused"),
    [
        ("FEDHET_MIN_NOISE", ".5", ["privacy.noise=.5"], ["privacy.noise=.4"]),
        ("FEDHET_MIN_NOISE", ".5", ["privacy.noise=1"], []),
        ("FEDHET_MAX_EPSILON", "8", ["privacy.noise=1", "privacy.budget=8"], ["privacy.noise=1"]),
        ("FEDHET_MAX_EPSILON", "8", ["privacy.noise=1", "privacy.budget=1"], []),
        (
            "FEDHET_MAX_EPSILON",
            "8",
            ["privacy.noise=1", "privacy.budget=7"],
            ["privacy.noise=1", "privacy.budget=8.1"],
        ),
        (
            "FEDHET_MAX_DELTA",
            "1e-06",
            ["privacy.noise=1", "privacy.budget=8", "privacy.delta=1e-6"],
            ["privacy.noise=1", "privacy.budget=8", "privacy.delta=1.1e-6"],
        ),
    ],
)
def test_the_owner_of_a_machine_demands_more(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    served: list[str],
    refused: list[str],
) -> None:
    """The settings of a run come from the server, which may ask for less."""

    def job(lines: list[str]) -> Job:
        return Job(composed("method=fedavg", "eval.clients=false", *lines), toy_task())

    if variable == "FEDHET_MAX_DELTA":
        monkeypatch.setenv("FEDHET_MAX_EPSILON", "8")
    monkeypatch.setenv(variable, value)
    assert job(served).strategy
    with pytest.raises(ConfigError, match=f"owner .*machine.*{variable}={float(value):g}"):
        _ = job(refused).strategy
    for wrong in ("canary-much", "-17.25", "nan", "inf"):
        monkeypatch.setenv(variable, wrong)
        with pytest.raises(ConfigError, match=f"^{variable} .*number > 0$"):
            _ = job(served).strategy


def test_the_owner_bounds_delta_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a delta near 1 any epsilon is within any budget."""
    monkeypatch.setenv("FEDHET_MAX_EPSILON", "8")
    noise = Noise(1.0, delta=0.9, budget=8.0)
    with pytest.raises(ConfigError, match=r"privacy\.delta=0\.9.*FEDHET_MAX_DELTA=1e-05"):
        allowed_here(noise)
    assert allowed_here(replace(noise, delta=1e-5))

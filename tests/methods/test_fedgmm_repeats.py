"""FedGMM: its random draws and what a client keeps, and runs that must end with equal weights."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from composing import composed
from maths.cases import named_case
from methods.fedgmm_task import DATA, kept, task
from torch import Tensor
from torch.utils import _pytree as pytree

from fedhet.core import messages
from fedhet.core.messages import Broadcast
from fedhet.core.server.phases import locate
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedgmm import FedGMMPlugin
from fedhet.methods.scaffold import Scaffold
from fedhet.runs.job import Job
from fedhet.runs.stores import MemoryStore

Launch = Callable[..., Any]


# ---- streams, state


def test_draws_follow_the_seed_and_the_client(fedgmm: Launch) -> None:
    """They do not depend on the number of local epochs, the rounds or the cohort."""
    same_data = task(c0=DATA[1], c2=DATA[1])

    def generated(**settings: Any) -> list[Tensor]:
        run = fedgmm(same_data, **settings).run()
        return [kept(run, pid)["x"] for pid in range(3)]

    first = generated(seed=0, epochs=1, fraction=1.0)
    again = generated(seed=0, epochs=3, fraction=0.5)
    other = generated(seed=1, epochs=1, fraction=1.0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])


def test_the_generated_samples_stay_as_they_are(fedgmm: Launch) -> None:
    """Also where the host changes the client's state in every round."""
    run = fedgmm(cls=Scaffold, fraction=0.7, options={"psi": 0.0})
    run.step()
    run.step()
    before = [kept(run, pid) for pid in range(3)]
    for _ in range(3):
        run.step()
    assert max(run.strategy.run.versions.values()) > 2
    for pid, old in enumerate(before):
        new = kept(run, pid)
        assert all(torch.equal(old[name], new[name]) for name in old)


def test_num_examples_are_the_real_ones(fedgmm: Launch) -> None:
    seen: list[int] = []

    def note(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        seen.extend(reply.num_examples for reply in replies)
        return replies

    fedgmm(rounds=1).run(alter=note)
    assert seen == [10, 7, 4] * 3


# ---- reductions


def test_without_generated_samples_it_is_the_host(federation: Launch) -> None:
    """target 0 and psi 0, bit for bit, with all cohorts and batches."""
    settings = {"rounds": 3, "fraction": 0.5, "epochs": 2}

    def sha256(cls: type, **options: Any) -> str:
        def plugins() -> list[FedGMMPlugin]:
            return [FedGMMPlugin(**options)] if options else []

        return str(federation(toy_task(), cls, plugins=plugins, **settings).run().sha256)

    for cls in (FedAvg, Scaffold):
        assert sha256(cls, target=0, psi=0) == sha256(cls)
    assert sha256(FedAvg, target=0, psi=0.1) != sha256(FedAvg)


def test_psi_is_the_clients_decay(federation: Launch) -> None:
    def plugins() -> list[FedGMMPlugin]:
        return [FedGMMPlugin(target=0, psi=0.25)]

    psi = federation(toy_task(), FedAvg, plugins=plugins, rounds=3).run()
    decay = federation(toy_task(), FedAvg, lr_decay=0.75, rounds=3).run()
    assert psi.sha256 == decay.sha256


def test_the_stronger_decay_applies_once(federation: Launch) -> None:
    cases = [(0.25, 1.0, 0.75), (0.25, 0.5, 0.5), (0.25, 0.9, 0.75), (0.0, 0.9, 0.9)]
    for psi, lr_decay, factor in cases:
        with named_case(psi, lr_decay, factor):
            run = federation(
                toy_task(),
                FedAvg,
                plugins=lambda psi=psi: [FedGMMPlugin(target=0, psi=psi)],
                rounds=3,
                lr=0.1,
                lr_decay=lr_decay,
            )
            rates = [msg.local.lr for _ in range(5) for msg in run.step() if msg.trains]
            expected = [0.1 * factor**t for t in range(3) for _ in range(4)]
            assert rates == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedgmm"])
def test_the_papers_decay_is_one_override_for_its_three_methods(method: str) -> None:
    """client.lr_decay=0.98 gives each of them the rates eta (1 - psi)^(t - 1) with psi = .02."""
    lines = [f"method={method}", "rounds=4", "client.lr=0.1", "client.lr_decay=0.98"]
    job = Job(composed(*lines), object_task=toy_task(3))
    strategy = job.strategy
    store = MemoryStore()
    rates = []
    while locate(strategy.timetable, strategy.run.round + 1):
        step = strategy.plan(strategy.run.round + 1)
        rates += [msg.local.lr for msg in step.messages if msg.trains]
        strategy.finish_step(step, [job.client(store).handle(msg) for msg in step.messages])
    assert rates == [0.1 * 0.98**t for t in range(4) for _ in range(3)]


SHORT = ["rounds=2", "client.epochs=1", "eval.every=2", "eval.clients=false"]


def test_method_and_plugin_are_one(launch: Launch) -> None:
    method = launch(*SHORT, "method=fedgmm", task=toy_task())
    plugin = launch(*SHORT, "method=fedavg", "plugin=[fedgmm]", task=toy_task())
    assert method.summary["weights_sha256"] == plugin.summary["weights_sha256"]


@pytest.mark.slow
def test_two_workers_give_the_same_bytes(launch: Launch) -> None:
    """EM, the state on disk and the uploads as they travel; digits, five components."""
    lines = [*SHORT, "partition.clients=4", "method=fedgmm", "plugin=[fednorm]"]
    lines.append("plugin.fedgmm.agg_count=augmented")
    one, two = (launch(*lines, f"engine.workers={n}").summary for n in (1, 2))
    assert one["weights_sha256"] == two["weights_sha256"]
    assert one["bytes"] == two["bytes"]
    assert not multiprocessing.active_children()


class Accelerated(Tensor):
    """Behaves like a tensor of an accelerator.

    It refuses NumPy and CPU tensors other than scalars, and results stay there until `cpu`.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cpu:
            return args[0].as_subclass(Tensor)
        mixing = func is not Tensor.__getitem__ and any(
            type(t) is Tensor and t.ndim for t in pytree.tree_leaves((args, kwargs))
        )
        if func is Tensor.numpy or mixing:
            raise RuntimeError(f"{func.__name__}: expected all tensors to be on the same device")
        return super().__torch_function__(func, types, args, kwargs or {})


def accelerated(value: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.as_subclass(Accelerated), value)


def test_what_arrives_on_an_accelerator_gives_the_same(
    fedgmm: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extras are on the device where they arrive; EM, merging and drawing happen on the CPU."""
    plain = fedgmm(options={"max_components": 1}).run().sha256
    monkeypatch.setattr(messages, "on_device", accelerated)
    assert fedgmm(options={"max_components": 1}).run().sha256 == plain

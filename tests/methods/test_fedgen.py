"""FedGen: what it shares with FedAvg, what travels, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from maths.cases import named_case
from methods.readouts import place
from methods.small_generator import SMALL
from safetensors.torch import load_file
from torch import Tensor, nn

from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.messages import Broadcast, Upload
from fedhet.core.server.merging import NormClip
from fedhet.data.toy import toy_task
from fedhet.methods import fedgen
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedgen import FedGen

GENERATOR, COUNTS = "fedgen.generator", "fedgen.counts"


@pytest.mark.parametrize("norm", [False, True])
def test_without_its_terms_it_is_fedavg(federation: Callable[..., Any], norm: bool) -> None:
    """lam = kl = 0: the same bits, and no generator travels.

    With lam > 0 the first round is still FedAvg's.
    """
    settings = {"rounds": 3, "fraction": 0.75, "epochs": 2, "local": {"momentum": 0.5}}
    plain = federation(toy_task(norm=norm), FedAvg, **settings)
    off = federation(toy_task(norm=norm), FedGen, options={**SMALL, "lam": 0.0}, **settings)
    on = federation(toy_task(norm=norm), FedGen, options=SMALL, **settings)
    for step in (1, 2, 3):
        for run in (plain, off, on):
            plan = run.step()
            assert (GENERATOR in plan[0].extras) is (run is on and step > 1)
        assert all(torch.equal(t, off.model[name]) for name, t in plain.model.items())
        assert all(torch.equal(t, on.model[name]) for name, t in plain.model.items()) is (step == 1)


@pytest.mark.parametrize("workers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_generator_is_recorded_and_workers_agree(
    launch: Callable[..., Any], workers: bool
) -> None:
    options = [f"method.{key}={value}" for key, value in SMALL.items()]
    lines = ["method=fedgen", "rounds=2", "eval.every=2", *options]
    run = launch(*lines, task=toy_task())
    if workers:
        parallel = launch(*lines, "engine.workers=2", task=toy_task())
        assert run.summary["weights_sha256"] == parallel.summary["weights_sha256"]
    up, down = (run.summary["bytes"][way] for way in ("up", "down"))
    tree = load_file(run.dir / "generator.safetensors")
    # once to each of four clients
    assert down[GENERATOR] == 4 * sum(t.numel() * t.element_size() for t in tree.values())
    assert set(up) == {"model", COUNTS}
    assert up["model"] == down["model"]
    assert up[COUNTS] == 2 * 4 * 16


@pytest.mark.parametrize("options", [{}, {"lam": 0.0, "kl": 1.0}])
def test_steps_with_its_terms_are_not_compiled(
    federation: Callable[..., Any], options: dict[str, float]
) -> None:
    run = federation(toy_task(), FedGen, options={**SMALL, **options}, rounds=2)
    run.step()
    run.workspace.speed = replace(run.workspace.speed, compile=True)
    method = run.strategy.method
    msg, state, ctx = place(run, run.strategy.plan(2).messages[0], method)
    terms = method.client(method).terms(msg, state, ctx)
    of = run.workspace.load(msg.weights), ctx.data, msg.local
    assert [term.kind for term in terms] == ["loss" if options else "penalty"]
    assert ctx._descent(*of, terms).quick is None
    assert ctx._descent(*of, []).quick is not None


def test_bad_counts_are_the_clients_failure(federation: Callable[..., Any]) -> None:
    sums = r".*2 whole numbers .*at least 1.*the sum 12"
    cases = [
        (None, "whole numbers are expected"),
        (torch.tensor([12.0, 0.0]), "whole numbers are expected"),
        (torch.tensor([12]), r"the shape \(1,\); expected: \(2,\)"),
        (torch.tensor([13, -1]), sums),
        (torch.tensor([6, 7]), sums),
    ]
    for counts, reason in cases:
        with named_case(counts):

            def falsify(
                plan: list[Broadcast], replies: list[Any], counts: Any = counts
            ) -> list[Any]:
                replies[-1].extras[COUNTS] = counts
                return replies

            with pytest.raises(RunFailed, match=rf"client 0 .*fedgen.counts.*{reason}"):
                federation(toy_task(), FedGen, options=SMALL).step(alter=falsify)


def test_a_generator_that_diverges_stops_the_run(federation: Callable[..., Any]) -> None:
    with pytest.raises(RunFailed, match=r"loss .*generator .*(nan|inf).*server_lr"):
        federation(toy_task(), FedGen, options={**SMALL, "server_lr": 1e30}).step()


class NoFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)


def test_an_unsuitable_model_is_refused(federation: Callable[..., Any]) -> None:
    for model in (lambda: nn.Sequential(nn.Linear(4, 2)), NoFeatures):
        message = rf"method=fedgen .*features\(x\).*`head`.* {type(model()).__name__}"
        with named_case(model), pytest.raises(ConfigError, match=message):
            federation(replace(toy_task(), model=model), FedGen)


def test_bad_options_are_named(federation: Callable[..., Any]) -> None:
    cases = [
        {"lam": -1},
        {"kl": -1},
        {"decay": 0},
        {"decay": 1.1},
        {"eta": -1},
        {"ensemble": "mean"},
        {"noise": "no"},
        {"noise_dim": 0},
        {"hidden": 0},
        {"server_steps": -1},
        {"server_lr": 0},
        {"server_batch_size": 1},
    ]
    for options in cases:
        with (
            named_case(options),
            pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}="),
        ):
            federation(toy_task(), FedGen, options=options)


def test_norm_clip_shortens_the_heads_too(
    federation: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those against which the generator is trained, and not only the mean of the weights."""
    heads: list[Tensor] = []
    stacked = fedgen.stacked

    def look(*args: Any) -> Tensor:
        heads.append(stacked(*args))
        return heads[-1]

    def alter(plan: list[Broadcast], replies: list[Upload]) -> list[Upload]:
        replies[1].weights = {name: t + 1e3 for name, t in replies[1].weights.items()}
        return replies

    monkeypatch.setattr(fedgen, "stacked", look)
    run = federation(toy_task(4), FedGen, merge=NormClip(norm=1e-2), options=SMALL)
    run.step(alter)
    assert len(heads) == 2
    for name, of_clients in zip(("head.weight", "head.bias"), heads, strict=True):
        change = (of_clients - run.workspace.initial[name]).flatten(1).norm(dim=1)
        assert 0 < change.max() <= 1.001e-2

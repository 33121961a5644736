"""FedSA as a method: rounds by hand, what it composes with, and what it records.

The equations are tested in tests/maths.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from convergence.quadratic import final_weight
from maths.cases import named_case
from maths.fedsa_literal import aggregate as literal
from methods.by_hand import EPOCHS, LR, SIZES, Weights, each, local_sgd, same, task
from safetensors.torch import load_file
from torch import Tensor

from fedhet.core import trees
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.server.server_opt import FedAvgM
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.methods.fedsa import FedSA

Launch = Callable[..., Any]
COMMON = [
    "seed=1",
    "rounds=3",
    "fraction=0.75",
    "client.epochs=2",
    "client.batch_size=5",
    "eval.every=3",
    "eval.clients=false",
]


def by_hand(local: list[Weights], **options: Any) -> Weights:
    """Section 3 of the paper, for each tensor."""
    new = {}
    for name, first in local[0].items():
        values = np.stack([w[name].ravel() for w in local])
        new[name] = literal(values, **options)["w"].reshape(first.shape)
    return new


@pytest.mark.parametrize(
    "options", [{}, {"cv_t": 0.01, "sim_t": 0.6, "C": 6, "S": 2}], ids=["defaults", "others"]
)
@pytest.mark.parametrize("beta", [None, 0.0, 0.7])
def test_rounds_by_hand(federation: Launch, options: dict[str, Any], beta: float | None) -> None:
    """Algorithm 1.

    With a server optimiser, the pseudo-gradient is what FedSA proposes minus the old value.
    """
    optimizer = None if beta is None else FedAvgM(lr=0.6, beta=beta)
    run = federation(
        task(),
        FedSA,
        lr=LR,
        epochs=EPOCHS,
        batch_size=max(SIZES),
        rounds=3,
        options=options,
        server_opt=optimizer,
    )
    v = None
    changed = 0.0
    for _ in range(3):
        x = {name: t.numpy().copy() for name, t in run.model.items()}
        cohort = [msg.pid for msg in run.step()]
        assert len(cohort) == len(SIZES)
        local = [local_sgd(x, k) for k in cohort]
        expected = by_hand(local, **options)
        plain = each(lambda *ws: sum(ws) / len(ws), *local)
        changed += sum(float(np.abs(expected[name] - plain[name]).max()) for name in x)
        if beta is not None:
            delta = each(np.subtract, expected, x)
            v = delta if v is None else each(lambda a, b: beta * a + b, v, delta)
            expected = each(lambda a, b: a + 0.6 * b, x, v)
        same({name: t.numpy() for name, t in run.model.items()}, expected)
    assert changed > 1e-3  # else this would be the uniform mean


def ulps(a: dict[str, Tensor], b: dict[str, Tensor]) -> int:
    """The largest distance of two entries, in units of the last place."""
    assert list(a) == list(b)
    distances = [(a[name].view(torch.int32) - b[name].view(torch.int32)).abs() for name in a]
    return max(int(distance.max()) for distance in distances)


@pytest.mark.parametrize(
    "options",
    [{"cv_t": 1.0}, {"cv_t": 1.0, "client_weighting": "samples"}],
    ids=["uniform", "samples"],
)
def test_cv_t_of_one_is_a_plain_mean(federation: Launch, options: dict[str, Any]) -> None:
    """Within one float32 ulp: by samples FedAvg; uniformly FedAvg of clients of equal size."""
    uniform = "client_weighting" not in options
    fedsa = federation(toy_task(equal=uniform), FedSA, options=options)
    fedavg = federation(toy_task(equal=uniform), FedAvg)
    fedsa.step()
    fedavg.step()
    assert ulps(fedsa.model, fedavg.model) <= 1


def test_one_client_is_plain_sgd(federation: Launch) -> None:
    fedsa, fedavg = (federation(toy_task(1), cls, rounds=3).run() for cls in (FedSA, FedAvg))
    assert ulps(fedsa.model, fedavg.model) <= 1


@pytest.mark.slow
def test_a_single_weight_is_averaged_uniformly() -> None:
    """One entry has one cv, so nothing is high: FedAvg's limit, as both clients have one sample."""
    problem = {"a": [1.0, 4.0], "b": [1.0, -1.0], "steps": 10, "lr": 0.05}
    limit = final_weight(**problem, method="fedsa", rounds=40)
    assert limit == pytest.approx(-0.379757, abs=1e-6)


# ---- what it composes with


def test_fedprox_trains_and_fedsa_aggregates(federation: Launch) -> None:
    mu = 0.8
    run = federation(
        task(),
        FedSA,
        lr=LR,
        epochs=EPOCHS,
        batch_size=max(SIZES),
        plugins=lambda: [FedProxPlugin(mu=mu)],
    )
    x = {name: t.numpy().copy() for name, t in run.model.items()}

    def pulled(g: Weights, w: Weights) -> Weights:
        return each(lambda a, b, c: a + mu * (b - c), g, w, x)

    local = [local_sgd(x, msg.pid, pulled) for msg in run.step()]
    same({name: t.numpy() for name, t in run.model.items()}, by_hand(local))


def test_fednorm_is_refused_where_it_would_be_void(federation: Launch) -> None:
    refusal = r"method=fedsa .*'fednorm'.*client_weighting=samples"
    with pytest.raises(ConfigError, match=refusal):
        federation(toy_task(), FedSA, plugins=lambda: [FedNormPlugin()])


def test_fednorm_sets_the_weights_of_the_means(federation: Launch) -> None:
    """With cv_t = 1 nothing is left of FedSA, and FedNorm on it is FedNorm."""

    def plugins() -> list[FedNormPlugin]:
        return [FedNormPlugin(temperature=0.05)]

    options = {"cv_t": 1.0, "client_weighting": "samples"}
    fedsa = federation(toy_task(), FedSA, plugins=plugins, options=options)
    fednorm = federation(toy_task(), FedAvg, plugins=plugins)
    fedavg = federation(toy_task(), FedAvg)
    for run in (fedsa, fednorm, fedavg):
        run.step()
    assert ulps(fedsa.model, fednorm.model) <= 1 < ulps(fedsa.model, fedavg.model)


def test_same_and_other_bytes(federation: Launch) -> None:
    """mu = 0 and beta = 0 change nothing, other values do."""

    def sha(mu: float | None = None, beta: float | None = None) -> str:
        run = federation(
            toy_task(8),
            FedSA,
            options={"cv_t": 0.01, "S": 2},
            plugins=lambda: [] if mu is None else [FedProxPlugin(mu=mu)],
            server_opt=None if beta is None else FedAvgM(beta=beta),
            rounds=3,
            fraction=0.75,
            epochs=2,
        )
        return trees.sha256({"model": run.run().model})

    first = sha()
    assert first == sha(mu=0) == sha(beta=0)
    assert len({first, sha(mu=1), sha(beta=0.9)}) == 3


@pytest.mark.slow
def test_two_workers_give_the_same_bytes(launch: Launch) -> None:
    lines = ["method=fedsa", "method.cv_t=0.01", "method.S=2"]
    one, two = (
        launch(*COMMON, *lines, f"engine.workers={workers}", task=toy_task(8)).summary
        for workers in (1, 2)
    )
    assert one["weights_sha256"] == two["weights_sha256"]


def test_every_option_changes_the_result(federation: Launch) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"cv_t": 0.2},
        {"sim_t": 0.9},
        {"C": 9},
        {"S": 1},
        {"cv_t": 0.2, "cv_clip_quantile": 0.6},
        {"mic_scale": "layer"},
        {"alpha_mode": "shrink"},
        {"sim_t": 0.9, "threshold": "always"},
        {"client_weighting": "samples"},
    ]
    sha256 = set()
    for change in changes:
        options = {"cv_t": 0.01, "S": 2, **change}
        run = federation(toy_task(8), FedSA, options=options, rounds=2, epochs=2).run()
        sha256.add(run.sha256)
    assert len(sha256) == len(changes)


# ---- buffers, records, failures


def test_buffers_are_averaged_beside_it(federation: Launch) -> None:
    received: list[Any] = []
    run = federation(toy_task(5, norm=True), FedSA, options={"cv_t": 0.0}, epochs=2)
    run.step(alter=lambda plan, replies: received.extend(replies) or replies)
    for name in ("body.1.running_mean", "body.1.running_var"):
        expected = torch.stack([update.weights[name].double() for update in received]).mean(0)
        torch.testing.assert_close(run.model[name].double(), expected, rtol=1e-6, atol=1e-8)
    batches = [int(update.weights["body.1.num_batches_tracked"]) for update in received]
    assert int(run.model["body.1.num_batches_tracked"]) == max(batches)


def test_the_unclustered_share(federation: Launch) -> None:
    """With one cluster and sim_t = 1 no client joins the pair that opens it.

    Three of five thus stay outside, at every tensor.
    """
    run = federation(toy_task(5), FedSA, options={"cv_t": 0.0, "S": 1, "sim_t": 1.0})
    run.step()
    assert run.current.recorded["fedsa"]["unclustered"] == pytest.approx(0.6)


def test_what_is_recorded(launch: Launch) -> None:
    run = launch(*COMMON, "method=fedsa", "method.cv_t=0.05", task=toy_task(6))
    assert set(run.summary["bytes"]["up"]) == {"model"}
    sizes = torch.tensor([p.numel() for p in toy_task().model().parameters()])
    rows = [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        arrays = load_file(run.dir / "arrays" / f"fedsa-{row['step']}.safetensors")
        high = arrays["frac_high_per_tensor"] * sizes
        torch.testing.assert_close(high, high.round(), rtol=0, atol=1e-9)
        assert row["fedsa.high"] == round(float(high.sum())) > 0
        assert row["fedsa.frac_high"] == pytest.approx(row["fedsa.high"] / int(sizes.sum()))
        assert 0 <= row["fedsa.unclustered"] <= 1


def test_a_client_with_nan_stops_the_run_or_is_left_out(federation: Launch) -> None:
    def poison(plan: list[Any], replies: list[Any]) -> list[Any]:
        bad = replies[2]
        weights = {name: t.clone() for name, t in bad.weights.items()}
        weights["head.bias"][0] = float("nan")
        return [replace(reply, weights=weights) if reply is bad else reply for reply in replies]

    def drop(plan: list[Any], replies: list[Any]) -> list[Any]:
        return replies[:2] + replies[3:]

    failure = r"client \d .*'train', step 1: .*'head.bias'.*NaN"
    with pytest.raises(RunFailed, match=failure):
        federation(toy_task(5), FedSA).step(alter=poison)
    skipped = federation(toy_task(5), FedSA, on_failure="skip")
    skipped.step(alter=poison)
    without = federation(toy_task(5), FedSA, on_failure="skip")
    without.step(alter=drop)
    assert skipped.sha256 == without.sha256
    assert len(skipped.current.failures) == 1


def test_bad_options_are_named(launch: Launch) -> None:
    cases = [
        ("cv_t=2", "method.cv_t=2 .*>= 0 and <= 1"),
        ("sim_t=-1", "method.sim_t=-1"),
        ("C=0", "method.C=0"),
        ("S=1.5", "method.S=1.5"),
        ("cv_clip_quantile=0", "method.cv_clip_quantile=0"),
        ("mic_scale=rank", "method.mic_scale=rank.*entry, layer, none"),
        ("alpha_mode=x", "method.alpha_mode=x"),
        ("threshold=x", "at_full, always"),
        ("client_weighting=n", "uniform, samples"),
    ]
    for setup, reason in cases:
        with named_case(setup, reason), pytest.raises(ConfigError, match=reason):
            launch("method=fedsa", f"method.{setup}", task=toy_task())

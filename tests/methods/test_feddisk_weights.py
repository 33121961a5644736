"""FedDisk: what the sample weights are, and what they do."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from methods.feddisk_task import TRAINED, Make, ctx, kept, kinds, plugins, task_of
from methods.readouts import place
from torch import Tensor, nn

from fedhet.core.kernel import Plugin, State
from fedhet.core.task import Samples
from fedhet.core.workspace import Workspace
from fedhet.data.toy import toy_task
from fedhet.methods.feddisk import FedDisk, FedDiskPlugin, densities, pooled


@pytest.mark.parametrize("ratio", ["sampled", "raw"])
def test_a_kind_that_is_rare_here_and_common_elsewhere_gets_more_weight(
    federation: Make, ratio: str
) -> None:
    """The truth is (.5 / .8, .5 / .2) = (.625, 2.5) at client 0 and the reverse at client 1."""
    task = task_of(kinds(80, 20, 0), kinds(20, 80, 1))
    run = federation(task, FedDisk, plugins=plugins(**TRAINED, ratio=ratio)).run()
    for pid, split in ((0, 80), (1, 20)):
        means = [float(part.mean()) for part in kept(run, pid).split([split, 100 - split])]
        common, rare = means if pid == 0 else means[::-1]
        assert 0.4 < common < 0.8
        assert 1.7 < rare < 3.5


@pytest.mark.parametrize("ratio", [pytest.param("sampled", marks=pytest.mark.slow), "raw"])
def test_identical_clients_have_weights_near_one(federation: Make, ratio: str) -> None:
    x = kinds(50, 50, 0)
    trained = plugins(**{**TRAINED, "clf_lr": 0.01}, ratio=ratio)
    run = federation(task_of(x, x, x), FedDisk, plugins=trained).run()
    for pid in range(3):
        w = kept(run, pid)
        assert float(w.mean()) == pytest.approx(1, abs=1e-6)
        assert densities.effective_size(w.double()) > 0.93 * 100


def test_small_clients_keep_weights_of_one(federation: Make) -> None:
    """12, 16, 20 and 24 samples, where 21 are required."""
    run = federation(toy_task(), FedDisk, plugins=plugins(min_samples=21, clf_max_epochs=50))
    for _ in range(4):
        run.step()
    assert run.current.recorded["feddisk"]["unweighted"] == 3
    ones = [bool((kept(run, pid) == 1).all()) for pid in range(4)]
    assert ones == [True, True, True, False]


class Single(nn.Module):
    """Softmax regression on a single input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def test_one_sample_and_one_input_are_allowed(federation: Make) -> None:
    x = torch.linspace(0, 1, 20)[:, None]
    run = federation(task_of(x, x[:1], x[:12], model=Single), FedDisk, plugins=plugins()).run()
    assert kept(run, 1).tolist() == [1.0]
    assert torch.isfinite(kept(run, 0)).all()


def test_effective_sample_sizes_are_recorded_and_low_ones_are_reported(
    federation: Make, caplog: pytest.LogCaptureFixture
) -> None:
    task = task_of(kinds(60, 2, 0), kinds(2, 60, 1))
    run = federation(task, FedDisk, plugins=plugins(**TRAINED, ratio="raw"))
    with caplog.at_level(logging.WARNING, logger="fedhet"):
        run.step()
    assert run.current.entry.name == "feddisk.weigh"
    recorded = run.current.recorded["feddisk"]
    expected = [
        densities.effective_size(kept(run, int(pid)).double()) / 62 for pid in recorded["pids"]
    ]
    np.testing.assert_allclose(recorded["ess"], expected, rtol=1e-12)
    assert recorded["ess_min"] == pytest.approx(min(expected))
    assert recorded["ess_mean"] == pytest.approx(sum(expected) / 2)
    assert min(expected) < 0.5
    assert "below n_k / 2 for" in caplog.text


def test_each_network_stops_early_by_its_own_settings(
    federation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loss is lower by 1e9, so the classifier's second epoch is its last.

    `local_patience` is that of the local MADE alone.
    """

    def weights(**options: Any) -> list[Tensor]:
        run = federation(toy_task(), FedDisk, plugins=plugins(**options)).run()
        return [kept(run, pid) for pid in range(4)]

    def same(one: list[Tensor], other: list[Tensor]) -> bool:
        return all(map(torch.equal, one, other))

    two_epochs = weights(clf_max_epochs=2, ratio="raw")
    early = {"clf_max_epochs": 9, "clf_patience": 1, "ratio": "raw"}
    assert same(weights(**early, clf_tolerance=1e9), two_epochs)
    assert not same(weights(**early, clf_tolerance=0), two_epochs)

    patiences = []
    fit_made = densities.fit_made
    monkeypatch.setattr(
        densities, "fit_made", lambda *args: patiences.append(args[5]) or fit_made(*args)
    )
    weights(local_patience=7, made_patience=2)
    assert patiences == [7] * 4


def test_binarised_inputs_are_draws_of_the_pixels(federation: Make) -> None:
    """0 and 1 stay as they are; the share of ones among the draws of others is their value."""
    share = torch.tensor([0.0, 1.0, 0.3, 0.8])
    run = federation(task_of(share.repeat(4000, 1)), FedDisk, plugins=plugins(binarise=True))
    x = FedDiskPlugin(binarise=True)._inputs(ctx(run, 0), 0)
    assert set(x.unique().tolist()) == {0, 1}
    np.testing.assert_allclose(x.mean(0), share, rtol=0, atol=5 * (0.25 / 4000) ** 0.5)
    assert x[:, 0].max() == 0
    assert x[:, 1].min() == 1


@dataclass(frozen=True, kw_only=True)
class More(Plugin):
    """Appends three samples to the training set, as FedGMM does."""

    name = "more"

    def data(self, samples: Samples, state: State) -> Samples:
        x, y = samples.x, samples.y
        return Samples(torch.cat([x, x[:3]]), torch.cat([y, y[:3]]))


def test_samples_that_another_plugin_adds_have_weight_one(federation: Make) -> None:
    run = federation(toy_task(), FedDisk, plugins=lambda: [*plugins()(), More()]).run()
    plugin = run.strategy.plugins[0]
    msg, state, here = place(run, run.strategy.plan(run.round).messages[0], plugin)
    w = kept(run, msg.pid)
    n = len(here.own)
    assert len(here.data) == n + 3
    (term,) = plugin.terms(msg, state, here)
    assert term.kind == "weight"
    assert torch.equal(term.f({}, None, term.own), torch.cat([w, torch.ones(3)]))
    more = torch.cat([w, torch.ones(4)])
    with pytest.raises(ValueError, match=f"{n + 3} samples.* weights .*{n + 4}"):
        plugin.terms(msg, {"w": {"w": more}}, here)


def test_the_pool_is_drawn_from_all_clients_without_replacement() -> None:
    sizes = [3, 9, 5]
    inputs = [
        torch.full((n, 4), 0.1 * pid) + torch.arange(n)[:, None] / 100
        for pid, n in enumerate(sizes)
    ]
    workspace = Workspace(task_of(*inputs), device=torch.device("cpu"), seed=0)
    for n in (9, 17):
        pool = pooled(workspace, 1, n)[:, 0]
        assert len(pool.unique()) == n
        assert torch.isin(pool, torch.cat(inputs)[:, 0]).all()
    own = torch.isin(pooled(workspace, 1, 9)[:, 0], inputs[1][:, 0])
    assert int(own.sum()) < 9

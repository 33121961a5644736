"""FedDisk: what the weights do, what travels and what it costs, and what is refused."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest
import torch
from test_feddisk import COMMON, LINES, Make, criterion, kept, phases, plugins, task_of
from torch import Tensor, nn

from fedhet import config
from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError, RunFailed
from fedhet.job import Job
from fedhet.maths import feddisk
from fedhet.messages import Broadcast, Failure
from fedhet.methods.feddisk import FedDisk, FedDiskPlugin
from fedhet.methods.feddisk import networks as density
from fedhet.plugin import Plugin
from fedhet.site import Site
from fedhet.state import MemoryStore
from fedhet.task import ClientData, Samples, Task

# ---- what the weights do


def kinds(n_first: int, n_second: int, seed: int) -> Tensor:
    """(n, 4): samples of two kinds, near (.9, .9, .9, .1) and (.1, .1, .1, .9)."""
    g = torch.Generator().manual_seed(seed)
    centre = torch.tensor([[0.9, 0.9, 0.9, 0.1]] * n_first + [[0.1, 0.1, 0.1, 0.9]] * n_second)
    return (centre + 0.05 * torch.randn(centre.shape, generator=g)).clamp(0, 1)


TRAINED = {
    "hidden": 20,
    "made_lr": 0.01,
    "made_max_rounds": 40,
    "local_max_epochs": 200,
    "clf_max_epochs": 200,
    "clf_lr": 0.1,
}


@pytest.mark.parametrize("ratio", ["sampled", "raw"])
def test_a_kind_that_is_rare_here_and_common_elsewhere_gets_more_weight(
    federation: Make, ratio: str
) -> None:
    """The truth is (.5 / .8, .5 / .2) = (.625, 2.5) at client 0 and the reverse at client 1."""
    run = federation(
        task_of(kinds(80, 20, 0), kinds(20, 80, 1)),
        FedDisk,
        plugins=plugins(**TRAINED, ratio=ratio),
    ).run()
    for pid, split in ((0, 80), (1, 20)):
        means = [float(part.mean()) for part in kept(run, pid).split([split, 100 - split])]
        common, rare = means if pid == 0 else means[::-1]
        assert 0.4 < common < 0.8 and 1.7 < rare < 3.5


@pytest.mark.parametrize("ratio", ["sampled", "raw"])
def test_identical_clients_have_weights_near_one(federation: Make, ratio: str) -> None:
    x = kinds(50, 50, 0)
    run = federation(
        task_of(x, x, x), FedDisk, plugins=plugins(**{**TRAINED, "clf_lr": 0.01}, ratio=ratio)
    ).run()
    for pid in range(3):
        w = kept(run, pid)
        assert float(w.mean()) == pytest.approx(1, abs=1e-6)
        assert feddisk.effective_size(w.double()) > 0.93 * 100


def test_small_clients_keep_weights_of_one(federation: Make) -> None:
    """12, 16, 20 and 24 samples; 21 are asked for."""
    run = federation(toy_task(), FedDisk, plugins=plugins(min_samples=21, clf_max_epochs=50))
    for _ in range(4):
        run.step()
    assert run.strategy.plugins[0].report["unweighted"] == 3
    ones = [bool((kept(run, pid) == 1).all()) for pid in range(4)]
    assert ones == [True, True, True, False]


def test_one_sample_and_one_input_are_allowed(federation: Make) -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    x = torch.linspace(0, 1, 20)[:, None]
    task = Task(
        Single,
        criterion,
        [ClientData(Samples(each, (each[:, 0] > 0.5).long())) for each in (x, x[:1], x[:12])],
        None,
        2,
    )
    run = federation(task, FedDisk, plugins=plugins()).run()
    assert kept(run, 1).tolist() == [1.0]
    assert torch.isfinite(kept(run, 0)).all()


def test_each_clients_effective_sample_size_is_recorded_and_low_ones_are_told(
    federation: Make, caplog: pytest.LogCaptureFixture
) -> None:
    run = federation(
        task_of(kinds(60, 2, 0), kinds(2, 60, 1)), FedDisk, plugins=plugins(**TRAINED, ratio="raw")
    )
    with caplog.at_level(logging.WARNING, logger="fedhet"):
        run.step()
    assert run.strategy.current.entry.name == "feddisk.weigh"
    report = run.strategy.plugins[0].report
    expected = [feddisk.effective_size(kept(run, int(pid)).double()) / 62 for pid in report["pids"]]
    np.testing.assert_allclose(report["ess"], expected, rtol=1e-12)
    assert (report["ess_min"], report["ess_mean"]) == pytest.approx(
        (min(expected), sum(expected) / 2)
    )
    assert min(expected) < 0.5 and "below n_k / 2 for" in caplog.text


def outputs(made: dict[str, Tensor], x: np.ndarray) -> np.ndarray:
    """P(x_d = 1 | x_<d) of a MADE with 4 inputs and 8 hidden units of degrees 1, 1, 1, 2, 2, 2, 3,
    3, unit by unit."""
    w = {name: t.double().numpy() for name, t in made.items()}
    degrees = [1, 1, 1, 2, 2, 2, 3, 3]
    hidden = [np.maximum(w["b1"][k] + x[:, :m] @ w["W1"][k, :m], 0) for k, m in enumerate(degrees)]
    logits = [
        w["b2"][d]
        + sum(
            (w["W2"][d, k] * hidden[k] for k, m in enumerate(degrees) if m <= d), np.zeros(len(x))
        )
        for d in range(4)
    ]
    return 1 / (1 + np.exp(-np.stack(logits, 1)))


@pytest.mark.parametrize("features", ["outputs", "conditional"])
def test_what_the_classifier_tells_apart_with_ratio_outputs(
    federation: Make, monkeypatch: pytest.MonkeyPatch, features: str
) -> None:
    """0: what the local MADE says of the client's own samples; 1: what the global MADE says of
    them. Asked at the former."""
    fitted, seen = [], []
    fit, classify = density.fit_made, density.classify
    monkeypatch.setattr(density, "fit_made", lambda *args: fitted.append(fit(*args)) or fitted[-1])
    monkeypatch.setattr(density, "classify", lambda *args: seen.append(args[:3]) or classify(*args))
    run = federation(toy_task(), FedDisk, plugins=plugins(ratio="outputs", features=features))
    plan = [run.step() for _ in range(4)][-1]
    for msg, local, (zeros, ones, at) in zip(plan, fitted, seen, strict=True):
        x = run.site.task.clients[msg.pid].train.x.double().numpy()
        for made, found in ((local, zeros), (run.strategy.weights["density"], ones), (local, at)):
            out = outputs(made, x)
            np.testing.assert_allclose(
                found,
                out if features == "outputs" else x * out + (1 - x) * (1 - out),
                rtol=1e-5,
                atol=1e-6,
            )


def test_each_network_stops_early_by_its_own_settings(
    federation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loss is lower by 1e9, so the classifier's second epoch is its last; a patience of 1 ends
    the local MADE's training alone."""

    def weights(**options: Any) -> list[Tensor]:
        run = federation(toy_task(), FedDisk, plugins=plugins(**options)).run()
        return [kept(run, pid) for pid in range(4)]

    def same(one: list[Tensor], other: list[Tensor]) -> bool:
        return all(map(torch.equal, one, other))

    two = weights(clf_max_epochs=2, ratio="raw")
    assert same(weights(clf_max_epochs=9, clf_patience=1, clf_tolerance=1e9, ratio="raw"), two)
    assert not same(weights(clf_max_epochs=9, clf_patience=1, clf_tolerance=0, ratio="raw"), two)

    asked = []
    fit = density.fit_made
    monkeypatch.setattr(density, "fit_made", lambda *args: asked.append(args[5]) or fit(*args))
    weights(local_patience=7, made_patience=2)
    assert asked == [7] * 4


def test_binarised_inputs_are_draws_of_the_pixels(federation: Make) -> None:
    """Of 0 and 1 these themselves; of others so many ones."""
    share = torch.tensor([0.0, 1.0, 0.3, 0.8])
    client = federation(
        task_of(share.repeat(4000, 1)), FedDisk, plugins=plugins(binarise=True)
    ).client()
    client.pid = 0
    x = client.plugins[0]._inputs()
    assert set(x.unique().tolist()) == {0, 1}
    np.testing.assert_allclose(x.mean(0), share, rtol=0, atol=5 * (0.25 / 4000) ** 0.5)
    assert x[:, 0].max() == 0 and x[:, 1].min() == 1


class More(Plugin):
    """Appends three samples to the training set, as FedGMM does."""

    name = "more"

    def data(self, raw: Samples) -> Samples:
        return Samples(torch.cat([raw.x, raw.x[:3]]), torch.cat([raw.y, raw.y[:3]]))


def test_samples_that_another_plugin_adds_have_weight_one(federation: Make) -> None:
    run = federation(toy_task(), FedDisk, plugins=lambda: [*plugins()(), More()]).run()
    client = run.client()
    client.receive(run.strategy.plan(run.round)[0])
    plugin, n = client.plugins[0], client.num_examples
    weights = plugin.sample_weights(Samples(torch.zeros(n + 3, 4), torch.zeros(n + 3)))
    assert torch.equal(weights, torch.cat([kept(run, client.pid), torch.ones(3)]))
    with pytest.raises(ValueError, match=f"trains on {n - 1} samples, but has weights for {n}"):
        plugin.sample_weights(Samples(torch.zeros(n - 1, 4), torch.zeros(n - 1)))


def test_the_pool_is_drawn_from_everybody_without_replacement() -> None:
    sizes = [3, 9, 5]
    inputs = [
        torch.full((n, 4), 0.1 * pid) + torch.arange(n)[:, None] / 100
        for pid, n in enumerate(sizes)
    ]
    plugin, pid = FedDiskPlugin(ratio="raw"), 1
    client = FedDisk.client_cls(
        Site(task_of(*inputs), device=torch.device("cpu"), seed=0), [plugin], MemoryStore()
    )
    client.pid = pid
    for n in (9, 17):
        pool = plugin._pooled(n)[:, 0]
        assert len(pool.unique()) == n
        assert torch.isin(pool, torch.cat(inputs)[:, 0]).all()
    assert len(torch.isin(plugin._pooled(9)[:, 0], inputs[1][:, 0]).nonzero()) < 9


# ---- what is sent, and what it costs


def test_only_the_made_and_the_classifier_travel(launch: Make) -> None:
    """Equation 19 is the bytes that one client sends and receives in the rounds of both kinds; w,
    ESS and the local MADE cost nothing."""
    run = launch(*COMMON, *LINES, "method=feddisk", task=toy_task())
    made, model, clients = 2 * 4 * 8 + 8 + 4, 4 * 3 + 3 + 3 * 2 + 2, 4
    sizes = run.summary["bytes"]
    assert sizes["up"] == {
        "density": 4 * made * 3 * clients,
        "model": 4 * model * 2 * clients,
        "feddisk.val": 8 * 3 * clients,
    }
    assert sizes["down"] == {
        "density": 4 * made * (3 + 1) * clients,
        "model": 4 * model * 2 * clients,
    }  # weigh needs the final MADE
    assert [phase["rounds"] for phase in run.summary["phases"]] == [3, 1, 2]
    rows = [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]
    assert [row["feddisk.E1"] for row in rows] == [1, 2, 3, 3, 3, 3]
    done = [(1, 0), (2, 0), (3, 0), (3, 0), (3, 1), (3, 2)]
    assert [row["feddisk.cost"] for row in rows] == [
        2 * (made * e1 + model * e2) for e1, e2 in done
    ]
    assert (run.dir / "arrays" / "feddisk.weigh-1.safetensors").exists()


def test_feddiskab_sends_the_classifier_only(launch: Make) -> None:
    run = launch(*COMMON, *LINES, "method=feddiskab", task=toy_task())
    assert set(run.summary["bytes"]["up"]) == set(run.summary["bytes"]["down"]) == {"model"}
    assert [phase["name"] for phase in run.summary["phases"]] == ["feddisk.weigh", "train"]


@pytest.mark.parametrize(
    ("method", "options", "before", "numbers"),
    [
        ("fedavg", [], 0, 0),
        ("feddisk", LINES, 3, 3 * (2 * 4 * 8 + 8 + 4)),
        ("feddiskab", LINES, 0, 0),
        ("fedgmm", [], 2, 0),
        ("fedlex", ["plugin.fedlex.e_exp=1"], 1, 0),
    ],
    ids=["fedavg", "feddisk", "feddiskab", "fedgmm", "fedlex"],
)
def test_effective_rounds_count_what_is_sent_up(
    launch: Make, method: str, options: list[str], before: int, numbers: int
) -> None:
    """E_1 and the first training round with the best accuracy: `weigh` is no communication,
    exploring and sending mixtures are."""
    run = launch(
        *COMMON,
        *options,
        f"method={method}",
        "rounds=4",
        "eval.every=1",
        "client.lr=1",
        task=toy_task(),
    )
    rows = [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]
    accuracy = [row["acc_global"] for row in rows if row["phase"] == "train"]
    first, model = 1 + accuracy.index(max(accuracy)), 4 * 3 + 3 + 3 * 2 + 2
    assert first > 1
    assert run.summary["communication"] == {
        "effective_rounds": before + first,
        "cost": 2 * (numbers + model * first),
    }


# ---- what is refused


@pytest.mark.parametrize("bad", [1.2, -0.1, float("nan")])
@pytest.mark.parametrize("ratio", ["sampled", "raw"])
def test_inputs_outside_the_unit_interval_name_client_and_phase(
    federation: Make, bad: float, ratio: str
) -> None:
    first, second = kinds(20, 20, 0), kinds(20, 20, 1)
    second[3, 1] = bad
    run = federation(task_of(first, second), FedDisk, plugins=plugins(ratio=ratio))
    phase = "weigh" if ratio == "raw" else "density"
    with pytest.raises(
        RunFailed,
        match=(
            rf"client {'0' if ratio == 'raw' else '1'} .*feddisk\.{phase}.*the data of client 1:"
            r" .*\[0, 1\]"
        ),
    ):
        run.step()


def test_a_made_that_diverges_names_client_and_phase(federation: Make) -> None:
    run = federation(toy_task(), FedDisk, plugins=plugins(made_optimizer="sgd", made_lr=1e38))
    with pytest.raises(
        RunFailed, match=r"client 3 .*feddisk\.density.*(loss of the global MADE|NaN or infinite)"
    ):
        run.step()


def test_a_client_that_has_no_weights_is_told(federation: Make) -> None:
    def drop(plan: list[Any], replies: list[Any]) -> list[Any]:
        away = plan[0].phase == "feddisk.weigh"
        return [
            Failure(2, "feddisk.weigh", 1, "away") if away and reply.pid == 2 else reply
            for reply in replies
        ]

    run = federation(toy_task(), FedDisk, plugins=plugins(), on_failure="skip").run(alter=drop)
    assert [(f.pid, f.phase) for f in run.strategy.current.failures] == [(2, "train")]
    assert "no sample weights" in run.strategy.current.failures[0].cause


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": "pixels"},
        {"masks": "natural"},
        {"features": "x"},
        {"normalise": "sum"},
        {"binarise": 1},
        {"hidden": 0},
        {"made_lr": 0},
        {"made_optimizer": "lbfgs"},
        {"made_batch_size": 0},
        {"made_local_epochs": 0},
        {"made_patience": 0},
        {"made_max_rounds": 0},
        {"local_patience": 0},
        {"local_max_epochs": 0},
        {"clf_hidden": 0},
        {"clf_lr": -1},
        {"clf_batch_size": 1.5},
        {"clf_patience": 0},
        {"clf_tolerance": -1e-9},
        {"clf_max_epochs": 0},
        {"lo": 0},
        {"lo": 1.1},
        {"hi": 0.9},
        {"eps": 0.5},
        {"eps": 0},
        {"min_samples": 1},
        {"binarise": True, "ratio": "raw"},
    ],
    ids=str,
)
def test_bad_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"plugin\.feddisk\.{next(iter(options))}="):
        FedDiskPlugin(**options)


def test_pooling_is_for_simulations(caplog: pytest.LogCaptureFixture) -> None:
    settings = config.compose(["method=feddiskab"])
    with pytest.raises(ConfigError, match="pools the clients' raw data"):
        _ = Job(settings, toy_task(), engine="flwr").strategy
    with caplog.at_level(logging.WARNING, logger="fedhet"):
        _ = Job(settings, toy_task(), engine="ray").strategy
    assert "not federated learning" in caplog.text


@pytest.mark.parametrize("lines", [["plugin=[feddisk]"], ["plugin.feddisk.ratio=outputs"]])
def test_feddiskab_is_ratio_raw(lines: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"method=feddiskab is FedDisk with plugin\.feddisk\.ratio=raw"
    ):
        _ = Job(config.compose(["method=feddiskab", *lines]), toy_task()).strategy
    preset = config.compose(["method=feddiskab", "plugin.feddisk.lo=.2"]).cfg.plugin.feddisk
    assert (preset.ratio, preset.lo) == ("raw", 0.2)


def test_nobody_who_validates_is_told(federation: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fedhet"):
        run = federation(toy_task(), FedDisk, plugins=plugins(min_samples=99)).run()
    assert "no client validates" in caplog.text
    assert phases(run) == {"feddisk.density": 3, "feddisk.weigh": 1, "train": 1}


def test_a_message_before_the_weights_says_so(federation: Make) -> None:
    run = federation(toy_task(), FedDisk, plugins=plugins())
    digests = {plugin.name: plugin.digest() for plugin in run.strategy.plugins}
    msg = Broadcast(
        phase="train",
        step=1,
        round=1,
        local=run.strategy.local,
        slot="model",
        weights=run.model,
        trains=True,
        plugins=digests,
        pid=0,
    )
    reply = run.client().handle(msg)
    assert isinstance(reply, Failure) and "phase 'feddisk.weigh' has not reached it" in reply.cause

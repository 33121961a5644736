"""The character LSTM, alone and in a federation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data.leaf_files import windows, write_leaf
from maths.cases import named_case
from torch import nn

from fedhet.core.errors import ConfigError
from fedhet.core.targets import cross_entropy
from fedhet.core.task import ClientData, Task
from fedhet.data.leaf import ALPHABET
from fedhet.data.toy import toy_task
from fedhet.models import CharLSTM


def lstm(**other: Any) -> CharLSTM:
    torch.manual_seed(0)
    return CharLSTM(
        **{"shape": (6,), "classes": 9, "embedding": 3, "hidden": 5, "layers": 2, **other}
    )


def test_shapes_and_size() -> None:
    model, x = lstm(), torch.randint(0, 9, (4, 6), dtype=torch.int16)
    assert model.features(x).shape == (4, 5)
    assert torch.equal(model(x), model.head(model.features(x)))
    assert model(x).shape == (4, 9)
    assert type(model.head) is nn.Linear
    assert list(model.state_dict())[-2:] == ["head.weight", "head.bias"]
    nn.functional.cross_entropy(model(x), torch.tensor([0, 3, 8, 8])).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    full = CharLSTM(shape=(80,), classes=len(ALPHABET), embedding=8, hidden=256, layers=2)
    # four gates, each with weights for the input and the state, and two biases
    layers = [4 * 256 * (width + 256 + 2) for width in (8, 256)]
    assert sum(p.numel() for p in full.parameters()) == 80 * 8 + sum(layers) + 257 * 80 == 819_920


def test_it_is_the_recurrence() -> None:
    """One layer, compared step by step with Hochreiter & Schmidhuber 1997 with forget gates."""
    model, x = lstm(layers=1).double(), torch.tensor([[1, 4, 4, 8]])
    w = model.lstm.weight_ih_l0
    u = model.lstm.weight_hh_l0
    b = model.lstm.bias_ih_l0 + model.lstm.bias_hh_l0
    h = c = torch.zeros(5, dtype=torch.float64)
    for token in x[0]:
        i, f, g, o = (w @ model.embedding.weight[token] + u @ h + b).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    assert torch.allclose(model.features(x)[0], h)


def test_what_it_refuses() -> None:
    message = r"CharLSTM .*text, .*\(T,\).*\(1, 8, 8\)"
    with pytest.raises(ConfigError, match=message):
        lstm(shape=(1, 8, 8))
    for key in ("embedding", "hidden", "layers"):
        with pytest.raises(ConfigError, match=rf"model\.{key}=0"):
            lstm(**{key: 0})


# ---- text in a run


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides for 60 windows of a repetitive text, three clients, and a small LSTM."""
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "cache"))
    write_leaf(
        tmp_path / "shakespeare",
        {f"user {k}": windows("thou, ", 20) for k in range(3)},
        {"user 0": windows("thou, ", 20)},
    )
    return [
        f"data_dir={tmp_path}",
        "dataset=shakespeare",
        "partition=iid",
        "partition.clients=3",
        "partition.min_size=1",
        "client=adam",
        "client.lr=0.1",
        "model.hidden=8",
        "model.layers=1",
        "rounds=2",
        "client.epochs=5",
        "client.batch_size=4",
    ]


@pytest.mark.parametrize(
    "lines",
    [
        ["method=scaffold", "plugin=[fednorm]"],
        ["method=fedsgd"],
        *(
            pytest.param(lines, marks=pytest.mark.slow)
            for lines in (
                ["method=fednova", "plugin=[fedlex]", "plugin.fedlex.e_exp=1"],
                ["method=fedsa"],
                ["method=fedbabu", "plugin=[fedprox]"],
            )
        ),
    ],
    ids=lambda lines: lines[0],
)
def test_methods_without_densities_train_on_text(
    launch: Callable[..., Any], lines: list[str]
) -> None:
    x = torch.arange(3 * 12 * 6, dtype=torch.int16).view(3, 12, 6) * 7 % 9
    clients = [ClientData((own, own[:, 0].long()), None, (own[:4], own[:4, 0].long())) for own in x]
    task = Task(lstm, cross_entropy, clients, (x[0], x[0, :, 0].long()), 9)
    done = launch("rounds=2", "client.batch_size=4", *lines, task=task)
    assert done.summary["status"] == "ok"
    assert all(torch.isfinite(t).all() for t in done.weights.values())
    start = lstm().state_dict()
    recurrent = [name for name in done.weights if name.startswith("lstm")]
    assert any(not torch.equal(done.weights[name], start[name]) for name in recurrent)


@pytest.mark.matrix
def test_workers_make_no_difference(launch: Callable[..., Any], text: list[str]) -> None:
    runs = [launch(*text, "method=fedavg", f"engine.workers={workers}") for workers in (1, 2)]
    one, two = (run.summary["weights_sha256"] for run in runs)
    assert one == two


def test_it_learns(launch: Callable[..., Any], text: list[str]) -> None:
    done = launch(*text, "method=fedavg", "eval.every=2")
    assert done.summary["model"] == "char_lstm"  # which the dataset chooses
    assert done.summary["accuracy"]["last"] == 1.0  # each character determines the next


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method=fedgmm"], "'fedgmm' .*density.*token numbers"),
        (["method=feddisk"], "'feddisk' .*density.*token numbers"),
        (
            ["method=fedavg", "model=mlp"],
            r"MLP reads .*shakespeare .*\(80,\), torch\.int16.* model=char_lstm",
        ),
    ],
)
def test_what_is_refused_on_text(
    launch: Callable[..., Any], text: list[str], overrides: list[str], message: str
) -> None:
    if "model=mlp" in overrides:  # the settings of the LSTM must go, too
        text = [override for override in text if not override.startswith("model")]
    with pytest.raises(ConfigError, match=message):
        launch(*text, *overrides)


@pytest.mark.slow
def test_shakespeare_alone_chooses_a_model_that_reads_text(
    launch: Callable[..., Any], text: list[str]
) -> None:
    lines = [line for line in text if not line.startswith("model")]
    run = launch(*lines, "method=fedavg", "client.epochs=1", "rounds=1")
    assert run.summary["model"] == "char_lstm"
    assert run.summary["status"] == "ok"


def test_an_lstm_refuses_a_table(launch: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,b,label\n" + "1,2,x\n3,4,y\n" * 10)
    settings = ["dataset=csv", "partition=iid", "partition.clients=2"]
    message = r"CharLSTM reads .*token numbers \(T,\).* csv .*\(2,\), torch\.float64"
    with pytest.raises(ConfigError, match=message):
        launch(f"data_dir={tmp_path}", *settings, "model=char_lstm", "method=fedavg")


def test_densities_refuse_a_table_outside_the_unit_interval(launch: Callable[..., Any]) -> None:
    toy = toy_task()
    test = (torch.full((3, 4), 2.0), torch.zeros(3).long())
    message = r"density .*inputs .*\[0, 1\].*\[2, 2\]"
    task = Task(toy.model, toy.criterion, toy.clients, test, 2)
    for method in ("fedgmm", "feddisk", "feddiskab"):
        with named_case(method), pytest.raises(ConfigError, match=message):
            launch(f"method={method}", task=task)

"""Evaluation on all clients, model selection by validation, and what clients remember."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as parquet
import pytest
import torch
from torch import nn

import fedhet
from fedhet import trees
from fedhet.client import FedClient
from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError, RunFailed
from fedhet.messages import Broadcast
from fedhet.methods.fedavg import FedAvg
from fedhet.metrics import macro_f1
from fedhet.record.terminal import step_line
from fedhet.server import Selection

Launch = Callable[..., Any]
SHORT = ["method=fedavg", "rounds=3", "fraction=0.4", "client.lr=0.1", "client.epochs=1"]


def validated(clients: int = 5, val: int = 12, **how: Any) -> fedhet.Task:
    """Clients with validation and test data of their own."""
    task = toy_task(clients, **how)
    draw = torch.Generator().manual_seed(1)

    def part(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(n, *task.clients[0].train.x.shape[1:], generator=draw)
        return x, torch.randint(task.classes, (n,), generator=draw)

    task.clients = [
        fedhet.ClientData(client.train, part(val) if val else None, part(7 + pid))
        for pid, client in enumerate(task.clients)
    ]
    return task


def rows(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]


def test_every_client_is_evaluated_whoever_took_part(launch: Launch) -> None:
    """The files have each client's scores, computed here from the final model by definition."""
    task = validated()
    run = launch(*SHORT, "eval.every=2", task=task)
    assert sorted(path.name for path in (run.dir / "clients").iterdir()) == [
        "round-000002.parquet",
        "round-000003.parquet",
    ]
    table = parquet.dataset(run.dir / "clients").to_table().to_pandas()
    assert list(table.columns) == ["round", "client", "split", "model", "metric", "value"]
    last = table[table["round"] == 3].set_index(["client", "split", "model", "metric"])["value"]
    model = task.model()
    model.load_state_dict(run.weights)
    model.eval()
    accuracies = []
    for pid, client in enumerate(task.clients):
        for split, samples in (("val", client.val), ("test", client.test)):
            logits, y = model(samples.x).detach(), samples.y
            confusion = torch.zeros(task.classes, task.classes, dtype=torch.int64)
            for target, guess in zip(y.tolist(), logits.argmax(1).tolist(), strict=True):
                confusion[target, guess] += 1
            expected = {
                "n": len(y),
                "accuracy": float((logits.argmax(1) == y).double().mean()),
                "f1": macro_f1(confusion),
                "loss": float(nn.functional.cross_entropy(logits, y)),
            }
            for metric, value in expected.items():
                assert last[pid, split, "global", metric] == pytest.approx(value, abs=1e-6), (
                    pid,
                    split,
                    metric,
                )
        accuracies.append(expected["accuracy"])
    final = rows(run)[-1]
    assert final["acc_clients_mean"] == pytest.approx(sum(accuracies) / 5, abs=1e-6)
    sizes = [len(client.test) for client in task.clients]
    assert final["acc_clients_weighted"] == pytest.approx(
        sum(a * n for a, n in zip(accuracies, sizes, strict=True)) / sum(sizes), abs=1e-6
    )


def test_fine_tuning_to_evaluate_is_plain_training_and_leaves_no_trace(launch: Launch) -> None:
    """For SCAFFOLD, whose own gradient is not that of plain training; one client, so that plain SGD
    can be done by hand."""
    lines = [
        "method=scaffold",
        "rounds=2",
        "client.lr=0.1",
        "client.epochs=1",
        "client.batch_size=1000",
    ]
    plain, tuned = (launch(*lines, f"eval.finetune_epochs={n}", task=validated(3)) for n in (0, 2))
    assert tuned.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert "finetuned" not in plain.summary and set(tuned.summary["finetuned"]) == {
        "last",
        "best_val",
        "best_test",
    }
    task = validated(3)
    table = parquet.dataset(tuned.dir / "clients").to_table().to_pandas()
    found = table[
        (table["round"] == 2)
        & (table.split == "test")
        & (table.model == "finetuned")
        & (table.metric == "loss")
    ]
    for pid, client in enumerate(task.clients):
        model = task.model()
        model.load_state_dict(tuned.weights)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):  # epochs of one batch
            sgd.zero_grad()
            nn.functional.cross_entropy(model(client.train.x), client.train.y).backward()
            sgd.step()
        assert float(found[found.client == pid].value.iloc[0]) == pytest.approx(
            float(nn.functional.cross_entropy(model(client.test.x), client.test.y)), abs=1e-5
        )


class _Judged:
    """What `Selection` asks a strategy and a record."""

    def __init__(self, patience: int | None, min_delta: float = 0.0, rounds: int = 10) -> None:
        self.setting = type("Setting", (), {"patience": patience, "min_delta": min_delta})
        self.rounds, self.kept, self.closed = rounds, [], False
        self.step = 0

    @property
    def current(self) -> Any:
        return type(
            "Step", (), {"step": self.step, "entry": type("Entry", (), {"rounds": self.rounds})}
        )

    def keep_best(self, strategy: _Judged) -> None:
        self.kept.append(self.step)

    def end_phase(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("patience", "min_delta", "expected"), [(2, 0.0, 5), (3, 0.0, 6), (2, 0.1, 3), (None, 0.0, 7)]
)
def test_training_stops_where_validation_no_longer_improves(
    patience: int | None, min_delta: float, expected: int
) -> None:
    judged = _Judged(patience, min_delta)
    select = Selection(judged, judged)  # type: ignore[arg-type]
    for accuracy in (0.5, 0.55, 0.58, 0.58, 0.4, 0.3, 0.6):
        judged.step += 1
        select({"acc_val_weighted": accuracy, "acc_global": 1 - accuracy})
        if judged.closed:
            break
    assert judged.step == expected
    assert judged.kept == [step for step in (1, 2, 3, 7) if step <= expected]


def test_a_loss_is_watched_where_there_is_no_accuracy() -> None:
    judged = _Judged(1)
    select = Selection(judged, judged)  # type: ignore[arg-type]
    for loss in (2.0, 1.0, 1.5):
        judged.step += 1
        select({"loss_val_weighted": loss})
    assert judged.kept == [1, 2] and judged.closed


def test_the_best_model_by_validation_is_kept(launch: Launch) -> None:
    """A rate that is far too large: validation gets worse, so the last model is not the best
    one."""
    run = launch(
        "method=fedavg", "rounds=8", "client.lr=3", "early_stopping.patience=3", task=validated()
    )
    found = rows(run)
    best = max(found, key=lambda row: row["acc_val_weighted"])
    assert len(found) == best["step"] + 3 < 8
    assert run.summary["phases"] == [{"name": "train", "rounds": len(found)}]
    shorter = launch("method=fedavg", f"rounds={best['step']}", "client.lr=3", task=validated())
    import safetensors.torch

    assert (
        trees.sha256({"model": safetensors.torch.load_file(run.dir / "best_val.safetensors")})
        == shorter.summary["weights_sha256"]
    )
    assert run.summary["accuracy"] == {
        "last": found[-1]["acc_global"],
        "best_val": best["acc_global"],
        "best_test": max(row["acc_global"] for row in found),
    }


def test_stopping_needs_validation_data(launch: Launch) -> None:
    with pytest.raises(RunFailed, match="no client has validation samples"):
        launch(*SHORT, "early_stopping.patience=1", task=validated(val=0))
    with pytest.raises(ConfigError, match=r"early_stopping\.patience=1 needs eval\.clients=true"):
        launch(*SHORT, "early_stopping.patience=1", "eval.clients=false", task=validated())


class _Fails(FedClient):
    """FedAvg's, but some clients cannot evaluate."""

    who: tuple[int, ...] = ()

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        if self.pid in self.who:
            raise OSError("the disk is full")
        return super().views(msg)


def test_a_client_that_cannot_evaluate(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops the run, or is left out of this evaluation and reported; where nobody can evaluate,
    the run has failed."""
    reference = launch(*SHORT, task=validated())
    monkeypatch.setattr(FedAvg, "client_cls", _Fails)
    monkeypatch.setattr(_Fails, "who", (1,))
    with pytest.raises(
        RunFailed, match="client 1 failed in phase 'evaluate', step 1: OSError: the disk is full"
    ) as caught:
        launch(*SHORT, task=validated())
    assert (
        len((Path(str(caught.value.folder)) / "rounds.jsonl").read_text().splitlines()) == 1
    )  # the step itself was done
    run = launch(*SHORT, "on_failure=skip", task=validated())
    assert run.summary["weights_sha256"] == reference.summary["weights_sha256"]
    assert [(f["round"], f["pid"], f["phase"]) for f in run.summary["failures"]] == [
        (n, 1, "evaluate") for n in (1, 2, 3)
    ]
    table = parquet.dataset(run.dir / "clients").to_table().to_pandas()
    assert set(table.client) == {0, 2, 3, 4}
    last = table[(table["round"] == 3) & (table.split == "test") & (table.metric == "accuracy")]
    assert rows(run)[-1]["acc_clients_mean"] == pytest.approx(last.value.mean())
    monkeypatch.setattr(_Fails, "who", range(5))
    with pytest.raises(RunFailed, match=r"client 0 failed.*client 4 failed"):
        launch(*SHORT, "on_failure=skip", task=validated())


def test_stopping_in_the_middle_of_a_timetable(launch: Launch) -> None:
    """Steps before the training, evaluations in every second round, personal models alone: the
    phase ends at an evaluation, once."""
    lines = [
        "method=fedpcl",
        "rounds=9",
        "eval.every=2",
        "client.lr=1e-9",
        "early_stopping.patience=2",
    ]
    run = launch(*lines, task=validated())
    evaluated = [row["step"] for row in rows(run) if row["acc_clients_mean"] is not None]
    assert run.summary["phases"] == [
        {"name": "collect", "rounds": 1},
        {"name": "train", "rounds": 6},
    ]
    assert evaluated == [2, 4, 6]  # such steps move no model: none is better than the first
    assert launch(*lines, "rounds=3", task=validated()).summary["phases"][-1] == {
        "name": "train",
        "rounds": 3,
    }
    assert run.summary["models"] == ["personal"] and run.summary["accuracy"]["best_val"] is None
    assert run.summary["validation"] == rows(run)[2]["acc_val_weighted"]


def test_what_a_line_tells() -> None:
    """The global model's accuracy, else that of the clients' models."""
    row = {
        "phase": "train",
        "step": 2,
        "acc_global": 0.5,
        "loss_global": None,
        "acc_clients_mean": 0.25,
        "failures": [],
    }
    assert step_line(row) == "train 2, accuracy 0.5000"
    assert step_line(row | {"acc_global": None}) == "train 2, clients' accuracy 0.2500"
    assert step_line(row | {"acc_global": None, "acc_clients_mean": None}) == "train 2"


def test_models_that_a_run_does_not_have(
    launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = ["rounds=1", "client.epochs=1", "partition.clients=2", "model.hidden=[4]"]
    run = launch("method=fedavg", *lines, "partition.split=[.8,0,.2]")
    assert run.summary["validation"] is None
    with pytest.raises(
        ConfigError,
        match=r"best_val.safetensors is missing: no evaluation has chosen.*partition\.split",
    ):
        fedhet.load(run.dir, "best_val")
    assert not caplog.records
    (run.dir / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing: the run has not ended"):
        fedhet.load(run.dir)
    with pytest.raises(ConfigError, match=r"not the folder of a run: .*partition\.json is missing"):
        fedhet.load(tmp_path)
    fedhet.load(launch("method=fedpcl", *lines).dir)
    assert "method=fedpcl has no global model" in caplog.text


def test_what_clients_remember_is_charged(launch: Launch) -> None:
    """SCAFFOLD keeps one number for each trained parameter, at those who took part."""
    run = launch("method=scaffold", "rounds=2", "fraction=0.4", "client.lr=0.1", task=toy_task(5))
    size = sum(t.nbytes for t in run.weights.values())
    seen: set[int] = set()
    for row in rows(run):
        seen |= set(row["cohort"])
        assert row["client_state"] == {
            "clients": len(seen),
            "bytes": size * len(seen),
            "largest": size,
        }
    assert run.summary["client_state"] == rows(run)[-1]["client_state"]
    assert launch(*SHORT, task=toy_task(5)).summary["client_state"] == {
        "clients": 0,
        "bytes": 0,
        "largest": 0,
    }

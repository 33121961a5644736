"""Evaluation on all clients: their scores by definition, fine-tuning, failures, and the records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as parquet
import pytest
import torch
from contracts.runs import SHORT, rows, validated, without_seconds
from pandas import DataFrame
from torch import nn

import fedhet
from fedhet.core.client.client import FedClient
from fedhet.core.client.context import ClientContext
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.kernel import Client, Message, State
from fedhet.core.messages import Upload
from fedhet.core.targets import macro_f1
from fedhet.core.task import Samples
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.runs.config import compose
from fedhet.runs.record.terminal import step_line

Launch = Callable[..., Any]


def scores_of_clients(run: Any) -> DataFrame:
    """The run's files clients/*.parquet as one table."""
    return parquet.dataset(run.dir / "clients").to_table().to_pandas()


def by_definition(model: nn.Module, samples: Samples, classes: int) -> dict[str, float]:
    """The scores of a model, computed without fedhet's evaluation."""
    logits = model(samples.x).detach()
    guesses = logits.argmax(1)
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    for target, guess in zip(samples.y.tolist(), guesses.tolist(), strict=True):
        confusion[target, guess] += 1
    return {
        "n": len(samples.y),
        "accuracy": float((guesses == samples.y).double().mean()),
        "f1": macro_f1(confusion[None])[0],
        "loss": float(nn.functional.cross_entropy(logits, samples.y)),
    }


def test_all_clients_are_evaluated_whether_or_not_they_trained(launch: Launch) -> None:
    """The files have each client's scores by the final model."""
    task = validated()
    run = launch(*SHORT, "eval.every=2", task=task)
    files = sorted(path.name for path in (run.dir / "clients").iterdir())
    assert files == ["round-000002.parquet", "round-000003.parquet"]
    table = scores_of_clients(run)
    assert list(table.columns) == ["round", "client", "split", "model", "metric", "value"]
    last = table[table["round"] == 3].set_index(["client", "split", "model", "metric"])["value"]
    model = task.model()
    model.load_state_dict(run.weights)
    model.eval()
    accuracies = []
    for pid, client in enumerate(task.clients):
        for split, samples in (("val", client.val), ("test", client.test)):
            expected = by_definition(model, samples, task.classes)
            for metric, value in expected.items():
                key = (pid, split, "global", metric)
                assert last[key] == pytest.approx(value, abs=1e-6), key
        accuracies.append(expected["accuracy"])
    final = rows(run)[-1]
    assert final["acc_clients_mean"] == pytest.approx(sum(accuracies) / 5, abs=1e-6)
    sizes = [len(client.test) for client in task.clients]
    weighted = sum(a * n for a, n in zip(accuracies, sizes, strict=True)) / sum(sizes)
    assert final["acc_clients_weighted"] == pytest.approx(weighted, abs=1e-6)


def test_training_data_are_evaluated_where_the_run_asks_for_it(launch: Launch) -> None:
    """By the final model, and nothing else changes."""
    plain = launch(*SHORT, task=validated())
    run = launch(*SHORT, "eval.train=true", task=validated())
    assert run.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert not [key for row in rows(plain) for key in row if "train" in key]
    task = validated()
    model = task.model()
    model.load_state_dict(run.weights)
    model.eval()
    expected = [by_definition(model, client.train, task.classes) for client in task.clients]
    final, samples = rows(run)[-1], sum(one["n"] for one in expected)
    for short, metric in (("acc", "accuracy"), ("loss", "loss")):
        plain_mean = sum(one[metric] for one in expected) / len(expected)
        weighted = sum(one[metric] * one["n"] for one in expected) / samples
        assert final[f"{short}_train_mean"] == pytest.approx(plain_mean, abs=1e-6)
        assert final[f"{short}_train_weighted"] == pytest.approx(weighted, abs=1e-6)
    added = [key for key in final if "train" in key]
    assert without_seconds(run, *added)[-1] == without_seconds(plain)[-1]


def test_no_scores_of_few_training_samples_are_sent(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's limit counts like the run's."""
    sizes = [len(client.train) for client in validated().clients]
    assert min(sizes) < max(sizes)
    monkeypatch.setenv("FEDHET_MIN_COUNT", str(max(sizes)))
    run = launch(*SHORT, "eval.train=true", task=validated())
    table = scores_of_clients(run)
    told = set(table[table.split == "train"].client)
    assert told == {pid for pid, size in enumerate(sizes) if size == max(sizes)}
    assert set(table[table.split == "test"].client) == set(range(len(sizes)))


def test_models_that_are_fetched_are_not_scored_on_training_data_again(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best personal models are fetched after the training, from their earlier round."""
    fetched: list[bool] = []
    assess = FedClient.assess

    def noting(self: FedClient) -> Upload:
        if "eval.keep" in self.msg.extras and self.msg.round < 3:
            fetched.append("eval.train" in self.msg.extras)
        return assess(self)

    monkeypatch.setattr(FedClient, "assess", noting)
    launch(*SHORT, "method=ditto", "client.lr=5", "eval.train=true", task=validated())
    assert fetched
    assert not any(fetched)


def test_scores_of_training_data_that_nobody_asked_for_are_refused(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assess = FedClient.assess

    def eager(self: FedClient) -> Upload:
        update = assess(self)
        update.metrics["train.global.loss"] = 0.0
        return update

    monkeypatch.setattr(FedClient, "assess", eager)
    with pytest.raises(RunFailed, match=r"metric '?train\.global\.loss"):
        launch(*SHORT, task=validated())


def test_evaluating_training_data_needs_clients_that_evaluate() -> None:
    with pytest.raises(ConfigError, match=r"eval\.train=true .*eval\.clients=true"):
        compose(["eval.train=true", "eval.clients=false"])


def test_fine_tuning_for_an_evaluation_is_plain_training_and_leaves_no_trace(
    launch: Launch,
) -> None:
    """For SCAFFOLD, whose own gradient is not that of plain training.

    Each epoch is one batch, so that the test can do plain SGD itself.
    """
    lines = [
        "method=scaffold",
        "rounds=2",
        "client.lr=0.1",
        "client.epochs=1",
        "client.batch_size=1000",
    ]
    plain = launch(*lines, "eval.finetune_epochs=0", task=validated(3))
    tuned = launch(*lines, "eval.finetune_epochs=2", task=validated(3))
    assert tuned.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert "finetuned" not in plain.summary
    assert set(tuned.summary["finetuned"]) == {"last", "best_val", "best_test"}
    task = validated(3)
    table = scores_of_clients(tuned)
    losses = table[
        (table["round"] == 2)
        & (table.split == "test")
        & (table.model == "finetuned")
        & (table.metric == "loss")
    ]
    for pid, client in enumerate(task.clients):
        model = task.model()
        model.load_state_dict(tuned.weights)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            sgd.zero_grad()
            nn.functional.cross_entropy(model(client.train.x), client.train.y).backward()
            sgd.step()
        expected = by_definition(model, client.test, task.classes)["loss"]
        loss = float(losses[losses.client == pid].value.iloc[0])
        assert loss == pytest.approx(expected, abs=1e-5)


class CannotEvaluate(Client):
    """A FedAvg client that fails in evaluations if it is one of `failing`."""

    failing: tuple[int, ...] = ()

    def views(
        self, msg: Message, state: State, ctx: ClientContext
    ) -> dict[str, Callable[[], nn.Module]]:
        if msg.pid in self.failing:
            raise OSError("the disk is full")
        return super().views(msg, state, ctx)


def test_a_client_that_cannot_evaluate(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops the run, or is left out of this evaluation and reported.

    Where no client can evaluate, the run has failed.
    """
    reference = launch(*SHORT, task=validated())
    monkeypatch.setattr(FedAvg, "client", CannotEvaluate)
    monkeypatch.setattr(CannotEvaluate, "failing", (1,))
    reason = "client 1 .*'evaluate', step 1: OSError: the disk is full"
    with pytest.raises(RunFailed, match=reason) as caught:
        launch(*SHORT, task=validated())
    # The step itself was done, and is recorded.
    recorded = (Path(str(caught.value.folder)) / "rounds.jsonl").read_text().splitlines()
    assert len(recorded) == 1

    run = launch(*SHORT, "on_failure=skip", task=validated())
    assert run.summary["weights_sha256"] == reference.summary["weights_sha256"]
    failures = [(f["round"], f["pid"], f["phase"]) for f in run.summary["failures"]]
    assert failures == [(n, 1, "evaluate") for n in (1, 2, 3)]
    table = scores_of_clients(run)
    assert set(table.client) == {0, 2, 3, 4}
    last = table[(table["round"] == 3) & (table.split == "test") & (table.metric == "accuracy")]
    assert rows(run)[-1]["acc_clients_mean"] == pytest.approx(last.value.mean())

    monkeypatch.setattr(CannotEvaluate, "failing", range(5))
    with pytest.raises(RunFailed, match=r"client 0 .*client 4 "):
        launch(*SHORT, "on_failure=skip", task=validated())


def test_the_accuracy_in_a_line_of_progress() -> None:
    """That of the global model, else that of the clients' models."""
    row = {
        "phase": "train",
        "step": 2,
        "acc_global": 0.5,
        "loss_global": None,
        "acc_clients_mean": 0.25,
        "failures": [],
    }
    assert step_line(row) == "train 2, acc_global 0.5000"
    assert step_line(row | {"acc_global": None}) == "train 2, acc_clients_mean 0.2500"
    assert step_line(row | {"acc_global": None, "acc_clients_mean": None}) == "train 2"


def test_models_that_a_run_does_not_have(
    launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = ["rounds=1", "client.epochs=1", "partition.clients=2", "model.hidden=[4]"]
    run = launch("method=fedavg", *lines, "partition.split=[.8,0,.2]")
    assert run.summary["validation"] is None
    caplog.clear()  # what the run has logged, if a test before has set the level
    reason = r"best_val\.safetensors .*missing.*partition\.split"
    with pytest.raises(ConfigError, match=reason):
        fedhet.load(run.dir, "best_val")
    assert not caplog.records
    (run.dir / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors .*missing"):
        fedhet.load(run.dir)
    with pytest.raises(ConfigError, match=r"summary\.json .*missing"):
        fedhet.load(tmp_path)
    fedhet.load(launch("method=fedpcl", *lines).dir)
    assert "method=fedpcl " in caplog.text


def test_the_size_of_what_clients_remember_is_recorded(launch: Launch) -> None:
    """SCAFFOLD keeps one number for each trained parameter, at the clients that took part."""
    run = launch("method=scaffold", "rounds=2", "fraction=0.4", "client.lr=0.1", task=toy_task(5))
    size = sum(t.nbytes for t in run.weights.values())
    seen: set[int] = set()
    for row in rows(run):
        seen |= set(row["cohort"])
        expected = {"clients": len(seen), "bytes": size * len(seen), "largest": size}
        assert row["client_state"] == expected
    assert run.summary["client_state"] == rows(run)[-1]["client_state"]
    stateless = launch(*SHORT, task=toy_task(5))
    assert stateless.summary["client_state"] == {"clients": 0, "bytes": 0, "largest": 0}

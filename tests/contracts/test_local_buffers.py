"""buffers=local: no model has both the shared weights and statistics that belong to them.

So there is no global model, whatever the method, and clients evaluate the shared weights with
their own statistics.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as parquet
import pytest
import torch
from composing import composed
from contracts.runs import rows, without_seconds
from contracts.short import slow_unless
from torch import Tensor, nn

import fedhet
from fedhet.core.errors import ConfigError
from fedhet.core.groups import Evaluation
from fedhet.core.messages import Upload
from fedhet.core.server.evaluation import evaluation_messages, global_scores
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.runs.config import Config
from fedhet.runs.job import Job
from fedhet.runs.record.terminal import print_summary
from fedhet.runs.stores import MemoryStore

Launch = Callable[..., Any]
Federation = Callable[..., Any]
PERSONAL = ["ditto", "fedala", "fedbabu", "fedrod"]  # they evaluate a model of each client's own
COMMON = ["rounds=3", "fraction=0.75", "client.lr=0.1", "client.epochs=2"]
STATISTICS = ("body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked")


@pytest.mark.parametrize(
    "method",
    slow_unless(
        ["fedavg", "fedsgd", "ditto"], ["fedavg", "scaffold", "fedsa", "fedsgd", *PERSONAL]
    ),
)
def test_the_headline_is_that_of_the_clients(launch: Launch, method: str) -> None:
    run = launch(f"method={method}", *COMMON, "buffers=local", task=toy_task(norm=True))
    summary = run.summary
    nothing = {"last": None, "best_val": None, "best_test": None}
    assert summary["models"] == ["personal"]
    assert summary["accuracy"] == nothing
    assert summary["loss"] is None
    recorded = parquet.dataset(run.dir / "clients").to_table().to_pandas()
    assert set(recorded.model) == {"personal"}
    lines = rows(run)
    for row in lines:
        assert row["acc_global"] is None
        assert row["acc_clients_mean"] == row["acc_personal_mean"]
        accuracies = recorded[
            (recorded["round"] == row["round"])
            & (recorded.split == "test")
            & (recorded.metric == "accuracy")
        ].value
        assert row["acc_clients_mean"] == pytest.approx(accuracies.mean())
    assert summary["personal"]["last"] == lines[-1]["acc_personal_mean"]
    best = max(lines, key=lambda row: row["acc_personal_val_weighted"])
    assert summary["validation"] == best["acc_val_weighted"] == best["acc_personal_val_weighted"]
    assert summary["personal"]["best_val"] == best["acc_personal_mean"]
    assert not (run.dir / "best_val.safetensors").exists()


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_a_model_without_statistics_is_unchanged(launch: Launch, method: str) -> None:
    lines = [f"method={method}", *COMMON, "eval.finetune_epochs=1"]
    average, local = (
        launch(*lines, f"buffers={buffers}", task=toy_task()) for buffers in ("average", "local")
    )
    assert local.summary["models"] == average.summary["models"]
    assert local.summary["models"][0] == "global"
    assert local.summary["weights_sha256"] == average.summary["weights_sha256"]
    assert local.summary["accuracy"] == average.summary["accuracy"]
    assert without_seconds(local) == without_seconds(average)


@pytest.mark.parametrize("buffers", ["average", "frozen"])
def test_shared_and_frozen_statistics_make_a_global_model(launch: Launch, buffers: str) -> None:
    run = launch("method=fedavg", *COMMON, f"buffers={buffers}", task=toy_task(norm=True))
    assert run.summary["models"] == ["global"]
    assert run.summary["accuracy"]["last"] is not None


class Counting(nn.Module):
    """A model whose only buffer is a whole number, which no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).tanh())
        return logits


def test_counters_are_no_statistics(launch: Launch) -> None:
    task = toy_task()
    task.model = Counting
    run = launch("method=fedavg", *COMMON, "buffers=local", task=task)
    assert run.summary["models"] == ["global"]


def own_model(run: Any, pid: int) -> dict[str, Tensor]:
    """The shared weights with the statistics that the client keeps, or the initial ones."""
    state = run.store.load(pid, run.strategy.run.versions.get(pid, 0)) or {}
    own = {
        name: state.get(f"client.kept/{name}", run.workspace.initial[name]) for name in STATISTICS
    }
    return {**run.model, **own}


def loss(model: nn.Module, samples: Any) -> float:
    return float(nn.functional.cross_entropy(model.eval()(samples.x), samples.y).detach())


def test_clients_evaluate_the_shared_weights_with_their_statistics(federation: Federation) -> None:
    """With the initial ones where they have never taken part, as under FedBN."""
    run = federation(toy_task(norm=True), FedAvg, buffers="local", fraction=0.5, epochs=5, lr=0.5)
    cohort = {msg.pid for msg in run.step()}
    assert 0 < len(cohort) < 4
    assert global_scores(run.strategy) == {}
    for msg in evaluation_messages(run.strategy):
        update = run.client().handle(msg)
        assert isinstance(update, Upload), update
        model = run.workspace.task.model()
        model.load_state_dict(own_model(run, msg.pid))
        expected = loss(model, run.workspace.task.clients[msg.pid].test)
        assert update.metrics["test.personal.loss"] == pytest.approx(expected, rel=1e-5)
        assert not any(".global." in name for name in update.metrics)


def test_what_is_fine_tuned_is_what_the_client_has(federation: Federation) -> None:
    """By hand, in full batches: the statistics follow the training, and nothing else changes."""
    run = federation(
        toy_task(norm=True),
        FedAvg,
        buffers="local",
        batch_size=99,
        evaluation=Evaluation(finetune_epochs=3),
        rounds=2,
    )
    run.step()
    before = run.sha256
    assert run.strategy.views == ("personal", "finetuned")
    for msg in evaluation_messages(run.strategy):
        metrics = run.client().handle(msg).metrics
        client = run.workspace.task.clients[msg.pid]
        model = run.workspace.task.model()
        model.load_state_dict(own_model(run, msg.pid))
        assert metrics["test.personal.loss"] == pytest.approx(loss(model, client.test), rel=1e-5)
        model.train()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            sgd.zero_grad()
            nn.functional.cross_entropy(model(client.train.x), client.train.y).backward()
            sgd.step()
        assert metrics["test.finetuned.loss"] == pytest.approx(loss(model, client.test), rel=1e-4)
    assert run.sha256 == before


@pytest.mark.parametrize("method", PERSONAL)
def test_a_personal_model_is_the_methods_own(method: str) -> None:
    """Such a method shows no further model: its shared weights alone have no statistics."""
    settings = composed(f"method={method}", *COMMON, "buffers=local", "eval.finetune_epochs=1")
    job = Job(settings, toy_task(norm=True))
    store = MemoryStore()
    strategy = job.strategy
    for number in (1, 2):
        step = strategy.plan(number)
        strategy.finish_step(step, [job.client(store).handle(msg) for msg in step.messages])
    assert strategy.views == ("personal", "finetuned")
    for msg in evaluation_messages(strategy):
        metrics = job.client(store).handle(msg).metrics  # type: ignore[union-attr]
        assert {name.split(".")[1] for name in metrics} == set(strategy.views)
        client = job.client(store)
        client.receive(msg)
        with job.workspace.seeded("torch", msg.phase, msg.step, msg.pid):
            model = client.views()["personal"]()
        samples = job.task.clients[msg.pid].test
        assert samples is not None
        assert metrics["test.personal.loss"] == pytest.approx(loss(model, samples), rel=1e-5)


def test_server_and_client_agree_on_the_views(methods: dict[str, Config]) -> None:
    offenders = []
    for method in methods:
        job = Job(composed(f"method={method}", *COMMON, "buffers=local"), toy_task(norm=True))
        expected = set(job.strategy.views)
        for msg in evaluation_messages(job.strategy):
            update = job.client(MemoryStore()).handle(msg)
            assert isinstance(update, Upload), update
            seen = {name.split(".")[1] for name in update.metrics}
            if seen != expected or "global" in expected:
                offenders.append((method, msg.pid, seen))
    assert not offenders


def test_statistics_that_the_method_averages_make_a_global_model() -> None:
    """FedBN's own mean of the batch norms does not depend on `buffers`."""
    settings = composed("method=fedbn", "method.server_bn=average", "buffers=local")
    assert Job(settings, toy_task(norm=True)).strategy.views == ("global", "personal")


def test_fine_tuning_is_refused_where_the_method_shares_no_model() -> None:
    """Under methods without a global model as before, with any buffers."""
    for method in ("fedbn", "fedpcl", "fedproto", "fedrep"):
        settings = composed(f"method={method}", "buffers=local", "eval.finetune_epochs=1")
        with pytest.raises(ConfigError, match=f"method={method} .*global model"):
            _ = Job(settings, toy_task(norm=True)).strategy


def test_the_user_is_shown_whose_accuracy_it_is(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the lines of the rounds, the final table and the figure."""
    run = launch("method=fedavg", *COMMON, "buffers=local", task=toy_task(norm=True))
    captured = capsys.readouterr()
    last = run.summary["personal"]["last"]
    assert f"train 3, acc_clients_mean {last:.4f}" in captured.err
    assert "global test set" not in captured.out
    assert (
        "acc_personal_mean" in captured.out and "(personal models, clients' mean)" in captured.out
    )
    assert "no global model" in captured.out
    assert f"last {last:.4f}" in captured.out
    (axes,) = run.plot().axes
    (label,) = axes.get_legend_handles_labels()[1]
    assert label == "personal models, mean over the clients' test data"
    plain = launch("method=fedavg", *COMMON, task=toy_task(norm=True))
    print_summary(plain.summary, Path(plain.dir))
    assert "acc_global" in capsys.readouterr().out
    (axes,) = plain.plot().axes
    assert axes.get_legend_handles_labels()[1] == [
        "global model, global test set",
        "global model, mean over the clients' test data",
    ]


def test_loading_the_weights_warns(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    few = ["partition.clients=2", "partition.split=[.04,.48,.48]", "eval.clients=false"]
    model = ["model.hidden=[4]", "model.norm=batch", "buffers=local"]
    run = launch("method=fedavg", "rounds=1", "client.epochs=1", *few, *model)
    fedhet.load(run.dir)
    assert re.search(r"method=fedavg .*buffers=local ", caplog.text)
    with pytest.raises(ConfigError, match=r"best_val.safetensors .*missing.*buffers=local"):
        fedhet.load(run.dir, "best_val")

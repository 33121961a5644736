"""The measures that summary.json and the final table have for every method."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as parquet
import pytest
from composing import composed
from contracts.short import slow

import fedhet
from fedhet.core.errors import ConfigError
from fedhet.core.messages import Upload
from fedhet.core.server.evaluation import client_means
from fedhet.core.targets import Classes
from fedhet.data.toy import toy_task
from fedhet.runs.record.summary import measures

Launch = Callable[..., Any]
CLASSES = Classes(2)
KEYS = {"acc_clients_mean", "acc_clients_worst_decile", "acc_last_k", "thresholds"}
COMMON = ["rounds=4", "client.lr=0.5", "client.epochs=2", "eval.thresholds=[.5,.8,1]"]
EXPLORING = ["method=fedlex", "plugin.fedlex.e_exp=2"]  # with a phase before the training
RUNS = [
    ["method=fedavg"],
    EXPLORING,
    ["method=fedpcl"],
    ["method=ditto"],
    *slow(
        ["method=fedavg", "engine.workers=2"],
        ["method=fedbn"],
        ["method=scaffold", "buffers=local"],
    ),
]


def rows(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]


def cost(lines: list[dict[str, Any]]) -> tuple[int, float]:
    """Bytes and seconds of these steps, evaluations left out."""
    sent = sum(sum(kinds.values()) for row in lines for kinds in row["bytes"].values())
    spent = sum(
        seconds for row in lines for name, seconds in row["seconds"].items() if name != "evaluate"
    )
    return sent, spent


@pytest.mark.parametrize("overrides", RUNS, ids=" ".join)
def test_every_method_has_them(launch: Launch, overrides: list[str]) -> None:
    """Recomputed from rounds.jsonl and the clients' files."""
    run = launch(*overrides, *COMMON, "eval.last_k=2", task=toy_task(12, norm=True))
    summary = run.summary
    assert summary.keys() >= KEYS
    lines = rows(run)
    table = parquet.dataset(run.dir / "clients").to_table().to_pandas()
    last = table[
        (table["round"] == table["round"].max())
        & (table.split == "test")
        & (table.model == summary["models"][0])
        & (table.metric == "accuracy")
    ]
    accuracies = sorted(last.value)
    assert len(accuracies) == 12
    assert summary["acc_clients_mean"] == pytest.approx(sum(accuracies) / 12)
    assert summary["acc_clients_mean"] == lines[-1]["acc_clients_mean"]
    assert summary["acc_clients_worst_decile"] == accuracies[0]  # one of 12 clients

    key = "acc_global" if "global" in summary["models"] else "acc_clients_mean"
    scored = [row[key] for row in lines if row["phase"] == "train"]
    mean = pytest.approx((scored[-1] + scored[-2]) / 2)
    assert summary["acc_last_k"] == {"mean": mean, "evaluations": 2}

    assert [reached["accuracy"] for reached in summary["thresholds"]] == [0.5, 0.8, 1.0]
    for reached in summary["thresholds"]:
        first = next(
            (i for i, row in enumerate(lines) if (row[key] or 0) >= reached["accuracy"]), None
        )
        if first is None:
            assert reached == {
                "accuracy": reached["accuracy"],
                "rounds": None,
                "bytes": None,
                "seconds": None,
            }
            continue
        sent, spent = cost(lines[: first + 1])
        assert reached["rounds"] == lines[first]["round"] == first + 1
        assert reached["bytes"] == sent
        assert reached["seconds"] == pytest.approx(spent)
    assert summary["thresholds"][0]["rounds"] is not None


def test_the_phases_before_the_training_are_paid_for(launch: Launch) -> None:
    """Seen by a threshold that any model reaches at its first evaluation."""
    run = launch(*EXPLORING, *COMMON, "eval.thresholds=[.01]", task=toy_task())
    lines = rows(run)
    assert lines[0]["phase"] == "fedlex.explore"
    reached = run.summary["thresholds"][0]
    step = lines[reached["rounds"] - 1]["step"]
    assert reached["rounds"] == step + 1
    assert reached["bytes"] > cost(lines[1 : step + 1])[0]


def row(number: int, accuracy: float | None, **more: Any) -> dict[str, Any]:
    """A line of rounds.jsonl: 10 bytes and 1.5 seconds, and an evaluation of 100 seconds."""
    return {
        "round": number,
        "acc_global": accuracy,
        "acc_clients_mean": None,
        "bytes": {"up": {"model": 3, "z": 1}, "down": {"model": 6}},
        "seconds": {"train": 1.0, "upload": 0.5, "evaluate": 100.0},
        **more,
    }


def test_by_hand() -> None:
    """Evaluated in every second round; the accuracy falls again after a threshold was reached."""
    accuracies = [None, 0.5, None, 0.75, None, 0.25]
    lines = [row(i, accuracy) for i, accuracy in enumerate(accuracies, start=1)]
    found = measures(lines, CLASSES, last_k=2, thresholds=[0.75, 0.5, 0.76])
    assert found == {
        "acc_clients_mean": None,
        "acc_clients_worst_decile": None,
        "acc_last_k": {"mean": 0.5, "evaluations": 2},
        "thresholds": [
            {"accuracy": 0.75, "rounds": 4, "bytes": 40, "seconds": 6.0},
            {"accuracy": 0.5, "rounds": 2, "bytes": 20, "seconds": 3.0},
            {"accuracy": 0.76, "rounds": None, "bytes": None, "seconds": None},
        ],
    }
    for k, expected in (
        (9, {"mean": 0.5, "evaluations": 3}),
        (1, {"mean": 0.25, "evaluations": 1}),
    ):
        assert measures(lines, CLASSES, last_k=k, thresholds=[])["acc_last_k"] == expected


def test_the_clients_accuracy_counts_where_there_is_no_global_one() -> None:
    lines = [
        row(i, None, acc_clients_mean=accuracy, acc_clients_worst_decile=accuracy - 0.25)
        for i, accuracy in enumerate([0.5, 0.75], start=1)
    ]
    found = measures(lines, CLASSES, last_k=5, thresholds=[0.6])
    assert found["acc_clients_mean"] == 0.75
    assert found["acc_clients_worst_decile"] == 0.5
    assert found["acc_last_k"] == {"mean": 0.625, "evaluations": 2}
    assert found["thresholds"][0]["rounds"] == 2


def test_a_run_without_evaluations_or_rounds() -> None:
    nothing = {
        "acc_clients_mean": None,
        "acc_clients_worst_decile": None,
        "acc_last_k": {"mean": None, "evaluations": 0},
    }
    never = [{"accuracy": 0.5, "rounds": None, "bytes": None, "seconds": None}]
    for lines in ([], [row(1, None)]):
        assert measures(lines, CLASSES, last_k=5, thresholds=[0.5]) == {
            **nothing,
            "thresholds": never,
        }


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2), (35, 3)])
def test_the_worst_decile(clients: int, worst: int) -> None:
    """A tenth of the clients that have test data, rounded down, and at least one."""
    accuracies = [((7 * pid) % clients) / clients for pid in range(clients)]
    updates = [
        Upload(pid, 5, metrics={"test.personal.n": 5.0, "test.personal.accuracy": accuracy})
        for pid, accuracy in enumerate(accuracies)
    ]
    updates.append(Upload(clients, 5, metrics={"val.personal.n": 5.0, "val.personal.accuracy": 0}))
    means = client_means(updates, ["personal"], CLASSES)
    expected = sum(sorted(accuracies)[:worst]) / worst
    assert means["acc_clients_worst_decile"] == pytest.approx(expected)


def test_it_is_that_of_the_first_view() -> None:
    metrics = {"test.global.n": 5.0, "test.global.accuracy": 0.25}
    metrics |= {"test.personal.n": 5.0, "test.personal.accuracy": 0.75}
    means = client_means([Upload(0, 5, metrics=metrics)], ["global", "personal"], CLASSES)
    assert means["acc_clients_worst_decile"] == 0.25


def test_the_clients_are_not_evaluated(launch: Launch) -> None:
    run = launch("method=fedavg", *COMMON, "eval.clients=false", task=toy_task())
    assert run.summary["acc_clients_mean"] is run.summary["acc_clients_worst_decile"] is None
    assert run.summary["acc_last_k"]["mean"] is not None


def test_an_aborted_run_has_them(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the rounds that were executed."""
    from fedhet.core.errors import RunFailed
    from fedhet.core.server.phases import OpenStep
    from fedhet.core.server.strategy import FedStrategy

    finish_step = FedStrategy.finish_step

    def fail(self: FedStrategy, step: OpenStep, *replies: Any, **options: Any) -> None:
        if step.round == 3:
            raise RunFailed("enough")
        finish_step(self, step, *replies, **options)

    monkeypatch.setattr(FedStrategy, "finish_step", fail)
    with pytest.raises(RunFailed) as caught:
        launch("method=fedavg", *COMMON, task=toy_task())
    summary = json.loads((Path(str(caught.value.folder)) / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary.keys() >= KEYS
    assert summary["acc_clients_mean"] is not None


@pytest.mark.parametrize("settings", [["method=ditto"], ["method=fedrep"]])
def test_every_score_says_which_one_it_is(launch: Launch, settings: list[str]) -> None:
    """In summary.json, in the frames, and in the line of the run."""
    run = launch(*settings, "rounds=2", task=toy_task(12))
    names, last = run.summary["columns"], rows(run)[-1]
    for entry in ("accuracy", "personal"):
        assert run.summary[entry]["last"] == last[names[entry]]
    assert run.summary["loss"] == last[names["loss"]]
    mean = run.rounds[names["acc_last_k"]].astype(float).mean()
    assert run.summary["acc_last_k"]["mean"] == pytest.approx(mean)
    frame = fedhet.results(run.dir).runs
    for entry in ("accuracy", "personal"):
        (value,) = frame[f"{names[entry]}.last"]
        assert value == run.summary[entry]["last"]
    assert frame["acc_val_weighted.best"].item() == run.rounds["acc_val_weighted"].max()
    assert not {"loss", "validation", "columns.loss"} & set(frame)
    assert f", acc_personal_mean {last['acc_personal_mean']:.4f};" in repr(run)


def test_the_table_shows_them(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    run = launch("method=fedavg", *COMMON, "eval.last_k=3", task=toy_task(12))
    shown = capsys.readouterr().out
    summary = run.summary
    assert f"last {summary['acc_clients_mean']:.4f}   worst tenth" in shown
    assert f"worst tenth of the clients {summary['acc_clients_worst_decile']:.4f}" in shown
    assert f"{summary['acc_last_k']['mean']:.4f}, the mean of the last 3 of acc_global" in shown
    assert "until acc_global 0.5" in shown
    assert f"round {summary['thresholds'][0]['rounds']}, after " in shown


def test_unreached_targets_are_shown(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    launch("method=fedavg", "rounds=1", "client.lr=1e-9", "eval.thresholds=[1]", task=toy_task())
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if "until acc_global 1" in line
    ]
    assert "not reached" in line


@pytest.mark.parametrize(
    "override",
    ["eval.thresholds=[0]", "eval.thresholds=[80]", "eval.thresholds=.8", "eval.last_k=0"],
)
def test_bad_settings_are_named(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key}[=\[]"):
        composed(override)

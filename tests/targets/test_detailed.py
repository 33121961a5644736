"""eval.scores=all: AUC, sensitivity, specificity, calibration and confusion of classes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.dataset as parquet
import pytest
import torch
from composing import composed
from sklearn import metrics
from targets.tasks import task_of
from torch import Tensor

import fedhet
from fedhet.core.errors import ConfigError
from fedhet.core.limits import UNLIMITED
from fedhet.core.targets import Target, make
from fedhet.data.toy import toy_task
from fedhet.runs.job import task_of as task_from
from fedhet.runs.run_data import RunData
from fedhet.study.report.compared import Study
from fedhet.study.report.overviews import detail_tables
from fedhet.study.report.results import results

Launch = Callable[..., fedhet.Run]
LINES = ["rounds=2", "client.epochs=1", "client.lr=.3"]


def drawn(classes: int, n: int = 400) -> tuple[Target, Tensor, Tensor]:
    """A target, and outputs that know something of the classes."""
    draw = torch.Generator().manual_seed(classes)
    y = torch.randint(0, classes, (n,), generator=draw)
    output = torch.randn(n, classes, generator=draw) * 2
    output[torch.arange(n), y] += 1
    return make("class", classes, detailed=True), output, y


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_they_are_those_of_sklearn(classes: int) -> None:
    target, output, y = drawn(classes)
    tally = target.tally(output, y)
    scores, guess = target.scores(tally), output.argmax(1)
    assert (tally["confusion"].numpy() == metrics.confusion_matrix(y, guess)).all()
    assert scores["accuracy"] == pytest.approx(metrics.accuracy_score(y, guess))
    if classes > 2:
        assert scores["recall_macro"] == pytest.approx(
            metrics.recall_score(y, guess, average="macro")
        )
        assert "auc" not in scores
        return
    assert scores["sensitivity"] == pytest.approx(metrics.recall_score(y, guess), rel=1e-12)
    assert scores["specificity"] == pytest.approx(metrics.recall_score(y, guess, pos_label=0))
    auc = metrics.roc_auc_score(y, output.softmax(1)[:, 1])
    assert scores["auc"] == pytest.approx(auc, abs=1e-3)
    assert 0.6 < auc < 0.9


def test_the_auc_of_outputs_at_the_limits_is_exact() -> None:
    """With ties, which count as one half, and with outputs beyond the first and the last limit."""
    target, output, y = drawn(2)
    output = (2 * output).round() / 2
    output[:9, 1] += 50
    output[9:20, 1] -= 50
    margin = (output[:, 1] - output[:, 0]).clamp(-12.5, 12)
    auc = target.scores(target.tally(output, y))["auc"]
    assert auc == pytest.approx(metrics.roc_auc_score(y, margin), abs=1e-12)


def test_the_calibration_error_by_hand() -> None:
    """Confidences .6 and .62 (one right) in a bin, .9 and 1 (both right) in two others."""
    p = torch.tensor([[0.6, 0.4], [0.38, 0.62], [0.1, 0.9], [1.0, 0.0]], dtype=torch.float64)
    target = make("class", 2, detailed=True)
    tally = target.tally(p.log(), torch.tensor([0, 0, 1, 0]))
    assert tally["bins"].nonzero().flatten().tolist() == [8, 9, 13, 14]
    # .6 is the upper end of its bin, (8/15, 9/15].
    expected = (abs(1 - 0.6) + abs(0 - 0.62) + abs(1 - 0.9) + 0) / 4
    assert target.scores(tally)["ece"] == pytest.approx(expected)
    same = target.tally(p[[0, 0, 0]].log(), torch.tensor([0, 0, 1]))
    assert target.scores(same)["ece"] == pytest.approx(abs(2 - 1.8) / 3)


def test_what_is_not_defined_is_left_out() -> None:
    target, output, y = drawn(2)
    ill = target.scores(target.tally(output[y == 1], y[y == 1]))
    assert "auc" not in ill and "specificity" not in ill and 0 < ill["sensitivity"] < 1
    diverged = target.scores(target.tally(output * torch.nan, y))
    assert all(0 <= value <= 1 for value in diverged.values()) and diverged["auc"] == 0.5


def test_a_model_that_is_sure_of_all_is_no_fault() -> None:
    """Its confidences lie at the upper edge of the last bin, whatever the number of samples."""
    target = make("class", 2, detailed=True)
    for n in range(1, 100):
        target.check(target.tally(torch.tensor([[0.0, 1e9]] * n), torch.zeros(n).long()))


@pytest.mark.parametrize("classes", [2, 4])
def test_clients_together_are_all_samples_together(classes: int) -> None:
    """In any order of the clients."""
    target, output, y = drawn(classes)
    whole = target.tally(output, y)
    cuts = [(0, 30), (30, 31), (31, 200), (200, 400)]
    parts = [target.tally(output[a:b], y[a:b]) for a, b in cuts]
    for order in itertools.permutations(parts):
        joined = target.joined(order)
        assert joined.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(joined[name], value, rtol=1e-12, atol=1e-12)
        found, expected = (target.details(target.check(tally)) for tally in (joined, whole))
        assert found.pop("confusion") == expected.pop("confusion")
        assert found == pytest.approx(expected)


def test_a_tally_that_no_samples_have_is_refused() -> None:
    """Any count but the number of samples may be changed, and sums by more than rounding."""
    target, output, y = drawn(2)
    honest = target.check(target.tally(output, y))
    lies: dict[str, Any] = {
        "confusion": [-1, 401],
        "bins": [-1, 401],
        "hits": [401],
        "confidence": [-1.0, 500.0, torch.nan, torch.inf],
        "above": [-1, 401],
        "samples": [0, -1],
    }
    for name, values in lies.items():
        for value in values:
            lie = {**honest, name: honest[name].clone()}
            lie[name].view(-1)[-1] = value
            with pytest.raises(ValueError, match="tally"):
                target.check(lie)
    more = {**honest, "confusion": torch.full((2, 2), 200)}
    with pytest.raises(ValueError, match="counts more"):
        target.check(more)
    for name in honest:
        with pytest.raises(ValueError, match="tally"):
            target.check({key: value for key, value in honest.items() if key != name})


# ---- in a run
def confusion(run: fedhet.Run, view: str, split: str = "test") -> np.ndarray:
    """The sum of the clients' matrices at the last evaluation."""
    rows = parquet.dataset(run.dir / "clients").to_table().to_pandas()
    rows = rows[(rows["round"] == rows["round"].max()) & (rows.model == view)]
    rows = rows[(rows.split == split) & rows.metric.str.startswith("confusion[")]
    total = np.zeros((2, 2))
    for metric, value in zip(rows.metric, rows.value, strict=True):
        i, j = metric.removeprefix("confusion[").removesuffix("]").split(",")
        total[int(i), int(j)] += value
    return total


@pytest.mark.parametrize("method", ["ditto", "local", "pooled"])
def test_a_run_has_them(launch: Launch, method: str) -> None:
    """Of each kind of models, and nothing else is another."""
    lines = [f"method={method}", *LINES]
    basic, run = (launch(*lines, f"eval.scores={s}", task=toy_task()) for s in ("basic", "all"))
    assert run.summary["weights_sha256"] == basic.summary["weights_sha256"]
    assert "details" not in basic.summary and "auc" not in set(basic.clients["metric"])
    same = [key for key in basic.rounds if not key.startswith(("seconds", "client_state"))]
    assert run.rounds[same].equals(basic.rounds[same])
    details = run.summary["details"]
    assert ("test_set" in details) == ("global" in run.summary["models"])
    assert list(details["clients"]) == run.summary["models"]
    for view, found in details["clients"].items():
        assert found["confusion"] == confusion(run, view).tolist()
        assert found["samples"] == np.sum(found["confusion"]) == 4 * 6
        assert {"auc", "sensitivity", "specificity", "ece"} <= found.keys()
    own = run.clients.query("split == 'test' and metric == 'auc' and round == 2")
    assert set(own["model"]) == set(run.summary["models"]) and own["value"].between(0, 1).all()
    card = (run.dir / "model_card.md").read_text()
    assert "| AUC of the" in card and "predicted as each class" in card


def test_a_task_may_ask_for_them(launch: Launch) -> None:
    """Unless the run does not want them; the caller's task stays as it is."""
    task = replace(toy_task(), detailed=True)
    lines = ["method=fedavg", "rounds=1"]
    assert "details" in launch(*lines, task=task).summary
    assert "details" not in launch(*lines, "eval.scores=basic", task=task).summary
    assert task.detailed
    data = RunData.of(composed("dataset=digits").cfg)
    asking = replace(data, dataset=replace(data.dataset, detailed=True))
    assert task_from(asking.cfg, asking, UNLIMITED).detailed


def test_the_global_test_set(launch: Launch) -> None:
    task = toy_task()
    lines = ["method=fedavg", "rounds=4", "client.epochs=2", "client.lr=.3", "eval.clients=false"]
    run = launch(*lines, "eval.scores=all", task=task)
    assert task.test is not None and list(run.summary["details"]) == ["test_set"]
    model = fedhet.load(run, model=task.model()).eval()
    with torch.no_grad():
        output = model(task.test.x)
    found = run.summary["details"]["test_set"]
    assert found["confusion"] == metrics.confusion_matrix(task.test.y, output.argmax(1)).tolist()
    auc = metrics.roc_auc_score(task.test.y, output[:, 1] - output[:, 0])
    assert found["auc"] == pytest.approx(auc, abs=0.01)


@pytest.mark.parametrize("engine", ["engine.workers=2", "engine.fused=3"])
def test_in_other_engines(launch: Launch, engine: str) -> None:
    lines = ["method=ditto", *LINES, "eval.scores=all", "partition.clients=4"]
    details = [launch(*lines, *more).summary["details"] for more in ([], [engine])]
    flat = [pd.json_normalize(one).drop(columns=_tables(one)) for one in details]
    pd.testing.assert_frame_equal(*flat, rtol=1e-5)
    assert _tables(details[0]) and details[0]["test_set"]["samples"] == 360


def _tables(details: dict[str, Any]) -> list[str]:
    return [name for name in pd.json_normalize(details) if name.endswith("confusion")]


def test_a_task_without_classes_is_refused(launch: Launch) -> None:
    with pytest.raises(ConfigError, match=r"eval\.scores=all: .*target=labels.*basic"):
        launch("method=fedavg", "eval.scores=all", task=task_of("labels"))


def test_the_report_has_tables_of_them(launch: Launch) -> None:
    runs = [
        launch(f"method={method}", *LINES, f"seed={seed}", *more, task=toy_task())
        for more in (["eval.scores=all"],)
        for method, seed in itertools.product(("fedavg", "local"), (0, 1))
    ]
    study = Study(results([run.dir for run in runs]))
    together, sites = detail_tables(study)
    of_method = together.data[together.data["method"] == "fedavg"]
    expected = [run.summary["details"]["test_set"]["auc"] for run in runs[:2]]
    assert (
        of_method[of_method["models"] == "global model, global test set"]["auc"].tolist()
        == expected
    )
    assert f"{np.mean(expected):.3f} ± {np.std(expected, ddof=1):.3f}" in {
        entry.text for row in together.rows for entry in row
    }
    assert len(sites.rows) == 2 * 4 and "sensitivity" in sites.columns
    own = runs[2].clients.query("split=='test' and metric=='ece' and round == 2 and client == 1")
    other = runs[3].clients.query("split=='test' and metric=='ece' and round == 2 and client == 1")
    mean = (own["value"].item() + other["value"].item()) / 2
    rows = sites.data.query("method == 'local' and client == 1")
    assert rows["ece"].item() == pytest.approx(mean)


def test_a_report_of_runs_without_them_has_no_such_table(launch: Launch) -> None:
    run = launch("method=fedavg", *LINES, task=toy_task())
    assert detail_tables(Study(results(run.dir))) == []

"""What `fedhet.run` and `fedhet.load_run` return: the record as tables, and figures of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contracts.runs import SHORT, rows, validated
from contracts.short import slow_unless

import fedhet
from fedhet.core.errors import ConfigError
from fedhet.runs.record import figures
from fedhet.runs.record.figures import CLASS_COLORS, Picture, labels, title
from fedhet.runs.record.terminal import print_summary

Launch = Callable[..., Any]
DITTO = ["method=ditto", "rounds=3", "client.epochs=1", "client.lr=0.1"]


def test_the_frames_are_the_files(launch: Launch) -> None:
    run = launch(*DITTO, task=validated())
    again = fedhet.load_run(run.dir)
    assert again.summary == json.loads((run.dir / "summary.json").read_text())
    lines = rows(run)
    assert list(again.rounds["acc_global"]) == [row["acc_global"] for row in lines]
    assert list(again.rounds["seconds.train"]) == [row["seconds"]["train"] for row in lines]
    assert list(again.rounds["cohort"]) == [row["cohort"] for row in lines]
    scores = again.clients
    means = scores[(scores.split == "test") & (scores.metric == "accuracy")]
    personal = means[means.model == "personal"].groupby("round").value.mean()
    assert list(personal) == pytest.approx([row["acc_personal_mean"] for row in lines])
    unseen = launch(*SHORT, "eval.clients=false", task=validated())
    assert unseen.clients.empty and list(unseen.clients.columns) == list(scores.columns)


def test_a_run_is_shown_in_one_line(launch: Launch) -> None:
    run = launch(*DITTO, task=validated())
    last = run.summary["accuracy"]["last"], run.summary["personal"]["last"]
    expected = f"acc_global {last[0]:.4f}, acc_personal_mean {last[1]:.4f}"
    assert repr(run) == f"Run(ditto on data given as a Task, 5 clients: ok, {expected}; {run.dir})"


def test_folders_that_are_no_runs(launch: Launch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"summary\.json .*missing"):
        fedhet.load_run(tmp_path)
    run = launch(*SHORT, task=validated())
    with pytest.raises(ConfigError, match=r"figure=acuracy .*accuracy"):
        run.plot("acuracy")
    (run.dir / "rounds.jsonl").write_text("")
    with pytest.raises(ConfigError, match="figure=accuracy: "):
        run.plot()
    (run.dir / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors .*missing"):
        fedhet.load_run(run.dir)


def curves(run: Any) -> dict[str, tuple[list[float], str]]:
    """Label of each curve -> its scores and its colour."""
    (axes,) = run.plot().axes
    return {line.get_label(): (list(line.get_ydata()), line.get_color()) for line in axes.lines}


def test_every_model_has_a_curve(launch: Launch) -> None:
    run = launch(*DITTO, "eval.finetune_epochs=1", task=validated())
    shown = curves(run)
    keys = {
        "global model, global test set": "acc_global",
        "global model, mean over the clients' test data": "acc_clients_mean",
        "personal models, mean over the clients' test data": "acc_personal_mean",
        "finetuned models, mean over the clients' test data": "acc_finetuned_mean",
    }
    assert {label: scores for label, (scores, _) in shown.items()} == {
        label: [row[key] for row in rows(run)] for label, key in keys.items()
    }
    assert len({color for _, color in shown.values()}) == 3  # one for each model


def test_a_method_without_a_global_model_shows_the_clients(launch: Launch) -> None:
    run = launch("method=fedpcl", "rounds=2", "client.epochs=1", task=validated())
    trained = [row["acc_personal_mean"] for row in rows(run) if row["phase"] == "train"]
    label = "personal models, mean over the clients' test data"
    assert {name: scores for name, (scores, _) in curves(run).items()} == {label: trained}


SUMMARY = {"method": "ditto", "plugins": ["fedprox"], "server_opt": "fedavgm", "dataset": "mnist"}
SUMMARY |= {"models": ["global"]}
PARTITION = {
    "name": "dirichlet",
    "clients": 2,
    "hash": "abc",
    "settings": {"alpha": 0.3, "noise": 0.1, "split": [0.8, 0.1, 0.1]},
}


def accuracy_axes(*scores: float | None) -> Any:
    lines = [
        {"step": i, "acc_global": score, "acc_clients_mean": None}
        for i, score in enumerate(scores, 1)
    ]
    picture = figures.accuracy(SUMMARY, lines, PARTITION)
    assert picture is not None
    return picture.axes[0]


def test_the_axis_shows_differences() -> None:
    """A steep start is left out, and said to be; where all differences are alike, all are shown."""
    late = [0.95 + 0.001 * i for i in range(40)]
    axes = accuracy_axes(0.1, 0.5, *late)
    low, high = axes.get_ylim()
    assert 0.94 < low < 0.96 and 0.98 < high < 1
    assert "down to 0.10" in axes.texts[0].get_text()
    axes = accuracy_axes(*(i / 10 for i in range(1, 10)))
    low, high = axes.get_ylim()
    assert low < 0.1 and high > 0.9 and not axes.texts
    low, high = accuracy_axes(0.5, 0.5).get_ylim()
    assert low < 0.5 < high
    low, high = accuracy_axes(0.5, float("nan"), None, 0.6).get_ylim()
    assert 0.4 < low < 0.5 and 0.6 < high < 0.7


def test_up_to_sixty_evaluations_have_a_mark_each() -> None:
    for evaluations, marker in ((60, "o"), (61, "None")):
        (line, *_) = accuracy_axes(*(0.5 for _ in range(evaluations))).get_lines()
        assert line.get_marker() == marker


def test_the_title_says_method_data_and_partition() -> None:
    text = title(SUMMARY, PARTITION)
    assert text == (
        "ditto + fedprox + fedavgm on mnist\ndirichlet, alpha 0.3, noise 0.1, 2 clients (abc)"
    )
    assert title(None, PARTITION | {"clients": 1}).endswith("\n1 client (abc)")


def partition(clients: int, classes: int) -> dict[str, Any]:
    counts = np.random.default_rng(0).integers(0, 50, (clients, classes))
    names = [f"class {label}" for label in range(classes)]
    return PARTITION | {"clients": clients, "counts": counts.tolist(), "classes": names}


@pytest.mark.parametrize(
    ("clients", "classes"),
    slow_unless(
        [(1, 2), (300, 10), (5, 11), (300, 200)],
        itertools.product([1, 5, 300], [2, 10, 11, 62, 200]),
    ),
)
def test_the_samples_of_any_number_of_clients_and_classes(
    clients: int, classes: int, tmp_path: Path
) -> None:
    """Up to ten classes have colours of their own and a legend; more have a map and a scale."""
    picture = labels(partition(clients, classes))
    assert picture is not None
    axes = picture.axes[0]
    if classes <= len(CLASS_COLORS):
        entries = [text.get_text() for text in axes.get_legend().get_texts()]
        assert entries == [f"class {label}" for label in range(classes)]
        colors = {patch.get_facecolor() for patch in axes.patches if patch.get_label()}
        assert len(colors) == classes
    else:
        (image,) = axes.get_images()
        assert image.get_array().shape == (clients, classes)
        assert picture.axes[-1].get_ylabel() == "samples of the class"
        assert axes.get_xticklabels()[0].get_text() == "class 0"
    ticks = [t for t in axes.get_yticks() if -0.5 <= t <= clients - 0.5]
    assert 1 <= len(ticks) <= 40
    assert axes.get_ylim() == (clients - 0.5, -0.5)  # the first client is at the top
    assert max(picture.get_size_inches()) <= 10
    assert inside(picture)


@pytest.mark.parametrize("classes", [2, 11])
def test_a_row_is_the_mean_of_many_clients(classes: int) -> None:
    """Matplotlib takes half a millisecond for each row and class, and a picture has no more."""
    clients = 2 * figures.ROWS + 500  # neighbours make up rows of two or three clients
    counts = np.zeros((clients, classes), int)
    counts[-3:, 1] = 6, 9, 12  # the last row has three clients
    picture = labels({"name": "many", "clients": clients, "counts": counts})
    assert picture is not None
    axes = picture.axes[0]
    assert axes.get_ylim() == (clients - 0.5, -0.5)
    if classes == 2:
        bars = next(patch for patch in axes.patches if patch.get_label() == "1").get_data()
        values, edges = bars.values - bars.baseline, bars.edges
        assert (edges[0], edges[-1]) == (-0.5, clients - 0.5)
        assert set(np.diff(edges)) == {2, 3} and edges[-2] == clients - 3.5
    else:
        (image,) = axes.get_images()
        assert image.get_extent() == [-0.5, classes - 0.5, clients - 0.5, -0.5]
        values = image.get_array().filled(0)[:, 1]
    assert len(values) == figures.ROWS and values[-1] == 9 and not values[:-1].any()


def inside(picture: Picture) -> bool:
    """Whether everything that is drawn lies in the figure, but for half a millimetre."""
    picture.png()
    box = picture.get_tightbbox()
    width, height = picture.get_size_inches()
    return bool(
        box.x0 > -0.02 and box.y0 > -0.02 and box.x1 < width + 0.02 and box.y1 < height + 0.02
    )


def test_the_figures_are_files_of_both_kinds(tmp_path: Path) -> None:
    lines = [{"step": 1, "acc_global": 0.5, "acc_clients_mean": 0.4}]
    paths = figures.draw(tmp_path, SUMMARY, lines, partition(5, 10))
    assert [path.name for path in paths] == ["accuracy.png", "labels.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert figures.draw(tmp_path, SUMMARY, [], PARTITION) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_paths_are_whole_at_any_width(
    launch: Launch,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
) -> None:
    run = launch(*DITTO, task=validated())
    (run.dir / "figures").mkdir()
    path = run.dir / "figures" / "accuracy.png"
    path.write_bytes(b"")
    monkeypatch.setenv("COLUMNS", "40")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    capsys.readouterr()
    print_summary(run.summary, run.dir)
    lines = capsys.readouterr().out.splitlines()
    assert f"figure: {path}" in lines
    last = run.summary["personal"]["last"]
    table = "\n".join(lines)
    assert "acc_personal_mean" in table and f"{last:.4f}" in table
    assert terminal == all(len(line) <= 60 for line in lines if not line.startswith("figure"))

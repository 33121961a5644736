"""What is learned: classes, numbers or sets of labels, as configured or inferred."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from composing import data_main as main
from data.own_data import load
from data.schemes import run_data

from fedhet.core.errors import ConfigError, DataError
from fedhet.data.arrays import RawSamples, encoded
from fedhet.data.storage import write_json

N = 30


def target_of(y: Any, **settings: Any) -> tuple[str, list[str], np.ndarray]:
    """The inferred or given target of these labels, the names of its outputs, and y."""
    settings = {"target": None, "classes": None, **settings}
    raw = RawSamples(np.zeros((len(y), 1)), y, None, "file", "column 'y'")
    (values,), described = encoded(raw, None, **settings)
    names = described["numbers"] if "numbers" in described else described["classes"]
    return str(described["target"][0]), names.tolist(), values


def lists(*values: list[Any]) -> np.ndarray:
    """A column of lists, as pandas returns one."""
    column = np.empty(len(values), dtype=object)
    column[:] = [np.array(each) for each in values]
    return column


i = np.arange(N)
INFERRED = {
    "text": (np.array(["a", "b"])[i % 2], "class", ["a", "b"]),
    "text as objects": (np.array(["a", "b"], dtype=object)[i % 2], "class", ["a", "b"]),
    "few whole numbers": (i % 3, "class", ["0", "1", "2"]),
    "few whole floats": (i % 2 * 5.0, "class", ["0", "5"]),
    "many whole numbers": (i + 7, "class", list(map(str, i + 7))),
    "fractions": (i / 7, "number", ["0"]),
    "a column of fractions": (i[:, None] / 7, "number", ["0"]),
    "columns of fractions": (np.stack([i / 7, i], 1), "number", ["0", "1"]),
    "columns of zeros and ones": (np.stack([i % 2, i % 3 // 2], 1), "labels", ["0", "1"]),
    "lists of text": (lists(*[["b"], [], ["a", "c"]] * 10), "labels", ["a", "b", "c"]),
    "lists of numbers": (lists(*[[10], [9, 2]] * 15), "labels", ["2", "9", "10"]),
    "lists of zeros and ones": (lists(*[[1, 0, 1], [0, 0, 0]] * 15), "labels", ["0", "1", "2"]),
    "lists of fractions": (lists(*[[0.5, 2]] * N), "number", ["0", "1"]),
}


@pytest.mark.parametrize(("y", "target", "names"), INFERRED.values(), ids=INFERRED)
def test_the_target_is_inferred(y: np.ndarray, target: str, names: list[str]) -> None:
    found, outputs, values = target_of(y)
    assert (found, outputs) == (target, names)
    if target == "class":
        assert values.dtype == np.int64
        assert [names[k] for k in values] == [str(v) for v in np.asarray(y).astype(type(y[0]))] or (
            y.dtype.kind == "f"
        )
    else:
        assert (values.dtype, values.shape) == (np.float32, (N, len(names)))


def test_sets_of_labels_are_zeros_and_ones() -> None:
    _, _, y = target_of(lists(["b"], [], ["c", "a"], ["b"]))
    assert y.tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0]]
    _, names, y = target_of(lists(["b"], []), classes=["c", "b", "a"])
    assert (names, y.tolist()) == (["c", "b", "a"], [[0, 1, 0], [0, 0, 0]])
    # Whole numbers of a single column are one label.
    target, _, y = target_of(np.array([0, 1, 1]), target="labels")
    assert (target, y.tolist()) == ("labels", [[0], [1], [1]])


def test_what_is_not_clear_says_what_to_write() -> None:
    message = r"column 'y': .*30 different .*dataset\.target=number .*dataset\.target=class"
    with pytest.raises(ConfigError, match=message):
        target_of(i * 1.0)
    assert target_of(i * 1.0, target="number")[2][:, 0].tolist() == i.tolist()
    assert target_of(i * 1.0, target="class")[0] == "class"
    assert target_of(i * 1.0, classes=N)[0] == "class"
    with pytest.raises(ConfigError, match=r"\(30, 2\); .*dataset\.target=number"):
        target_of(np.stack([i, i], 1))
    assert target_of(np.stack([i, i], 1), target="number")[0] == "number"


@pytest.mark.parametrize(
    ("y", "settings", "message"),
    [
        (i, {"target": "regression"}, r"dataset\.target=regression "),
        (i / 7, {"target": "number", "classes": 3}, r"dataset\.classes=3: .*classes"),
        (np.array(["1", "b"]), {"target": "number"}, r"dataset\.target=number .*numbers"),
        (np.array([1.0, np.inf]), {"target": "number"}, r"row 1: \[inf\]; .*finite numbers"),
        (np.array([1.0, 1e39]), {"target": "number"}, r"row 1: \[1e\+39\]; .*finite numbers"),
        (lists([1, 2], [3]), {"target": "number"}, "same number .*sample"),
        (np.array([0.5, 1]), {"target": "class"}, "row 0: label 0.5; .*class"),
        (np.eye(2), {"target": "class"}, "several labels .*sample"),
        (lists(["a"], ["b"]), {"target": "class"}, "several labels .*sample"),
        (np.array(["a", "b"]), {"target": "labels"}, "lists .*labels, .*columns "),
        (np.array([[0, 1], [2, 0]]), {"target": "labels"}, r"row 1: \[2, 0\]; .*zeros .*ones"),
        (np.eye(2), {"target": "labels", "classes": 3}, "2 columns .*labels; .*3"),
        (lists([], []), {}, "sample .*label"),
        (
            lists(["a"], ["b", "c"]),
            {"classes": ["a", "b"]},
            r"row 1: labels \['b', 'c'\]; ",
        ),
    ],
)
def test_labels_that_do_not_fit_are_named(
    y: np.ndarray, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        target_of(y, **settings)


# ---- files
def frame() -> pandas.DataFrame:
    """100 rows whose price is linear in the features."""
    draw = np.random.default_rng(0)
    data = pandas.DataFrame(draw.normal(size=(100, 3)), columns=["a", "b", "c"])
    data["price"] = 3e5 + 1e5 * data.a - 5e4 * data.b
    data["rent"] = 700 + 90 * data.b
    data["sun"] = (data.a > 0).astype(int)
    data["sea"] = (data.b > 0).astype(int)
    return data


def test_a_log_line_says_what_was_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also when the decoded data come from the cache."""
    frame().to_csv(tmp_path / "train.csv", index=False)
    keys = {"features": ["a", "b", "c"]}
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, "fedhet.data"):
            assert load("csv", tmp_path, label="price", **keys).target == "number"
        assert "dataset.target=number: there are 100 different labels in 100 samples" in caplog.text
    data = load("csv", tmp_path, label=["price", "rent"], **keys)
    assert (data.target, data.numbers, data.y.shape) == ("number", ("price", "rent"), (80, 2))
    data = load("csv", tmp_path, label=["sun", "sea"], **keys)
    assert (data.target, data.classes, data.outputs) == ("labels", *[("sun", "sea")] * 2)


def test_a_classification_of_too_many_numbers_suggests_another_target(tmp_path: Path) -> None:
    data = pandas.DataFrame({"a": range(40), "label": range(40)})
    data[5:].to_csv(tmp_path / "train.csv", index=False)
    data.to_csv(tmp_path / "test.csv", index=False)
    with pytest.raises(DataError, match=r"25 more; dataset\.target=number predicts "):
        load("csv", tmp_path, test="test.csv")


NUMBER = ["dataset=csv", "dataset.features=[a,b,c]", "dataset.label=[price,rent]"]
LABELS = ["dataset=csv", "dataset.features=[a,b,c]", "dataset.label=[sun,sea]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    frame().to_csv(tmp_path / "train.csv", index=False)
    return tmp_path


@pytest.mark.parametrize("scheme", ["dirichlet", "pathological", "shards"])
@pytest.mark.parametrize("lines", [NUMBER, LABELS], ids=["number", "labels"])
def test_schemes_that_divide_classes_refuse(folder: Path, lines: list[str], scheme: str) -> None:
    message = rf"partition={scheme} .*class, .*iid, quantity, natural"
    with pytest.raises(ConfigError, match=message):
        run_data(*lines, f"data_dir={folder}", f"partition={scheme}")


@pytest.mark.parametrize("scheme", ["iid", "quantity", "quantity partition.sizes=linear"])
@pytest.mark.parametrize("lines", [NUMBER, LABELS], ids=["number", "labels"])
def test_the_other_schemes_can_be_saved_and_used_again(
    folder: Path, lines: list[str], scheme: str
) -> None:
    number = lines is NUMBER
    lines = [*lines, f"data_dir={folder}"]
    table = frame() / 1e7 if number else frame()  # numbers that no whole number distinguishes
    table.to_csv(folder / "train.csv", index=False)
    choice = [f"partition={scheme.split()[0]}", *scheme.split()[1:], "partition.clients=3"]
    data = run_data(*lines, *choice)
    assert sum(map(len, data.partition.indices)) == 80
    write_json(folder / "partition.json", data.partition_record(), indent=None)
    again = ["partition=saved", f"partition.name={folder}/partition.json"]
    assert run_data(*lines, *again).partition == data.partition
    other = table * 1.01 if number else table.iloc[::-1]
    other.to_csv(folder / "train.csv", index=False)
    with pytest.raises(ConfigError, match=r"partition\.name=.*partition\.json .*other data"):
        run_data(*lines, *again)


def test_the_scale_is_that_of_the_clients_training_samples(folder: Path) -> None:
    lines = [*NUMBER, f"data_dir={folder}", "partition=iid", "partition.clients=3"]
    data = run_data(*lines)
    y = torch.cat([client.train.y for client in data.clients]).double()
    record = data.partition_record()
    assert record["target"] == "number" and record["numbers"] == ["price", "rent"]
    assert record["target_scale"]["mean"] == pytest.approx(y.mean(0).tolist())
    assert record["target_scale"]["std"] == pytest.approx(y.std(0, correction=0).tolist())
    assert record["classes"] == [] and record["counts"].tolist() == [[], [], []]
    given = run_data(*lines, "dataset.target_mean=[1,2]", "dataset.target_std=[3]").dataset
    assert (given.target_mean, given.target_std) == ((1, 2), (3, 3))
    with pytest.raises(ConfigError, match=r"dataset\.target_std=\[0\.0\]: .*> 0"):
        run_data(*lines, "dataset.target_std=[0]")
    with pytest.raises(ConfigError, match=r"target_mean=\[.*\]: .*2 numbers"):
        run_data(*lines, "dataset.target_mean=[1,2,3]")


@pytest.mark.parametrize("lines", [NUMBER, LABELS], ids=["number", "labels"])
def test_what_a_client_exports_can_be_read_again(folder: Path, lines: list[str]) -> None:
    lines = [*lines, f"data_dir={folder}", "partition=iid", "partition.clients=3"]
    assert main(["export", *lines, "--client", "1", "--out", str(folder)]) == 0
    data = run_data(*lines)
    file = ["dataset=npz", f"dataset.file={folder}/client-1.npz"]
    own = run_data(*file, "partition=iid", "partition.clients=1", "partition.split=[1,0,0]")
    mine = own.clients[0].train
    rows = data.clients[1].train
    assert sorted(mine.x.tolist()) == sorted(rows.x.tolist())
    assert sorted(mine.y.tolist()) == sorted(rows.y.tolist())
    for key in ("target", "outputs", "mean", "target_mean", "target_std"):
        assert getattr(own.dataset, key) == getattr(data.dataset, key), key


def test_describe_shows_the_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [*NUMBER, f"data_dir={folder}", "partition=iid", "partition.clients=3"]
    assert main(["describe", *lines, "--out", str(folder / "out")]) == 0
    shown = capsys.readouterr().out
    assert "target number" in " ".join(shown.split())
    y = run_data(*lines).dataset.y.numpy()[run_data(*lines).partition.indices[0]]
    mean, deviation = y.mean(0, dtype=float), y.std(0, dtype=float)
    assert f"{mean[0]:.4g} ± {deviation[0]:.3g}" in shown
    assert list((folder / "out").iterdir()) == []  # there are no classes to draw
    lines[1:3] = LABELS[1:3]
    assert main(["describe", *lines, "--out", str(folder / "out")]) == 0
    shown = capsys.readouterr().out
    sun = int(run_data(*lines).clients[0].train.y[:, 0].sum())
    assert "sun" in shown and sun > 0
    drawn = {"labels.png", "labels.pdf"}
    assert {path.name for path in (folder / "out").iterdir()} == drawn

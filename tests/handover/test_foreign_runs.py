"""A run folder may come from anyone: what in it is wrong is one error that names it."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedhet
from fedhet.__main__ import main
from fedhet.core.errors import ConfigError, DataError
from fedhet.data import forms
from fedhet.handover.served import opened


@pytest.fixture
def copy(of_a_table: fedhet.Run, tmp_path: Path) -> Path:
    """The folder of a run on a table with three columns and two classes."""
    return Path(shutil.copytree(of_a_table.dir, tmp_path / "copy"))


def change(file: Path, **entries: Any) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **entries}))


SCALE = {"mean": [0, 0, 0], "std": [1, 1, 1]}
# Entries of partition.json, and what is told of them.
WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"shape": value}, "shape is") for value in (None, 3, "3", [], [0], [-3], [3.0], [True])),
    *(({"shape": value}, "shape is") for value in ([1, 2, 3, 4], [10**12], [[3]], {"0": 3})),
    *(({"classes": value}, "classes is") for value in (None, 3, "ab", [1, 2], [["a"], "b"], {})),
    *(({"numbers": value}, "numbers is") for value in (None, 1, [1])),
    ({"classes": []}, "classes is []"),
    *(({"target": value}, "target is") for value in (None, 3, "klass", ["class"])),
    *(({"columns": value}, "columns is") for value in (None, "a", [1, 2, 3])),
    *(({"normalised": value}, "normalised is") for value in (3, "own", [], {}, {"mean": [0]})),
    ({"normalised": {**SCALE, "mean": "own"}}, "normalised is"),
    ({"normalised": {**SCALE, "mean": [0, 0, "a"]}}, "normalised is"),
    ({"normalised": {**SCALE, "mean": [0, 0, float("nan")]}}, "normalised is"),
    ({"normalised": {**SCALE, "mean": [0, 0, None]}}, "normalised is"),
    ({"normalised": {**SCALE, "std": [1, 1, 0]}}, "normalised is"),
    ({"normalised": {**SCALE, "mean": [0]}}, "normalised.mean has 1 numbers, not 3"),
    ({"normalised": {"mean": "own", "std": "own"}, "own": {"0": {}}}, "own.0 has no mean"),
    *(({"target_scale": value}, "target_scale is") for value in (1, [], {"mean": "own"})),
    ({"target_scale": SCALE}, "target_scale.mean has 3 numbers, not 2"),
    *(({"own": value}, "own is") for value in (None, 3, [], {"0": 3}, {"0": {"mean": [1]}})),
    ({"own": {"0": {"median": [1, 2]}}}, "own.0.median has 2 numbers, not 3"),
    *(({"vocabulary": value}, "vocabulary is") for value in (None, -1, 1.5, "a", 10**12)),
    ({"padding": 7}, "padding is 7, with vocabulary=0"),
    *(({"missing": value}, "missing is") for value in (None, 1)),
    ({"missing": "median", "normalised": None}, "normalised is None, with missing=median"),
    *(({"counts": value}, "counts is") for value in (3, [[1], [1, 2]], [[1.5, 2]], [[-1, 2]])),
    ({"counts": [[1, 2, 3]]}, "counts has not one column for each of the 2 classes"),
    ({"settings": []}, "settings is []"),
]


def test_wrong_contents_of_a_partition_are_errors_with_the_key(copy: Path) -> None:
    """For whoever builds the model, and for whoever describes its inputs."""
    file = copy / "partition.json"
    whole = file.read_bytes()
    told = {}
    for entries, expected in WRONG:
        file.write_bytes(whole)
        change(file, **entries)
        for read in (
            lambda: opened(copy, None, None),
            lambda: fedhet.load_run(copy).plot("labels"),
        ):
            try:
                read()
                told[str(entries)] = "nothing"
            except DataError as error:
                if f"partition.json is damaged: {expected}" not in str(error):
                    told[str(entries)] = str(error)
    # What a figure shows has no kind of target that could be wrong.
    assert told == {"{'target': 'klass'}": "nothing"}


@pytest.mark.parametrize(
    "key", ["shape", "classes", "numbers", "target", "normalised", "target_scale", "vocabulary"]
)
def test_a_key_that_is_missing_is_named(copy: Path, key: str) -> None:
    content = json.loads((copy / "partition.json").read_text())
    del content[key]
    (copy / "partition.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"partition\.json .*damaged: '?{key}'? .*missing"):
        opened(copy, None, None)


@pytest.mark.parametrize(
    "name", ["../../elsewhere", "/etc", "..", "", "a/b", "personal\n", "a.b", "a\\b"]
)
def test_the_names_of_models_are_no_paths(copy: Path, name: str) -> None:
    change(copy / "summary.json", models=[name])
    for read in (
        lambda: fedhet.load(copy, "best_val", client=0),
        lambda: opened(copy, "best_val", 0),
        lambda: fedhet.load_run(copy),
    ):
        with pytest.raises(DataError, match=r"summary\.json .*damaged: models "):
            read()


@pytest.mark.parametrize(
    "record", [{}, {"kept": {}}, {"kept": {"personal": {}}}, {"not_kept": {"personal.last": "x"}}]
)
def test_a_record_without_models_keeps_none(copy: Path, record: dict[str, Any]) -> None:
    change(copy / "summary.json", personal_models=record)
    with pytest.raises(ConfigError, match=r"personal models \(last\) .*kept"):
        fedhet.load(copy, "personal", client=0)


@pytest.mark.parametrize("kept", [3, {"personal": 3}, {"personal": {"last": "../../x"}}])
def test_a_wrong_record_of_models_is_damaged(copy: Path, kept: Any) -> None:
    change(copy / "summary.json", personal_models={"kept": kept})
    with pytest.raises(DataError, match=r"summary\.json .*damaged: personal_models "):
        fedhet.load(copy, "personal", client=0)


def a_link(file: Path) -> None:
    file.rename(file.with_name(f"real-{file.name}"))
    file.symlink_to(file.with_name(f"real-{file.name}"))


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def endless(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def too_large(file: Path) -> None:
    """With a hole that takes no room on the disk."""
    os.truncate(file, forms.LARGEST_FILE + 1)


@pytest.mark.timeout(60)  # what reads from a pipe does not end
@pytest.mark.parametrize("damage", [a_link, a_pipe, a_folder, endless, too_large])
@pytest.mark.parametrize("name", ["summary.json", "partition.json", "config.yaml"])
def test_only_plain_files_are_read(copy: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(copy / name)
    with pytest.raises(DataError, match=rf"{name} .*damaged: .*(is .*link, .*plain|has 640)"):
        opened(copy, None, None)


@pytest.mark.timeout(60)
def test_weights_are_read_from_no_pipe(copy: Path) -> None:
    a_pipe(copy / "model.safetensors")
    with pytest.raises(DataError, match=r"model\.safetensors .*damaged"):
        fedhet.load(copy)


def test_no_text_of_a_prediction_is_a_formula(
    capsys: pytest.CaptureFixture[str],
    copy: Path,
    tables: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names of classes come from the run; the input is what names the row, and stays."""
    change(copy / "partition.json", classes=["=cmd|' /C calc'!A0", "\t-1+1"])
    shutil.copy(tables / "test.csv", tmp_path / "=in.csv")
    monkeypatch.chdir(tmp_path)
    assert main(["predict", str(copy), "=in.csv", "--format", "csv", "--out", "out.csv"]) == 0
    capsys.readouterr()
    with Path("out.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["input", "prediction", "p(=cmd|' /C calc'!A0)", "p(\t-1+1)"]
    assert {row[1] for row in rows} == {"'=cmd|' /C calc'!A0", "'\t-1+1"}
    assert [row[0] for row in rows] == [f"=in.csv:{row}" for row in range(2, len(rows) + 2)]
    assert all(0 <= float(number) <= 1 for row in rows for number in row[2:])

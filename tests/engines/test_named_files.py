"""A node without data of its own reads what a run names below its FEDHET_DATA_DIR, and no more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest
from own_sites import Node

from fedhet.core.errors import SUBMITTED, DataError
from fedhet.data.files import confined, find_path

SECRET = "John Smith"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a folder for the data of runs, and a file that is no concern of theirs."""
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("FEDHET_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    for folder in ("data", "elsewhere"):
        table = pandas.DataFrame({"x": np.arange(40.0), "y": np.arange(40) % 2})
        table.to_csv(tmp_path / folder / "good.csv", index=False)
        table["x"] = SECRET
        table.to_csv(tmp_path / folder / "bad.csv", index=False)
        pandas.DataFrame({SECRET: [1.0], "61234": [2.0]}).to_csv(tmp_path / folder / "columns.csv")
    return tmp_path


def problem(home: Path, *lines: str) -> str:
    chosen = {line.partition("=")[0] for line in lines}
    run = [*([] if "dataset" in chosen else ["dataset=csv", "dataset.label=y"]), *lines]
    run += [] if "partition" in chosen else ["partition.clients=2"]
    # Without max-model no model is built before its weights are looked for.
    node = Node(home, 1, run, partition_id=0, num_partitions=2, max_model=0)
    return node.problem


def test_a_run_reads_what_is_in_the_folder_for_it(home: Path) -> None:
    assert not problem(home, "dataset.train=good.csv")
    assert not problem(home, f"dataset.train={home}/data/good.csv")
    (home / "data" / "linked.csv").symlink_to(home / "elsewhere" / "good.csv")
    assert not problem(home, "dataset.train=linked.csv")  # the machine's owner has put it there


@pytest.mark.parametrize(
    "lines",
    [
        ["dataset.train={home}/elsewhere/good.csv"],
        ["dataset.train={home}/data/../elsewhere/good.csv"],
        ["dataset.train=good.csv", "data_dir={home}/elsewhere"],
        ["dataset.train=good.csv", "data_dir=../elsewhere"],
        ["dataset.train=good.csv", "dataset.test={home}/elsewhere/good.csv"],
        ["dataset.train=good.csv", "partition=saved", "partition.name={home}/elsewhere/p.json"],
        ["dataset=digits", "model=torchvision/resnet18", "model.weights={home}/w.pt"],
        ["dataset=hf", "dataset.path={home}/elsewhere"],
    ],
    ids=["file", "dots", "folder", "dots in folder", "test", "partition", "weights", "hf"],
)
def test_a_run_reads_nothing_else(home: Path, lines: list[str]) -> None:
    (home / "elsewhere" / "p.json").write_text('{"name": "John Smith"}')
    reason = problem(home, *(line.format(home=home) for line in lines))
    assert "NotFound" in reason and str(home) not in reason and SECRET not in reason


def test_without_such_a_folder_a_run_reads_no_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDHET_DATA_DIR")
    assert "NotFound" in problem(home, "dataset.train=good.csv")
    assert not problem(home, "dataset=digits")


def test_the_nodes_of_engine_flwr_are_those_of_its_own_user(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SUBMITTED, "1")
    assert not problem(home, f"dataset.train={home}/elsewhere/good.csv")


@pytest.mark.parametrize("file", ["bad.csv", "columns.csv"])
def test_the_server_learns_no_cell_and_no_column(
    home: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    reason = problem(home, f"dataset.train={file}")
    assert "DataError; the log on that node" in reason
    assert SECRET not in reason and "61234" not in reason
    assert SECRET in caplog.text


def test_the_server_learns_that_a_file_is_missing(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reason = problem(home, "dataset.train=missing.csv")
    assert "NotFound" in reason and str(home) not in reason
    assert "missing.csv" in caplog.text


def test_the_limit_ends_with_its_block(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.touch()
    with confined(), pytest.raises(DataError, match=r"x\.csv: .*FEDHET_DATA_DIR"):
        find_path(str(tmp_path), "x.csv", "")
    assert find_path(str(tmp_path), "x.csv", "") == file

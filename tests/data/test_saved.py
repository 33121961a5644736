"""Saved partitions: what is written is what is read, and nothing that does not match is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.schemes import run_data, saved_scheme

from fedhet.core.errors import ConfigError, DataError
from fedhet.data.partition import Partition
from fedhet.data.storage import write_json
from fedhet.runs.run_data import RunData


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, RunData]:
    """A partition.json as a run writes it, and the data from which it was made."""
    data = run_data(
        "partition.clients=4", "seed=5", "partition.split=[.6,.2,.2]", "partition.noise=.02"
    )
    path = tmp_path / "run" / "partition.json"
    write_json(path, data.partition_record(), indent=None)
    return path, data


def test_the_record_has_arrays_and_the_file_no_spaces(kept: tuple[Path, RunData]) -> None:
    """With a million clients, lists need 0.4 GiB during the run, and spaces 14 MB of the file."""
    path, data = kept
    record = data.partition_record()
    assert all(isinstance(own, np.ndarray) for own in (record["counts"], *record["indices"]))
    text = path.read_text()
    assert " " not in text and "\n" not in text.rstrip("\n")
    read = json.loads(text)
    assert read["counts"] == record["counts"].tolist()
    assert read["indices"] == [own.tolist() for own in record["indices"]]


def test_a_run_writes_what_is_read(launch: Callable[..., Any]) -> None:
    run = launch("rounds=1", "partition=shards", "partition.clients=3", "eval.clients=false")
    again = launch("rounds=1", "partition=saved", f"partition.name={run.dir}", "eval.clients=false")
    assert again.summary["partition"] == run.summary["partition"]
    assert again.summary["weights_sha256"] == run.summary["weights_sha256"]
    # the second run has saved it again
    third = run_data("partition=saved", f"partition.name={again.dir}/partition.json")
    assert third.partition.name == "shards"
    assert third.partition.hash == run.summary["partition"]["hash"]


def test_everything_comes_back(kept: tuple[Path, RunData]) -> None:
    path, data = kept
    labels = data.dataset.y.numpy()
    for name in (path, path.parent):
        scheme = saved_scheme(name)
        assert (scheme.split, scheme.noise) == ((0.6, 0.2, 0.2), 0.02)
        partition = scheme.assign(labels, seed=99)
        assert partition == data.partition
        assert all(map(np.array_equal, partition.indices, data.partition.indices))
    assert (saved_scheme(path, split=[1, 0, 0]).split, saved_scheme(path, noise=0).noise) == (
        (1, 0, 0),
        0,
    )


def test_other_data_are_refused_with_both_numbers(kept: tuple[Path, RunData]) -> None:
    path, data = kept
    labels = data.dataset.y.numpy()
    message = r"other data, .*1437 samples .*; .*1436 "
    with pytest.raises(ConfigError, match=message):
        saved_scheme(path).assign(labels[1:], 5)
    message = (
        r"other data, .*1437 samples .*labels' digest \w{16};"
        r" .*1437 .*\w{16}"
    )
    with pytest.raises(ConfigError, match=message):
        saved_scheme(path).assign(np.roll(labels, 1), 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda record: record.pop("labels"),
            "damaged: labels .*missing",
        ),
        (
            lambda record: record.update(indices=None),
            "damaged: indices .*missing",
        ),
        (
            lambda record: record["settings"].pop("split"),
            "partition.split=None: ",
        ),
        (
            lambda record: record["indices"][0].append(1),
            r"damaged: .*indices .*hash \w{16}, ",
        ),
        (
            lambda record: record["indices"].append(["a"]),
            "damaged: .*indices .*lists .*whole numbers",
        ),
        (
            lambda record: record.update(settings=[]),
            r"damaged: settings .*\[\]",
        ),
        (
            lambda record: record["settings"].update(split=[2, 2, 2]),
            r"partition\.split=\[2, 2, 2\]: ",
        ),
        (
            lambda record: record["settings"].update(noise="a"),
            "partition.noise=a ",
        ),
        (
            lambda record: record["settings"].update(pool_test=3),
            "partition.pool_test=3 ",
        ),
        (
            lambda record: record.update(owners=[1, 2, 3, 4]),
            r"damaged: owners .*\[1, 2, 3, 4\]",
        ),
    ],
)
def test_damage_is_noticed(
    kept: tuple[Path, RunData], change: Callable[[dict[str, Any]], None], message: str
) -> None:
    path, data = kept
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises((ConfigError, DataError), match=f"{path}.*{message}"):
        saved_scheme(path).assign(data.dataset.y.numpy(), 0)


@pytest.mark.parametrize("one", [1437, 10**15, -1, 0])
def test_indices_that_are_no_samples_are_refused(kept: tuple[Path, RunData], one: int) -> None:
    """Also with the hash of such indices; sample 0 has an owner already."""
    path, data = kept
    record = json.loads(path.read_text())
    record["indices"][0].append(one)
    indices = [np.array(each) for each in record["indices"]]
    record["hash"] = Partition(record["name"], indices).hash
    path.write_text(json.dumps(record))
    message = "indices repeat .*sample, .*1436"
    with pytest.raises(DataError, match=message):
        saved_scheme(path).assign(data.dataset.y.numpy(), 0)


def test_a_wrong_setting_of_the_user_is_no_damage(kept: tuple[Path, RunData]) -> None:
    with pytest.raises(ConfigError, match=r"partition\.split=\[2, 2, 2\]: "):
        saved_scheme(kept[0], split=[2, 2, 2])


@pytest.mark.parametrize("content", ["", "[1, 2]", "{"])
def test_a_file_that_is_not_a_partition(tmp_path: Path, content: str) -> None:
    (tmp_path / "mine.json").write_text(content)
    with pytest.raises(DataError, match=r"mine.json .*damaged: "):
        saved_scheme(tmp_path / "mine.json")

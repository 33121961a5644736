"""`partition.pool_test=true`: the clients share the test set too, and no global one is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from composing import data_main as main
from data.image_data import write_images
from data.leaf_files import write_leaf
from data.schemes import run_data, saved_scheme

import fedhet
from fedhet.core.errors import ConfigError, DataError
from fedhet.data.federation import transform
from fedhet.data.partition import Iid, Partition
from fedhet.runs.run_data import RunData

POOL = "partition.pool_test=true"


def own_samples(data: RunData, pid: int) -> torch.Tensor:
    """All samples of a client, one in each row."""
    client = data.clients[pid]
    parts = [part.x for part in (client.train, client.val, client.test) if part is not None]
    return torch.cat(parts).flatten(1)


def rows(x: torch.Tensor) -> list[tuple[float, ...]]:
    return sorted(map(tuple, x.flatten(1).tolist()))


# ---- the samples


@pytest.mark.parametrize(
    "scheme", ["iid", "dirichlet", "quantity", "shards", "pathological", "noise"]
)
def test_the_clients_have_every_sample_of_both_sets(scheme: str) -> None:
    settings = (f"partition={scheme}", "partition.clients=13", "partition.noise=0")
    apart = run_data(*settings).dataset
    data = run_data(*settings, POOL)
    assert data.dataset.test is None
    assert len(data.dataset.y) == 1797
    held = torch.cat([own_samples(data, pid) for pid in range(13)])
    # shards are equal, and the remainder is left out: 1797 = 26 * 69 + 3
    assert len(held) == (26 * 69 if scheme == "shards" else 1797)
    if scheme != "shards":
        assert rows(held) == rows(torch.cat([apart.x, apart.test.x]))
    labels = [client.test.y for client in data.clients if client.test is not None]
    assert torch.bincount(torch.cat(labels)).min() > 0


def test_pfllib_splits_75_to_25() -> None:
    data = run_data(POOL, "partition.split=[.75,0,.25]", "partition.clients=20")
    for client, indices in zip(data.clients, data.partition.indices, strict=True):
        assert client.val is None
        assert len(client.test or ()) == int(len(indices) * 0.25 + 0.5)
        assert len(client.train) + len(client.test or ()) == len(indices)


def test_auto_is_measured_on_the_training_parts_of_both_sets() -> None:
    data = run_data(POOL, "dataset.mean=auto", "dataset.std=auto", "partition.split=[.5,0,.5]")
    x = torch.cat([client.train.x for client in data.clients]).double()
    assert data.dataset.mean == pytest.approx([float(x.mean())], rel=1e-12)
    assert data.dataset.std == pytest.approx([float(x.std(correction=0))], rel=1e-12)
    assert len(x) == pytest.approx(1797 / 2, abs=10)


def test_training_and_test_samples_of_two_types_are_refused(tmp_path: Path) -> None:
    grey = np.zeros((6, 2, 2), np.uint8)
    y = np.arange(6) % 2
    np.savez(tmp_path / "data.npz", x_train=grey, y_train=y, x_test=grey / 255.0, y_test=y)
    settings = ("dataset=npz", f"dataset.file={tmp_path}/data.npz", "partition=iid")
    run_data(*settings, "partition.clients=2")
    with pytest.raises(DataError, match=r"training .*torch.uint8 .*test .*torch.float32"):
        run_data(*settings, "partition.clients=2", POOL)


# ---- natural owners


def table(i: np.ndarray, owners: str) -> dict[str, np.ndarray]:
    return {"a": i.astype(float), "label": i % 2, "owner": np.array(list(owners))}


def owned(folder: Path) -> dict[str, tuple[str, dict[str, list[float]]]]:
    """dataset -> (its settings, owner -> the first number of each sample, of both sets)."""
    train = table(np.arange(12), "cabcabcabcab")
    test = table(np.arange(12, 16), "bzbc")  # z has no training sample
    both = {"a": [1, 4, 7, 10], "b": [2, 5, 8, 11, 12, 14], "c": [0, 3, 6, 9, 15], "z": [13]}
    pandas.DataFrame(train).to_csv(folder / "train.csv", index=False)
    pandas.DataFrame(test).to_csv(folder / "test.csv", index=False)
    arrays = {
        f"{key}_{part}": rows[column]
        for part, rows in (("train", train), ("test", test))
        for key, column in (("y", "label"), ("o", "owner"))
    }
    x = {"x_train": train["a"][:, None], "x_test": test["a"][:, None]}
    np.savez(folder / "data.npz", **arrays, **x)
    (folder / "hub").mkdir()
    for part, content in (("train", train), ("test", test)):
        pandas.DataFrame(content).to_parquet(folder / "hub" / f"{part}.parquet")
    image = [[0.0] * 784, [round(1 / 255, 4)] * 784, [round(2 / 255, 4)] * 784]
    users = {"w2": ([image[0]], [1]), "w1": ([image[1]], [2])}
    write_leaf(folder / "femnist", users, {"w2": ([image[2]], [3]), "w0": ([image[1]], [4])})
    for source in ("far", "near"):
        write_images(folder / "chest_xray" / source, (4, 4))
    # 10 * class + number, classes in the order b, a, c
    images = [0, 0, 1, 1, 2, 10, 10, 11, 11, 12, 20, 20, 21, 21, 22]
    csv = f"dataset=csv dataset.train={folder}/train.csv"
    leaf = {"w2": [0, 2], "w1": [1], "w0": [1]}
    held_out = {"a": both["a"], "b": [2, 5, 8, 11], "c": [0, 3, 6, 9]}
    return {
        "csv": (f"{csv} dataset.test={folder}/test.csv dataset.owner=owner", both),
        "held out": (f"{csv} dataset.test_fraction=.4 dataset.owner=owner", held_out),
        "hf": (f"dataset=hf dataset.path={folder}/hub dataset.owner=owner", both),
        "npz": (
            f"dataset=npz dataset.file={folder}/data.npz dataset.owner=o_train"
            " dataset.owner_test=o_test",
            both,
        ),
        "femnist": (f"dataset=femnist data_dir={folder}", leaf),
        "chest_xray": (
            f"dataset=chest_xray data_dir={folder} dataset.size=4",
            {"far": images, "near": images},
        ),
    }


NATURAL = ("partition=natural", "partition.min_size=1")


@pytest.mark.parametrize("kind", ["csv", "held out", "hf", "npz", "femnist", "chest_xray"])
def test_an_owner_has_its_samples_of_both_sets(tmp_path: Path, kind: str) -> None:
    settings, expected = owned(tmp_path)[kind]
    data = run_data(*settings.split(), *NATURAL, POOL)
    held = {
        owner: sorted(own_samples(data, pid)[:, 0].tolist())
        for pid, owner in enumerate(data.partition.owners)
    }
    assert held == expected
    assert run_data(*settings.split(), *NATURAL).dataset.test is not None


def test_the_test_set_may_have_no_owners(tmp_path: Path) -> None:
    settings, _ = owned(tmp_path)["csv"]
    test = pandas.read_csv(tmp_path / "test.csv")
    for change in (test.drop(columns="owner"), test.assign(owner=["b", None, "b", "c"])):
        change.to_csv(tmp_path / "test.csv", index=False)
        assert len(run_data(*settings.split(), *NATURAL).partition.indices) == 3
        with pytest.raises(ConfigError, match="test set"):
            run_data(*settings.split(), *NATURAL, POOL)
        iid = run_data(*settings.split(), "partition=iid", "partition.clients=2", POOL)
        assert sum(map(len, iid.partition.indices)) == 16


def test_owners_of_the_test_set_alone_are_refused(tmp_path: Path) -> None:
    settings, _ = owned(tmp_path)["npz"]
    message = r"dataset\.owner_test=o_test: .*dataset\.owner, "
    with pytest.raises(ConfigError, match=message):
        run_data(*settings.split(), "dataset.owner=null")


# ---- the partition's identity


def test_the_hash_tells_pooled_samples_apart() -> None:
    indices = [np.array([0, 3]), np.array([1])]
    assert Partition("a", indices).hash == Partition("b", indices, pool_test=False).hash
    assert Partition("a", indices, pool_test=True).hash != Partition("a", indices).hash
    assert run_data().partition_record()["settings"]["pool_test"] is False


@pytest.mark.parametrize("value", [1, "true", None])
def test_it_is_a_boolean(value: object) -> None:
    with pytest.raises(ConfigError, match=r"partition\.pool_test="):
        Iid(name="iid", clients=2, min_size=1, split=[1, 0, 0], noise=0, pool_test=value)


def test_a_saved_partition_stays_pooled(tmp_path: Path, cache_dir: Path) -> None:
    settings = ("partition=shards", "partition.clients=4")
    assert main(["partition", "--name", "both", *settings, POOL]) == 0
    assert main(["partition", "--name", "one", *settings]) == 0
    data = run_data("partition=saved", "partition.name=both")
    assert data.partition == run_data(*settings, POOL).partition
    assert (data.dataset.test, len(data.dataset.y)) == (None, 1797)
    assert data.partition_record()["settings"]["pool_test"] is True
    assert run_data("partition=saved", "partition.name=both", POOL).partition == data.partition
    for name, value, made in (("both", "false", True), ("one", "true", False)):
        message = rf"partition\.pool_test={value.title()}: .*{name}\.json .*{made}"
        with pytest.raises(ConfigError, match=message):
            run_data("partition=saved", f"partition.name={name}", f"partition.pool_test={value}")
    assert main(["partition", "--name", "one", *settings, POOL]) == 2  # another partition
    # a file from before the setting
    record = json.loads((cache_dir / "one.json").read_text())
    del record["settings"]["pool_test"]
    (tmp_path / "old.json").write_text(json.dumps(record))
    assert saved_scheme(tmp_path / "old.json").pool_test is False
    old = run_data("partition=saved", f"partition.name={tmp_path}/old.json")
    assert old.partition == run_data(*settings).partition


# ---- runs and commands


def test_a_run_reports_the_clients_own_tests(launch: Callable[..., Any]) -> None:
    settings = (POOL, "rounds=2", "partition.clients=4", "partition.split=[.75,0,.25]")
    run = launch(*settings)
    rounds = [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]
    assert [row["acc_global"] for row in rounds] == [None, None]
    assert run.summary["accuracy"] == {"last": None, "best_val": None, "best_test": None}
    data = run_data(*settings)
    model = fedhet.load(run.dir)
    normalize = transform(data.dataset)
    with torch.no_grad():
        right = [
            float((model(normalize(test.x)).argmax(1) == test.y).double().mean())
            for test in (client.test for client in data.clients)
        ]
    assert rounds[-1]["acc_clients_mean"] == pytest.approx(np.mean(right))


@pytest.mark.slow
def test_two_workers_and_a_saved_partition_give_the_same_bytes(
    launch: Callable[..., Any],
) -> None:
    settings = (POOL, "rounds=2", "partition.clients=4", "partition.split=[.75,0,.25]")
    run = launch(*settings)
    again = launch(*settings, "engine.workers=2")
    saved = launch("rounds=2", "partition=saved", f"partition.name={run.dir}")
    for other in (again, saved):
        assert other.summary["weights_sha256"] == run.summary["weights_sha256"]
        assert other.summary["partition"] == run.summary["partition"]


def test_nothing_to_test_on_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    run_data(POOL, "partition.split=[.8,.2,0]")
    assert "there is no global test set" in caplog.text


def test_describe_and_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedhet.runs.record.terminal.log_to_stderr", lambda: None)
    settings = ("partition=iid", "partition.clients=3", POOL)
    assert main(["describe", *settings, "--out", str(tmp_path)]) == 0
    title = " ".join(capsys.readouterr().out.split())
    assert "3 clients, 1797 of 1797 samples, 599 to 599" in title
    assert main(["export", *settings, "--client", "2", "--out", str(tmp_path)]) == 0
    client = run_data(*settings).clients[2]
    with np.load(tmp_path / "client-2.npz") as file:
        assert np.array_equal(file["x_train"], client.train.x.numpy())
        assert np.array_equal(file["x_test"], client.test.x.numpy())

"""`python -m fedhet data`: partition, export and describe."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from composing import data_main as main
from data.schemes import run_data, saved_scheme

from fedhet.core.errors import ConfigError
from fedhet.core.task import Samples
from fedhet.data.dataset import Dataset
from fedhet.data.partition import Scheme, read_saved
from fedhet.runs import config
from fedhet.runs.config.instantiation import instantiate
from fedhet.runs.data_commands.partitions import table
from fedhet.runs.run_data import RunData


@pytest.fixture(autouse=True)
def _logger() -> Iterator[None]:
    """`main` configures the log of its process; here it is restored."""
    log = logging.getLogger("fedhet")
    handlers, level = list(log.handlers), log.level
    yield
    log.handlers[:], log.level = handlers, level


# ---- partition


def test_a_name_is_kept(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["partition=pathological", "partition.clients=5"]
    assert main(["partition", overrides[0], "--name", "two-each", overrides[1]]) == 0
    path = cache_dir / "two-each.json"
    assert str(path) in capsys.readouterr().out
    scheme: Scheme = saved_scheme("two-each")
    data = run_data(*overrides)
    assert scheme.assign(data.dataset.y.numpy(), 3) == data.partition
    # the same partition may be saved again
    assert main(["partition", "--name", "two-each", *overrides]) == 0
    before = path.read_bytes()
    assert main(["partition", "--name", "two-each", "partition=iid"]) == 2
    error = capsys.readouterr().err
    assert f"{path} is another partition" in error and data.partition.hash in error
    assert main(["partition", "--name", "two-each", *overrides, "partition.noise=.1"]) == 2
    assert "0.0], those to save" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert main(["partition", "--name", "../mine"]) == 2
    assert "--name ../mine: " in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"saved names .*two-each"):
        saved_scheme("two_each")
    assert read_saved("two-each")[0] == path


# ---- export


def test_export_holds_one_client_and_no_other(tmp_path: Path) -> None:
    overrides = ["partition.clients=4", "partition.noise=.1"]
    out = tmp_path / "out"
    assert main(["export", *overrides, "--client", "1", "--client", "3", "--out", str(out)]) == 0
    data = run_data(*overrides)
    assert sorted(path.name for path in out.iterdir()) == ["client-1.npz", "client-3.npz"]
    for pid in (1, 3):
        with np.load(out / f"client-{pid}.npz") as file:
            arrays = dict(file)
        client = data.clients[pid]
        assert client.val is not None and client.test is not None
        for part, samples in (("train", client.train), ("val", client.val), ("test", client.test)):
            assert torch.equal(torch.from_numpy(arrays.pop(f"x_{part}")), samples.x)
            assert torch.equal(torch.from_numpy(arrays.pop(f"y_{part}")), samples.y)
        assert arrays.pop("target") == "class"
        for key in ("classes", "mean", "std"):
            assert arrays.pop(key).tolist() == list(getattr(data.dataset, key))
        assert arrays == {}


def test_export_leaves_out_empty_parts_and_unknown_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "partition.split=[1,0,0]", "--client", "0", "--out", str(tmp_path)]) == 0
    with np.load(tmp_path / "client-0.npz") as file:
        assert set(file) == {"x_train", "y_train", "target", "classes", "mean", "std"}
    capsys.readouterr()
    for client in ("10", "-1"):
        assert main(["export", f"--client={client}", "--out", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert f"--client {client}: " in error and "0 to 9" in error


# ---- describe


def rows_of(output: str) -> list[list[str]]:
    """The cells of the rows of a printed table."""
    cells = [line.split() for line in output.splitlines()]
    return [row for row in cells if row and row[0].isdigit()]


def test_describe_prints_the_counts_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["partition=shards", "partition.clients=3", "partition.noise=.1"]
    assert main(["describe", *overrides, "--out", str(tmp_path)]) == 0
    data = run_data(*overrides)
    rows = rows_of(capsys.readouterr().out)
    assert len(rows) == 3
    for pid, row in enumerate(rows):
        y = data.dataset.y[torch.from_numpy(data.partition.indices[pid])]
        counts = [int((y == label).sum()) for label in range(10)]
        client = data.clients[pid]
        assert client.val is not None and client.test is not None
        parts = [len(client.train), len(client.val), len(client.test)]
        noise = f"{(0.1 * (pid + 1) / 3) ** 0.5:.3f}"
        numbers = [len(y), *parts, sum(n > 0 for n in counts), *counts]
        assert row == [str(pid), noise, *map(str, numbers)]
    assert [path.read_bytes()[:4] for path in tmp_path.glob("*.png")] == [b"\x89PNG"]


def test_owners_are_named() -> None:
    dataset = Dataset(
        "letters",
        torch.zeros(30, 1, 2, 2),
        torch.arange(30) % 25,
        Samples(torch.zeros(1, 1, 2, 2), torch.tensor([0])),
        tuple("abcdefghijklmnopqrstuvwxy"),
        owners=np.arange(30) % 3,
        owner_names=("ada", "bert", "cleo"),
    )
    cfg = config.compose(["partition=natural"]).cfg
    scheme = instantiate(cfg.partition)
    partition = scheme.assign(dataset.y.numpy(), 0, dataset.owners, dataset.owner_names)
    data = RunData(cfg, scheme, dataset, partition)
    record = data.partition_record()
    assert record["owners"] == ["ada", "bert", "cleo"]
    # no columns for the 25 classes
    assert rows_of(table(data, record)) == [
        ["0", "ada", "10", "8", "1", "1", "10"],
        ["1", "bert", "10", "8", "1", "1", "10"],
        ["2", "cleo", "10", "8", "1", "1", "10"],
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("partition.clients=2000", r"partition\.clients=2000 .* the data have 1437"),
        ("partition=natural", "partition=natural: .*owners"),
        ("partition.noise=-1", r"partition\.noise=-1 is not allowed; .*>= 0"),
        ("partition=saved", r"partition\.name=null is not allowed"),
        ("nonsense=1", "unknown setting 'nonsense'"),
    ],
)
def test_wrong_settings_are_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert main(["describe", override]) == 2
    output = capsys.readouterr().err
    assert re.match(f"error: {message}", output) and output.count("\n") == 1


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describ"]) == 2
    assert "'describ'" in capsys.readouterr().err

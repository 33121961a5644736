"""Saved partitions, and `python -m fedhet.data`: what is written is what is read, and nothing that
does not fit is used."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fedhet import config
from fedhet.config.targets import instantiate
from fedhet.data import saved
from fedhet.data.__main__ import main
from fedhet.data.commands.describe import table
from fedhet.data.configured import Configured
from fedhet.data.dataset import Dataset
from fedhet.data.saved import Saved
from fedhet.data.scheme import Scheme
from fedhet.errors import ConfigError, DataError
from fedhet.task import Samples


def configured(*overrides: str) -> Configured:
    return Configured.of(config.compose(list(overrides)).cfg)


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, Configured]:
    """A partition.json as a run writes it, and what it was made of."""
    found = configured(
        "partition.clients=4", "seed=5", "partition.split=[.6,.2,.2]", "partition.noise=.02"
    )
    path = tmp_path / "run" / "partition.json"
    path.parent.mkdir()
    path.write_text(json.dumps(found.about()))
    return path, found


def use(name: str | Path, **keys: Any) -> Saved:
    return Saved(**{"name": str(name), "split": None, "noise": None, **keys})


def test_a_run_writes_what_is_read(launch: Callable[..., Any]) -> None:
    run = launch("rounds=1", "partition=shards", "partition.clients=3", "eval.clients=false")
    again = launch("rounds=1", "partition=saved", f"partition.name={run.dir}", "eval.clients=false")
    assert again.summary["partition"] == run.summary["partition"]
    assert again.summary["weights_sha256"] == run.summary["weights_sha256"]
    third = configured(
        "partition=saved", f"partition.name={again.dir}/partition.json"
    )  # saved again by the second
    assert (third.partition.name, third.partition.hash) == (
        "shards",
        run.summary["partition"]["hash"],
    )


def test_all_comes_back(kept: tuple[Path, Configured]) -> None:
    path, found = kept
    labels = found.dataset.y.numpy()
    for name in (path, path.parent):
        scheme = use(name)
        assert (scheme.split, scheme.noise) == ((0.6, 0.2, 0.2), 0.02)
        partition = scheme.assign(labels, seed=99)
        assert partition == found.partition and all(
            map(np.array_equal, partition.indices, found.partition.indices)
        )
    assert (use(path, split=[1, 0, 0]).split, use(path, noise=0).noise) == ((1, 0, 0), 0)


def test_other_data_are_refused_with_both_numbers(kept: tuple[Path, Configured]) -> None:
    path, found = kept
    labels = found.dataset.y.numpy()
    with pytest.raises(
        ConfigError, match=r"is of other data, 1437 samples .*; these are 1436 with"
    ):
        use(path).assign(labels[1:], 5)
    with pytest.raises(
        ConfigError,
        match=(
            r"is of other data, 1437 samples with the labels' digest \w{16}; these are 1437 with"
            r" \w{16}"
        ),
    ):
        use(path).assign(np.roll(labels, 1), 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about.pop("labels"), "no partition that can be used again: labels missing"),
        (lambda about: about.update(indices=None), "indices missing or of another kind"),
        (
            lambda about: about["settings"].pop("split"),
            "its settings have no split; give partition.split",
        ),
        (
            lambda about: about["indices"][0].append(1),
            r"is damaged: its indices have the hash \w{16}, not",
        ),
        (
            lambda about: about["indices"].append(["a"]),
            "is damaged: its indices are no lists of whole numbers",
        ),
    ],
)
def test_damage_is_noticed(
    kept: tuple[Path, Configured], change: Callable[[dict[str, Any]], None], message: str
) -> None:
    path, found = kept
    about = json.loads(path.read_text())
    change(about)
    path.write_text(json.dumps(about))
    with pytest.raises(DataError, match=f"{path}.*{message}"):
        use(path).assign(found.dataset.y.numpy(), 0)


@pytest.mark.parametrize("content", ["", "[1, 2]", "{"])
def test_a_file_that_is_no_partition(tmp_path: Path, content: str) -> None:
    (tmp_path / "mine.json").write_text(content)
    with pytest.raises(DataError, match=r"mine.json is damaged: expected a partition.json"):
        use(tmp_path / "mine.json")


# ---- python -m fedhet.data


@pytest.fixture(autouse=True)
def _logger() -> Iterator[None]:
    """`main` owns its process's log: it is put back."""
    log = logging.getLogger("fedhet")
    handlers, level = list(log.handlers), log.level
    yield
    log.handlers[:], log.level = handlers, level


def test_a_name_is_kept(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["partition", "partition=pathological", "--name", "two-each", "partition.clients=5"])
        == 0
    )
    path = cache_dir / "two-each.json"
    assert str(path) in capsys.readouterr().out
    scheme: Scheme = use("two-each")
    found = configured("partition=pathological", "partition.clients=5")
    assert scheme.assign(found.dataset.y.numpy(), 3) == found.partition
    assert (
        main(["partition", "--name", "two-each", "partition=pathological", "partition.clients=5"])
        == 0
    )  # the same again
    before = path.read_bytes()
    assert main(["partition", "--name", "two-each", "partition=iid"]) == 2
    assert f"{path} is another partition, {found.partition.hash}" in capsys.readouterr().err
    assert (
        main(
            [
                "partition",
                "--name",
                "two-each",
                "partition=pathological",
                "partition.clients=5",
                "partition.noise=.1",
            ]
        )
        == 2
    )
    assert "noise 0.0, not" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert main(["partition", "--name", "../mine"]) == 2
    assert "--name ../mine: a name has letters" in capsys.readouterr().err
    with pytest.raises(
        ConfigError,
        match=(
            r"neither a run's folder, nor a partition.json, nor a saved name; saved are: two-each"
        ),
    ):
        use("two_each")
    assert saved.read("two-each")[0] == path


def test_export_holds_one_client_and_no_other(tmp_path: Path) -> None:
    lines = ["partition.clients=4", "partition.noise=.1"]
    assert (
        main(["export", *lines, "--client", "1", "--client", "3", "--out", str(tmp_path / "out")])
        == 0
    )
    found = configured(*lines)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "client-1.npz",
        "client-3.npz",
    ]
    for pid in (1, 3):
        with np.load(tmp_path / "out" / f"client-{pid}.npz") as file:
            arrays = dict(file)
        client = found.clients[pid]
        assert client.val is not None and client.test is not None
        for part, samples in (("train", client.train), ("val", client.val), ("test", client.test)):
            assert torch.equal(torch.from_numpy(arrays.pop(f"x_{part}")), samples.x)
            assert torch.equal(torch.from_numpy(arrays.pop(f"y_{part}")), samples.y)
        assert all(
            arrays.pop(key).tolist() == list(getattr(found.dataset, key))
            for key in ("classes", "mean", "std")
        )
        assert arrays == {}


def test_export_leaves_out_empty_parts_and_unknown_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "partition.split=[1,0,0]", "--client", "0", "--out", str(tmp_path)]) == 0
    with np.load(tmp_path / "client-0.npz") as file:
        assert set(file) == {"x_train", "y_train", "classes", "mean", "std"}
    capsys.readouterr()
    for client in ("10", "-1"):
        assert main(["export", f"--client={client}", "--out", str(tmp_path)]) == 2
        assert f"--client {client}: the partition has the clients 0 to 9" in capsys.readouterr().err


def test_describe_prints_the_counts_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["partition=shards", "partition.clients=3", "partition.noise=.1"]
    assert main(["describe", *lines, "--out", str(tmp_path)]) == 0
    found = configured(*lines)
    said = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│")
    ]
    for pid, row in enumerate(said):
        y = found.dataset.y[torch.from_numpy(found.partition.indices[pid])]
        counts = [int((y == label).sum()) for label in range(10)]
        client = found.clients[pid]
        assert client.val is not None and client.test is not None
        parts = [len(client.train), len(client.val), len(client.test)]
        assert row == [
            str(pid),
            f"{(0.1 * (pid + 1) / 3) ** 0.5:.3f}",
            *map(str, [len(y), *parts, sum(n > 0 for n in counts), *counts]),
        ]
    assert len(said) == 3
    assert [path.read_bytes()[:4] for path in sorted(tmp_path.glob("*.png"))] == [b"\x89PNG"] * 2


def test_owners_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    data = Dataset(
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
    found = Configured(
        cfg, scheme, data, scheme.assign(data.y.numpy(), 0, data.owners, data.owner_names)
    )
    assert found.about()["owners"] == ["ada", "bert", "cleo"]
    Console(width=120).print(table(found, found.about()))
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│")
    ]
    assert rows == [
        [str(pid), name, "10", "8", "1", "1", "10"]
        for pid, name in enumerate(("ada", "bert", "cleo"))
    ]  # not 25 columns


def test_wrong_settings_are_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for lines, message in (
        (["partition.clients=2000"], "partition.clients=2000: there are only 1437 samples"),
        (["partition=natural"], "partition=natural: these data do not say"),
        (["partition.noise=-1"], "partition.noise=-1: must be a number >= 0"),
        (["partition=saved"], "partition.name=None: give a saved name"),
        (["nonsense=1"], "unknown setting 'nonsense'"),
    ):
        assert main(["describe", *lines]) == 2
        assert (said := capsys.readouterr().err).startswith(f"error: {message}") and said.count(
            "\n"
        ) == 1
    with pytest.raises(SystemExit) as caught:
        main(["describ"])
    assert caught.value.code == 2

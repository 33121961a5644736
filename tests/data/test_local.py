"""Every site's own data (dataset=local): simulations with a file for each site."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from composing import composed
from data.local_files import CUTS, SHORT, data_of, digits, write_digits, write_tables
from PIL import Image

import fedhet
from fedhet.core.counts import withheld
from fedhet.core.errors import ConfigError, DataError, Rejected
from fedhet.data.local.description import read_statistics
from fedhet.runs.local_data import LocalData, declaration


def test_each_site_is_a_client_with_all_of_its_own_samples(tmp_path: Path) -> None:
    data = data_of(*write_digits(tmp_path))
    x, y = digits()
    assert data.clients.sizes == [80, 71, 96]  # b has test samples, and only validation is cut off
    for pid, (start, end) in enumerate(pairwise(CUTS)):
        client = data.clients[pid]
        own = [client.train, client.val, *([] if pid == 1 else [client.test])]
        got = torch.cat([part.x for part in own]).numpy()
        order = np.lexsort(got.reshape(len(got), -1).T)
        expected = x[start:end].reshape(end - start, -1)
        assert (got.reshape(len(got), -1)[order] == expected[np.lexsort(expected.T)]).all()
        labels = torch.cat([part.y for part in own]).numpy()
        assert (np.sort(labels) == np.sort(y[start:end])).all()
    assert (data.clients[1].test.x.numpy() == x[400:420]).all()
    assert data.partition_record()["sizes"]["b"] == {"train": 71, "val": 9, "test": 20}


def test_normalisation_is_that_of_all_training_parts_together(tmp_path: Path) -> None:
    data = data_of(*write_digits(tmp_path))
    pixels = torch.cat([client.train.x for client in data.clients]).double() / 255
    assert data.dataset.mean == pytest.approx([pixels.mean().item()], rel=1e-12)
    assert data.dataset.std == pytest.approx([pixels.std(correction=0).item()], rel=1e-12)
    given = data_of(*write_digits(tmp_path), "dataset.mean=[.5]")
    assert given.dataset.mean == (0.5,) and given.dataset.std == data.dataset.std


def test_the_data_of_another_site_are_not_here(tmp_path: Path) -> None:
    cfg = composed(*write_tables(tmp_path)).cfg
    here = LocalData.simulated(cfg, "local")
    assert here.agreed is not None
    at_a = LocalData.at_site(cfg, 0, here.clients.here[0], here.agreed.statistics)
    assert len(at_a.clients[0].train) == at_a.clients.sizes[0] > 0
    with pytest.raises(DataError, match="client 1"):
        at_a.clients[1]


def test_the_agreed_statistics_are_of_each_column_and_each_number(tmp_path: Path) -> None:
    declared, _ = declaration(composed(*write_tables(tmp_path)).cfg)
    agreed = {"mean": [1.0, 2.0], "std": [1.0, 2.0], "target_mean": [3.0], "target_std": [1.0]}
    assert read_statistics(declared, agreed) == agreed
    wrong = {"target_mean": [3.0, 4.0], "mean": [1.0], "std": [0.0, 1.0], "target_std": [0.0]}
    for key, value in wrong.items():
        with pytest.raises(Rejected):
            read_statistics(declared, {**agreed, key: value})


@pytest.mark.slow
def test_a_run_gives_the_same_bytes_in_several_processes(tmp_path: Path) -> None:
    lines = [*write_digits(tmp_path), *SHORT]
    one = fedhet.run([*lines, f"hydra.run.dir={tmp_path / 'one'}"])
    two = fedhet.run([*lines, "engine.workers=2", f"hydra.run.dir={tmp_path / 'two'}"])
    for key in ("weights_sha256", "accuracy", "acc_clients_mean", "bytes"):
        assert one.summary[key] == two.summary[key], key


def test_a_global_test_set_at_the_server(tmp_path: Path, launch: Callable[..., Any]) -> None:
    x, y = digits()
    np.savez(tmp_path / "test.npz", x=x[500:600], y=y[500:600])
    lines = [*write_digits(tmp_path), "dataset.test=test.npz", *SHORT]
    run = launch(*lines)
    assert run.summary["accuracy"]["last"] is not None
    assert run.summary["validation"] > 0.1  # best_val comes from the clients
    assert fedhet.load(run)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_columns_have_the_declared_order_whatever_the_file_has(tmp_path: Path) -> None:
    data = data_of(*write_tables(tmp_path), "partition.split=[1,0,0]")
    for pid, site in enumerate("ab"):
        frame = pandas.read_csv(tmp_path / f"{site}.csv")
        expected = frame[["age", "height"]].to_numpy(np.float64)
        order = np.lexsort(expected.T)
        got = data.clients[pid].train.x.numpy()
        assert (got[np.lexsort(got.T)] == expected[order]).all()
    prices = np.concatenate([pandas.read_csv(tmp_path / f"{s}.csv")["price"] for s in "ab"])
    assert data.dataset.target_mean == pytest.approx([prices.mean()], rel=1e-6)
    assert data.dataset.numbers == ("price",)


def test_a_folder_of_images_may_lack_a_class(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for site, kinds in (("a", ["cat", "dog"]), ("b", ["dog"])):
        for part in ("train", "test"):
            for kind in kinds:
                folder = tmp_path / site / part / kind
                folder.mkdir(parents=True)
                for i in range(4):
                    pixels = draw.integers(0, 256, (5, 6), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{i}.png")
    lines = [
        "dataset=local",
        f"data_dir={tmp_path}",
        "dataset.sites=[a,b]",
        "dataset.classes=[cat,dog]",
        "dataset.shape=[1,5,6]",
        "dataset.dtype=uint8",
        "dataset.files={a:a,b:b}",
        "partition.split=[1,0,0]",
    ]
    data = data_of(*lines)
    assert data.clients[0].test.y.tolist() == [0] * 4 + [1] * 4
    assert data.clients[1].train.y.tolist() != [] and set(data.clients[1].train.y.tolist()) == {1}
    with pytest.raises(DataError, match=r"site 'a' .*class folders \['dog'\]"):
        data_of(*lines, "dataset.classes=[cat,fish]")
    with pytest.raises(DataError, match=r"folder .*images .*classes.*target=labels"):
        data_of(*lines, "dataset.target=labels")


def test_a_sites_images_are_as_viewers_show_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fedhet.data")
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("clear", "dark"):
        folder = tmp_path / "a" / kind
        folder.mkdir(parents=True)
        pixels = np.zeros((3, 2, 4), np.uint8)
        pixels[..., 3] = 0 if kind == "clear" else 255
        for i in range(2):
            Image.fromarray(pixels).save(folder / f"{i}.webp", lossless=True, exif=exif)
    (tmp_path / "a" / "dark" / "2.gif").touch()
    lines = ["dataset=local", f"data_dir={tmp_path}", "dataset.sites=[a]", "dataset.files={a:a}"]
    declared = ["dataset.classes=[clear,dark]", "dataset.shape=[1,2,3]", "dataset.colours=grey"]
    samples = data_of(*lines, *declared, "dataset.dtype=uint8", "partition.split=[1,0,0]")
    x, y = samples.clients[0].train.x, samples.clients[0].train.y
    assert [one.unique().numel() for one in x] == [1] * 4
    assert (x[y == 0].min(), x[y == 1].max()) == (255, 0)
    assert f"{tmp_path / 'a'}: 1 file is not read: dark/2.gif" in caplog.messages


# ---- what does not fit
def replaced(site: str, change: Callable[[dict[str, np.ndarray]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        arrays = dict(np.load(folder / f"{site}.npz"))
        change(arrays)
        np.savez(folder / f"{site}.npz", **arrays)

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(x_train=a["x_train"][:, :, 1:]), r"\(1, 7, 8\); .*run "),
        (lambda a: a.update(x_train=a["x_train"] / 255), "float32; .*run .*uint8"),
        (lambda a: a.update(y_train=a["y_train"] + 1), "label 10; .*one .*classes"),
        (lambda a: a.update(classes=np.array(list("abcdefghij"))), "'classes' .*'a', 'b'"),
        (lambda a: a.pop("y_train"), "array 'y_train'"),
        (lambda a: [a.pop(key) for key in list(a)], "array 'x'"),
    ],
    ids=["shape", "dtype", "label", "names", "no-labels", "empty"],
)
def test_a_site_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, np.ndarray]], Any], message: str
) -> None:
    lines = write_digits(tmp_path)
    replaced("c", change)(tmp_path)
    with pytest.raises(DataError, match=f"site 'c' .*declaration.*{message}"):
        data_of(*lines)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    lines = write_tables(tmp_path)
    with pytest.raises(DataError, match=r"site 'a' .*column 'weight'"):
        data_of(*lines, "dataset.features=[age,weight]")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["partition=dirichlet"], "partition=dirichlet: .*site keeps "),
        (["partition=iid", "partition.clients=3"], "partition=iid: .*site keeps "),
        (["partition.clients=4"], "partition.clients=4: dataset.sites .*3"),
        (["dataset.sites=[a,b,c,d]"], "dataset.files.*'d'"),
        (["dataset.sites=[a,b]"], r"\['c'\] .*among dataset.sites"),
        (["dataset.sites=[a,a]"], "distinct names"),
        (["dataset.sites=null"], "dataset.sites="),
        (["dataset.sites=['../a']"], r"dataset\.sites.*'\.\./a'.*letters"),
        (["dataset.classes=null"], r"dataset\.classes=(None|null) .*declared"),
        (["dataset.shape=null"], "declare .*columns .*table, .*shape"),
        (["dataset.dtype=int8"], "dataset.dtype=int8"),
        (["dataset.mean=[1,2]"], r"dataset\.mean=\[.*\]: .*one number"),
        (["dataset.nodes={z:1}"], r"\['z'\] .*among"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        data_of(*write_digits(tmp_path), *lines)


def test_the_partition_of_sites_needs_sites() -> None:
    with pytest.raises(ConfigError, match=r"partition=sites.*dataset=local"):
        fedhet.run(["dataset=digits", "partition=sites"])


def test_a_method_that_must_know_the_range_of_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"feddisk.* server "):
        fedhet.run([*write_tables(tmp_path)[:2], *TABLE, "method=feddisk"])


TABLE = [
    "dataset.sites=[a,b]",
    "dataset.classes=2",
    "dataset.features=[age,height]",
    "dataset.label=old",
    "dataset.files={a:a.csv,b:b.csv}",
]


def test_small_counts_are_not_told_and_cannot_be_found_by_subtraction() -> None:
    assert withheld([3, 50, 20, 4], 10) == [True, False, True, True]  # 7 would follow
    assert withheld([3, 50, 20, 40], 10) == [True, False, True, False]
    assert withheld([30, 50], 10) == [False, False]
    assert withheld([3], 10) == [True]

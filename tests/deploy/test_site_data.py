"""`fedhet deploy check` with a run's overrides: the data of a site or the server beside the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from deploy.checking import Printed, at_site, edit, failed, served

from fedhet import __main__ as main


def test_the_data_of_a_run(kit: Path, capsys: Printed) -> None:
    edit(kit / "sites/a/site.toml", "data", "")
    assert at_site(kit, capsys, "dataset=digits", "--disk=0", "partition.clients=3") == {}
    found = at_site(kit, capsys, "dataset=npz", f"dataset.file={kit / 'nothing.npz'}")
    assert list(found) == ["data"] and "nothing.npz" in found["data"]


LOCAL = ("dataset=local", "dataset.sites=[a,b]", "dataset.shape=[2]", "dataset.classes=2")


def test_the_data_of_a_site_beside_the_declaration_of_a_run(kit: Path, capsys: Printed) -> None:
    """A site learns what it would tell the server; and what is wrong, in full."""
    assert at_site(kit, capsys, *LOCAL, "--disk=0") == {}
    edit(kit / "sites/a/site.toml", "share-counts", True)
    edit(kit / "sites/a/site.toml", "min-count", 1)
    with served(kit / "server") as port:
        edit(kit / "sites/a/site.toml", "server", f"localhost:{port}")
        run = [*LOCAL, "partition.split=[1,0,0]", "privacy.min_count=1"]
        main.main(["deploy", "check", str(kit / "sites/a"), *run])
    line = next(row for row in capsys.readouterr().out.splitlines() if " data: " in row)
    assert line.endswith(
        "8 training, 0 validation, 0 test samples; counts of classes: 4, 4; mean and squares of"
        " the inputs"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dataset.shape=[3]", "a sample has shape (2,); the run declares (3,)"),
        ("dataset.classes=[no,yes]", "array 'y_train', row 0"),
        ("dataset.sites=[b,c]", "the site 'a', which the run does not declare"),
        ("dataset.files={a:a.npz}", "names no paths of sites"),
        ("dataset=digits", "divides a data set that all machines hold"),
    ],
)
def test_data_that_a_run_does_not_declare(
    kit: Path, override: str, message: str, capsys: Printed
) -> None:
    found = at_site(kit, capsys, *([] if "digits" in override else LOCAL), override)
    assert list(found) == ["data"] and message in found["data"]


def test_a_site_without_data_and_a_run_on_data_of_each_sites_own(
    kit: Path, capsys: Printed
) -> None:
    edit(kit / "sites/a/site.toml", "data", "")
    found = at_site(kit, capsys, *LOCAL)
    assert list(found) == ["data"] and "write their absolute path" in found["data"]


def test_further_data_of_a_site_must_be_there(kit: Path, capsys: Printed) -> None:
    edit(kit / "sites/a/site.toml", "test", str(kit / "missing.csv"))
    found = at_site(kit, capsys)
    assert list(found) == ["data"] and "missing.csv" in found["data"]


def test_the_data_of_a_run_at_the_server(kit: Path, capsys: Printed) -> None:
    server = kit / "server"
    assert failed(server, capsys, "dataset=digits", "partition.clients=3") == {}
    assert failed(server, capsys, *LOCAL) == {}
    for name, columns in (("good", 2), ("bad", 3)):
        np.savez(kit / f"{name}.npz", x=np.zeros((4, columns), np.float32), y=np.arange(4) % 2)
    assert failed(server, capsys, *LOCAL, f"dataset.test={kit}/good.npz") == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["nonsense=1"], "nonsense"),
        (["dataset=npz", "dataset.file=/nothing.npz"], "nothing.npz"),
        ([*LOCAL, "dataset.test=/nothing.npz"], "nothing.npz"),
        ([*LOCAL, "dataset.test={kit}/data3.npz"], "the run declares (2,)"),
        ([*LOCAL, "partition=iid"], "no partition may divide them"),
        (["method._target_=missing_package.Method"], "missing_package"),
    ],
)
def test_a_run_that_the_server_cannot_serve(
    kit: Path, overrides: list[str], message: str, capsys: Printed
) -> None:
    np.savez(kit / "data3.npz", x=np.zeros((4, 3), np.float32), y=np.arange(4) % 2)
    found = failed(kit / "server", capsys, *(line.format(kit=kit) for line in overrides))
    assert list(found) == ["data"] and message in found["data"]


def test_a_package_that_is_missing_is_a_failed_check(
    kit: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compose(_: object) -> None:
        raise ImportError("No module named 'pandas'")

    monkeypatch.setattr("fedhet.runs.config.compose", compose)
    assert failed(kit / "server", capsys, "dataset=digits") == {"data": "No module named 'pandas'"}
    assert at_site(kit, capsys, "dataset=digits") == {"data": "No module named 'pandas'"}


def test_of_a_sites_data_no_copy_is_written(
    kit: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDHET_CACHE")
    edit(kit / "sites/a/site.toml", "state", str(kit / "state"))
    assert at_site(kit, capsys, *LOCAL) == {}
    assert not (kit / "state/cache").exists()
    assert "writes no copy of this site's data" in (kit / "sites/a/README.md").read_text()

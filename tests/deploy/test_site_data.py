"""`fedhet deploy check` with a run's overrides: the site's data beside what the run declares."""

from __future__ import annotations

from pathlib import Path

import pytest
from deploy.checking import Printed, at_site, edit, served

from fedhet.cli import main


def test_the_data_of_a_run(kit: Path, capsys: Printed) -> None:
    edit(kit / "sites/a/site.toml", "data", "")
    assert at_site(kit, capsys, "dataset=digits", "--disk=0", "partition.clients=3") == {}
    assert at_site(kit, capsys, "--disk=0", "dataset=digits") == {}
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
        main.main(["deploy", "check", str(kit / "sites/a"), *LOCAL, "partition.split=[1,0,0]"])
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
        ("dataset.files={a:a.npz}", "names no path of a site"),
        ("dataset=digits", "would cut a data set that all machines hold"),
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

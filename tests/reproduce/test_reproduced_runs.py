"""Reproductions as a user runs them, at scale smoke, which needs no data."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fedhet.errors import DataError
from fedhet.reproduce import table
from fedhet.reproduce.command import main
from fedhet.reproduce.verdict import NOT_COMPARABLE

pytestmark = pytest.mark.usefixtures("own_process")
HERE = "hydra/launcher=basic"  # in this process


@pytest.mark.parametrize("name", ["fedgmm/figure6", "fedlex/figure5", "fedsa/figure7"])
def test_a_reproduction_runs_and_ends_with_its_comparison(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "scale=smoke", HERE]) == 0
    folder = Path("reproductions") / name / "smoke"
    lines = table.read_csv(folder / "report" / "reproduction.csv")
    assert lines
    for line in lines:
        assert int(line["seeds"]) == 1
        assert line["mean"]
        assert line["verdict"] == NOT_COMPARABLE  # two rounds on digits say nothing
        assert line["changed"] == ""
    page = (folder / "report" / "reproduction.md").read_text()
    assert page in capsys.readouterr().out
    assert (folder / "report" / "index.html").exists()

    assert main(["--verdicts", str(folder)]) == 0
    assert page in capsys.readouterr().out


def test_a_reproduction_without_its_data_ends_before_its_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FEDHET_DATA_DIR", raising=False)
    with pytest.raises(DataError, match=r"data not found.*download cifar10"):
        main(["fedsa/table4", "scale=cpu", HERE])
    assert capsys.readouterr().out == ""  # no comparison
    assert not any(Path("reproductions/fedsa/table4/cpu").iterdir())


def test_overrides_change_the_runs_and_the_page_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["fedgmm/figure6", "scale=smoke", "method=FedAvg", "client.lr=0.05", "seed=0,1", HERE]
    assert main(given) == 0
    lines = table.read_csv(Path("reproductions/fedgmm/figure6/smoke/report/reproduction.csv"))
    assert {(line["method"], line["seeds"]) for line in lines} == {("FedAvg", "2")}
    assert "Changed for these runs: `method=FedAvg client.lr=0.05`." in capsys.readouterr().out


def test_an_estimate_measures_and_leaves_no_runs(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["fedgmm/figure6", "scale=smoke", "seed=range(0,4)", "--estimate", "--times", "t.csv"]
    assert main(given) == 0
    out = capsys.readouterr().out
    assert "FedAvg, data=smoke" in out
    assert "2 rounds of " in out
    assert "8 runs, one after another: " in out
    (row,) = csv.DictReader(Path("t.csv").read_text().splitlines())
    assert (row["reproduction"], row["scale"], row["runs"]) == ("fedgmm/figure6", "smoke", "8")
    assert not Path("reproductions").exists()

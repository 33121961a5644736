"""Data are looked for before the first run of an experiment starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from experiment.mine import SMALL, run

from fedhet.cli import main
from fedhet.experiment.code import Code

pytestmark = pytest.mark.usefixtures("own_process")
Write = Callable[..., None]
TWO = f"""rounds: 1{SMALL}
data_dir: nowhere
axes:
  dataset: [digits, mnist]
  seed: [0, 1]
"""
TABLE = f"rounds: 1{SMALL}\naxes: {{dataset: [csv], dataset.train: [a.csv, b.csv], seed: [0]}}"


def finished() -> list[Path]:
    return sorted(Path("experiments/mine/cells").glob("*/summary.json"))


@pytest.mark.parametrize("launcher", ["basic", "processes"])
def test_missing_data_are_told_once_and_as_by_a_single_run(
    write: Write, capsys: pytest.CaptureFixture[str], launcher: str
) -> None:
    assert main.main(["dataset=mnist", "data_dir=nowhere"]) == 2
    alone = capsys.readouterr().err
    assert alone.startswith("error: data not found")
    write(TWO)
    assert run(f"hydra/launcher={launcher}") == 2
    printed = capsys.readouterr()
    assert printed.err == f"experiment mine: checking its runs\n{alone}"
    assert printed.out == ""
    assert not any(Path("experiments/mine").iterdir())
    # What is not asked for need not be there.
    assert run(f"hydra/launcher={launcher}", "axes.dataset=digits") == 0
    assert len(finished()) == 2


def test_all_files_are_looked_for_and_those_of_finished_runs_no_more(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(TABLE)
    rows = "".join(f"{i % 7},{i % 3},{i % 2}\n" for i in range(60))
    folder = Path("data")
    folder.mkdir()
    (folder / "a.csv").write_text(f"u,v,label\n{rows}")
    assert run() == 2
    assert "b.csv" in capsys.readouterr().err
    (folder / "b.csv").write_text(f"u,v,label\n{rows}")
    assert run() == 0
    assert len(finished()) == 2
    (folder / "a.csv").unlink()
    assert run() == 0
    monkeypatch.setattr(Code, "current", lambda: Code("0.0.9", None, "0123456789abcdef"))
    assert run("on_other_code=rerun") == 2
    assert len(finished()) == 2  # nothing was removed, because nothing can replace it

"""Data are looked for before the first run of an experiment starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from experiment.mine import SMALL, run, written
from experiment.pretend import Pretend

from fedhet import __main__ as main
from fedhet.core.errors import DataError
from fedhet.runs.config import compose
from fedhet.study.code import Code
from fedhet.study.executors import Here, Processes, Ray
from fedhet.study.findable import find_data

pytestmark = pytest.mark.usefixtures("own_process")
Write = Callable[..., None]
TWO = f"""rounds: 1{SMALL}
data_dir: nowhere
axes:
  dataset: [digits, mnist]
  seed: [0, 1]
"""
TABLE = f"rounds: 1{SMALL}\naxes: {{dataset: [csv], dataset.train: [a.csv, b.csv], seed: [0]}}"


@pytest.mark.slow
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
    assert printed.err == f"experiment mine: checking 4 runs\n{alone}"
    assert printed.out == ""
    assert not any(Path("experiments/mine").iterdir())
    # What is not asked for need not be there.
    assert run(f"hydra/launcher={launcher}", "axes.dataset=digits") == 0
    assert len(written()) == 2


def test_nothing_is_run_or_written_where_data_are_missing(
    write: Write, pretend: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    write(TWO.replace("seed: [0, 1]", "seed: [0]"))
    pretend.find = find_data
    assert pretend.run() == 2 and not pretend.launched
    assert not any(pretend.folder.iterdir())
    printed = capsys.readouterr()
    assert printed.err.splitlines()[1].startswith("error: data not found")
    assert printed.out == ""


def test_what_is_not_asked_for_is_not_looked_for(write: Write, pretend: Pretend) -> None:
    write(TWO.replace("seed: [0, 1]", "seed: [0]"))
    assert pretend.run("axes.dataset=digits") == 0
    assert len(pretend.launched) == 1 and len(pretend.sought) == 1


def test_data_are_looked_for_where_the_runs_read_them(write: Write, pretend: Pretend) -> None:
    """Not here, if the runs may be on other machines."""
    nowhere = compose(["dataset=mnist", "data_dir=nowhere"]).cfg
    with pytest.raises(DataError, match=r"data_dir='nowhere'"):
        find_data([nowhere])
    assert Here.reads_here and Processes.reads_here
    pretend.reads_here = Ray.reads_here
    write(TWO)
    assert pretend.run() == 0 and pretend.launched and not pretend.sought


@pytest.mark.slow
def test_all_files_are_looked_for_and_those_of_finished_runs_no_more(
    write: Write,
    pretend: Pretend,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend.find = find_data
    write(TABLE)
    rows = "".join(f"{i % 7},{i % 3},{i % 2}\n" for i in range(60))
    folder = Path("data")
    folder.mkdir()
    (folder / "a.csv").write_text(f"u,v,label\n{rows}")
    assert pretend.run() == 2
    assert "b.csv" in capsys.readouterr().err
    (folder / "b.csv").write_text(f"u,v,label\n{rows}")
    assert pretend.run() == 0
    assert len(pretend.written()) == 2
    (folder / "a.csv").unlink()
    assert pretend.run() == 0 and not pretend.sought
    monkeypatch.setattr(Code, "current", lambda: Code("0.0.9", None, "0123456789abcdef"))
    assert pretend.run("on_other_code=rerun") == 2
    assert len(pretend.written()) == 2  # nothing was removed, because nothing can replace it

"""Code that changes while an experiment runs: each cell says what its own process has found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from experiment.mine import SMALL, run, written

import fedhet
from fedhet.core.errors import OtherCode
from fedhet.study import executors as launched
from fedhet.study.code import Code, digest, joined, short
from fedhet.study.folder import recorded

pytestmark = pytest.mark.usefixtures("own_process")
Write = Callable[..., None]
TWO = f"rounds: 1{SMALL}\naxes: {{seed: [0, 1]}}"
THREE = f"rounds: 30{SMALL}\naxes: {{seed: [0, 1, 2]}}"


def change(tmp_path: Path, text: str = "lr: .1\n") -> None:
    """Change a choice of one's own, which counts as code."""
    path = tmp_path / "own" / "client" / "mine.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def cells(home: Path = Path("experiments/mine")) -> list[dict[str, Any]]:
    """The content of cell.json of each cell, by seed."""
    record = json.loads((home / "experiment.json").read_text())
    return [json.loads((home / c["folder"] / "cell.json").read_text()) for c in record["cells"]]


@pytest.fixture
def changed_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The code changes once, in the first run that is made; has its digests before and after."""
    digests = [digest()]
    run_one = launched.make

    def runs(settings: Any) -> Any:
        if len(digests) == 1:
            change(tmp_path)
            digests.append(digest())
        return run_one(settings)

    monkeypatch.setattr(launched, "make", runs)
    return digests


@pytest.mark.slow
def test_the_experiment_stops(
    write: Write, changed_on_the_way: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(TWO)
    assert run() == 2
    old, new = changed_on_the_way
    both = f"{short(old)}+{short(new)}"
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"code {short(old)}; now" in error and f"code {short(new)})" in error
    assert "2 of the last 2 runs" in error and "on_other_code=keep" in error
    assert [cell["code"]["digest"] for cell in cells()] == [both, old]
    assert [cell["status"] for cell in cells()] == ["finished", "waiting"]
    assert len(written()) == 1
    assert run() == 2  # as for every run that was made by other code
    assert "1 of the 2 runs were made by other code" in capsys.readouterr().err


@pytest.mark.slow
def test_what_other_code_makes_is_kept_and_told(
    write: Write, changed_on_the_way: list[str]
) -> None:
    write(THREE.replace("rounds: 30", "rounds: 1"))
    assert run("on_other_code=keep") == 0
    old, new = changed_on_the_way
    both = f"{short(old)}+{short(new)}"
    assert {cell["code"]["digest"] for cell in cells()} == {both}
    assert run("on_other_code=keep", "seed=0,1,2,3") == 0
    page = Path("experiments/mine/report/index.html").read_text()
    assert "different versions of the code" in page
    assert f"digest {both} in 3" in page and f"digest {short(new)} in 1" in page


@pytest.mark.slow
def test_it_starts_again_and_runs_all_with_the_new_code(
    write: Write, changed_on_the_way: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a new process, because this one has imported the old code; here it is stood in for."""
    write(TWO)
    begun: list[list[str]] = []

    def execv(path: str, arguments: list[str]) -> None:
        assert (path, arguments) == (sys.executable, sys.orig_argv)
        begun.append(arguments)
        assert run("on_other_code=rerun") == 0
        raise SystemExit  # whoever has started another program does not go on

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(SystemExit):
        from fedhet.study import definition, launch

        lines = ["experiment=mine", "hydra/launcher=basic", "on_other_code=rerun"]
        experiment = definition.read(lines)
        assert experiment is not None
        launch.run_experiment(experiment)
    assert len(begun) == 1
    assert {cell["code"]["digest"] for cell in cells()} == {changed_on_the_way[1]}


def test_a_cell_records_what_its_process_finds(write: Write, tmp_path: Path) -> None:
    write(TWO)  # which is no code, and sets the folder up
    folder = tmp_path / "cell"
    folder.mkdir()

    def cell() -> tuple[str, str]:
        content = json.loads((folder / "cell.json").read_text())
        return content["status"], content["code"]["digest"]

    code = Code.current()
    (folder / "cell.json").write_text(json.dumps({"code": code.record()}))
    with recorded(folder, any_code=False):
        assert cell() == ("running", code.digest)
        change(tmp_path)
    both = f"{short(code.digest)}+{short(digest())}"
    assert cell() == ("finished", both)
    (folder / "cell.json").write_text(json.dumps({"code": code.record()}))
    with pytest.raises(OtherCode, match=short(code.digest)), recorded(folder, any_code=False):
        pytest.fail("it has begun")
    assert cell() == ("waiting", code.digest)
    with recorded(folder, any_code=True):
        assert cell() == ("running", both)
    assert cell() == ("finished", both)


def test_a_joined_digest_equals_no_code() -> None:
    old, new, third = ("0123456789abcdef", "fedcba9876543210", "00112233445566ff")
    one = {"version": "1", "commit": "c" * 40, "digest": old}
    assert joined(one, old) == one
    two = joined(one, new)
    assert two == {"version": "1", "commit": None, "digest": "01234567+fedcba98"}
    assert joined(two, new) == two
    assert joined(two, third)["digest"] == "01234567+fedcba98+00112233"


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "code"), [("stop", 2), ("keep", 0), ("rerun", 0)])
def test_warm_processes_do_not_run_what_has_changed(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, code: int
) -> None:
    write(THREE)
    old = digest()
    home = tmp_path / "experiment"
    command = [sys.executable, "-m", "fedhet", "experiment=mine", f"on_other_code={setting}"]
    # Else all runs would begin at once, in one process.
    command += ["engine.fused=off", "hydra.launcher.workers=1", f"hydra.sweep.dir={home}"]
    monkeypatch.chdir(Path(fedhet.__file__).parents[1])
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not any(f.stat().st_size for f in home.glob("cells/*/rounds.jsonl")):
            assert process.poll() is None
            time.sleep(0.01)
        change(tmp_path)
        err = process.communicate(timeout=120)[1]
    assert process.returncode == code, err
    new = digest()
    digests = [cell["code"]["digest"] for cell in cells(home)]
    statuses = [cell["status"] for cell in cells(home)]
    both = f"{short(old)}+{short(new)}"
    if setting == "stop":
        assert statuses == ["finished", "waiting", "waiting"]
        assert digests == [both, old, old]
        assert err.count("\n") == 3, err  # what it checks, the run that has ended, and why it stops
    else:
        assert statuses == ["finished"] * 3
        assert digests == [both if setting == "keep" else new] * 3

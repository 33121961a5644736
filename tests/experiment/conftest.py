from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from experiment.finished import TUNED, Finished
from experiment.mine import run
from experiment.pretend import Pretend
from omegaconf import DictConfig

from fedhet.runs.config import components, composition
from fedhet.runs.config.composition import Bases

_composed: dict[object, Bases] = {}


@pytest.fixture(autouse=True)
def _composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra composes the same choices once, as long as the pieces of one's own say the same.

    It takes a tenth of a second each time, and reading an experiment takes it three times.
    tests/config/test_bases.py shows that `Bases` composes the same.
    """
    inner = composition._hydra_config

    def once(texts: Sequence[str]) -> DictConfig:
        files = [file for folder in components.search_path() for file in folder.glob("*/*")]
        key = tuple((*file.parts[-2:], file.read_bytes()) for file in sorted(files))
        if texts in ([], ()):
            key = ()  # the defaults are the same
        return _composed.setdefault(key, Bases(inner))(texts)

    monkeypatch.setattr(composition, "_hydra_config", once)


def own(folder: Path, text: str, name: str = "mine") -> None:
    """Write the experiment into a folder of one's own pieces."""
    (folder / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes conf/experiment/<name>.yaml into a folder of one's own pieces."""
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    monkeypatch.setenv(components.SEARCH_PATH, str(tmp_path / "own"))
    return lambda text, name="mine": own(tmp_path / "own", text, name)


@pytest.fixture
def pretend(tmp_path: Path) -> Pretend:
    """The experiment that `write` has written, without training."""
    return Pretend(tmp_path / "experiments" / "mine")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """An experiment from the command line, for all tests that only read what it leaves and says."""
    home = tmp_path_factory.mktemp("finished")
    (home / "own" / "experiment").mkdir(parents=True)
    own(home / "own", TUNED)
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv(components.SEARCH_PATH, str(home / "own"))
        patch.chdir(home)
        code = run()
    return Finished(home / "experiments" / "mine", code, out.getvalue(), err.getvalue())

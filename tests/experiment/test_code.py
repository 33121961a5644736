"""Which files count as the code of an experiment."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fedhet.runs.config import components
from fedhet.study import code as code_module
from fedhet.study.code import Code

Write = Callable[..., None]


def digest() -> str:
    return Code.current().digest


def test_of_a_folder_of_yaml_files_only_these_count(write: Write, tmp_path: Path) -> None:
    before = digest()
    (tmp_path / "plots.py").write_text("x = 1\n")  # beside the folder
    (tmp_path / "other.yaml").write_text("x: 1\n")
    write("rounds: 2")  # an experiment
    assert digest() == before
    choice = tmp_path / "own" / "client" / "mine.yaml"
    choice.parent.mkdir()
    choice.write_text("lr: 1\n")
    added = digest()
    assert added != before
    choice.rename(choice.with_name("yours.yaml"))  # its path counts
    assert digest() not in (before, added)


@pytest.mark.parametrize(
    "file", ["my_pieces/__init__.py", "my_pieces/inner/deep.py", "my_module.py", "space/part.py"]
)
def test_all_modules_of_a_trusted_package_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    code = tmp_path / file
    code.parent.mkdir(parents=True, exist_ok=True)
    if file.startswith("my_pieces"):
        (tmp_path / "my_pieces" / "__init__.py").touch()
    code.write_text("raise RuntimeError('this must not be imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(components.TRUST, "my_pieces,my_module,space.part,no_such_package")
    before = digest()
    (tmp_path / "neighbour.py").write_text("x = 1\n")
    assert digest() == before
    code.write_text("raise RuntimeError('nor this')\n")
    changed = digest()
    assert changed != before
    code.rename(code.with_name("moved.py"))
    assert digest() != changed


def test_the_commit_of_a_foreign_repository_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "site-packages" / "fedhet"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(code_module, "_PACKAGE", package)
    git("init")
    git("commit", "--allow-empty", "-m", "theirs")
    assert Code.current().commit is None
    git("add", "site-packages")
    git("commit", "-m", "ours")
    assert Code.current().commit == git("rev-parse", "HEAD")

"""The keys of a deployment stay out of repositories and images."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def test_git_and_docker_do_not_take_the_keys(kit: Path, tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    shutil.copytree(kit, tmp_path / "keys")
    status = ["git", "-C", str(tmp_path), "status", "--porcelain"]
    assert subprocess.run(status, capture_output=True, check=True).stdout == b""
    rules = (Path(__file__).parents[2] / ".dockerignore").read_text().splitlines()
    assert rules[1] == "*" and "deploy" not in "".join(rules)
    assert {"!pyproject.toml", "!fedhet", "!conf"} <= set(rules)

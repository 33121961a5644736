"""The examples of docs/extending.md run as printed, in a copy of the package."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILE = re.compile(r"`((?:fedhet|conf)/\S+)`:\n\n```(?:python|yaml)\n(.*?)```", re.DOTALL)
COMMANDS = re.compile(r"```bash\n(.*?)```", re.DOTALL)


def test_the_files_of_the_recipes_are_new_and_can_be_read() -> None:
    files = FILE.findall(PAGE)
    assert len(files) == 4
    for path, text in files:
        assert not (ROOT / path).exists(), path
        if path.endswith(".py"):
            ast.parse(text)
        else:
            assert yaml.safe_load(text), path


@pytest.mark.slow
def test_the_recipes_run_as_printed(tmp_path: Path) -> None:
    for folder in ("fedhet", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for path, text in FILE.findall(PAGE):
        (tmp_path / path).write_text(text, encoding="utf-8")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    commands = [line for block in COMMANDS.findall(PAGE) for line in block.splitlines()]
    assert commands
    for command in commands:
        process = subprocess.run(
            ["bash", "-c", command.replace("python", sys.executable, 1)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert process.returncode == 0, f"{command}\n{process.stderr}"
        assert "accuracy" in process.stdout

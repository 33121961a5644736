"""The examples of docs/extending.md run as printed, and pass fedhet's checks, in a copy of it."""

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


TRIMMED = """
def test_the_largest_and_the_smallest_value_do_not_count(federation: Any) -> None:
    run = federation(toy_task(3), FedTrim, options={"trim": 0.34})
    step, old = run.plan(), run.strategy.weights["model"]
    replies = [run.client().handle(msg) for msg in step]
    run.finish_step(replies)
    for name, new in run.strategy.weights["model"].items():
        middle = torch.stack([reply.weights[name] for reply in replies]).median(0).values
        torch.testing.assert_close(new, middle.to(new))
        assert not torch.equal(new, old[name])
"""
# Those of all tests that ask something of each method.
CHECKS = (
    *("tests/house_rules", "tests/test_readme.py", "tests/methods/test_fedtrim.py"),
    *("tests/contracts/test_compositions.py", "tests/contracts/test_refused_merges.py"),
    *("tests/privacy", "tests/targets/test_methods.py", "tests/invariant"),
)


@pytest.mark.slow
def test_a_method_is_three_files(tmp_path: Path) -> None:
    """FedTrim, its file of settings and its test: what else there is of each method is made."""
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".git", ".venv", ".*_cache", "outputs", "pages", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored)
    files = {path: text for path, text in FILE.findall(PAGE) if "fedtrim" in path}
    imports = ["from typing import Any", "import torch", "from fedhet.data.toy import toy_task"]
    imports += ["from fedhet.methods.fedtrim import FedTrim"]
    files["tests/methods/test_fedtrim.py"] = "\n\n".join(['"""FedTrim."""', *imports, TRIMMED])
    assert len(files) == 3
    for path, text in files.items():
        (copy / path).write_text(text, encoding="utf-8")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
    fast = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not matrix"]
    chosen = "fedtrim or house_rules or readme or takes_a_merge or does_not_compose or is_listed"
    for command in (
        ["-c", "import sys; sys.path[0] = 'scripts'; import methods_page as m; m.write_tables()"],
        [*fast, *CHECKS, "-k", chosen],
    ):
        process = subprocess.run(
            [sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stdout + process.stderr

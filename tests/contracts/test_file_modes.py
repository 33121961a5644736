"""The files of a run folder have the mode that the umask gives to any new file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contracts.short import slow

import fedhet
from fedhet.data.toy import toy_task


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0)
    os.umask(before)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o007, 0o660), *slow((0o022, 0o644))])
def test_every_file_has_the_same_mode(
    tmp_path: Path, umask: Callable[[int], int], mask: int, mode: int
) -> None:
    """Tensors, tables, figures and texts, those that are replaced during the run among them."""
    umask(mask)
    folder = tmp_path / "run"
    fedhet.run(["method=fednorm", "rounds=2", f"hydra.run.dir={folder}"], task=toy_task())
    modes = {
        path.relative_to(folder).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert {"model.safetensors", "best_val.safetensors", "arrays/fednorm-1.safetensors"} <= set(
        modes
    )
    assert set(modes.values()) == {mode}, modes
    assert not list(folder.rglob("*.part"))

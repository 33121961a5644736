"""Several folders are one report only if their runs can be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import change, make_experiment

import fedhet
from fedhet.errors import ConfigError


def part(folder: Path, method: str, **entries: Any) -> Path:
    return make_experiment(folder, {"method": [method], "seed": [0, 1]}, lambda _: 0.5, **entries)


def test_parts_with_other_settings_are_refused(tmp_path: Path) -> None:
    """The first override that differs is named; where the runs were made does not matter."""
    fixed = ["experiment=made", "rounds=1", "engine=local"]
    first = part(tmp_path / "a", "A", fixed=fixed)
    same = ["experiment=made", "rounds=1", "engine=ray", "engine.workers=2"]
    assert len(fedhet.results([first, part(tmp_path / "b", "B", fixed=same)]).runs) == 4
    longer = part(tmp_path / "c", "C", fixed=["experiment=made", "rounds=3"])
    with pytest.raises(ConfigError, match="rounds is 1 in the first and 3 in the second"):
        fedhet.results([first, longer])
    default = part(tmp_path / "d", "D", fixed=["experiment=made"])
    with pytest.raises(ConfigError, match="rounds is 1 in the first and not given in the second"):
        fedhet.results([first, default])


def test_the_command_decides_where_the_fixed_overrides_are_not_recorded(tmp_path: Path) -> None:
    begin = ["experiment=made", "--config-dir", "mine"]
    first = part(tmp_path / "a", "A", command=[*begin, "method=A", "axes.method=[A]", "rounds=1"])
    other = part(tmp_path / "b", "B", command=["experiment=made", "method=B", "rounds=1"])
    assert len(fedhet.results([first, other]).runs) == 4
    change(other / "experiment.json", command=["experiment=made", "rounds=3"])
    with pytest.raises(ConfigError, match="rounds is 1 in the first and 3 in the second"):
        fedhet.results([first, other])


def test_parts_of_a_file_that_was_changed_are_refused(tmp_path: Path) -> None:
    first = part(tmp_path / "a", "A", digest="abc")
    with pytest.raises(ConfigError, match="digests abc and abd"):
        fedhet.results([first, part(tmp_path / "b", "B", digest="abd")])


def test_two_results_of_one_run_need_equal_settings(tmp_path: Path) -> None:
    first, other = (part(tmp_path / name, "A") for name in "ab")
    assert len(fedhet.results([first, other]).runs) == 2
    cells = json.loads((other / "experiment.json").read_text())["cells"]
    cells[1]["overrides"].append("client.lr=0.3")
    change(other / "experiment.json", cells=cells)
    with pytest.raises(ConfigError, match=r"client\.lr is not given in the first and 0\.3"):
        fedhet.results([first, other])


def test_parts_with_other_axes_are_refused(tmp_path: Path) -> None:
    first = part(tmp_path / "a", "A")
    axes = {"method": ["B"], "partition.alpha": [0.3], "seed": [0, 1]}
    other = make_experiment(tmp_path / "b", axes, lambda _: 0.5)
    with pytest.raises(ConfigError, match="have different axes"):
        fedhet.results([first, other])

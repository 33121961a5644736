"""Keys in an experiment's file that nothing reads are refused, and not ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedhet.core.errors import ConfigError
from fedhet.runs.config import compose
from fedhet.study import definition

Write = Callable[..., None]


@pytest.mark.parametrize(
    "text, message",
    [
        ("axis: {seed: [0]}", "unknown setting 'axis' in the file of experiment=mine (did you mea"),
        ("roundz: 2", "(did you mean rounds?); python -m fedhet --help "),
        ("lr: 2", "(did you mean client: {lr: ...}"),
        ("client.lr: 2", "(did you mean client: {lr: ...}"),
        ("axes: {seed: [0]}\ntunes: {budget: 3}", "unknown setting 'tunes'"),
        ("axes: {seed: [0]}\ntune: {spaces: {}}", "(did you mean space?); tune has budget, seeds"),
        ("axes: {seed: [0]}\ntune: 3", "tune is a group of settings: budget, seeds"),
        ("report: {metrik: last}", "(did you mean metric?); report has compare, metric"),
        (
            "eval: {targets: [.8]}",
            "'eval.targets' in the file of experiment=mine (did you mean eval.th",
        ),
        ("client: {lrr: 2}", "(did you mean lr?); client has optimizer, lr"),
    ],
)
def test_a_misspelled_key_is_refused(write: Write, text: str, message: str) -> None:
    write(text)
    with pytest.raises(ConfigError) as error:
        definition.read(["experiment=mine"])
    assert message in str(error.value)


def test_a_single_run_refuses_it_too(write: Write) -> None:
    write("axes: {seed: [0]}\ntune: {bugdet: 3}")
    with pytest.raises(ConfigError, match=r"'tune\.bugdet' .*file .*experiment=mine"):
        compose(["experiment=mine"])


def test_a_misspelled_key_of_another_file_is_found_too(write: Write) -> None:
    write("roundz: 2", "base")
    write("defaults: [base, _self_]\naxes: {seed: [0]}")
    with pytest.raises(ConfigError, match="unknown setting 'roundz'"):
        definition.read(["experiment=mine"])


def test_names_that_a_user_chooses_are_no_misspelled_keys(write: Write, tmp_path: Path) -> None:
    """Nor are the keys that a client of one's own adds, and the options of a class."""
    (tmp_path / "own" / "client").mkdir()
    (tmp_path / "own" / "client" / "slow.yaml").write_text("defaults: [sgd]\npause: 3\n")
    text = """
defaults: [override /client: slow]
client: {pause: 4}
partition: {_target_: fedhet.data.partition.Shards, clients: 3, shards: 2}
axes: {anything: {A: rounds=1}, seed: [0]}
tune: {space: {client.lr: [1, 2]}, own: {A: {client.clip: [null, 1]}}}
scales: {tiny: [rounds=1]}
paper: {source: mine}
"""
    write(text)
    assert definition.read(["experiment=mine", "tune.own.A={}"]) is not None
    assert compose(["experiment=mine"]).cfg.client.pause == 4


def test_a_file_without_its_first_line_is_refused(write: Write, tmp_path: Path) -> None:
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text("rounds: 2\n")
    with pytest.raises(ConfigError, match=r"begin .*line `# @package _global_`"):
        compose(["experiment=mine"])

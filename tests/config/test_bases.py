"""Configurations that are composed from a base are those that Hydra composes."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

import fedhet
from fedhet.runs.config import composition
from fedhet.runs.config.composition import Bases

FEW = [
    ["client.lr=.3", "hydra.run.dir=here", "model={}", "hydra.sweep.subdir='a b'"],
    ["method=scaffold", "seed=1", "plugin=[fedprox]", "plugin.fedprox.mu=.5"],
    ["seed=3", "method=scaffold", "plugin=[fedprox]", "eval={every: 2}", "eval.thresholds=[.8,.9]"],
]
MORE = [
    *FEW,
    ["seed=1"],
    ["seed=2", "rounds=3"],
    ["seed=3", "plugin=[fedprox]", "method=scaffold"],
    ["eval={every: 2}", "eval.thresholds=[.8,.9]", "partition.alpha=0.3"],
    ["partition.alpha=0.3", "experiment=smoke"],
    ["++rounds=3", "++seed=4"],
    ["hydra/launcher=processes", "hydra.launcher.workers=3", "seed=4"],
    ["server_opt=fedadam", "server_opt.lr=.1", "data_dir='${oc.env:HOME}'"],
]


def raw(cfg: Any) -> Any:
    del cfg.hydra.job.override_dirname  # `composition.subfolder` sets it
    return OmegaConf.to_container(cfg)


@pytest.mark.parametrize(
    "runs",
    [FEW, pytest.param([*MORE, *reversed(MORE)], marks=pytest.mark.slow)],
    ids=["few", "more"],
)
def test_a_base_gives_what_hydra_gives(runs: list[list[str]]) -> None:
    bases = Bases(composition._hydra_config)
    for lines in runs:
        assert raw(bases(lines)) == raw(composition._hydra_config(lines)), lines


def test_files_are_read_once_for_each_set_of_choices() -> None:
    loaded = []

    def load(lines: list[str]) -> Any:
        loaded.append(lines)
        return composition._hydra_config(lines)

    bases = Bases(load)
    for seed in range(2):
        for method in ("fedavg", "scaffold"):
            cfg = bases([f"method={method}", f"seed={seed}", f"hydra.sweep.subdir={seed}"])
            assert cfg.seed == seed
    assert loaded == [["method=fedavg"], ["method=scaffold"]]


@pytest.mark.parametrize("line", ["client.lrr=1", "hydra.sweep.x=1"])
def test_what_is_wrong_is_said_as_hydra_says_it(line: str) -> None:
    messages = []
    for compose in (composition._hydra_config, Bases(composition._hydra_config)):
        with pytest.raises(fedhet.ConfigError) as caught:
            compose([line])
        messages.append(str(caught.value))
    assert messages[0] == messages[1]

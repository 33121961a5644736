"""The ranges of the settings that no constructor checks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

import fedhet
from fedhet.__main__ import main
from fedhet.core.errors import ConfigError
from fedhet.core.groups import Evaluation, Noise, ReplyLimits
from fedhet.methods.fedavg import FedAvg
from fedhet.runs.config import compose
from fedhet.runs.config.validation import validate
from fedhet.testing import Federation, toy_task

# key -> (values that are allowed, values that are refused)
RANGES = {
    "seed": ([0, 2**63 - 1], [-1, 1.0, True, None, 2**63]),
    "rounds": ([1], [0, -1, 1.5, "a", True]),
    "fraction": ([1, 0.01], [0, 1.01, True, "all"]),
    "data_dir": (["here"], ["", None]),
    "device": (["auto", "cpu", "cuda"], ["gpu", None]),
    "on_failure": (["stop", "skip"], ["ignore"]),
    "on_lost_state": (["stop", "restart"], ["skip"]),
    "deliver": ([True, False], [1, "yes"]),
    "figures": ([True, False], [1, "yes"]),
    "buffers": (["average", "local", "frozen"], ["mean"]),
    "privacy.noise": ([0], [-0.1, 1e-200, 9e-7, 1e200, None, True]),
    "privacy.clip": ([1], [0, -1, None]),
    "privacy.delta": ([1e-5], [0, 1, None]),
    "privacy.budget": ([None], [0, -1, "all"]),
    "privacy.min_count": ([0, 5], [-1, 0.5, True, None]),
    "eval.every": ([1, 5], [0, 0.5]),
    "eval.clients": ([True, False], [1, "yes"]),
    "eval.train": ([True, False], [1, "yes"]),
    "eval.personal": ([True, False], [1, "yes"]),
    "eval.finetune_epochs": ([0, 5], [-1, 0.5, None]),
    "eval.personal_mb": ([0, 0.5, None], [-1, "all"]),
    "eval.last_k": ([1, 5], [0, 0.5, None]),
    "eval.scores": (["auto", "basic", "all"], ["auc", None]),
    "eval.thresholds": ([[], [0.8, 1]], [[0], [0.8, 80], 0.8, None]),
    "replies.deadline": ([None, 0.5], [0, -1, "soon"]),
    "replies.grace": ([0, 10], [-1, None]),
    "replies.enough": ([None, 0.5, 1], [0, 1.1]),
    "replies.oversample": ([0], [-0.1, None]),
    "replies.least": ([1, 5], [0, 1.5, None]),
    "replies.bad_steps": ([0, 5], [-1, 0.5]),
    "replies.max_lost": ([0, 1], [-0.1, 1.1, None]),
    "replies.join": ([0, 600], [-1, None]),
    "replies.min_nodes": ([None, 1], [0, 1.5]),
    "replies.max_jump": ([1.5, 1000, None], [1, -3]),
    "replies.max_mb": ([0.1, 256], [0, None]),
    "checkpoint.every": ([None, 0, 0.5, 60], [-1, "often"]),
    "early_stopping.patience": ([None, 1], [0, 2.5]),
    "early_stopping.min_delta": ([0, 0.01], [-0.1, None]),
    "client.optimizer": (["sgd", "adam"], ["adamw"]),
    "client.lr": ([1e-9, 10], [0, -1, "fast", float("nan"), float("inf")]),
    "client.epochs": ([1], [0, 1.5]),
    "client.steps": ([None, 1], [0, 1.5, True]),
    "client.batch_size": ([1], [0, None]),
    "client.momentum": ([0, 0.99], [1, -0.1]),
    "client.weight_decay": ([0, 1], [-0.1]),
    "client.lr_decay": ([0.5, 1], [0, 1.1]),
    "client.schedule": (["constant", "cosine"], ["linear", None]),
    "client.clip": ([None, 0.1], [0, -1, "no"]),
    "engine.workers": ([None, 1], [0, 1.5]),
    "engine.threads": ([1], [0, None]),
    "engine.num_cpus": ([1, 0.5], [0, None]),
    "engine.num_gpus": ([0, 0.25], [-1]),
    "engine.address": ([None, "auto"], ["", 6379]),
    "engine.compile": ([True, False], [1, "yes"]),
    "engine.amp": ([True, False], [1, "bf16"]),
    "engine.channels_last": ([True, False], [0, None]),
    "engine.fused": ([1, 8, "auto", "off"], [0, -1, 1.5, True, False, "on"]),
}


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    return compose([]).cfg


def refusal(cfg: DictConfig) -> str:
    """What `validate` says; empty if it allows all."""
    try:
        validate(cfg)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranges(composed: DictConfig) -> None:
    offenders = []
    for key, (allowed, refused) in RANGES.items():
        cfg = composed.copy()
        OmegaConf.set_readonly(cfg, False)
        for value in allowed:
            OmegaConf.update(cfg, key, value)
            if said := refusal(cfg):
                offenders.append(f"{key}={value} is refused: {said}")
        for value in refused:
            OmegaConf.update(cfg, key, value)
            said = refusal(cfg)
            if not re.match(rf"{re.escape(key)}(\[\d\])?=.*(allowed|must|choose)", said):
                offenders.append(f"{key}={value} is allowed, or not named: {said}")
    assert not offenders


def test_every_setting_without_a_constructor_is_checked(composed: DictConfig) -> None:
    with_constructor = {
        "dataset",
        "partition",
        "model",
        "method",
        "plugin",
        "server_opt",
        "merge",
        "tracker",
    }
    keys: set[str] = set()
    for key, value in composed.items():
        if key in with_constructor:
            continue
        if OmegaConf.is_dict(value):
            keys |= {f"{key}.{inner}" for inner in value}
        else:
            keys.add(str(key))
    assert keys - {"engine.name"} == set(RANGES)


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("line", ["budget=5", "clip=.5", "delta=1e-6"])
def test_settings_of_the_noise_need_noise(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rounds=1", f"privacy.{line}"]) == 2
    assert re.search(
        rf"privacy\.{line.split('=')[0]}=.*privacy\.noise > 0", capsys.readouterr().err
    )
    for noise in (1e-6, 1, 1e6):
        assert compose([f"privacy.{line}", f"privacy.noise={noise}", "eval.clients=false"])


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("noise", ["1e-200", "1e200"])
def test_noise_that_the_accountant_cannot_square_is_refused(noise: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.noise=1e[-+]200 .*\b0\b"):
        fedhet.run([f"privacy.noise={noise}", "eval.clients=false", f"hydra.run.dir={tmp_path}/r"])
    assert not (tmp_path / "r").exists()


def test_ranges_are_checked_when_composing() -> None:
    with pytest.raises(ConfigError, match=r"client\.lr=-1.* > 0"):
        compose(["client.lr=-1"])


@pytest.mark.parametrize(
    ("message", "build"),
    [
        (r"fraction=2 .* > 0 and <= 1", {"fraction": 2}),
        (r"rounds=0 .* >= 1", {"rounds": 0}),
        (r"client\.lr_decay=1\.5 .* <= 1", {"lr_decay": 1.5}),
        (r"client\.momentum=1 .* < 1", {"local": {"momentum": 1}}),
        (r"on_failure=skipp .*\bskip\b", {"on_failure": "skipp"}),
    ],
)
def test_a_method_without_a_configuration_gets_the_same_errors(
    message: str, build: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=message):
        Federation(toy_task(), FedAvg, **build)


def test_groups_check_their_values_together() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.clip=2\.0 .*privacy\.noise > 0"):
        Noise(clip=2.0)
    with pytest.raises(ConfigError, match=r"eval\.train=true .*eval\.clients=true"):
        Evaluation(clients=False, train=True)


def test_oversampling_needs_clients_that_are_left() -> None:
    compose(["fraction=.5", "replies.oversample=1"])
    with pytest.raises(ConfigError, match=r"oversample=1 .*fraction=0\.6: .*0\.666667"):
        compose(["fraction=.6", "replies.oversample=1"])


def test_a_number_that_no_float_reaches_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"replies\.grace=10+ .* >= 0"):
        ReplyLimits(grace=10**400)

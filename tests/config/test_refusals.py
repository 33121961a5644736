"""Wrong overrides: what the message must say, and that torch is not imported for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from fedhet.config.config import check, compose, validate
from omegaconf import DictConfig, OmegaConf

from fedhet.errors import ConfigError

REFUSED = [
    # unknown choices: all that are allowed, and the nearest
    (
        "method=fednormm",
        ["unknown method 'fednormm'", "did you mean fednorm", "fedavg", "scaffold"],
    ),
    ("plugin=[fednormm]", ["unknown plugin 'fednormm'", "did you mean fednorm", "fedntd, fedprox"]),
    (
        "plugin=[scaffold]",
        [
            "unknown plugin 'scaffold': it is a method",
            "one method, which owns the aggregation",
            "fedsa with fednova or scaffold",
            "mean of the changes under known weights",
            "choose from: feddisk, fedgmm",
        ],
    ),
    ("plugin=[fednorm,fednova]", ["unknown plugin 'fednova': it is a method"]),
    ("plugin=[fednorm,zzz]", ["unknown plugin 'zzz'"]),
    ("dataset=digit", ["unknown dataset 'digit'", "did you mean digits?", "mnist"]),
    ("partition=dirichlett", ["did you mean dirichlet?", "iid"]),
    ("model=zzz", ["unknown model 'zzz'", "mlp"]),
    ("client=sdg", ["unknown client 'sdg'", "adam, sgd"]),
    ("server_opt=adam", ["unknown server_opt 'adam'", "did you mean fedadam"]),
    ("engine=rai", ["unknown engine 'rai'", "did you mean ray?", "flwr, local, ray"]),
    ("experiment=smok", ["unknown experiment 'smok'", "did you mean smoke?"]),
    ("method=null", ["unknown method 'null'", "fedavg"]),
    ("plugin=null", ["unknown plugin 'null'"]),
    ("method=[fedavg,fednorm]", ["method takes one choice", "fedavg"]),
    ("hydra/launcher=nowhere", ["hydra/launcher/nowhere"]),
    # unknown keys: the nearest, and those allowed at that level
    (
        "client.lrr=1",
        [
            "unknown setting 'client.lrr'",
            "did you mean client.lr",
            "client has optimizer, lr, epochs, batch_size",
        ],
    ),
    ("+client.lrr=1", ["unknown setting 'client.lrr'", "did you mean client.lr"]),
    ("++newkey=1", ["unknown setting 'newkey'", "the top level has", "rounds", "method"]),
    ("lr=1", ["unknown setting 'lr'", "did you mean client.lr?"]),
    ("temperature=1", ["did you mean plugin.fednorm.temperature?"]),
    ("methd=fedavg", ["unknown setting 'methd'", "did you mean method?"]),
    ("client.lr.x=1", ["unknown setting 'client.lr.x'", "client.lr has nothing below it"]),
    ("client={lrr: 1}", ["unknown setting 'client.lrr'", "did you mean client.lr"]),
    ("partition.split.7=.1", ["unknown setting 'partition.split.7'"]),
    ("plugin.fedprox.mu=1", ["the plug-in fedprox is not in this run; add plugin=[fedprox]"]),
    ("plugin.fedproxx.mu=1", ["unknown plug-in (did you mean fedprox?)", "fedntd, fedprox"]),
    (
        "plugin.fednorm.temp=1",
        ["unknown setting 'plugin.fednorm.temp'", "plugin.fednorm has temperature, z_when"],
    ),
    (
        "server_opt.lr=1",
        ["unknown setting 'server_opt.lr'", "server_opt has no settings in this run"],
    ),
    ("hydra.run.dirr=x", ["hydra.run.dirr"]),
    # no overrides at all
    ("fedavg", ["cannot read 'fedavg'", "write key=value", "did you mean method=fedavg?"]),
    ("client.lr=a#b", ["cannot read 'client.lr=a#b'", "unexpected '#b'"]),
    ("+client.lr=a#b", ["unexpected '#b'"]),
    ("client.lr=[1", ["cannot read 'client.lr=[1'"]),
    ("=1", ["cannot read '=1'", "no key"]),
    ("~client.lr", ["cannot be deleted"]),
    ("method@here=fedavg", ["without @here"]),
    # sweeps need -m
    ("method=fedavg,fednorm", ["gives several values", "-m"]),
    ("seed=range(0,3)", ["gives several values", "-m"]),
    ("seed=choice(0,1)", ["gives several values", "-m"]),
    # values
    ("client.lr=", ["client.lr=", "a number > 0"]),
    ("data_dir=${nowhere}", ["nowhere"]),
]


@pytest.mark.parametrize(("override", "said"), REFUSED)
def test_what_is_said(override: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert [part for part in said if part not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_right_overrides_are_not_blamed_for_a_wrong_one() -> None:
    right = [
        "partition.split.0=.7",
        "client={lr: 1}",
        "experiment=smoke",
        "hydra.run.dir=x",
        "plugin.fednorm.temperature=1",
    ]
    with pytest.raises(ConfigError, match="unknown setting 'newkey'"):
        compose([*right, "newkey=1"])


def test_no_refusal_imports_torch() -> None:
    program = """
import json, sys
from fedhet.config.config import check
from fedhet.errors import ConfigError
for override in json.loads(sys.argv[1]):
    for sweep in (False, True):
        try:
            check([override], sweep=sweep)
        except ConfigError:
            pass
print(sorted({"torch", "flwr", "numpy", "sklearn"} & set(sys.modules)))
"""
    overrides = json.dumps([override for override, _ in REFUSED[::6]] + ["client.lr=-1"])
    done = subprocess.run(
        [sys.executable, "-c", program, overrides], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


RANGES = {
    "seed": ([0, 2**63 - 1], [-1, 1.0, True, None, 2**63]),
    "rounds": ([1], [0, -1, 1.5, "a", True]),
    "fraction": ([1, 0.01], [0, 1.01, True, "all"]),
    "data_dir": (["here"], ["", None]),
    "device": (["auto", "cpu", "cuda"], ["gpu", None]),
    "on_failure": (["stop", "skip"], ["ignore"]),
    "buffers": (["average", "local", "frozen"], ["mean"]),
    "eval.every": ([1, 5], [0, 0.5]),
    "eval.clients": ([True, False], [1, "yes"]),
    "eval.finetune_epochs": ([0, 5], [-1, 0.5, None]),
    "early_stopping.patience": ([None, 1], [0, 2.5]),
    "early_stopping.min_delta": ([0, 0.01], [-0.1, None]),
    "client.optimizer": (["sgd", "adam"], ["adamw"]),
    "client.lr": ([1e-9, 10], [0, -1, "fast", float("nan"), float("inf")]),
    "client.epochs": ([1], [0, 1.5]),
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
    "engine.vectorize": ([0, 8, "auto"], [-1, 1.5, True]),
}


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    return compose([]).cfg


@pytest.mark.parametrize("key", RANGES)
def test_ranges(composed: DictConfig, key: str) -> None:
    cfg = composed.copy()
    OmegaConf.set_readonly(cfg, False)
    allowed, refused = RANGES[key]
    for value in allowed:
        OmegaConf.update(cfg, key, value)
        validate(cfg)
    for value in refused:
        OmegaConf.update(cfg, key, value)
        with pytest.raises(ConfigError, match=f"^{key}=.* is not allowed"):
            validate(cfg)


def test_every_setting_without_a_constructor_is_checked(composed: DictConfig) -> None:
    cfg = composed
    groups = {
        "dataset",
        "partition",
        "model",
        "method",
        "plugin",
        "server_opt",
    }  # their constructors check
    keys = {
        f"{key}.{inner}" if OmegaConf.is_dict(cfg[key]) else str(key)
        for key in cfg
        if key not in groups
        for inner in (cfg[key] if OmegaConf.is_dict(cfg[key]) else [""])
    }
    assert keys - {"engine.name"} == set(RANGES)


def test_ranges_are_checked_when_composing() -> None:
    with pytest.raises(ConfigError, match=r"client\.lr=-1 is not allowed; it must be a number > 0"):
        compose(["client.lr=-1"])


@pytest.mark.parametrize(
    "sweep",
    [
        ["method=fedavg,fednorm", "plugin=[fedprox],[fedprox,fednorm]", "seed=0,1"],
        ["method=choice(fedavg,scaffold)", "client.lr=.1,.2"],
        ["method=glob(fedad*)"],
        ["seed=range(0,100000)"],
        ["client.lr=interval(0.1,1)"],
        ["plugin=fednorm,fedprox"],
        ["method='fedavg','fednorm'"],
        ["method=fednorm,scaffold", "plugin=[fednorm]", "plugin.fednorm.temperature=.1,1"],
    ],
)
def test_sweeps_that_are_right(sweep: list[str]) -> None:
    assert check(sweep, sweep=True) == sweep


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        (["method=fedavg,fednormm"], ["unknown method 'fednormm'", "did you mean fednorm"]),
        (["method=choice(fedavg,fednormm)"], ["unknown method 'fednormm'"]),
        (
            ["plugin=[fednorm],[fednorm,fedprx]"],
            ["unknown plugin 'fedprx'", "did you mean fedprox"],
        ),
        (["method=range(0,3)"], ["unknown method '0'"]),
        (["method=glob(zzz*)"], ["no value to run"]),
        (["method=fedavg,fednorm", "client.lrr=1,2"], ["client.lrr", "did you mean client.lr"]),
        (
            ["method=fednorm,fedavg", "plugin.fednorm.temperature=.1"],
            ["add plugin=[fednorm]", "in the sweep's run method=fedavg"],
        ),
        (["client.lr=.1,-1"], ["client.lr=-1 is not allowed"]),
        (["seed=range(-1,3)"], ["seed=-1 is not allowed"]),
        (["seed=range(3,0,-1)", "rounds=range(5,-1,-1)"], ["rounds=0 is not allowed"]),
        (["client.lr=interval(0,1)"], ["client.lr=0.0 is not allowed"]),
        (
            ["method=fedadam,fedavg", "server_opt=none,fedadam"],
            ["method=fedadam is defined by server_opt=fedadam"],
        ),
        (["seed=0,1", "newkey=1"], ["unknown setting 'newkey'"]),
    ],
)
def test_sweeps_are_refused_before_their_first_job(sweep: list[str], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(sweep, sweep=True)
    assert [part for part in said if part not in str(caught.value)] == []

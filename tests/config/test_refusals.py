"""Wrong overrides: what the message must contain, and that torch is not imported for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fedhet.core.errors import ConfigError
from fedhet.runs.config import catalogue, compose

PLUGINS = ", ".join(catalogue.choices("plugin"))
REFUSED = [
    # unknown choices: the closest, and all that are allowed
    (
        "method=fednormm",
        ["method 'fednormm'", "did you mean fednorm", "fedavg", "scaffold"],
    ),
    ("plugin=[fednormm]", ["plugin 'fednormm'", "did you mean fednorm", PLUGINS]),
    (
        "plugin=[scaffold]",
        [
            "plugin 'scaffold'",
            "a method",
            f": {PLUGINS}",
        ],
    ),
    ("plugin=[fednorm,fednova]", ["unknown plugin 'fednova': it is a method"]),
    ("dataset=digit", ["unknown dataset 'digit'", "did you mean digits", "mnist"]),
    ("model=zzz", ["unknown model 'zzz'", "mlp"]),
    ("experiment=smok", ["unknown experiment 'smok'", "did you mean smoke"]),
    ("experiment=nix", ["'nix' (to begin with: experiment=first_look); choose from: digits, "]),
    ("method=null", ["unknown method 'null'", "fedavg"]),
    ("plugin=null", ["unknown plugin 'null'"]),
    ("method=[fedavg,fednorm]", ["method takes one choice", "fedavg"]),
    ("hydra/launcher=nowhere", ["hydra/launcher/nowhere"]),
    # unknown keys: the closest, and those allowed at that level
    (
        "client.lrr=1",
        [
            "setting 'client.lrr'",
            "did you mean client.lr",
            "optimizer, lr, epochs, steps, batch_size",
        ],
    ),
    ("++newkey=1", ["setting 'newkey'", "python -m fedhet --help"]),
    ("lerning_rate=1", ["setting 'lerning_rate'", "did you mean client.lr?", "python -m"]),
    ("lr=1", ["setting 'lr'", "did you mean client.lr"]),
    ("eval.targets=[.8]", ["setting 'eval.targets'", "did you mean eval.thresholds"]),
    ("methd=fedavg", ["setting 'methd'", "did you mean method"]),
    ("client.lr.x=1", ["setting 'client.lr.x'", "client.lr "]),
    ("client={lrr: 1}", ["setting 'client.lrr'", "did you mean client.lr"]),
    ("partition.split.7=.1", ["setting 'partition.split.7'"]),
    ("plugin.fedprox.mu=1", ["'plugin.fedprox.mu'", "plugin=[fedprox]"]),
    ("plugin.fedproxx.mu=1", ["plugin.fedproxx", "did you mean fedprox", PLUGINS]),
    (
        "plugin.fednorm.temp=1",
        ["setting 'plugin.fednorm.temp'", "temperature, z_when"],
    ),
    (
        "server_opt.lr=1",
        ["setting 'server_opt.lr'", "no settings"],
    ),
    ("hydra.run.dirr=x", ["hydra.run.dirr"]),
    # texts that are no overrides
    ("fedavg", ["'fedavg'", "key=value", "did you mean method=fedavg"]),
    ("client.lr=a#b", ["'client.lr=a#b'", "'#b'"]),
    ("client.lr=[1", ["'client.lr=[1'"]),
    ("=1", ["'=1'", "key"]),
    ("~client.lr", ["'~client.lr'", "deleted"]),
    ("method@here=fedavg", ["'method@here=fedavg'", "@here"]),
    # sweeps need -m
    ("method=fedavg,fednorm", ["'method=fedavg,fednorm'", "-m"]),
    ("seed=range(0,3)", ["'seed=range(0,3)'", "-m"]),
    # values
    ("client.lr=", ["client.lr=", "number > 0"]),
    ("data_dir=${nowhere}", ["nowhere"]),
]


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize(("override", "parts"), REFUSED)
def test_what_the_message_contains(override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([override])
    message = str(caught.value)
    assert [part for part in parts if part not in message] == []
    assert "\n" not in message


def test_correct_overrides_are_not_blamed_for_a_wrong_one() -> None:
    correct = [
        "partition.split.0=.7",
        "client={lr: 1}",
        "experiment=smoke",
        "hydra.run.dir=x",
        "plugin.fednorm.temperature=1",
    ]
    with pytest.raises(ConfigError, match="setting 'newkey'"):
        compose([*correct, "newkey=1"])


def test_no_refusal_imports_torch() -> None:
    program = """
import json, sys
from fedhet.runs.config import composition
from fedhet.core.errors import ConfigError
for override in json.loads(sys.argv[1]):
    try:
        composition.sweep_runs([override], composition.of_sweep())
    except ConfigError:
        pass
print(sorted({"torch", "flwr", "numpy", "sklearn"} & set(sys.modules)))
"""
    overrides = json.dumps(["method=fednormm", "client.lr=-1"])
    process = subprocess.run(
        [sys.executable, "-c", program, overrides], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"

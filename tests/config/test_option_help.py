"""`--help group=choice`: every option with its default and its range, and the range is true."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from composing import composed
from omegaconf import OmegaConf

from fedhet.cli import main
from fedhet.config import catalogue
from fedhet.config.catalogue import YamlSetting
from fedhet.config.targets import instantiate
from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError
from fedhet.job import Job

pytestmark = pytest.mark.usefixtures("own_process")
ROOT = Path(__file__).parents[2]
FILES = [f"{group}/{name}" for group, names in catalogue.groups().items() for name in names]
SETTINGS = [(path, setting) for path in ["config", *FILES] for setting in catalogue.settings(path)]
BOUND = re.compile(r"(?P<sign>>=|>) (?P<low>[\d.]+)|in (?P<open>[\[(])(?P<from>[\d.]+), ")
UPPER = re.compile(r"in [\[(][\d.]+, (?P<high>[\d.]+)(?P<close>[\])])")


def shown(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What --help prints, as one line."""
    assert main.main(["--help", *words]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    return " ".join(out.split())


# ---- the comments
@pytest.mark.parametrize("path", ["config", *FILES])
def test_every_option_has_help(path: str) -> None:
    lacking = [setting.key for setting in catalogue.settings(path) if not setting.help]
    assert not lacking, f"conf/{path}.yaml: write a comment behind or above {', '.join(lacking)}"
    if path != "config":
        group, _, choice = path.partition("/")
        assert catalogue.title(group, choice), f"conf/{path}.yaml: begin with a comment, its title"


def test_the_reader_of_comments_misses_no_key() -> None:
    """Compared with what OmegaConf reads."""
    for path in FILES:
        file = catalogue.CONF / f"{path}.yaml"
        content = OmegaConf.to_container(OmegaConf.load(file))
        keys = {setting.key for setting in (*catalogue.settings(path), *catalogue.presets(path))}
        assert {key.partition(".")[0] for key in keys} >= set(content) - {
            "_target_",
            "defaults",
            "name",
            "method",
        }


def numbers() -> Iterator[Any]:
    for path, setting in SETTINGS:
        if re.fullmatch(r"-?[\d.]+(e-?\d+)?", setting.value):
            yield pytest.param(path, setting, id=f"{path}:{setting.key}")


@pytest.mark.parametrize(("path", "setting"), list(numbers()))
def test_the_range_of_a_number_is_what_the_code_allows(path: str, setting: YamlSetting) -> None:
    """What lies outside is refused, and the end of a closed range is not."""
    bound = BOUND.search(setting.help)
    words = f"conf/{path}.yaml: say in the comment of {setting.key} which values are allowed, >= 0"
    assert bound or re.search(r"\d < \w+ <", setting.help), words
    if bound is None:
        return
    low = float(bound["low"] or bound["from"])
    closed = (bound["sign"] or bound["open"]) in (">=", "[")
    for value in [low - 1, *([] if closed else [low])]:
        with pytest.raises(ConfigError, match=re.escape(setting.key)):
            use(path, setting.key, value, setting.value)
    if closed and not path.startswith(("dataset", "model")):
        use(path, setting.key, low, setting.value)
    if upper := bound["open"] and UPPER.search(setting.help):
        high = float(upper["high"])
        for value in [high + 0.5, *([high] if upper["close"] == ")" else [])]:
            with pytest.raises(ConfigError, match=re.escape(setting.key)):
                use(path, setting.key, value, setting.value)


def use(path: str, key: str, value: float, default: str) -> None:
    """Build what reads the setting; a whole number stays one if the default is."""
    group, _, choice = path.partition("/")
    number = int(value) if value == int(value) and "." not in default else value
    if group == "dataset":
        pytest.skip("the ranges of datasets are checked when their files are read")
    if group in ("partition", "model"):
        node = OmegaConf.create({group: OmegaConf.load(catalogue.CONF / f"{path}.yaml")})[group]
        node[key] = number
        shape = (80,) if choice == "char_lstm" else (1, 28, 28)
        instantiate(node, **({"shape": shape, "classes": 10} if group == "model" else {}))
        return
    prefix = {"config": "", "plugin": f"plugin.{choice}."}.get(group, f"{group}.")
    lines = {
        "config": ["method=fedavg"],
        "plugin": ["method=fedavg", f"plugin=[{choice}]"],
    }.get(group, [f"{group}={choice}", *(["method=fedavg"] if group != "method" else [])])
    settings = composed(*lines, f"{prefix}{key}={number}")
    _ = Job(settings, toy_task()).strategy


# ---- what is printed
def test_options_of_several_pieces_and_of_what_they_bring(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown("method=scaffold", "plugin=[fednorm,moon]", "model=cnn", capsys=capsys)
    assert "method=scaffold: SCAFFOLD: control variates" in out
    assert "method.lr_g=1.0 server's step along the mean update, > 0" in out
    assert "method.control=steps c_i+ comes from: steps | gradient steps: option II" in out
    assert "plugin.fednorm.temperature=0.5 T of the softmax" in out
    assert "plugin.moon.tau=0.5 temperature of the cosines, > 0" in out
    assert "model.hidden=512 width of the hidden layer, >= 1" in out
    assert "The paper trains with client=adam" in out
    out = shown("experiment=smoke/fedlex", "method=fedadam", "dataset=shakespeare", capsys=capsys)
    assert "plugin.fedlex.rescale=mean1" in out
    assert "server_opt=fedadam (part of method=fedadam): Adam on the server" in out
    assert "server_opt.beta2=0.99 decay of the second moment, in [0, 1)" in out
    assert "model=char_lstm (part of dataset=shakespeare)" in out
    assert "char_lstm" not in shown("dataset=shakespeare", "model=cnn", capsys=capsys)


@pytest.mark.parametrize("path", FILES)
def test_every_choice_prints_every_option(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    group, _, choice = path.partition("/")
    word = f"plugin=[{choice}]" if group == "plugin" else f"{group}={choice}"
    out = shown(word, capsys=capsys)
    assert out.startswith(word)
    prefix = f"plugin.{choice}." if group == "plugin" else f"{group}."
    for setting in catalogue.settings(path):
        value = "" if setting.value == "???" else setting.value.replace(", ", ",")
        assert f"{prefix}{setting.key}={value} " in out
        assert setting.help.split()[0] in out


def test_groups_and_settings_name_pieces_too(capsys: pytest.CaptureFixture[str]) -> None:
    """So that --help can be put behind any command."""
    out = shown("dataset", capsys=capsys)
    assert all(f" {name} " in out for name in catalogue.choices("dataset") if name != "digits")
    assert "*digits The handwritten digits" in out
    out = shown("client=adam", "client.lr=.1", "rounds=3", "plugin.moon.mu=2", capsys=capsys)
    assert "client.lr=0.001" in out and "client=sgd" not in out
    assert "early_stopping.patience=null" in out
    assert "plugin.moon.mu=1.0" in out
    assert "client.lr=0.2" in shown("client.lr", capsys=capsys)
    out = shown("model=torchvision/resnet18", "method=fedavg,ditto", capsys=capsys)
    assert "model.name= required: a name in torchvision.models" in out
    assert "method=fedavg" in out and "method.lam=1.0" in out


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("method=scafold", "did you mean scaffold?"),
        ("plugin=[fednorm,moom]", "did you mean moon?"),
        ("metod=scaffold", "did you mean method"),
        ("scaffold", "did you mean method=scaffold"),
        ("lr=.1", "did you mean client.lr?"),
        ("eval.evry", "did you mean eval.every"),
        ("zzz", "groups: client, dataset"),
    ],
)
def test_wrong_names(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help", word]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: --help {word}: ") and hint in printed.err
    assert printed.err.count("\n") == 1


def test_the_plain_help_says_that_this_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    assert "--help method=scaffold" in capsys.readouterr().out


def test_it_imports_neither_torch_nor_hydra() -> None:
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fedhet", "--help", "method=fedlex"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=ROOT,
    )
    imported = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "fedhet.cli.options" in imported
    assert not {"torch", "flwr", "numpy", "hydra"} & imported

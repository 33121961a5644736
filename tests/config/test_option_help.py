"""`--help group=choice`: every option with its default and its range, and the range is true."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml
from composing import composed
from omegaconf import OmegaConf

from fedhet import __main__ as main
from fedhet.core.errors import ConfigError
from fedhet.data.toy import toy_task
from fedhet.runs.config import Config, catalogue
from fedhet.runs.config.catalogue import YamlSetting
from fedhet.runs.config.instantiation import instantiate
from fedhet.runs.config.validation import validate
from fedhet.runs.job import Job

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
def test_every_option_has_help() -> None:
    offenders = [
        f"conf/{path}.yaml: write a comment behind or above {setting.key}"
        for path, setting in SETTINGS
        if not setting.help
    ]
    offenders += [
        f"conf/{path}.yaml: begin with a comment, its title"
        for path in FILES
        if not catalogue.title(*path.split("/", 1))
    ]
    assert not offenders


def test_the_reader_of_comments_misses_no_key() -> None:
    """Compared with what a reader of YAML reads."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    offenders = []
    for path in FILES:
        content = yaml.load(catalogue.file(path).read_text(), loader)
        keys = {setting.key for setting in (*catalogue.settings(path), *catalogue.presets(path))}
        lacking = set(content) - {key.partition(".")[0] for key in keys}
        lacking -= {"_target_", "defaults", "name", "method"}
        offenders += [f"conf/{path}.yaml: {key}" for key in sorted(lacking)]
    assert not offenders


GROUPS = [group for group in catalogue.groups() if group not in ("dataset", "experiment")]
LATE = "method/fedgen"  # it imports much when it is built


@pytest.mark.parametrize("place", ["config", *GROUPS, pytest.param(LATE, marks=pytest.mark.slow)])
def test_the_range_of_a_number_is_what_the_code_allows(place: str) -> None:
    """What lies outside is refused, and the end of a closed range is not.

    The ranges of datasets are checked when their files are read.
    """
    offenders = [
        f"conf/{path}.yaml: {setting.key}={setting.value} # {setting.help}: {fault}"
        for path, setting in SETTINGS
        if place in ((path,) if path == LATE else (path, path.partition("/")[0]))
        and re.fullmatch(r"-?[\d.]+(e-?\d+)?", setting.value)
        and (fault := fault_of(path, setting))
    ]
    assert not offenders


def fault_of(path: str, setting: YamlSetting) -> str:
    """What is wrong with the range in the setting's comment."""
    bound = BOUND.search(setting.help)
    if bound is None:
        return (
            "" if re.search(r"\d < \w+ <", setting.help) else "say which values are allowed, >= 0"
        )
    low = float(bound["low"] or bound["from"])
    closed = (bound["sign"] or bound["open"]) in (">=", "[")
    outside = [low - 1 if closed else low]
    if upper := bound["open"] and UPPER.search(setting.help):
        high = float(upper["high"])
        outside.append(high if upper["close"] == ")" else high + 0.5)
    for value in outside:
        said = refusal(path, setting, value)
        if setting.key not in said:
            return f"{value} is allowed, or not named: {said}"
    if closed and not path.startswith("model") and (said := refusal(path, setting, low)):
        return f"{low} is refused: {said}"
    return ""


def refusal(path: str, setting: YamlSetting, value: float) -> str:
    """What is said against this value; empty if it is allowed."""
    try:
        use(path, setting.key, value, setting.value)
    except ConfigError as error:
        return str(error)
    return ""


@cache
def without_choices() -> Config:
    return composed("method=fedavg")


def use(path: str, key: str, value: float, default: str) -> None:
    """Build what reads the setting; a whole number stays one if the default is."""
    group, _, choice = path.partition("/")
    number = int(value) if value == int(value) and "." not in default else value
    content = catalogue.content(group, choice) if choice else {}
    if group in ("partition", "model"):
        node = OmegaConf.create({group: content | {key: number}})[group]
        shape = (80,) if choice == "char_lstm" else (1, 28, 28)
        instantiate(node, **({"shape": shape, "classes": 10} if group == "model" else {}))
        return
    base = without_choices()
    cfg = base.cfg.copy()
    OmegaConf.set_readonly(cfg, False)
    content.pop("defaults", None)  # what a method brings has files of its own
    if group == "plugin":
        cfg.plugin = {choice: content}
    elif choice:
        cfg[group] = content
    prefix = {"config": "", "plugin": f"plugin.{choice}."}.get(group, f"{group}.")
    OmegaConf.update(cfg, f"{prefix}{key}", number)
    validate(cfg)
    _ = Job(replace(base, cfg=cfg), toy_task()).strategy


# ---- what is printed
def test_options_of_several_pieces_and_of_what_they_bring(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown("method=scaffold", "plugin=[fednorm,moon]", "model=cnn", capsys=capsys)
    assert "method=scaffold: SCAFFOLD: control variates" in out
    assert "method.lr_g=1.0 learning rate of the server for the mean update, > 0" in out
    assert "method.control=steps way to compute c_i+: steps | gradient steps: option II" in out
    assert "plugin.fednorm.temperature=0.5 T of the softmax" in out
    assert "plugin.moon.tau=0.5 temperature of the cosines, > 0" in out
    assert "model.hidden=512 width of the hidden layer, >= 1" in out
    assert "The paper trains with client=adam" in out
    out = shown("plugin=[fedlex]", "method=fedadam", "dataset=shakespeare", capsys=capsys)
    assert "plugin.fedlex.rescale=none" in out
    assert "server_opt=fedadam (part of method=fedadam): Adam on the server" in out
    assert "server_opt.beta2=0.99 decay of the second moment, in [0, 1)" in out
    assert "model=char_lstm (part of dataset=shakespeare)" in out
    assert "char_lstm" not in shown("dataset=shakespeare", "model=cnn", capsys=capsys)


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(group, marks=[pytest.mark.slow] * (len(names) > 10))
        for group, names in catalogue.groups().items()
    ],
)
def test_every_choice_prints_every_option(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    offenders = []
    for choice in catalogue.choices(group):
        word = f"plugin=[{choice}]" if group == "plugin" else f"{group}={choice}"
        out = shown(word, capsys=capsys)
        assert out.startswith(word)
        prefix = f"plugin.{choice}." if group == "plugin" else f"{group}."
        for setting in catalogue.settings(f"{group}/{choice}"):
            value = "" if setting.value == "???" else setting.value.replace(", ", ",")
            if f"{prefix}{setting.key}={value} " not in out or setting.help.split()[0] not in out:
                offenders.append(f"{word}: {setting.key}")
    assert not offenders


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
    assert "fedhet.runs.cli.help" in imported
    assert not {"torch", "flwr", "numpy", "hydra"} & imported

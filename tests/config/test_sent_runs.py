"""No setting reads a machine: interpolations are references to settings, wherever a run is made."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from flwr.app import ConfigRecord, RecordDict
from omegaconf import OmegaConf

import fedhet
from fedhet.__main__ import main as fedhet_main
from fedhet.core.errors import ConfigError, public_text
from fedhet.data.toy import toy_task
from fedhet.flower import transport
from fedhet.flower.apps import FLOWER_NAMES, client_for, client_of, strategy_of
from fedhet.runs.config import Config, compose, sent
from fedhet.runs.config.overrides import literal, parse

SECRET = "canary-7f3a"

ATTEMPTS = {
    "environment": "data_dir='${oc.env:FEDHET_CANARY,x}'",
    "inside a text": "data_dir='a-${oc.env:FEDHET_CANARY}-b'",
    "nested": "data_dir='${oc.decode:${oc.env:FEDHET_CANARY}}'",
    "as a default": "data_dir='${oc.env:NOT_SET,${oc.env:FEDHET_CANARY}}'",
    "in a dictionary": "partition={alpha: 1, x: {y: '${oc.env:FEDHET_CANARY}'}}",
    "in a list": "eval.thresholds=['${oc.env:FEDHET_CANARY}']",
    "composed name": "data_dir='${oc.${engine.name}:FEDHET_CANARY}'",
    "spaces": "data_dir='${ oc.env : FEDHET_CANARY }'",
    "escaped": r"data_dir='\${oc.env:FEDHET_CANARY}'",
    "doubly escaped": r"data_dir='\\${oc.env:FEDHET_CANARY}'",
    "without quotes": "data_dir=${oc.env:FEDHET_CANARY}",
    "selected": "data_dir='${oc.select:hydra.runtime.cwd}'",
    "hydra's settings": "data_dir='${hydra.runtime.cwd}'",
    "hydra's resolver": "data_dir='${hydra:runtime.cwd}'",
    "relative to hydra": "data_dir='${.hydra.runtime.cwd}'",
    "composed setting": "data_dir='${${engine.name}.x}'",
    "create": "data_dir='${oc.create:{a: 1}}'",
    "clock": "seed=${now:%s}",
    "fedhet's own": "data_dir='${fedhet.searchpath:}'",
    "plug-in's option": "plugin.fednorm.temperature=${oc.env:FEDHET_CANARY}",
    "a cast": "data_dir=str('${oc.env:FEDHET_CANARY}')",
    "run folder": "hydra.run.dir='/tmp/${oc.env:FEDHET_CANARY}'",
    "run folder by hydra": "hydra.run.dir='/tmp/${hydra.runtime.cwd}'",
    "job name": "hydra.job.name='${oc.env:FEDHET_CANARY}'",
    "copied variables": "+hydra.job.env_copy=[FEDHET_CANARY]",
    "set variables": "+hydra.job.env_set.PYTHONPATH=/tmp",
    "callbacks": "++hydra.callbacks.x._target_=hydra.experimental.callbacks.LogJobReturnCallback",
    "chdir": "hydra.job.chdir=true",
    "subfolder": "hydra.output_subdir=x",
    "logging": "hydra/job_logging=default",
    "all of hydra": "hydra={run: {dir: /tmp/x}}",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHET_CANARY", SECRET)


def context(*lines: str, **keys: Any) -> Any:
    keys = {key.replace("_", "-"): value for key, value in keys.items()}
    return SimpleNamespace(
        run_config={"overrides": shlex.join(lines), "method": "", "alpha": "", **keys},
        node_config={"partition-id": 0, "num-partitions": 1},
    )


SETTINGS = [
    "method='${oc.env:FEDHET_CANARY}'",
    *(line for line in ATTEMPTS.values() if "hydra" not in line.partition("=")[0]),
]


@pytest.mark.usefixtures("read_once")
def test_no_run_resolves_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one run, of a sweep, and from Python: nothing is written, and nothing is told."""
    monkeypatch.chdir(tmp_path)
    for line in SETTINGS:
        check_that_no_run_resolves(line, capfd)
    assert not list(tmp_path.iterdir())


def check_that_no_run_resolves(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        fedhet.run([line, "rounds=1", "hydra.run.dir=run"])
    assert fedhet_main(["--quiet", line, "rounds=1"]) == 2
    assert fedhet_main(["-m", line, "rounds=1", "seed=0,1"]) == 2
    written = capfd.readouterr()
    for text in (str(refused.value), written.out, written.err):
        assert SECRET not in text and str(Path.cwd()) not in text


@pytest.mark.parametrize(
    "text",
    [
        "data_dir: ${oc.env:FEDHET_CANARY}",
        "model: {weights: '${oc.env:FEDHET_CANARY}'}",
        "client: {lr: '${oc.decode:${oc.env:FEDHET_CANARY}}'}",
    ],
)
def test_a_file_reads_no_machine(own_conf: Path, text: str) -> None:
    (own_conf / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    with pytest.raises(ConfigError) as refused:
        compose(["experiment=mine"])
    assert SECRET not in str(refused.value)


@pytest.mark.usefixtures("read_once")
def test_the_server_resolves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for line in ATTEMPTS.values():
        refused = refusal(context("rounds=1", line))
        for text in (refused, caplog.text):
            assert SECRET not in text and str(Path.cwd()) not in text


def refusal(sent: Any) -> str:
    """What the server says of a run."""
    with pytest.raises(ConfigError) as refused:
        strategy_of(sent)
    return str(refused.value)


# ---- the nodes, which get values
def values(line: str) -> dict[str, Any]:
    """The settings that a hostile server would send for an override."""
    key, _, text = line.lstrip("+").partition("=")
    settings: Any = OmegaConf.to_container(default().cfg)
    node = settings
    *path, last = key.replace("/", ".").split(".")
    for part in path:
        node = node.setdefault(part, {})
    node[last] = text
    return dict(settings)


def message(settings: Any, choices: Any = None) -> Any:
    content = {"cfg": settings, "choices": choices or default().choices}
    record = ConfigRecord({transport.SETTINGS: json.dumps(content)})
    return SimpleNamespace(content=RecordDict({transport.SETTINGS: record}))


@cache
def default() -> Config:
    return compose(["partition.clients=1"])


NODES: list[Callable[[Any], Any]] = [
    lambda message: client_for(message, context(), cast("Any", None)),
    lambda message: client_of(message, context(), replace(toy_task(1), sizes=[]), None),
]
CLASSES = [
    "model._target_=os.system",
    "server_opt={_target_: subprocess.Popen, args: [ls]}",
    "plugin.fednorm._target_=fedhet.data.storage.append_line",
    "method.inner._target_=os.system",
]


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("node", NODES, ids=["of a whole run", "of an app of one's own"])
def test_no_node_resolves_or_calls_anything(
    node: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in (*ATTEMPTS.values(), *CLASSES):
        with pytest.raises(ConfigError) as refused:
            node(message(values(line)))
        problem = public_text(refused.value)
        assert problem and SECRET not in problem
        assert str(Path.cwd()) not in problem
    assert not list(tmp_path.iterdir())


DAMAGED = {
    "no settings": [],
    "nothing": {},
    "a missing key": {"client": {}},
    "a group that is a number": {"plugin": 3},
    "a list for a group": {"client": [1]},
    "a missing value": {"rounds": "???"},
    "a text for a number": {"rounds": "two"},
    "a number out of range": {"rounds": 0},
    "a setting that this version lacks": {"client": {"new": 1}},
    "a text for a class": {"method": "fedavg"},
    "a number for a class": {"method": {"_target_": 3}},
    "a plug-in of an odd name": {"plugin": {"a.b[": {}}},
    "deep": json.loads("[" * 500 + "]" * 500),
}


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("change", DAMAGED.values(), ids=DAMAGED)
def test_damaged_settings_are_one_error(change: Any) -> None:
    settings: Any = OmegaConf.to_container(default().cfg)
    for key, value in change.items() if isinstance(change, dict) else ():
        if isinstance(value, dict) and value and "_target_" not in value:
            settings[key] |= value
        else:
            settings[key] = value
    with pytest.raises(ConfigError):
        NODES[0](message(settings if change and isinstance(change, dict) else change))


def test_texts_that_are_no_settings_are_one_error() -> None:
    for text in ("", "{", "[" * 10**5, '"x"', '{"cfg": {}}', '{"cfg": {}, "choices": {"a": 1}}'):
        with pytest.raises(ConfigError, match=r"run's settings .*read"):
            sent.read(text)
    with pytest.raises(ConfigError, match="settings"):
        NODES[0](SimpleNamespace(content=RecordDict()))


@pytest.mark.usefixtures("read_once")
def test_what_is_sent_means_the_same_there() -> None:
    config = compose(["client.epochs=2", "client.batch_size=${client.epochs}", "data_dir='a b'"])
    there = sent.read(sent.written(config))
    assert there.cfg == config.cfg and there.choices == config.choices and there.run == config.run
    assert there.cfg.client.batch_size == 2
    assert (there.overrides, there.run_dir) == ((), "")


@pytest.mark.usefixtures("read_once")
def test_a_run_folder_of_any_name_is_submitted(tmp_path: Path) -> None:
    for name in ("it's", 'a "b"', "back\\", "comma, here"):
        config = replace(compose(["rounds=3"]), run_dir=str(tmp_path / name), run_dir_given=True)
        sent.save(config, tmp_path / "settings.json")
        there = sent.load(tmp_path / "settings.json")
        assert there == config


# ---- the keys of the run config beside overrides
def test_the_app_declares_the_keys_as_not_given() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    declared = project["tool"]["flwr"]["app"]["config"]
    assert declared == dict.fromkeys(["overrides", *FLOWER_NAMES], "")


@pytest.mark.usefixtures("read_once")
def test_a_key_sets_what_its_override_sets() -> None:
    sent = context(
        "fraction=.5",
        method="scaffold",
        dataset="digits",
        partition="dirichlet",
        alpha=1e-3,
        num_server_rounds=2,
        local_epochs="3",
        learning_rate=0.1,
        batch_size=16,
    )
    expected = (
        "fraction=.5 rounds=2 client.epochs=3 client.lr=0.1 client.batch_size=16 method=scaffold"
        " dataset=digits partition=dirichlet partition.alpha=0.001"
    )
    assert " ".join(strategy_of(sent).job.config.overrides) == expected


HOSTILE = [
    "fedavg hydra.run.dir=/tmp/x",
    "fedavg\nrounds=1",
    "fedavg,fedprox",
    "glob(*)",
    "{_target_: os.system}",
    "${oc.env:FEDHET_CANARY}",
    "=fedavg",
    "scafold",
    "'",
    " ",
    True,
]


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize(("key", "name"), [("method", "method"), ("learning-rate", "client.lr")])
def test_a_wrong_value_is_answered_as_on_the_command_line(key: str, name: str) -> None:
    for value in HOSTILE:
        line = f"{name}={value if isinstance(value, str) else literal(value)}"
        with pytest.raises(ConfigError) as there:
            compose(["rounds=1", line])
        refused = refusal(context("rounds=1", **{key: value}))
        assert str(there.value) in refused or "${" in line
        assert SECRET not in refused


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("client.lr=.5", "learning-rate", 0.1),
        ("++client.lr=.5", "learning-rate", 0.1),
        ("method=fedprox", "method", "scaffold"),
    ],
)
def test_a_setting_in_both_places_is_refused(line: str, key: str, value: Any) -> None:
    said = refusal(context("rounds=1", line, **{key: value}))
    assert f"{FLOWER_NAMES[key]}={value}" in said and line.lstrip("+") in said


@pytest.mark.usefixtures("read_once")
def test_two_references_make_no_resolver() -> None:
    """`${a}{oc.env:X}` is a text that reads `${oc.env:X}` where a is `$`."""
    with pytest.raises(ConfigError, match="cannot contain"):
        compose(["device='$'", "data_dir='${device}{oc.env:FEDHET_CANARY}'"])


LITERALS = [
    "a'b\\",
    "\\'",
    'x"y',
    "a, b",
    "null",
    "1",
    " ",
    "",
    "[x]",
    "é%n:",
    None,
    True,
    1e-5,
    3,
    [1, "a,b", None],
    {"a": {"b": ["'", False]}, "c": {}},
]


def test_a_literal_is_read_back() -> None:
    read = [parse([f"data_dir={literal(value)}"])[0].value() for value in LITERALS]
    assert read == LITERALS

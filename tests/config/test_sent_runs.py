"""No setting reads a machine: interpolations are references to settings, wherever a run is made."""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from flwr.app import ConfigRecord, RecordDict
from omegaconf import OmegaConf

import fedhet
from fedhet.__main__ import main as fedhet_main
from fedhet.core.errors import ConfigError, told
from fedhet.data.toy import toy_task
from fedhet.engines.flwr import _run_config
from fedhet.flower import grid
from fedhet.flower.apps import FLOWER_NAMES, _overrides, client_for, strategy_of
from fedhet.flower.clientapp import client_of
from fedhet.runs.config import cached, compose
from fedhet.runs.config.interpolations import literal
from fedhet.runs.config.overrides import parse
from fedhet.runs.job import Job

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
        compose(["experiment=mine"], sent=True)
    assert SECRET not in str(refused.value)


@pytest.mark.usefixtures("read_once")
def test_neither_server_nor_node_resolves(caplog: pytest.LogCaptureFixture) -> None:
    for line in ATTEMPTS.values():
        check_that_neither_side_resolves(line, caplog)


def check_that_neither_side_resolves(line: str, caplog: pytest.LogCaptureFixture) -> None:
    refused, reason = refusals(context("rounds=1", line))
    assert line in refused.replace("\\\\", "\\")  # it names the override
    assert repr(line) in reason
    for text in (refused, reason, caplog.text):
        assert SECRET not in text and str(Path.cwd()) not in text


def refusals(sent: Any) -> tuple[str, str]:
    """What the server and a node say of a run."""
    with pytest.raises(ConfigError) as refused:
        strategy_of(sent)
    with pytest.raises(ConfigError) as at_node:
        client_for(sent, cast("Any", None))
    return str(refused.value), told(at_node.value)


@pytest.mark.usefixtures("read_once")
def test_no_node_of_an_app_of_ones_own_resolves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the settings come in a message of the server."""
    monkeypatch.chdir(tmp_path)
    node: Any = context()
    classes = ["model._target_=os.system", "server_opt={_target_: subprocess.Popen, args: [ls]}"]
    for line in (*ATTEMPTS.values(), *classes):
        settings = ConfigRecord({grid.LINES: ["method=fedavg", line]})
        message: Any = SimpleNamespace(content=RecordDict({grid.SETTINGS: settings}))
        with pytest.raises(ConfigError) as refused:
            client_of(message, node, replace(toy_task(1), sizes=[]), None)
        problem = told(refused.value)
        assert problem and SECRET not in problem
        assert str(Path.cwd()) not in problem
    assert not list(tmp_path.iterdir())


# ---- the keys of the run config beside overrides
def test_the_app_declares_the_keys_as_not_given() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    declared = project["tool"]["flwr"]["app"]["config"]
    assert declared == dict.fromkeys(["overrides", *FLOWER_NAMES, "resume"], "")


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
    assert " ".join(_overrides(sent)) == expected
    assert cached(_overrides(sent)).overrides == tuple(expected.split())


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
def test_a_wrong_value_is_answered_as_on_the_command_line() -> None:
    for value in HOSTILE:
        for key, name in (("method", "method"), ("learning-rate", "client.lr")):
            line = f"{name}={value if isinstance(value, str) else literal(value)}"
            with pytest.raises(ConfigError) as there:
                compose(["rounds=1", line], sent=True)
            refused, reason = refusals(context("rounds=1", **{key: value}))
            assert str(there.value) in refused
            assert str(there.value)[:60] in reason
            assert SECRET not in refused + reason


def test_keys_are_not_longer_than_overrides_may_be() -> None:
    assert all("100000 " in said for said in refusals(context(method="x" * 2**20)))


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("client.lr=.5", "learning-rate", 0.1),
        ("++client.lr=.5", "learning-rate", 0.1),
        ("client={lr: .5, epochs: 1}", "learning-rate", 0.1),
        ("method=fedprox", "method", "scaffold"),
    ],
)
def test_a_setting_in_both_places_is_refused(line: str, key: str, value: Any) -> None:
    for said in refusals(context("rounds=1", line, **{key: value})):
        assert f"{key}={value!r}" in said and line.lstrip("+") in said
    assert _overrides(context("method.mu=.1", method="fedprox")) == (
        "method.mu=.1",
        "method=fedprox",
    )


@pytest.mark.usefixtures("read_once")
def test_a_run_from_elsewhere_may_refer_to_settings() -> None:
    lines = ("client.epochs=3", "client.batch_size=${client.epochs}", "data_dir='x-${client.lr}'")
    assert cached(lines).cfg.client.batch_size == 3
    run_dir = compose(["hydra.run.dir='/tmp/${now:%Y}-${seed}'"], sent=True).run_dir
    assert run_dir.startswith("/tmp/2") and run_dir.endswith("-0")


@pytest.mark.usefixtures("read_once")
def test_two_references_make_no_resolver() -> None:
    """`${a}{oc.env:X}` is a text that reads `${oc.env:X}` where a is `$`."""
    for sent in (False, True):
        with pytest.raises(ConfigError, match=r"data_dir=\$\{oc\.env:FEDHET_CANARY\} .*'\$\{'"):
            compose(["device='$'", "data_dir='${device}{oc.env:FEDHET_CANARY}'"], sent=sent)


# ---- the machine that sends the run
@pytest.mark.usefixtures("read_once")
def test_what_is_sent_means_the_same_everywhere() -> None:
    lines = ["client.epochs=2", "client.batch_size=${client.epochs}", "data_dir='a b'"]
    config = compose(lines)
    there = compose(config.overrides, sent=True)
    assert OmegaConf.to_container(there.cfg) == OmegaConf.to_container(config.cfg)
    assert there.cfg.client.batch_size == 2


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


@pytest.mark.usefixtures("read_once")
def test_a_run_folder_of_any_name_is_submitted(tmp_path: Path) -> None:
    job = Job(compose([]))
    for name in ("it's", 'a "b"', "back\\", "comma, here"):
        run_config = _run_config(job, tmp_path / name)
        lines = shlex.split(tomllib.loads(run_config)["overrides"])
        assert compose(lines, sent=True).run_dir == str(tmp_path / name)

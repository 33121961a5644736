"""A run from another machine reads nothing of the server or a node but references to settings."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from omegaconf import OmegaConf

import fedhet
from fedhet.config import cached, compose, portable
from fedhet.config.interpolations import literal
from fedhet.config.overrides import parse
from fedhet.engines.flwr import _run_config
from fedhet.errors import ConfigError
from fedhet.flower.apps import client_for, server_for
from fedhet.flower.telling import told
from fedhet.job import Job

SECRET = "canary-7f3a"

ATTEMPTS = {
    "environment": "data_dir='${oc.env:FEDHET_CANARY,x}'",
    "inside a text": "data_dir='a-${oc.env:FEDHET_CANARY}-b'",
    "nested": "data_dir='${oc.decode:${oc.env:FEDHET_CANARY}}'",
    "as a default": "data_dir='${oc.env:NOT_SET,${oc.env:FEDHET_CANARY}}'",
    "in a dictionary": "partition={alpha: 1, x: {y: '${oc.env:FEDHET_CANARY}'}}",
    "in a list": "eval.targets=['${oc.env:FEDHET_CANARY}']",
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
    "create": "method='${oc.create:{a: 1}}'",
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


def context(line: str) -> Any:
    return SimpleNamespace(
        run_config={"overrides": shlex.join(["rounds=1", line])},
        node_config={"partition-id": 0, "num-partitions": 1},
    )


@pytest.mark.parametrize("line", ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_neither_server_nor_node_resolves(line: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError) as refused:
        server_for(context(line))
    assert line in str(refused.value).replace("\\\\", "\\")  # it names the override
    client: Any = client_for(context(line), cast("Any", None))
    reason = client.numpy_client._reason
    assert "its node cannot serve this run" in reason and told(repr(line)) in reason
    for text in (str(refused.value), reason, caplog.text):
        assert SECRET not in text and str(Path.cwd()) not in text


def test_a_run_from_elsewhere_may_refer_to_settings() -> None:
    lines = ("client.epochs=3", "client.batch_size=${client.epochs}", "data_dir='x-${client.lr}'")
    assert cached(lines).cfg.client.batch_size == 3
    run_dir = compose(["hydra.run.dir='/tmp/${now:%Y}-${seed}'"], sent=True).run_dir
    assert run_dir.startswith("/tmp/2") and run_dir.endswith("-0")


def test_two_references_make_no_resolver() -> None:
    """`${a}{oc.env:X}` is a text that reads `${oc.env:X}` where a is `$`."""
    for sent in (False, True):
        with pytest.raises(ConfigError, match="cannot contain"):
            compose(["device='$'", "data_dir='${device}{oc.env:FEDHET_CANARY}'"], sent=sent)


def test_a_file_on_the_server_or_node_reads_nothing(own_conf: Path) -> None:
    text = "# @package _global_\ndata_dir: ${oc.env:FEDHET_CANARY}\n"
    (own_conf / "experiment" / "mine.yaml").write_text(text)
    assert compose(["experiment=mine"]).cfg.data_dir == SECRET
    with pytest.raises(ConfigError, match=r"data_dir=.*is not resolved in a run that"):
        compose(["experiment=mine"], sent=True)


# ---- the machine that sends the run
def test_what_is_sent_means_the_same_everywhere() -> None:
    lines = ["client.epochs=2", "client.batch_size=${client.epochs}", "data_dir='a b'"]
    config = compose(lines)
    there = compose(portable(config), sent=True)
    assert OmegaConf.to_container(there.cfg) == OmegaConf.to_container(config.cfg)
    assert there.cfg.client.batch_size == 2


@pytest.mark.parametrize(
    "line",
    ["data_dir='${oc.env:FEDHET_CANARY}/x'", "experiment=mine", "client.lr='${oc.decode:\".1\"}'"],
)
def test_the_sender_refuses_before_anything_is_sent(
    line: str, own_conf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In an override and in a file; the error names the variable, and not its value."""
    text = "# @package _global_\ndata_dir: ${oc.env:FEDHET_CANARY}\n"
    (own_conf / "experiment" / "mine.yaml").write_text(text)
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"write the value itself") as refused:
        fedhet.run([line, "engine=flwr", f"hydra.run.dir={folder}"])
    written = capfd.readouterr()
    assert SECRET not in str(refused.value) + written.out + written.err
    assert not folder.exists()


@pytest.mark.parametrize(
    "value",
    [
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
    ],
)
def test_a_literal_is_read_back(value: Any) -> None:
    assert parse([f"data_dir={literal(value)}"])[0].value() == value


def test_a_run_folder_of_any_name_is_submitted(tmp_path: Path) -> None:
    for name in ("it's", 'a "b"', "back\\", "comma, here"):
        run_config = _run_config(Job(compose([])), tmp_path / name)
        lines = shlex.split(tomllib.loads(run_config)["overrides"])
        assert compose(lines, sent=True).run_dir == str(tmp_path / name)

"""Pieces in a folder that --config-dir or FEDHET_CONF names; FEDHET_TRUST trusts their package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from composing import check_overrides
from own.conftest import ROOT, Command, forget

import fedhet
from fedhet import __main__ as main
from fedhet.runs.cli.help import compatibility
from fedhet.runs.cli.new import KINDS, create
from fedhet.runs.config import catalogue, compose
from fedhet.runs.config.instantiation import find_target
from fedhet.testing import sha256, toy_task

CHOSEN = [
    "method=m_method",
    "method.pull=.2",
    "plugin=[m_plugin]",
    "plugin.m_plugin.strength=.2",
    "model=m_model",
    "model.hidden=8",
    "dataset=m_dataset",
    "dataset.samples=300",
    "partition=m_partition",
    "partition.mixed=1",
    "partition.clients=3",
    "rounds=2",
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the package mine_pkg, which is not installed: one piece of every kind."""
    folder = tmp_path / "mine-pkg"
    for kind in KINDS:
        create(kind, f"m_{kind}", folder)
    monkeypatch.setenv("FEDHET_TRUST", "mine_pkg")
    forget(monkeypatch, "mine_pkg")
    return folder


@pytest.fixture
def conf(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The conf folder of `project`, for runs in this process."""
    folder = project / "mine_pkg" / "conf"
    monkeypatch.setenv("FEDHET_CONF", str(folder))
    monkeypatch.syspath_prepend(project)
    return folder


def summary(output: str) -> dict[str, Any]:
    """What the run recorded whose folder the last line of the output names."""
    folder = Path(output.splitlines()[-1].removeprefix("run folder: "))
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_the_console_script_finds_what_python_m_finds(project: Path, console: Command) -> None:
    """A package in the working directory; all five kinds in one run, with an option each."""
    ours = console("--config-dir", "mine_pkg/conf", *CHOSEN, cwd=project)
    assert ours.returncode == 0, ours.stderr
    recorded = summary(ours.stdout)
    names = ("method", "plugins", "model", "dataset")
    assert [recorded[key] for key in names] == ["m_method", ["m_plugin"], "m_model", "m_dataset"]
    assert recorded["partition"]["name"] == "m_partition"
    assert recorded["run_dir"].endswith("-m_method")
    module = subprocess.run(
        [sys.executable, "-m", "fedhet", *CHOSEN],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(ROOT), "FEDHET_CONF": "mine_pkg/conf"},
        capture_output=True,
        text=True,
    )
    assert module.returncode == 0, module.stderr
    assert summary(module.stdout)["weights_sha256"] == recorded["weights_sha256"]


@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["ray", "flwr"])
def test_flower_finds_a_package_of_the_working_directory(
    project: Path, console: Command, engine: str
) -> None:
    """FEDHET_CONF is relative, and Flower's processes have another working directory."""
    hashes = set()
    for lines in ([], [f"engine={engine}"]):
        done = console(*CHOSEN, *lines, cwd=project, FEDHET_CONF="mine_pkg/conf")
        assert done.returncode == 0, done.stderr
        hashes.add(summary(done.stdout)["weights_sha256"])
    assert len(hashes) == 1


@pytest.mark.usefixtures("conf")
def test_every_entry_to_fedhet_knows_the_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    assert {f"m_{kind}" for kind in KINDS} <= set(capsys.readouterr().out.split())
    assert main.main(["data", "describe", *CHOSEN[6:11], "--out", "figures"]) == 0
    assert "3 clients" in capsys.readouterr().out
    assert main.main(["m_methd"]) == 2
    assert "did you mean method=m_method?" in capsys.readouterr().err
    sweep = ["method=fedavg,m_method", "partition=glob(m_*)", "model.hidden=8", "model=m_model"]
    assert len(check_overrides(sweep, sweep=True)) == 2
    with pytest.raises(fedhet.ConfigError, match=r"unknown model 'mmodel' .*did you mean m_model"):
        check_overrides(["model=m_model,mmodel"], sweep=True)
    for kind in KINDS:
        assert f"m_{kind}" not in catalogue.built_in(kind)


@pytest.mark.usefixtures("conf")
def test_figures_are_written_where_they_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = fedhet.run([*CHOSEN, "eval.clients=false"])
    assert fedhet.load(run.dir)(run.weights["head.weight"].new_zeros(1, 2)).shape == (1, 5)


def test_config_dir_reaches_the_processes_that_are_started_later(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDHET_CONF", str(project / "mine_pkg" / "conf"))
    other = project / "other" / "experiment"
    other.mkdir(parents=True)
    (other / "short.yaml").write_text("# @package _global_\nrounds: 1\n")
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    assert main.main(["--cfg", "job", "--config-dir=other", "experiment=short", *CHOSEN[:2]]) == 0
    out = capsys.readouterr().out
    assert "rounds: 1\n" in out and "pull: 0.2\n" in out
    here = os.environ["FEDHET_CONF"].split(os.pathsep)
    assert here == [str(project / "other"), str(project / "mine_pkg" / "conf")]


@pytest.mark.usefixtures("conf")
def test_a_piece_may_build_on_fedhets_own(project: Path) -> None:
    """Defaults lists name choices of either folder."""
    file = project / "mine_pkg" / "conf" / "method" / "both.yaml"
    file.write_text("# Both\ndefaults:\n  - /plugin/fedprox\n  - m_method\n  - _self_\npull: 0.0\n")
    settings = compose(["method=both"])
    assert settings.plugins == ("fedprox",)
    assert settings.choices["method"] == "both"
    fast = ["rounds=1", "eval.clients=false"]
    expected = sha256("method=fedprox", *fast, task=toy_task())
    assert sha256("method=both", *fast, task=toy_task()) == expected


def test_list_goes_on_where_a_piece_cannot_be_built(
    conf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (conf / "method" / "open.yaml").write_text("_target_: mine_pkg.m_method.MMethod\npull: ???\n")
    (conf / "plugin" / "lost.yaml").write_text("# @package plugin.lost\n_target_: lost.Lost\n")
    few = {"method": ("fedavg", "m_method", "open"), "plugin": ("m_plugin", "lost")}
    every = catalogue.choices
    monkeypatch.setattr(catalogue, "choices", lambda group: few.get(group) or every(group))
    rows = {(method, plugin): reason for method, plugin, reason in compatibility()}
    assert {pair for pair, reason in rows.items() if reason is None} == {
        ("fedavg", "m_plugin"),
        ("m_method", "m_plugin"),
    }
    assert "your own components" in capsys.readouterr().err
    assert "method.pull " in str(rows["open", "m_plugin"])
    assert "lost.Lost " in str(rows["fedavg", "lost"])


# ---- what is wrong is said in one line
@pytest.mark.usefixtures("conf")
def test_the_package_must_be_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDHET_TRUST")
    message = r"method\._target_=mine_pkg\.m_method\.MMethod .*trusted.*FEDHET_TRUST adds"
    with pytest.raises(fedhet.ConfigError, match=message):
        compose(["method=m_method"])


def test_a_package_that_python_does_not_find_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDHET_CONF", str(project / "mine_pkg" / "conf"))
    message = r"method\._target_=mine_pkg\.m_method\.MMethod: .*package mine_pkg .*PYTHONPATH"
    with pytest.raises(fedhet.ConfigError, match=message):
        find_target(compose(["method=m_method"]).cfg.method)


@pytest.mark.slow
def test_the_console_script_names_it_too(conf: Path, console: Command) -> None:
    done = console("method=m_method", cwd=conf, FEDHET_CONF=str(conf))
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert "method._target_=mine_pkg.m_method.MMethod: " in line
    assert "no package mine_pkg" in line and "PYTHONPATH" in line


@pytest.mark.parametrize("how", ["--config-dir", "FEDHET_CONF"])
def test_a_folder_that_is_not_there(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if how == "FEDHET_CONF":
        monkeypatch.setenv("FEDHET_CONF", "nowhere")
    argv = ["--config-dir", "nowhere"] if how == "--config-dir" else []
    assert main.main([*argv, "--help"]) == 2
    assert capsys.readouterr().err == f"error: {how}=nowhere: there is no such folder\n"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "method/fedavg.yaml",
            "a: 1",
            r"method=fedavg .*twice: \S+fedavg.yaml .*\S+",
        ),
        ("methods/mine.yaml", "a: 1", r"mine.yaml .*group .*did you mean method"),
        ("config.yaml", "a: 1", r"config.yaml .*group"),
        ("hydra/launcher/mine.yaml", "a: 1", r"mine.yaml .*group"),
        ("method/mine.yaml", "a: [", r"mine.yaml.*line 1|line 1.*mine.yaml"),
        ("method/mine.yaml", "[1]", r"mine.yaml: .*settings `key: value`"),
        ("method/mine.yaml", "defaults: [/plugin/nope]\n", r"plugin/nope"),
        (
            "plugin/mine.yaml",
            "_target_: mine_pkg.m_plugin.MPluginPlugin",
            "`# @package plugin.<name>`",
        ),
    ],
)
def test_files_that_cannot_be_pieces(conf: Path, file: str, text: str, message: str) -> None:
    path = conf / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    chosen = "plugin=[mine]" if file.startswith("plugin") else "method=mine"
    with pytest.raises(fedhet.ConfigError, match=message) as caught:
        compose([chosen])
    assert "\n" not in str(caught.value)

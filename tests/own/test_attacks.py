"""Neither a run nor a yaml file of a piece can name code, or folders, that nobody has trusted."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from composing import check_overrides
from own.conftest import forget

from fedhet.core.errors import ConfigError
from fedhet.runs.config import compose

EVIL = "_target_: os.system\ncommand: touch owned\n"
FEDAVG = "_target_: fedhet.methods.fedavg.FedAvg\n"


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder on the search path; nothing is trusted."""
    folder = tmp_path / "conf"
    for group in ("method", "experiment"):
        (folder / group).mkdir(parents=True)
    monkeypatch.setenv("FEDHET_CONF", str(folder))
    monkeypatch.delenv("FEDHET_TRUST", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize(
    "line",
    [
        "hydra.searchpath=[file://{folder}]",
        "+hydra.searchpath=[file://{folder}]",
        "++hydra.searchpath=[pkg://evil.conf]",
        "hydra.searchpath.0=file://{folder}",
        "hydra={{searchpath: [file://{folder}]}}",
    ],
)
def test_a_run_names_no_folder(tmp_path: Path, line: str) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "evil.yaml").write_text(FEDAVG)
    for sweep in (False, True):
        with pytest.raises(ConfigError, match=r"--config-dir.*FEDHET_CONF"):
            check_overrides([line.format(folder=tmp_path)], sweep=sweep)
    with pytest.raises(ConfigError, match="unknown method 'evil'"):
        compose(["method=evil", line.format(folder=tmp_path)])


@pytest.mark.parametrize("line", ["--config-dir={folder}", "--config-dir", "-cd={folder}"])
def test_an_option_of_the_command_line_is_no_override(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(line.format(folder=tmp_path)))):
        compose([line.format(folder=tmp_path)])


@pytest.mark.usefixtures("read_once")
def test_a_run_changes_no_variable_that_says_what_is_trusted() -> None:
    for name in ("FEDHET_CONF", "FEDHET_TRUST"):
        with pytest.raises(ConfigError, match=f"env_set.{name}=/tmp "):
            check_overrides([f"+hydra.job.env_set.{name}=/tmp"])


# (settings of Hydra, what the message says)
HYDRA = [
    ("launcher: {_target_: os.system}", r"hydra\.launcher=.*os.system.* is not allowed"),
    ("callbacks: {a: {_target_: os.system}}", r"hydra\.callbacks=.*os.system.* is not allowed"),
    ("searchpath: ['file:///tmp']", "searchpath is only supported from the primary config"),
    ("job: {env_set: {PYTHONPATH: /tmp}}", r"hydra\.job\.env_set=.*PYTHONPATH.* is not allowed"),
    ("job: {env_copy: [HOME]}", r"hydra\.job\.env_copy=\['HOME'\] is not allowed"),
    (
        "job_logging: {handlers: {a: {class: logging.StreamHandler, stream: 'ext://evil.stream'}}}",
        r"hydra\.job_logging=.*evil.stream.* is not allowed",
    ),
    ("launcher: '${oc.create:{_target_: os.system}}'", "oc.create"),
]
# (the text of a method's file, what the message says)
METHODS = [
    (EVIL, r"method\._target_=os.system is not trusted"),
    (f"{FEDAVG}inner: {{_target_: os.system}}\n", r"method\.inner\._target_=os.system is not"),
    (f"{FEDAVG}inner: [{{_target_: eval}}]\n", r"method\.inner\.0\._target_=eval is not trusted"),
    (
        f"{FEDAVG}inner: '${{oc.create:{{_target_: os.system}}}}'\n",
        r"method\.inner=.*oc\.create.* is refused: resolvers",
    ),
    (
        f"defaults: [override /hydra/launcher: evil]\n{FEDAVG}",
        "Could not override 'hydra/launcher@",
    ),
    (
        f"defaults: [override /hydra/launcher@_global_.hydra.launcher: evil]\n{FEDAVG}",
        "hydra/launcher/evil",
    ),
    (f"defaults: [/hydra/launcher/evil]\n{FEDAVG}", "hydra/launcher/evil"),
    *(
        (f"# @package _global_\nhydra: {{{text}}}\nmethod: {{{FEDAVG.strip()}}}\n", message)
        for text, message in HYDRA
    ),
]
EXPERIMENTS = [(f"# @package _global_\nhydra: {{{text}}}\n", message) for text, message in HYDRA]


@pytest.mark.parametrize(
    ("group", "text", "message"),
    [
        *(("method", *case) for case in METHODS[:5]),
        *(("experiment", *EXPERIMENTS[number]) for number in (0, 1, 3, 5)),
    ],
)
def test_a_file_on_the_search_path_names_no_other_code(
    conf: Path, group: str, text: str, message: str
) -> None:
    (conf / group / "evil.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        check_overrides([f"{group}=evil"])
    assert not Path("owned").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [False, True])
@pytest.mark.parametrize(("group", "cases"), [("method", METHODS), ("experiment", EXPERIMENTS)])
def test_no_file_on_the_search_path_names_other_code(
    conf: Path, group: str, cases: list[tuple[str, str]], sweep: bool
) -> None:
    offenders = []
    for text, message in cases:
        (conf / group / "evil.yaml").write_text(text)
        try:
            check_overrides([f"{group}=evil"], sweep=sweep)
        except ConfigError as error:
            if not re.search(message, str(error)):
                offenders.append((text, str(error)))
        else:
            offenders.append((text, "is allowed"))
    assert not offenders
    assert not Path("owned").exists()


# ---- entry points
def dist_info(site: Path, name: str, value: str) -> None:
    """What an installer leaves of a distribution with one entry point."""
    folder = site / f"{name}-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[fedhet.conf]\n{name} = {value}\n")


def package(site: Path, name: str, target: str) -> None:
    """A package whose method `<name>` names the class `target`; importing it is noticed."""
    file = site / name / "conf" / "method" / f"{name}.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"_target_: {target}\n")
    (site / name / "__init__.py").write_text("from fedhet.methods.fedavg import FedAvg\n")
    (site / name / "own.py").write_text(
        "from fedhet.methods.fedavg import FedAvg\nclass Own(FedAvg):\n    pass\n"
    )


@pytest.mark.usefixtures("read_once")
def test_an_entry_point_trusts_its_own_package_only(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDHET_TRUST", raising=False)
    for name in ("honest_pkg", "other_pkg"):
        forget(monkeypatch, name)
    package(site, "honest_pkg", "other_pkg.own.Own")
    package(site, "other_pkg", "other_pkg.own.Own")
    dist_info(site, "honest_pkg", "honest_pkg.conf")
    message = r"method\._target_=other_pkg\.own\.Own .*trusted.*fedhet.\*, honest_pkg"
    with pytest.raises(ConfigError, match=message):
        compose(["method=honest_pkg"])
    with pytest.raises(ConfigError, match=r"honest_pkg\.FedAvg: .*class"):
        compose(["method=fedavg", "method._target_=honest_pkg.FedAvg"])  # fedhet's, not its own
    assert (
        compose(["method=fedavg", "method._target_=honest_pkg.own.Own"]).choices["method"] == "Own"
    )


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("value", ["deep_pkg.inner.conf", "deep_pkg.inner:conf"])
def test_of_a_package_in_a_package_only_the_inner_one_is_trusted(
    site: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    forget(monkeypatch, "deep_pkg")
    (site / "deep_pkg").mkdir()
    package(site / "deep_pkg", "inner", "deep_pkg.inner.own.Own")
    (site / "deep_pkg" / "outer.py").write_text("class Outer: ...\n")
    dist_info(site, "deep_pkg", value)
    assert compose(["method=inner"]).choices["method"] == "inner"
    with pytest.raises(ConfigError, match=r"method\._target_=deep_pkg\.outer\.Outer .*trusted"):
        compose(["method=fedavg", "method._target_=deep_pkg.outer.Outer"])


@pytest.mark.parametrize("value", ["nowhere_pkg.conf", "os.conf", "empty_pkg.nothing", "..", "a b"])
def test_an_entry_point_without_a_folder_is_reported(site: Path, value: str) -> None:
    (site / "empty_pkg").mkdir()
    (site / "empty_pkg" / "__init__.py").touch()
    dist_info(site, "broken_dist", value)
    with pytest.raises(ConfigError, match=r"broken_dist names .*folder"):
        compose([])


def test_composing_imports_no_installed_package(site: Path) -> None:
    package(site, "quiet_pkg", "quiet_pkg.own.Own")
    (site / "quiet_pkg" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    dist_info(site, "quiet_pkg", "quiet_pkg.conf")
    assert compose(["method=quiet_pkg"]).choices["method"] == "quiet_pkg"
    assert os.environ.get("FEDHET_CONF") is None

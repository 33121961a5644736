"""`_target_`: what a configuration may name, and how it is instantiated."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from composing import check_overrides
from omegaconf import DictConfig, OmegaConf

from fedhet.core.errors import ConfigError, DataError
from fedhet.runs.config import compose
from fedhet.runs.config.instantiation import check_targets, find_target, instantiate


class Component:
    def __init__(
        self, *, size: int, shape: tuple[int, ...] = (), where: dict[str, Any] | None = None
    ) -> None:
        if size < 0:
            raise ValueError(f"size={size} is below 0")
        if size == 0:
            raise DataError("nothing there")
        if size == 99:
            raise TypeError("a bug")
        self.size, self.shape, self.where = size, shape, where


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `trustme` with a class of its own, a function, and things that it only imports."""
    module = types.ModuleType("trustme.pieces")

    def build(size: int) -> int:
        return size

    class Own(Component):
        pass

    for thing in (build, Own):
        thing.__module__ = "trustme.pieces"
    module.__dict__.update(Piece=Own, build=build, Popen=__import__("subprocess").Popen, number=3)
    monkeypatch.setitem(sys.modules, "trustme", types.ModuleType("trustme"))
    monkeypatch.setitem(sys.modules, "trustme.pieces", module)
    monkeypatch.setenv("FEDHET_TRUST", "trustme")


def node(**settings: Any) -> DictConfig:
    mine = {"_target_": "trustme.pieces.Piece", **settings}
    return OmegaConf.create({"plugin": {"mine": mine}}).plugin.mine


def test_an_object_gets_its_settings_and_the_callers_as_plain_values() -> None:
    component = instantiate(node(size=3, where={"a": [1, {"_target_": "os.system"}]}), shape=(1, 2))
    assert (component.size, component.shape) == (3, (1, 2))
    assert type(component.where) is dict  # its content is data: nothing in it is called
    assert component.where == {"a": [1, {"_target_": "os.system"}]}
    assert instantiate(OmegaConf.create({"_target_": "trustme.pieces.build", "size": 2})) == 2


def test_no_target_is_no_object() -> None:
    assert instantiate(OmegaConf.create({"_target_": None})) is None
    assert instantiate(compose([]).cfg.server_opt) is None


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"size": 1, "colour": 2},
            ConfigError,
            "plugin.mine .* trustme.pieces.Piece: .*colour",
        ),
        ({}, ConfigError, "plugin.mine .* trustme.pieces.Piece: .*size"),
        ({"size": -1}, ConfigError, "plugin.mine: size=-1 is below 0"),
        ({"size": 0}, DataError, "^nothing there$"),
        ({"size": 99}, ConfigError, "plugin.mine: a bug"),
    ],
)
def test_errors_of_a_constructor_name_the_key(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        instantiate(node(**settings))


@pytest.mark.parametrize(
    "target",
    [
        "trustme.pieces.Piec",
        "trustme.nothing.Piece",
        "trustme.pieces.number",
        "trustme.pieces.Popen",
        "trustme",
    ],
)
def test_a_target_must_be_a_class_of_its_package(target: str) -> None:
    with pytest.raises(ConfigError, match=f"plugin.mine._target_={target}: .*class"):
        find_target(node(_target_=target))


def test_what_fedhet_imports_cannot_be_reached_through_it() -> None:
    for target in (
        "fedhet.runs.config.instantiation.os.system",
        "fedhet.runs.config.instantiation.importlib",
        "fedhet.runs.config.instantiation.DictConfig",
    ):
        with pytest.raises(ConfigError, match=f"_target_={target}: .*class"):
            find_target(OmegaConf.create({"_target_": target}))


def test_a_missing_dependency_is_not_a_wrong_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "trustme_too.py").write_text("import not_there\nclass Piece: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEDHET_TRUST", "trustme_too")
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        find_target(OmegaConf.create({"_target_": "trustme_too.Piece"}))


@pytest.mark.parametrize(
    ("trust", "target", "trusted"),
    [
        ("", "fedhet.methods.fedavg.FedAvg", True),
        ("", "fedhetx.methods.Evil", False),
        ("", "os.system", False),
        ("", "builtins.eval", False),
        ("mine", "mine.Method", True),
        ("mine", "minefield.Method", False),
        ("mine.deep", "mine.Method", False),
        ("a, mine.deep.,b", "mine.deep.Method", True),
        ("a:mine", "mine.Method", True),
        (",", "os.system", False),
        ("mine", 3, False),
    ],
)
def test_what_is_trusted(
    monkeypatch: pytest.MonkeyPatch, trust: str, target: object, trusted: bool
) -> None:
    monkeypatch.setenv("FEDHET_TRUST", trust)
    cfg = OmegaConf.create({"a": [{"b": {"_target_": target}}], "c": {"_target_": None}})
    if trusted:
        check_targets(cfg)
    else:
        message = rf"a\.0\.b\._target_={target} .* fedhet\.\*.*FEDHET_TRUST"
        with pytest.raises(ConfigError, match=message):
            check_targets(cfg)


@pytest.mark.usefixtures("read_once")
def test_a_configuration_cannot_name_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "trustme.pieces.Piece"
    assert compose([f"method._target_={target}"]).cfg.method._target_ == target
    monkeypatch.delenv("FEDHET_TRUST")
    for override in (
        "method._target_=trustme.pieces.Piece",
        "plugin.fednorm._target_=os.system",
        "partition.split=[{_target_: os.system}]",
    ):
        with pytest.raises(ConfigError, match=r"_target_=[\w.]+ .* fedhet\.\*.*FEDHET_TRUST"):
            compose([override])


@pytest.mark.parametrize(
    "override",
    [
        "hydra.launcher._target_=os.system",
        "hydra.sweeper._target_=trustme.pieces.Piece",
        "+hydra.launcher.inner._target_=hydralisk.Thing",
        "hydra.launcher='${oc.create:{_target_: os.system}}'",
        "+hydra.job.env_set.FEDHET_TRUST=os",
    ],
)
def test_hydras_own_settings_cannot_name_other_code(override: str) -> None:
    key = override.lstrip("+").partition("=")[0]
    with pytest.raises(ConfigError, match=re.escape(key)):
        check_overrides([override])


def test_logging_factories_cannot_name_code(own_conf: Path) -> None:
    """Python's logging settings name a function in the key "()", which only a file can contain."""
    (own_conf / "experiment" / "logged.yaml").write_text(
        "# @package _global_\nhydra: {job_logging: {formatters: {mine: {(): os.system}}}}\n"
    )
    with pytest.raises(ConfigError, match=r"hydra.job_logging=.*os.system"):
        compose(["experiment=logged"])

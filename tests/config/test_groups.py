"""What the groups in conf/ compose to: every choice, plug-ins, server optimisers, experiments."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from fedhet.core.errors import ConfigError
from fedhet.runs.config import cached, catalogue, compose
from fedhet.runs.config.instantiation import check_targets

# A method may fix its server optimiser, and an experiment any group: both have tests of their own.
GROUPS = {
    group: names
    for group, names in catalogue.groups().items()
    if group not in ("server_opt", "experiment")
}
# Choices that need a name.
NAMED = {"torchvision": "torchvision/resnet18", "timm": "timm/resnet18"}
SERVER_OPTS = [name for name in catalogue.choices("server_opt") if name != "none"]


def settings(*overrides: str) -> dict[str, Any]:
    content: Any = OmegaConf.to_container(cached(overrides).cfg)
    return content


def chosen_in(turn: int) -> dict[str, str]:
    """Turn k takes the k-th choice of each group, and starts again where a group has fewer."""
    chosen = {group: names[turn % len(names)] for group, names in GROUPS.items()}
    return {group: NAMED.get(name, name) for group, name in chosen.items()}


TURNS = range(max(map(len, GROUPS.values())))


@pytest.mark.parametrize(
    "turns", [TURNS[:4], pytest.param(TURNS[4:], marks=pytest.mark.slow)], ids=["first", "others"]
)
def test_every_choice_composes_and_its_objects_are_trusted(turns: range) -> None:
    for turn in turns:
        chosen = chosen_in(turn)
        config = compose([f"{group}={name}" for group, name in chosen.items()])
        check_targets(config.cfg)
        assert chosen.pop("plugin") in config.plugins
        assert {group: config.choices[group] for group in chosen} == chosen


def not_composing(names: Iterable[str]) -> list[str]:
    offenders = []
    for name in names:
        try:
            assert compose([f"experiment={name}"]).choices["experiment"] == name
        except ConfigError as error:
            offenders.append(f"experiment={name}: {error}")
    return offenders


EXPERIMENTS = catalogue.choices("experiment")


def test_some_experiments_compose() -> None:
    assert not not_composing(EXPERIMENTS[::20])


@pytest.mark.slow
def test_every_experiment_composes() -> None:
    assert not not_composing(EXPERIMENTS)


def test_a_method_with_a_plugin_is_fedavg_with_that_plugin() -> None:
    own = settings("method=fedprox")
    added = settings("method=fedavg", "plugin=[fedprox]")
    assert own.pop("method") != added.pop("method")
    assert own == added


@pytest.mark.parametrize(
    ("overrides", "plugins"),
    [
        (["method=fedavg"], ()),
        (["method=fednorm"], ("fednorm",)),
        (["method=fednorm", "plugin=[fednorm]"], ("fednorm",)),
        (["plugin=[fedprox,fednorm]", "method=fednorm"], ("fednorm", "fedprox")),
        (["method=scaffold", "plugin=[fedprox,fednorm]"], ("fedprox", "fednorm")),
        (["method=fedavg", "plugin=fednorm"], ("fednorm",)),
    ],
)
def test_plugins_are_the_methods_own_then_the_users(
    overrides: list[str], plugins: tuple[str, ...]
) -> None:
    assert compose(overrides).plugins == plugins


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=fednorm", "plugin.fednorm.temperature=.3"],
        ["plugin.fednorm.temperature=.3", "method=fednorm", "plugin=[fednorm]"],
        ["method=scaffold", "plugin=[fednorm]", "+plugin.fednorm.temperature=.3"],
        ["method=fednorm", "plugin={fednorm: {temperature: .3}}"],
    ],
)
def test_plugin_options_in_all_spellings(overrides: list[str]) -> None:
    assert compose(overrides).cfg.plugin.fednorm.temperature == 0.3


@pytest.mark.parametrize(
    "name",
    [SERVER_OPTS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in SERVER_OPTS[1:])],
)
def test_methods_named_after_a_server_optimiser(name: str) -> None:
    named = settings(f"method={name}", "server_opt.lr=.5")
    assert named == settings("method=fedavg", f"server_opt={name}", "server_opt.lr=.5")
    assert named["server_opt"]["lr"] == 0.5
    assert compose([f"method={name}"]).choices["server_opt"] == name


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("other", ["none", "fedyogi"])
def test_a_method_defined_by_a_server_optimiser_refuses_another(other: str) -> None:
    assert compose(["method=fedadam", "server_opt=fedadam"]).choices["method"] == "fedadam"
    message = f"method=fedadam .*server_opt=fedadam; .*server_opt={other} .*method=fedavg"
    with pytest.raises(ConfigError, match=message):
        compose(["method=fedadam", f"server_opt={other}"])


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("chosen", ["method=fedadam", "server_opt=fedadam"])
def test_a_server_optimiser_is_what_its_name_says(chosen: str) -> None:
    message = r"server_opt\.kind=yogi: server_opt=fedadam .*kind=adam; .*server_opt=fedyogi"
    with pytest.raises(ConfigError, match=message):
        compose([chosen, "server_opt.kind=yogi"])


def test_switching_the_engine_breaks_no_other_override() -> None:
    for name in catalogue.choices("engine"):
        engine = settings(f"engine={name}")["engine"]
        assert set(engine) == {
            "name",
            "workers",
            "threads",
            "num_cpus",
            "num_gpus",
            "address",
            "compile",
            "amp",
            "channels_last",
            "fused",
        }
        assert engine["name"] == name


def test_clients_differ_only_in_their_optimiser_and_its_learning_rate() -> None:
    sgd = settings()["client"]
    adam = settings("client=adam")["client"]
    assert {key for key in sgd if sgd[key] != adam[key]} == {"optimizer", "lr"}


def test_an_experiment_overrides_the_defaults_and_the_command_line_overrides_both() -> None:
    assert settings("experiment=smoke")["rounds"] == 2
    assert settings("+experiment=smoke")["rounds"] == 2
    assert settings("rounds=7", "experiment=smoke")["rounds"] == 7
    assert settings("experiment=smoke")["partition"] == {**settings()["partition"], "clients": 3}


MODEL_OF_DATA = """# @package _global_
defaults:
  - override /dataset: shakespeare
"""


@pytest.mark.parametrize(
    ("overrides", "model"),
    [
        (["dataset=shakespeare"], "char_lstm"),
        (["dataset=shakespeare", "model.hidden=8"], "char_lstm"),
        (["model=cnn", "dataset=shakespeare"], "cnn"),
        pytest.param(
            ["dataset=shakespeare", "model=torchvision/resnet18"],
            "torchvision/resnet18",
            marks=pytest.mark.slow,
        ),
        (["experiment=text"], "char_lstm"),
        pytest.param(["experiment=text", "dataset=digits"], "mlp", marks=pytest.mark.slow),
        (["experiment=both"], "logistic"),
        pytest.param(["experiment=both", "model=cnn"], "cnn", marks=pytest.mark.slow),
        (["experiment=model", "dataset=shakespeare"], "logistic"),
    ],
    ids=" ".join,
)
def test_a_dataset_chooses_its_model_unless_the_user_or_an_experiment_does(
    own_conf: Path, overrides: list[str], model: str
) -> None:
    chosen = "  - override /model: logistic\n"
    experiments = {
        "text": MODEL_OF_DATA,
        "both": MODEL_OF_DATA + chosen,
        "model": f"# @package _global_\ndefaults:\n{chosen}",
    }
    for name, text in experiments.items():
        (own_conf / "experiment" / f"{name}.yaml").write_text(text)
    config = compose(overrides)
    assert config.choices["model"] == model
    defined = OmegaConf.load(own_conf / "model" / f"{model.partition('/')[0]}.yaml")
    assert config.cfg.model._target_ == defined._target_


def test_an_experiment_in_a_folder_chooses_groups(own_conf: Path) -> None:
    folder = own_conf / "experiment" / "smoke"  # beside smoke.yaml
    folder.mkdir(exist_ok=True)
    (folder / "adam.yaml").write_text(
        "# @package _global_\n"
        "defaults: [override /method: fedadam, override /plugin: [fedprox]]\n"
        "rounds: 3\n"
        "server_opt: {tau: .5}\n"
    )
    config = compose(["experiment=smoke/adam"])
    assert config.choices["method"] == "fedadam"
    assert config.choices["server_opt"] == "fedadam"
    assert config.plugins == ("fedprox",)
    assert config.cfg.rounds == 3
    assert (config.cfg.server_opt.tau, config.cfg.server_opt.lr) == (0.5, 0.1)
    assert compose(["experiment=smoke/adam", "method=fednorm", "plugin=[]"]).plugins == ("fednorm",)
    with pytest.raises(ConfigError, match=r"experiment 'smoke/adm' .*smoke/adam"):
        compose(["experiment=smoke/adm"])

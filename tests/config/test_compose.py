from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from composing import composed
from fedhet.config.config import CONF, cached, compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from omegaconf.errors import ReadonlyConfigError

from fedhet.config import catalogue
from fedhet.config.targets import check_targets
from fedhet.errors import ConfigError

# A method may fix its server optimiser, and an experiment any group: those two have tests of their
# own.
GROUPS = {
    group: names
    for group, names in catalogue.groups().items()
    if group not in ("server_opt", "experiment")
}
NAMED = {
    "torchvision": "torchvision/resnet18",
    "timm": "timm/resnet18",
}  # choices that ask for a name
SERVER_OPTS = [name for name in catalogue.choices("server_opt") if name != "none"]


def settings(*overrides: str) -> dict[str, Any]:
    found: Any = OmegaConf.to_container(cached(overrides).cfg)
    return found


def test_the_defaults_are_the_main_job() -> None:
    found = compose([])
    assert found.choices == {
        "dataset": "digits",
        "partition": "dirichlet",
        "model": "mlp",
        "client": "sgd",
        "server_opt": "none",
        "method": "fednorm",
        "engine": "local",
    }
    assert found.plugins == ("fednorm",)
    assert (found.cfg.rounds, found.cfg.seed, found.cfg.partition.clients) == (20, 0, 10)
    assert found.cfg.server_opt._target_ is None
    assert "hydra" not in found.cfg
    assert found.overrides == ()


@pytest.mark.parametrize("turn", range(max(map(len, GROUPS.values()))))
def test_every_choice_composes_and_its_objects_are_trusted(turn: int) -> None:
    """Turn k takes the k-th choice of each group, from the start again where a group has fewer."""
    chosen = {
        group: NAMED.get(name := names[turn % len(names)], name) for group, names in GROUPS.items()
    }
    found = compose([f"{group}={name}" for group, name in chosen.items()])
    check_targets(found.cfg)
    assert chosen.pop("plugin") in found.plugins
    assert {group: found.choices[group] for group in chosen} == chosen


@pytest.mark.parametrize("name", catalogue.choices("experiment"))
def test_every_experiment_composes(name: str) -> None:
    assert compose([f"experiment={name}"]).choices["experiment"] == name


def test_a_method_with_a_plugin_is_fedavg_with_that_plugin() -> None:
    for plugin in ("fednorm", "fedprox"):
        own, added = settings(f"method={plugin}"), settings("method=fedavg", f"plugin=[{plugin}]")
        assert own.pop("method") != added.pop("method")
        assert own == added


@pytest.mark.parametrize(
    ("overrides", "plugins"),
    [
        (["method=fedavg"], ()),
        (["method=fednorm", "plugin=[]"], ("fednorm",)),
        (["method=fednorm", "plugin=[fednorm]"], ("fednorm",)),
        (["method=fednorm", "plugin=[fedprox]"], ("fednorm", "fedprox")),
        (["plugin=[fedprox,fednorm]", "method=fednorm"], ("fednorm", "fedprox")),
        (["method=fedprox", "plugin=[fednorm]"], ("fedprox", "fednorm")),
        (["method=fedavg", "plugin=[fedprox,fednorm]"], ("fedprox", "fednorm")),
        (["method=fedavg", "plugin=[fednorm,fednorm]"], ("fednorm",)),
        (["method=scaffold", "plugin=[fednorm]"], ("fednorm",)),
        (["method=fedavg", "plugin=fednorm"], ("fednorm",)),
        (["method=fedavg", "+plugin=[fednorm]"], ("fednorm",)),
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
        ["method=scaffold", "plugin=[fednorm]", "plugin.fednorm.temperature=.3"],
        ["method=scaffold", "plugin=[fednorm]", "+plugin.fednorm.temperature=.3"],
        ["method=fednorm", "plugin={fednorm: {temperature: .3}}"],
    ],
)
def test_plugin_options_in_all_spellings(overrides: list[str]) -> None:
    assert compose(overrides).cfg.plugin.fednorm.temperature == 0.3


@pytest.mark.parametrize("name", SERVER_OPTS)
def test_methods_named_after_a_server_optimiser(name: str) -> None:
    named = settings(f"method={name}", "server_opt.lr=.5")
    assert named == settings("method=fedavg", f"server_opt={name}", "server_opt.lr=.5")
    assert named["server_opt"]["lr"] == 0.5
    assert compose([f"method={name}"]).choices["server_opt"] == name


def test_a_method_defined_by_a_server_optimiser_refuses_another() -> None:
    assert compose(["method=fedadam", "server_opt=fedadam"]).choices["method"] == "fedadam"
    for other in ("none", "fedyogi"):
        with pytest.raises(
            ConfigError,
            match=(
                f"method=fedadam is defined by server_opt=fedadam; for server_opt={other} use"
                " method=fedavg"
            ),
        ):
            compose(["method=fedadam", f"server_opt={other}"])


@pytest.mark.parametrize("chosen", ["method=fedadam", "server_opt=fedadam"])
def test_a_server_optimiser_is_what_its_name_says(chosen: str) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"server_opt\.kind=yogi: server_opt=fedadam is defined by kind=adam; choose"
            r" server_opt=fedyogi"
        ),
    ):
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
            "vectorize",
        }
        assert engine["name"] == name


def test_clients_differ_in_their_optimiser_and_its_learning_rate_only() -> None:
    sgd, adam = settings()["client"], settings("client=adam")["client"]
    assert {key for key in sgd if sgd[key] != adam[key]} == {"optimizer", "lr"}


def test_an_experiment_beats_the_defaults_and_the_command_line_beats_it() -> None:
    assert (settings("experiment=smoke")["rounds"], settings("+experiment=smoke")["rounds"]) == (
        2,
        2,
    )
    assert settings("rounds=7", "experiment=smoke")["rounds"] == 7
    assert settings("experiment=smoke")["partition"] == {**settings()["partition"], "clients": 3}


def test_an_experiment_in_a_folder_chooses_groups(own_conf: Path) -> None:
    folder = own_conf / "experiment" / "smoke"  # beside smoke.yaml
    folder.mkdir(exist_ok=True)
    (folder / "adam.yaml").write_text(
        "# @package _global_\ndefaults: [override /method: fedadam, override /plugin:"
        " [fedprox]]\nrounds: 3\nserver_opt: {tau: .5}\n"
    )
    found = compose(["experiment=smoke/adam"])
    assert (found.choices["method"], found.choices["server_opt"], found.plugins) == (
        "fedadam",
        "fedadam",
        ("fedprox",),
    )
    assert (found.cfg.rounds, found.cfg.server_opt.tau, found.cfg.server_opt.lr) == (3, 0.5, 0.1)
    assert compose(["experiment=smoke/adam", "method=fednorm", "plugin=[]"]).plugins == ("fednorm",)
    with pytest.raises(
        ConfigError, match=r"unknown experiment 'smoke/adm' \(did you mean smoke/adam"
    ):
        compose(["experiment=smoke/adm"])


def test_a_setting_without_a_default_is_asked_for(own_conf: Path) -> None:
    (own_conf / "dataset" / "mine.yaml").write_text(
        "_target_: fedhet.x\nfolder: ???\nname: ${dataset.folder}\n"
    )
    with pytest.raises(ConfigError, match=r"dataset"):
        compose(["dataset=mine"])
    (own_conf / "dataset" / "mine.yaml").write_text("_target_: fedhet.x\nfolder: ???\n")
    with pytest.raises(
        ConfigError, match=r"dataset.folder has no default; write dataset.folder=<value>"
    ):
        compose(["dataset=mine"])
    assert compose(["dataset=mine", "dataset.folder=a"]).cfg.dataset.folder == "a"


def test_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = compose(["method=scaffold"])
    folder = Path(found.run_dir)
    assert folder.parents[1] == tmp_path.resolve() / "outputs"
    assert folder.name.endswith("-scaffold")
    assert not found.run_dir_given
    named = compose(["hydra.run.dir=here", "seed=1"])
    assert (named.run_dir, named.run_dir_given, named.overrides) == (
        str(tmp_path.resolve() / "here"),
        True,
        ("seed=1",),
    )


def test_interpolations_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMEWHERE", "/there")
    assert compose(["data_dir=${oc.env:SOMEWHERE}"]).cfg.data_dir == "/there"
    with pytest.raises(ConfigError, match="NOWHERE"):
        compose(["data_dir=${oc.env:NOWHERE}"])


def test_a_configuration_is_read_only_and_can_be_sent() -> None:
    found = compose(["method=scaffold"])
    with pytest.raises(ReadonlyConfigError):
        found.cfg.client.lr = 1
    here, there = multiprocessing.Pipe()
    here.send(found)
    assert there.recv() == found


def test_the_cached_configuration_is_one_object_without_a_run_folder() -> None:
    found = cached(("method=scaffold", "seed=3"))
    assert cached(("method=scaffold", "seed=3")) is found
    assert found.run_dir == ""
    assert found.cfg == compose(["method=scaffold", "seed=3"]).cfg


@pytest.mark.matrix
def test_composing_is_safe_in_threads_and_keeps_a_running_hydra() -> None:
    methods = ["fedavg", "fednorm", "scaffold", "fedadam"] * 3
    with initialize_config_dir(str(CONF), version_base="1.3"):
        running = GlobalHydra.instance().hydra
        with ThreadPoolExecutor(6) as pool:
            found = list(
                pool.map(
                    lambda job: compose([f"method={job[1]}", f"seed={job[0]}"]), enumerate(methods)
                )
            )
        assert GlobalHydra.instance().hydra is running
    assert [(each.choices["method"], each.cfg.seed) for each in found] == [
        (name, seed) for seed, name in enumerate(methods)
    ]
    assert all(
        each.cfg.method == compose([f"method={name}"]).cfg.method
        for each, name in zip(found[:4], methods[:4], strict=True)
    )


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (
            "method=scaffold",
            "plugin=[fednorm]",
            "client.lr=.5",
            "plugin.fednorm.temperature=.3",
            "rounds=3",
        ),
        (
            "method=fedadam",
            "plugin=[fedprox,fednorm]",
            "server_opt.tau=1e-2",
            "eval.clients=false",
            "engine.vectorize=auto",
        ),
        (
            "plugin.fedprox.mu=1",
            "plugin=[fedprox,fednorm]",
            "method=fednorm",
            "partition.split=[.5,.25,.25]",
            "seed=1",
            "seed=2",
        ),
        (
            "method=feddiskab",
            "plugin=[feddisk]",
        ),  # the plug-in's own settings are put over the method's
        (
            "method=fedlex",
            "model=cnn",
            "experiment=smoke",
            "client=adam",
            "partition=iid",
            "partition.clients=7",
            "data_dir='a b'",
        ),
    ],
)
def test_the_shortcut_of_other_tests_finds_what_hydra_composes(overrides: tuple[str, ...]) -> None:
    assert composed(*overrides) == replace(compose(overrides), run_dir="")
    assert composed(*overrides).plugins == compose(overrides).plugins


def test_overrides_are_a_list() -> None:
    with pytest.raises(ConfigError, match=r"write \['seed=1'\]"):
        compose("seed=1")

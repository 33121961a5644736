"""What a composed configuration is: its run folder, its values, and how it is kept."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from composing import composed
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf.errors import ReadonlyConfigError

from fedhet.core.errors import ConfigError
from fedhet.runs import config
from fedhet.runs.config import cached, compose
from fedhet.runs.config.catalogue import CONF


def test_the_package_exports_what_it_announces() -> None:
    for name in config.__all__:
        assert getattr(config, name) is not None
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = config.nothing  # type: ignore[attr-defined]


def test_the_defaults_are_the_main_job() -> None:
    defaults = compose([])
    assert defaults.choices == {
        "dataset": "digits",
        "partition": "dirichlet",
        "model": "mlp",
        "client": "sgd",
        "server_opt": "none",
        "tracker": "none",
        "merge": "mean",
        "method": "fednorm",
        "engine": "local",
    }
    assert defaults.plugins == ("fednorm",)
    cfg = defaults.cfg
    assert (cfg.rounds, cfg.seed, cfg.partition.clients) == (20, 0, 10)
    assert cfg.server_opt._target_ is None
    assert "hydra" not in cfg
    assert defaults.overrides == ()


def test_a_setting_without_a_default_is_required(own_conf: Path) -> None:
    file = own_conf / "dataset" / "mine.yaml"
    file.write_text("_target_: fedhet.x\nfolder: ???\nname: ${dataset.folder}\n")
    with pytest.raises(ConfigError, match=r"dataset"):
        compose(["dataset=mine"])
    file.write_text("_target_: fedhet.x\nfolder: ???\n")
    with pytest.raises(ConfigError, match=r"dataset.folder .*dataset.folder=<value>"):
        compose(["dataset=mine"])
    assert compose(["dataset=mine", "dataset.folder=a"]).cfg.dataset.folder == "a"


def test_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    automatic = compose(["method=scaffold"])
    folder = Path(automatic.run_dir)
    assert folder.parents[1] == tmp_path.resolve() / "outputs"
    assert folder.name.endswith("-scaffold")
    assert not automatic.run_dir_given
    named = compose(["hydra.run.dir=here", "seed=1"])
    assert named.run_dir == str(tmp_path.resolve() / "here")
    assert named.run_dir_given is True
    assert named.overrides == ("seed=1",)


def test_references_are_resolved() -> None:
    assert compose(["data_dir=a-${client.epochs}", "client.epochs=3"]).cfg.data_dir == "a-3"
    with pytest.raises(ConfigError, match="nowhere"):
        compose(["data_dir=${nowhere}"])


def test_a_configuration_is_read_only_and_can_be_sent() -> None:
    settings = compose(["method=scaffold"])
    with pytest.raises(ReadonlyConfigError):
        settings.cfg.client.lr = 1
    here, there = multiprocessing.Pipe()
    here.send(settings)
    assert there.recv() == settings


def test_the_cached_configuration_is_one_object_without_a_run_folder() -> None:
    settings = cached(("method=scaffold", "seed=3"))
    assert cached(("method=scaffold", "seed=3")) is settings
    assert settings.run_dir == ""
    assert settings.cfg == compose(["method=scaffold", "seed=3"]).cfg


@pytest.mark.matrix
def test_composing_is_safe_in_threads_and_keeps_a_running_hydra() -> None:
    methods = ["fedavg", "fednorm", "scaffold", "fedadam"] * 3
    overrides = [[f"method={name}", f"seed={seed}"] for seed, name in enumerate(methods)]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        running = GlobalHydra.instance().hydra
        with ThreadPoolExecutor(6) as pool:
            configs = list(pool.map(compose, overrides))
        assert GlobalHydra.instance().hydra is running
    assert [(settings.choices["method"], settings.cfg.seed) for settings in configs] == [
        (name, seed) for seed, name in enumerate(methods)
    ]
    for settings, name in zip(configs[:4], methods[:4], strict=True):
        assert settings.cfg.method == compose([f"method={name}"]).cfg.method


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        pytest.param(
            (
                "method=scaffold",
                "plugin=[fednorm]",
                "client.lr=.5",
                "plugin.fednorm.temperature=.3",
                "rounds=3",
            ),
            marks=pytest.mark.slow,
        ),
        (
            "method=fedadam",
            "plugin=[fedprox,fednorm]",
            "server_opt.tau=1e-2",
            "eval.clients=false",
            "engine.fused=auto",
        ),
        pytest.param(
            (
                "plugin.fedprox.mu=1",
                "plugin=[fedprox,fednorm]",
                "method=fednorm",
                "partition.split=[.5,.25,.25]",
                "seed=1",
                "seed=2",
            ),
            marks=pytest.mark.slow,
        ),
        # The plug-in's own settings replace the method's.
        pytest.param(
            ("method=feddiskab", "plugin=[feddisk]"),
            marks=pytest.mark.slow,
        ),
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
def test_the_shortcut_of_other_tests_equals_what_hydra_composes(
    overrides: tuple[str, ...],
) -> None:
    expected = replace(compose(overrides), run_dir="")
    assert composed(*overrides) == expected
    assert composed(*overrides).plugins == expected.plugins


def test_overrides_are_a_list() -> None:
    with pytest.raises(ConfigError, match=r"overrides .*list.*'seed=1'"):
        compose("seed=1")

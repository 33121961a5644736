"""Runs that Hydra's own sweepers, launchers and callbacks drive.

Hydra calls `validation_of_run` for each run. Hydra also calls any function that its settings name.
Its settings may therefore come from the command line only: a file that changes one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from fedhet.core.errors import ConfigError
from fedhet.runs.config import catalogue, composition, hydra_settings, overrides
from fedhet.runs.config.lines import by_key, key_of, value_of
from fedhet.study.executors import EXECUTORS, make, make_here

CONFIG = "config"
LAUNCHER = "hydra/launcher"


def is_asked(lines: Sequence[str]) -> bool:
    """Whether the overrides need Hydra: fedhet's own executors do not read all of its settings."""
    own = map(hydra_settings.is_read, filter(hydra_settings.is_hydras, map(key_of, lines)))
    return _launcher(lines) not in EXECUTORS or not all(own)


def _launcher(lines: Sequence[str]) -> str:
    return value_of(by_key(lines).get(LAUNCHER, f"{LAUNCHER}=basic"))


def start(lines: Sequence[str], *, sweep: bool) -> None:
    """Make one run or a sweep with Hydra, by its settings among the overrides.

    Args:
        lines: the overrides of the command line.
        sweep: whether the overrides may give several values.

    Raises:
        ConfigError: an override is wrong, or the launcher does not belong to Hydra.
    """
    overrides.parse(lines)  # for its messages, which name the choices
    if (launcher := _launcher(lines)) in ("processes", "ray"):
        raise ConfigError(
            f"{LAUNCHER}={launcher} works for fedhet's own sweeps and experiments only; together"
            f" with other settings of Hydra use one of Hydra's launchers, such as {LAUNCHER}=joblib"
        )
    place = initialize_config_dir(
        str(catalogue.CONF), job_name="fedhet", version_base=composition.HYDRA_VERSION
    )
    with place, composition.as_config_error():
        hydra: Any = GlobalHydra.instance().hydra
        hydra.config_loader = CheckedLoader(hydra.config_loader.get_search_path())
        if sweep:
            hydra.multirun(CONFIG, validation_of_run, [*lines, "hydra.mode=MULTIRUN"])
        else:
            hydra.run(CONFIG, validation_of_run, [*lines, "hydra.mode=RUN"])


class CheckedLoader(ConfigLoaderImpl):
    """Loads configurations for Hydra, and checks that no file changes a setting of Hydra.

    Raises:
        ConfigError: a file changes a setting of Hydra, which could make Hydra call any function.
    """

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        load, how = super().load_configuration, (run_mode, from_shell, validate_sweep_overrides)
        settings = [line for line in overrides if not hydra_settings.is_hydras(key_of(line))]
        hydra_settings.check(load(config_name, settings, *how).hydra, settings)
        return load(config_name, overrides, *how)


def validation_of_run(_: DictConfig) -> float | None:
    """Make the run that Hydra's current configuration describes.

    Returns:
        The best validation score of the run (higher is better); None if the run has no such score
        (`eval.clients=false`).

    Raises:
        ConfigError: a setting is wrong.
    """
    hydra = HydraConfig.get()
    settings = composition.compose(list(hydra.overrides.task))
    run = make_here(
        make, replace(settings, run_dir=str(hydra.runtime.output_dir), run_dir_given=True)
    )
    return None if run is None else run.summary["validation"]

"""The configuration: composed by Hydra from conf/, checked, and turned into objects. Imports no
torch and no flwr."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedhet.check import boolean, integer, number, one_of, optional, text
from fedhet.config import catalogue, overrides
from fedhet.config.catalogue import CONF
from fedhet.config.targets import check_hydra_targets, check_targets
from fedhet.errors import ConfigError

__all__ = ["CONF", "Config", "cached", "check", "compose", "of_job", "validate"]

HYDRA_VERSION = "1.3"
_LOCK = threading.Lock()  # Hydra's state is one object for the process


@dataclass(frozen=True)
class Config:
    """One run's configuration.

    Attributes: cfg: the settings: interpolations resolved, checked, read-only, without Hydra's own.
        choices: group -> choice, for every group but plugin (see `plugins`); a group without a
        choice is absent. run_dir: absolute path of the run folder; "" where `cached` made it.
        run_dir_given: whether the user named it, by hydra.run.dir=... overrides: the overrides that
        make `cfg`, those of Hydra's own settings left out.
    """

    cfg: DictConfig
    choices: dict[str, str]
    run_dir: str
    run_dir_given: bool
    overrides: tuple[str, ...]

    @property
    def plugins(self) -> tuple[str, ...]:
        """The active plug-ins in their order: the method's own, then those of plugin=[...]."""
        return tuple(str(name) for name in self.cfg.plugin)


def compose(lines: Sequence[str]) -> Config:
    """The configuration that the overrides make of conf/, checked. Safe in threads and inside a
    Hydra application.

    Raises:
        ConfigError: an unknown name or key, a value out of range, an object that is not trusted.
    """
    parsed = overrides.parse(lines)
    texts = overrides.single(parsed)
    try:
        cfg = _load(texts)
    except ConfigError:
        # Hydra does not say what would be allowed.
        settings: Any = OmegaConf.to_container(_load(overrides.choices_only(parsed)))
        overrides.check_keys(
            parsed, {key: value for key, value in settings.items() if key != "hydra"}
        )
        raise
    with _errors_explained():
        return _checked(cfg, cfg.hydra, str(Path(cfg.hydra.run.dir).resolve()))


@lru_cache(maxsize=32)
def cached(lines: tuple[str, ...]) -> Config:
    """`compose` once for the same overrides, for the many short messages of a client.

    Without the run folder: its name holds the time, and two runs of the same overrides need two.
    """
    return replace(compose(lines), run_dir="")


def of_job(cfg: DictConfig) -> Config:
    """The configuration of the job that Hydra is running, from what it hands to the task."""
    hydra = HydraConfig.get()
    with _errors_explained():
        return _checked(cfg, hydra, hydra.runtime.output_dir)


def check(lines: Sequence[str], *, sweep: bool = False) -> list[str]:
    """The overrides as Hydra is to get them; all their names and values checked, those of a sweep
    before its first run starts.

    Raises:
        ConfigError: as `compose`; for a sweep with its first run that is wrong.
    """
    parsed = overrides.parse(lines)
    for run in overrides.runs_of_sweep(parsed) if sweep else [overrides.single(parsed)]:
        try:
            compose(run)
        except ConfigError as error:
            raise ConfigError(
                f"{error} (in the sweep's run {' '.join(run)})" if sweep else str(error)
            ) from error
    return [str(override.input_line) for override in parsed]


def validate(cfg: DictConfig) -> None:
    """Check the settings that no constructor checks: those without a group, client.* and
    engine.*."""
    integer("seed", cfg.seed, low=0, high=2**63 - 1)
    integer("rounds", cfg.rounds, low=1)
    number("fraction", cfg.fraction, open_low=0, high=1)
    text("data_dir", cfg.data_dir)
    one_of("device", cfg.device, ("auto", "cpu", "cuda"))
    one_of("on_failure", cfg.on_failure, ("stop", "skip"))
    one_of("buffers", cfg.buffers, ("average", "local", "frozen"))
    integer("eval.every", cfg.eval.every, low=1)
    boolean("eval.clients", cfg.eval.clients)
    integer("eval.finetune_epochs", cfg.eval.finetune_epochs, low=0)
    optional(integer, "early_stopping.patience", cfg.early_stopping.patience, low=1)
    number("early_stopping.min_delta", cfg.early_stopping.min_delta, low=0)
    if not cfg.eval.clients and (patience := cfg.early_stopping.patience) is not None:
        raise ConfigError(
            f"early_stopping.patience={patience} needs eval.clients=true: it watches the clients'"
            " validation data"
        )

    one_of("client.optimizer", cfg.client.optimizer, ("sgd", "adam"))
    number("client.lr", cfg.client.lr, open_low=0)
    integer("client.epochs", cfg.client.epochs, low=1)
    integer("client.batch_size", cfg.client.batch_size, low=1)
    number("client.momentum", cfg.client.momentum, low=0, open_high=1)
    number("client.weight_decay", cfg.client.weight_decay, low=0)
    number("client.lr_decay", cfg.client.lr_decay, open_low=0, high=1)
    one_of("client.schedule", cfg.client.schedule, ("constant", "cosine"))
    optional(number, "client.clip", cfg.client.clip, open_low=0)

    optional(integer, "engine.workers", cfg.engine.workers, low=1)
    integer("engine.threads", cfg.engine.threads, low=1)
    number("engine.num_cpus", cfg.engine.num_cpus, open_low=0)
    number("engine.num_gpus", cfg.engine.num_gpus, low=0)
    optional(text, "engine.address", cfg.engine.address)
    boolean("engine.compile", cfg.engine.compile)
    boolean("engine.amp", cfg.engine.amp)
    boolean("engine.channels_last", cfg.engine.channels_last)
    if cfg.engine.vectorize != "auto":
        integer("engine.vectorize", cfg.engine.vectorize, low=0)
    if cfg.engine.vectorize and cfg.engine.name != "local":
        raise ConfigError(
            f"engine.vectorize={cfg.engine.vectorize} with engine={cfg.engine.name}: only"
            " engine=local trains clients as one"
        )


def _load(texts: Sequence[str]) -> DictConfig:
    """Compose by Hydra; a Hydra application that runs in this process keeps its state."""
    with _LOCK, _errors_explained():
        running = GlobalHydra.instance().hydra
        GlobalHydra.instance().hydra = None
        try:
            with initialize_config_dir(str(CONF), job_name="fedhet", version_base=HYDRA_VERSION):
                return hydra_compose("config", list(texts), return_hydra_config=True)
        finally:
            GlobalHydra.instance().hydra = running


def _checked(cfg: DictConfig, hydra: Any, run_dir: str) -> Config:
    choices = {
        str(group): str(name)
        for group, name in hydra.runtime.choices.items()
        if "/" not in str(group) and name is not None
    }
    choices.pop("plugin", None)
    method = choices["method"]
    for group, choice in catalogue.fixed("method", method).items():
        if choices[group] != choice:
            raise ConfigError(
                f"method={method} is defined by {group}={choice}; for {group}={choices[group]} use"
                " method=fedavg"
            )
    check_hydra_targets(hydra)
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.pop("hydra", None)
    OmegaConf.resolve(cfg)
    for key in sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigError(f"{key} has no default; write {key}=<value>")
    groups = (
        "dataset",
        "partition",
        "model",
        "client",
        "method",
        "server_opt",
        "engine",
        "eval",
        "early_stopping",
    )
    for key in (*groups, *(f"plugin.{name}" for name in cfg.plugin)):
        if not isinstance(OmegaConf.select(cfg, key), DictConfig):
            raise ConfigError(
                f"{key}={OmegaConf.select(cfg, key)}: that is a group of settings; set"
                f" {key}.<setting>=<value>"
            )
    chosen = choices["server_opt"]
    kind, own = (
        OmegaConf.select(found, "kind")
        for found in (cfg.server_opt, OmegaConf.load(CONF / "server_opt" / f"{chosen}.yaml"))
    )
    if kind != own:
        raise ConfigError(
            f"server_opt.kind={kind}: server_opt={chosen} is defined by kind={own}; choose"
            f" server_opt=fed{kind}"
        )
    check_targets(cfg)
    validate(cfg)
    OmegaConf.set_readonly(cfg, True)
    given = any(line.startswith("hydra.run.dir=") for line in hydra.overrides.hydra)
    return Config(cfg, choices, run_dir, given, tuple(hydra.overrides.task))


@contextmanager
def _errors_explained() -> Iterator[None]:
    """Hydra's and OmegaConf's errors as a ConfigError of one line, with the key and the cause that
    they keep apart."""
    try:
        yield
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        said = [getattr(error, "full_key", None), error, error.__cause__]
        parts = [str(part).partition("\n")[0].rstrip(".") for part in said if part]
        raise ConfigError(": ".join(dict.fromkeys(parts))) from error


def _subdir(number: int, overrides_of_job: str) -> str:
    """A short folder name for a job of a sweep: its number, unique, and what it overrides."""
    return f"{number}-{re.sub(r'[^a-zA-Z0-9_.,=+-]+', '_', overrides_of_job)}"[:80].rstrip("-_,")


OmegaConf.register_new_resolver("fedhet.subdir", _subdir, replace=True)

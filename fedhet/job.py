"""From a configuration to the objects of a run: the task, the strategy, the clients, the record."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional

from fedhet.client import FedClient
from fedhet.config.config import Config
from fedhet.config.targets import find_target, instantiate
from fedhet.data.augment import augmentation
from fedhet.data.federation import transform
from fedhet.data.run_data import RunData
from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError, RunFailed
from fedhet.messages import LocalSettings
from fedhet.plugin import Plugin
from fedhet.process import choose_device, pinned_threads
from fedhet.record import run_folder, terminal
from fedhet.record.run_folder import Recorder
from fedhet.server import Observer
from fedhet.setting import Setting
from fedhet.site import Site, Speed
from fedhet.state import Store
from fedhet.strategy import FedStrategy
from fedhet.task import Task
from fedhet.trees import Tree

if TYPE_CHECKING:
    pass

log = logging.getLogger("fedhet")


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """(B, classes), (B,) -> per-sample losses (B,)."""
    return functional.cross_entropy(output, y, reduction="none")


@dataclass
class Run:
    """A run that has ended: its summary (summary.json), its folder, and the final global model's
    tensors."""

    summary: dict[str, Any]
    dir: Path
    weights: Tree = field(repr=False)

    @classmethod
    def read(cls, folder: Path) -> Run:
        import safetensors.torch

        return cls(
            json.loads((folder / "summary.json").read_text()),
            folder,
            safetensors.torch.load_file(folder / "model.safetensors"),
        )


@dataclass
class Job:
    """What one configuration builds, each part when it is first asked for. `task` replaces dataset,
    partition and model."""

    config: Config
    given: Task | None = None
    engine: str = "local"

    def __getstate__(self) -> dict[str, Any]:
        """A spawned worker gets the recipe and builds its own parts."""
        return {"config": self.config, "given": self.given, "engine": self.engine}

    # ---- what is trained
    @cached_property
    def task(self) -> Task:
        return self.given or self._composed[0]

    @cached_property
    def _composed(self) -> tuple[Task, dict[str, Any]]:
        found = RunData.of(self.config.cfg)
        dataset, clients = found.dataset, found.clients

        def model() -> torch.nn.Module:
            made: torch.nn.Module = instantiate(
                self.config.cfg.model, shape=dataset.shape, classes=len(dataset.classes)
            )
            if getattr(made, "text", dataset.text) != dataset.text:
                kinds = {
                    True: "token numbers (T,), a text",
                    False: "numbers (C, H, W) or (F,), images or a table",
                }
                raise ConfigError(
                    f"model: {type(made).__name__} reads {kinds[not dataset.text]}; a sample of"
                    f" {dataset.name} is {dataset.shape}, {dataset.x.dtype}"
                )
            return made

        task = Task(
            model,
            cross_entropy,
            clients,
            dataset.test,
            len(dataset.classes),
            transform(dataset),
            clients.sizes,
            augmentation(dataset),
        )
        return task, found.partition_record()

    @property
    def partition(self) -> dict[str, Any]:
        """partition.json."""
        if self.given is None:
            return self._composed[1]
        return {
            "name": "task",
            "clients": len(self.given.sizes),
            "hash": None,
            "train_sizes": self.given.sizes,
        }

    # ---- who trains it
    @cached_property
    def _strategy_cls(self) -> type[FedStrategy]:
        cls: type[FedStrategy] = find_target(self.config.cfg.method)
        return cls

    @cached_property
    def site(self) -> Site:
        cfg = self.config.cfg
        return Site(
            self.task,
            device=choose_device(cfg.device),
            seed=cfg.seed,
            buffers=cfg.buffers,
            scope=self._strategy_cls.scope,
            simulated=self.engine != "flwr",
            speed=Speed(cfg.engine.compile, cfg.engine.amp, cfg.engine.channels_last),
        )

    def plugins(self) -> list[Plugin]:
        """New objects: a plug-in is one object on the server, and one per message at a client."""
        return deepcopy(self._templates)

    @cached_property
    def _templates(self) -> list[Plugin]:
        # Reading the configuration costs more than a small client's whole message, so it is done
        # once.
        return [instantiate(self.config.cfg.plugin[name]) for name in self.config.plugins]

    @cached_property
    def strategy(self) -> FedStrategy:
        return self.strategy_with(self.plugins())

    def strategy_with(self, plugins: list[Plugin]) -> FedStrategy:
        cfg = self.config.cfg
        server_opt = instantiate(cfg.server_opt)
        local = {
            key: value for key, value in cfg.client.items() if key not in ("lr_decay", "schedule")
        }
        setting = Setting(
            self.site,
            LocalSettings(**local),
            rounds=cfg.rounds,
            fraction=cfg.fraction,
            lr_decay=cfg.client.lr_decay,
            schedule=cfg.client.schedule,
            on_failure=cfg.on_failure,
            eval_every=cfg.eval.every,
            finetune_epochs=cfg.eval.finetune_epochs,
            patience=cfg.early_stopping.patience,
            min_delta=cfg.early_stopping.min_delta,
            plugins=plugins,
            server_opt=server_opt,
        )
        found: FedStrategy = instantiate(cfg.method, setting=setting)
        return found

    def client(self, store: Store, properties: dict[str, Any] | None = None) -> FedClient:
        return self._strategy_cls.client_cls(self.site, self.plugins(), store, properties)

    # ---- what is kept of it
    @cached_property
    def recorder(self) -> Recorder:
        cfg, choices, site = self.config.cfg, self.config.choices, self.strategy.site
        folder = run_folder.claim(Path(self.config.run_dir), explicit=self.config.run_dir_given)
        log.info("run folder: %s", folder)
        objects = self.given is not None
        about = {
            "method": choices["method"],
            "plugins": list(self.config.plugins),
            "server_opt": choices["server_opt"],
            "dataset": None if objects else choices["dataset"],
            "model": type(site.model).__name__ if objects else choices["model"],
            "partition": {key: self.partition[key] for key in ("name", "clients", "hash")},
            "seed": cfg.seed,
            "rounds": cfg.rounds,
            "run_dir": str(folder),
        }
        environment = {
            "engine": self.engine,
            "device": str(site.device),
            "threads": torch.get_num_threads(),
            # Equal bytes for equal seeds are promised in this mode only
            # (docs/architecture.md).
            "bit_exact": (
                site.device.type == "cpu"
                and torch.get_num_threads() == 1
                and site.speed == Speed()
                and not cfg.engine.vectorize
            ),
        }
        return Recorder(
            folder,
            about,
            config=OmegaConf.to_yaml(cfg),
            overrides=self.config.overrides,
            partition=self.partition,
            environment=environment,
        )

    def progress(self) -> AbstractContextManager[Observer]:
        return terminal.progress(
            self.config.choices["method"], [entry.rounds for entry in self.strategy.timetable]
        )


def run_job(settings: Config, task: Task | None = None) -> Run:
    """Run a configuration in its engine and return the run; RunFailed or ConfigError where it does
    not end well."""
    name = settings.cfg.engine.name
    if task is not None and name != "local":
        raise ConfigError(
            f"engine={name} builds the task anew in other processes; a Task given as objects runs"
            " with engine=local"
        )
    with pinned_threads(settings.cfg.engine.threads):
        if task is None:
            _try_settings(settings)
        job = Job(settings, task, name)
        engine = importlib.import_module(f"fedhet.engines.{name}")
        try:
            folder = engine.run(job)
        except Exception as error:
            if "recorder" not in vars(job) and not isinstance(error, RunFailed):
                raise  # nothing had begun: a setting was wrong
            raise _failed(job, error) from error
    run = Run.read(folder)
    terminal.summary(run.summary, run.dir)
    return run


def _try_settings(settings: Config) -> None:
    """Refuse settings of method, plug-ins and server optimiser that do not fit, before any data are
    read."""
    with quiet():
        _ = Job(settings, toy_task()).strategy


@contextmanager
def quiet() -> Iterator[None]:
    """For strategies that are only tried: what they have to say is said once, by the run itself."""
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False


def _failed(job: Job, error: Exception) -> RunFailed:
    """The failure as the user sees it; the record says so too, also where an engine failed outside
    the run's own steps."""
    reason = error.reason if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
    if "recorder" not in vars(job):
        return RunFailed(reason, error.folder if isinstance(error, RunFailed) else None)
    if not job.recorder.ended:
        job.recorder.finish("failed", reason=reason, strategy=job.strategy)
    return RunFailed(reason, str(job.recorder.folder))

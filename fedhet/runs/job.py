"""Builds the objects of a run from its configuration: task, strategy, clients and recorder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from fedhet.core import targets
from fedhet.core.client.client import FedClient
from fedhet.core.client.state import Store
from fedhet.core.errors import ConfigError, log
from fedhet.core.groups import Course
from fedhet.core.interruptions import exits_as_errors
from fedhet.core.kernel import Method, Plugin
from fedhet.core.limits import UNLIMITED, Limits, least_count
from fedhet.core.noise import allowed_here
from fedhet.core.server.compatibility import check_cohorts
from fedhet.core.server.evaluation import Selection
from fedhet.core.server.loop import Loop
from fedhet.core.server.run_setup import RunSetup
from fedhet.core.server.strategy import FedStrategy
from fedhet.core.task import Task
from fedhet.core.workspace import Workspace
from fedhet.data.federation import augmentation, target_scale, transform
from fedhet.data.toy import toy_task
from fedhet.runs import delivery
from fedhet.runs.config import Config
from fedhet.runs.config.instantiation import find_target, instantiate
from fedhet.runs.config.validation import RunSettings
from fedhet.runs.local_data import LocalData, check_merge, is_local
from fedhet.runs.model_building import build_model
from fedhet.runs.object_task import partition_record
from fedhet.runs.privacy import account
from fedhet.runs.process import choose_device
from fedhet.runs.record import terminal
from fedhet.runs.record.personal import PersonalModels
from fedhet.runs.record.start import start
from fedhet.runs.run_data import RunData
from fedhet.runs.trackers.tracker import tracker_of

A_GPU = "engine.num_gpus=1 gives each client a GPU, .25 a quarter of one"


def task_of(cfg: DictConfig, data: RunData | LocalData, limits: Limits) -> Task:
    """Return the learning problem that a configuration defines on the data."""
    dataset = data.dataset
    scale = target_scale(dataset)
    if dataset.target == "class":  # the array counts the samples by [label, prediction]
        outputs = len(dataset.outputs)
        limits.check_array(f"dataset.classes={outputs}", outputs, outputs, width=8)
    return Task(
        model=lambda: build_model(cfg.model, dataset, limits.max_model),
        criterion=targets.make(dataset.target, len(dataset.outputs), *(scale or ())).losses,
        clients=data.clients,
        test=dataset.test,
        classes=len(dataset.classes),
        transform=transform(dataset),
        sizes=data.clients.sizes,
        augment=augmentation(dataset),
        target=dataset.target,
        target_scale=scale,
        detailed=dataset.detailed,
        example=data.example,
    )


def device_of(run: RunSettings) -> torch.device:
    """Return the device of this process; under Ray and Flower it is the CPU without `num_gpus`.

    Some versions of Ray hide GPUs that a client did not ask for, and some do not.
    """
    if run.engine.name == "local" or run.engine.num_gpus:
        return choose_device(run.device)
    if run.device == "cuda":
        raise ConfigError(f"device=cuda with engine.num_gpus=0; {A_GPU}")
    return torch.device("cpu")


@dataclass
class Job:
    """A configuration and the objects that are built from it, each of them once.

    An object is built when it is first used. Only `begin` creates the run folder.

    Attributes:
        config: the composed configuration.
        object_task: a task that replaces the configured dataset, partition and model, or None.
        engine: what transports the messages: local, ray or flwr.
        local: this process's part of the sites' own data, if the configuration does not name it.
        limits: the limits that the operator of this node sets.
        own_loop: whether clients train by a loop of the app's owner instead of fedhet's.
        together: how many clients train in one batch (fused); 0: one after another. The engine
            sets it.
        folder, loop: the run folder and the run's steps; None before `begin`.
    """

    config: Config
    object_task: Task | None = None
    engine: str = "local"
    local: LocalData | None = None
    limits: Limits = UNLIMITED
    own_loop: bool = False
    together: int = field(default=0, init=False)
    folder: Path | None = field(default=None, init=False)
    loop: Loop | None = field(default=None, init=False)

    @property
    def run_dir(self) -> Path:
        """The run folder of a run that has begun."""
        assert self.folder is not None
        return self.folder

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker receives the configuration and builds the objects itself.
        return {"config": self.config, "object_task": self.object_task, "engine": self.engine}

    @cached_property
    def _data(self) -> RunData | LocalData:
        """The clients' data that this machine can read."""
        cfg = self.config.cfg
        if is_local(cfg):
            return self.local or LocalData.simulated(cfg, self.engine)
        return RunData.of(cfg)

    @cached_property
    def task(self) -> Task:
        """The learning problem: model, criterion and the clients' data."""
        return self.object_task or task_of(self.config.cfg, self._data, self.limits)

    @cached_property
    def partition(self) -> dict[str, Any]:
        """The content of partition.json."""
        return (
            partition_record(self.object_task)
            if self.object_task
            else self._data.partition_record()
        )

    @cached_property
    def data_digest(self) -> str:
        """16 hex digits; two machines compare them to see whether they have the same data."""
        return self._data.digest

    @cached_property
    def workspace(self) -> Workspace:
        """The objects that the clients of this process share.

        Raises:
            ConfigError: `method._target_` names a class that is no method.
        """
        run, method = self.config.run, self.config.cfg.method
        cls = find_target(method)
        if not (isinstance(cls, type) and issubclass(cls, Method)):
            raise ConfigError(
                f"method._target_={method._target_} is no subclass of fedhet.core.kernel.Method"
            )
        return Workspace(
            self.task,
            device=device_of(run),
            seed=run.seed,
            buffers=run.buffers,
            scope=cls.scope,
            simulated=self.engine != "flwr",
            noise=allowed_here(run.noise),
            release=account.release,
            min_count=least_count(run.min_count, self.limits),
            limits=self.limits,
            evaluation=run.evaluation,
            speed=run.engine.speed,
        )

    @cached_property
    def plugins(self) -> list[Plugin]:
        """The plug-ins; clients and server share them, because they never change."""
        return [instantiate(self.config.cfg.plugin[name]) for name in self.config.plugins]

    @cached_property
    def _method(self) -> Method:
        return instantiate(self.config.cfg.method)  # type: ignore[no-any-return]

    @cached_property
    def strategy(self) -> FedStrategy:
        """The run's strategy.

        Raises:
            ConfigError: the method, the plug-ins and their settings do not fit together.
        """
        cfg, run = self.config.cfg, self.config.run
        server_opt, merge = instantiate(cfg.server_opt), instantiate(cfg.merge)
        check_merge(cfg, merge, self.task)
        setup = RunSetup(
            self.workspace,
            run.local,
            plugins=self.plugins,
            server_opt=server_opt,
            merge=merge,
            **{each.name: getattr(run, each.name) for each in fields(Course)},
        )
        return FedStrategy(setup, instantiate(cfg.method))

    def client(
        self, store: Store | Callable[[str], Store], properties: dict[str, Any] | None = None
    ) -> FedClient:
        """Return a client that keeps its state in `store`, or in the store of a message's run."""
        client = FedClient(self.workspace, self._method, self.plugins, store, properties)
        if self.engine == "flwr":
            client.delivery = partial(delivery.keep, self)
        return client


def begin(job: Job) -> Loop:
    """Create the run folder, or reopen it for a resumed run, and return the run's steps.

    Raises:
        ConfigError: the settings do not fit together, the folder cannot be used, or its run cannot
            continue; no new folder was created.
        RunFailed: a file cannot be written.
    """
    run, strategy, workspace = job.config.run, job.strategy, job.workspace
    if (run.device, workspace.device.type) == ("auto", "cpu") and torch.cuda.is_available():
        log.warning("device=auto with engine.num_gpus=0 means the CPU; %s", A_GPU)
    check_cohorts(strategy)
    account.check_run(strategy)
    record, tracking, checkpoints, lock = start(job)
    shown: AbstractContextManager[terminal.Observer] = nullcontext(terminal.log_step)
    if job.engine != "flwr":
        steps = sum(entry.rounds for entry in strategy.timetable)
        shown = terminal.progress(job.config.choices["method"], steps, len(record.rows))
    callbacks = [
        *([account.Account(workspace.noise)] if workspace.noise else []),
        Selection(strategy.setup),
        PersonalModels(strategy, record.folder),
        *([delivery.Delivery()] if run.deliver else []),
        terminal.Display(shown),
        record,
        tracking,
        checkpoints,
        lock,
    ]
    job.folder = record.folder
    job.loop = Loop(strategy, callbacks, evaluates=run.evaluation.clients)
    return job.loop


@exits_as_errors()
def try_settings(settings: Config) -> None:
    """Refuse wrong settings of the method, plug-ins, server optimiser, merge and tracker.

    It reads no data: the objects are built on a toy task. Their log messages are dropped, because
    the run itself repeats them.
    """
    log.disabled = True
    try:
        _ = Job(settings, toy_task()).strategy
    finally:
        log.disabled = False
    tracker_of(settings.cfg)

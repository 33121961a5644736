"""What Flower's two apps consist of: the client of one message, and the server of a run.

client_app.py and server_app.py in the repository's root are the apps for `flwr run`.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.client import NumPyClient
from flwr.common import ndarrays_to_parameters
from flwr.serverapp import Grid

from fedhet.core.client.client import FedClient
from fedhet.core.client.state import Store
from fedhet.core.errors import (
    SUBMITTED,
    ConfigError,
    DataError,
    Rejected,
    RunFailed,
    clean,
    log,
    public_text,
    traceback_wanted,
)
from fedhet.core.limits import Limits
from fedhet.core.server.loop import Loop
from fedhet.core.task import PARTS, Task
from fedhet.data.files import confined
from fedhet.flower import wire
from fedhet.flower.nodes import OWN_LOOP, Nodes, place_of
from fedhet.flower.own_loop import OwnersContext, OwnLoop, check_own_loop
from fedhet.flower.packing import RecordPacker, opened
from fedhet.flower.serverapp import Strategy, job_of
from fedhet.flower.sites import EXAMPLE, OwnData, SiteClient, SiteNodes, declared_elsewhere
from fedhet.flower.transport import ASKS, CONFIG, RAISED, SETTINGS
from fedhet.runs.config import Config, compose, experiment_file, sent
from fedhet.runs.config.lines import refuse_repeated
from fedhet.runs.config.overrides import literal
from fedhet.runs.config.resuming import RESUME
from fedhet.runs.config.validation import check_keys
from fedhet.runs.job import Job, begin, try_settings
from fedhet.runs.local_data import LocalData, is_local
from fedhet.runs.process import pin_threads
from fedhet.runs.record import terminal
from fedhet.runs.stores import store_at_site

# The keys of the run config that set one setting each, most by the names that other apps use.
FLOWER_NAMES = {
    "num-server-rounds": "rounds",
    "fraction-train": "fraction",
    "local-epochs": "client.epochs",
    "learning-rate": "client.lr",
    "batch-size": "client.batch_size",
    "method": "method",
    "dataset": "dataset",
    "partition": "partition",
    "alpha": "partition.alpha",
    RESUME: RESUME,
}


def answer(message: Message, context: Context, make: Callable[[], NumPyClient]) -> Message:
    """The reply to a message of a run: to a step, an evaluation, or who the node is.

    Where this machine cannot serve the run, because it lacks a piece, a package or data, the reply
    is an error of Flower's with what `told` says of the reason.

    Args:
        message, context: as Flower gives them.
        make: makes the client that serves it.
    """
    try:
        return Message(served(make(), message.content), reply_to=message)
    except Exception as error:
        expected = isinstance(error, ConfigError | DataError | ImportError | OSError)
        log.error(
            "cannot serve this run: %s", clean(str(error)), exc_info=None if expected else error
        )
        site = context.node_config.get("site")
        whose = f"the node of site {site!r}" if site else "its node"
        reason = clean(f"{whose} cannot serve this run: {public_text(error)}")
        return Message(Error(RAISED, reason), reply_to=message)


def served(client: NumPyClient, content: RecordDict) -> RecordDict:
    """What the client returns for the content of a message, or tells of itself.

    Raises:
        Rejected: the message is damaged.
    """
    if ASKS in content:
        about = ConfigRecord(client.get_properties({}))  # type: ignore[arg-type]
        return RecordDict({ASKS: about})
    tensors, carried = opened(content)
    arrays, examples, metrics = client.fit(list(map(wire.read_array, tensors)), carried)
    tensors = ndarrays_to_parameters(arrays).tensors
    return RecordPacker()(tensors, {**metrics, wire.EXAMPLES: examples})


def client_for(
    message: Message, context: Context, store: Store | Callable[[str], Store]
) -> NumPyClient:
    """The client of one message, which may be for any of the clients that its node hosts.

    Args:
        message, context: as Flower gives them.
        store: where the clients' states are; where that depends on the run, a function.

    Raises:
        ConfigError, DataError, ImportError, OSError: this machine cannot serve the run, or the node
            was started without partition-id or num-partitions.
    """
    node = context.node_config
    text = _text_in(message)
    check_threads(_read(text))
    if own := OwnData.of(node):
        return _cached_site(text, own, store)  # type: ignore[arg-type]
    place = place_of(node, f", or, with data of its own, {EXAMPLE}")
    job = _cached_job(text, Limits.of(node))
    with foreign():
        return wire.Adapter(job.client(store, {**place, "data": job.data_digest}))


def settings_in(message: Message) -> Config:
    """The run's settings, which every message has.

    Raises:
        ConfigError: there are none, or this machine cannot have them.
    """
    return _read(_text_in(message))


def _text_in(message: Message) -> str:
    text = message.content.config_records.get(SETTINGS, {}).get(SETTINGS)
    if not isinstance(text, str):
        raise ConfigError(
            "the message has no settings of a run: start a fedhet.flower.Strategy in the server's"
            " @app.main()"
        )
    return text


@lru_cache(maxsize=8)
def _read(text: str) -> Config:
    settings = sent.read(text)
    check_keys(settings.cfg, "the run's settings")
    return settings


def check_threads(settings: Config) -> None:
    """Compute with the run's number of threads in this process from now on.

    Raises:
        ConfigError: this node has not so many cores.
    """
    threads, cores = settings.run.engine.threads, os.cpu_count() or 1
    if threads > cores:
        raise ConfigError(f"engine.threads={threads}: this node has {cores} cores, and no more")
    pin_threads(threads)


@lru_cache(maxsize=1)
def _cached_job(text: str, limits: Limits) -> Job:
    """The job of this process, so that it loads data and model once for all its messages.

    Raises:
        DataError: the data cannot be read, or are not as the run's settings say.
    """
    job = Job(_read(text), engine="flwr", limits=limits)
    try:
        if not is_local(job.config.cfg):
            with foreign():
                _ = job.data_digest
    except ConfigError as error:  # which may have values of samples
        raise DataError(str(error)) from error
    return job


def foreign() -> AbstractContextManager[None]:
    """What a run from another machine may read; engine=flwr submits those of this one."""
    return nullcontext() if SUBMITTED in os.environ else confined()


@lru_cache(maxsize=1)
def _cached_site(text: str, own: OwnData, store: Store | Callable[[str], Store]) -> SiteClient:
    """The site of this process, which reads its data once for all messages of a run."""
    return SiteClient(_read(text), own, store)


# ---- at a node of an app of one's own
def client_of(
    message: Message,
    context: Context,
    task: Task | Callable[[Context], Task],
    loop: OwnLoop | None,
) -> NumPyClient:
    """The client that serves a message of a `Strategy`.

    Args:
        message, context: as Flower gives them.
        task: as for `fedhet.flower.train`.
        loop: the owner's training loop; None for fedhet's.

    Raises:
        ConfigError, DataError, ImportError, OSError: the message is of something else, the node's
            configuration is wrong, or this machine cannot serve the run.
    """
    client = client_at(context, settings_in(message), task, store_at_site)
    config = dict(message.content.config_records.get(CONFIG, {}))
    if loop is None and config and ASKS in message.content:
        raise ConfigError(
            f"train_config={config} has no effect without a training loop of your own: give its"
            " settings to fedhet.flower.Strategy, such as overrides=['client.lr=0.1']"
        )
    if loop is not None:
        check_own_loop(client.method, client.plugins)
        client.context_of = partial(OwnersContext, loop=loop, config=config)
        client.properties[OWN_LOOP] = True
    return wire.Adapter(client)


def client_at(
    context: Context,
    settings: Config,
    task: Task | Callable[[Context], Task],
    store: Store | Callable[[str], Store],
) -> FedClient:
    """The client of a node that has one.

    Args:
        context: Flower's context of the node.
        settings: the run's.
        task: as for `fedhet.flower.train`.
        store: where the client's state is.

    Raises:
        ConfigError, DataError: the settings do not fit the node, or not the task.
    """
    place = place_of(context.node_config)
    check_threads(settings)
    whole = task(context) if callable(task) else task
    job = job_of(settings, whole.at(*place.values()), Limits.of(context.node_config))
    with foreign():
        sizes = dict(zip(PARTS, job.task.part_sizes[place["partition-id"]], strict=True))
        return job.client(store, place | sizes)  # the node tells its client's samples


# ---- at the server
class ConfiguredStrategy(Strategy):
    """The method of a run under `flwr run`, whose settings say all, and where it is recorded.

    Args:
        settings: of the run.

    Attributes:
        job: what is made of them.

    Raises:
        ConfigError: the settings do not fit together.
    """

    def __init__(self, settings: Config) -> None:
        self._lines, self._own = (), None
        self._sites: SiteNodes | None = None
        self.job = Job(settings, engine="flwr")
        if is_local(settings.cfg):
            declared, _ = declared_elsewhere(settings)
            try_settings(settings)
            self._sites = SiteNodes(settings.run.replies, declared)

    def _begun(self, lines: tuple[str, ...], arrays: ArrayRecord | None, **folder: Any) -> Job:
        return self.job

    def _nodes(self, job: Job) -> Nodes:
        return self._sites or Nodes(job.config.run.replies, job.data_digest)

    def _loop(self, job: Job) -> Loop:
        if self._sites:  # by now they have said what the strategy needs to know of their data
            data = LocalData.agreed_on(job.config.cfg, self._sites.agreed_on)
            self.job = replace(job, local=data)
        return begin(self.job)


def serve(grid: Grid, context: Context) -> None:
    """Carry out a run under `flwr run`; the last line of its log names the run folder.

    Args:
        grid: Flower's grid of the run.
        context: Flower's context of the run.

    Raises:
        ConfigError: a setting is wrong, or the folder cannot be used.
        RunFailed: the run has failed.
    """
    strategy = strategy_of(context)
    try:
        strategy.start(grid)
    except (RunFailed, Rejected) as error:
        recorded = strategy.job.loop is not None
        if not recorded:
            log.error("the run does not begin: %s", error)
        # Flower would print the error too, with a traceback and an exit code of its own.
        if not recorded or SUBMITTED not in os.environ or traceback_wanted():
            raise


def strategy_of(context: Context) -> ConfiguredStrategy:
    """The strategy of a run under `flwr run`.

    Args:
        context: Flower's context of the run.

    Raises:
        ConfigError: a setting is wrong.
    """
    terminal.log_to_stderr()
    # Flower sets its lines apart by empty ones; at the end of a run nothing else would follow.
    logging.getLogger("flwr").addFilter(lambda record: bool(record.getMessage().strip()))
    file = os.environ.get(SUBMITTED)
    settings = sent.load(Path(file)) if file else _composed(context)
    pin_threads(settings.run.engine.threads)
    return ConfiguredStrategy(settings)


def _composed(context: Context) -> Config:
    """The configuration that the run config of another machine describes.

    It has the overrides in its text `overrides`, and some settings by names of their own.

    Raises:
        ConfigError: a setting is wrong, is given twice, or would read this machine.
    """
    given = context.run_config
    named = [
        f"{name}={value if isinstance(value, str) else literal(value)}"
        for key, name in FLOWER_NAMES.items()
        if (value := given.get(key, "")) != ""
    ]
    lines = [*shlex.split(str(given.get("overrides", ""))), *named]
    refuse_repeated(lines)
    for line in lines:
        if "${" in line:
            raise ConfigError(f"{line!r}: a run from another machine has values alone, and no ${{")
    settings = compose(lines)
    experiment_file.refuse(lines)
    return settings

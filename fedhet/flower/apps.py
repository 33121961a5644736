"""The contents of Flower's two apps: the client for one message, and the server of a run.

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

# Keys of the run config that set one setting each. Most are names that other Flower apps use, too.
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
    """Return the reply to a message of a run: a step, an evaluation, or a question about the node.

    If this machine cannot serve the run, because it lacks a component, a package or data, the reply
    is a Flower error with the `public_text` of the reason.

    Args:
        message, context: from Flower.
        make: returns the client that serves the message.
    """
    try:
        return Message(served(make(), message.content), reply_to=message)
    except Exception as error:
        expected = isinstance(error, ConfigError | DataError | ImportError | OSError)
        log.error(
            "cannot serve this run: %s", clean(str(error)), exc_info=None if expected else error
        )
        site = context.node_config.get("site")
        node = f"the node of site {site!r}" if site else "its node"
        reason = clean(f"{node} cannot serve this run: {public_text(error)}")
        return Message(Error(RAISED, reason), reply_to=message)


def served(client: NumPyClient, content: RecordDict) -> RecordDict:
    """Return the client's reply to the content of a message, or its properties if it is asked.

    Raises:
        Rejected: the message is damaged.
    """
    if ASKS in content:
        return RecordDict({ASKS: ConfigRecord(client.get_properties({}))})  # type: ignore[arg-type]
    tensors, carried = opened(content)
    arrays, examples, metrics = client.fit(list(map(wire.read_array, tensors)), carried)
    tensors = ndarrays_to_parameters(arrays).tensors
    return RecordPacker()(tensors, {**metrics, wire.EXAMPLES: examples})


def client_for(
    message: Message, context: Context, store: Store | Callable[[str], Store]
) -> NumPyClient:
    """Return the client for one message. The message may be for any client that the node hosts.

    Args:
        message, context: from Flower.
        store: the store of the clients' states, or a function from the run to the store.

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


def _text_in(message: Message) -> str:
    """Return the run's settings as text; every message contains them.

    Raises:
        ConfigError: the message has none.
    """
    text = message.content.config_records.get(SETTINGS, {}).get(SETTINGS)
    if not isinstance(text, str):
        raise ConfigError(
            "the message has no settings of a run (a text in its record 'fedhet.settings'): start a"
            " fedhet.flower.Strategy in the server's @app.main()"
        )
    return text


@lru_cache(maxsize=8)
def _read(text: str) -> Config:
    settings = sent.read(text)
    check_keys(settings.cfg, "the run's settings")
    return settings


def check_threads(settings: Config) -> None:
    """Use the run's number of threads in this process from now on.

    Raises:
        ConfigError: this node has fewer cores than that.
    """
    threads, cores = settings.run.engine.threads, os.cpu_count() or 1
    if threads > cores:
        raise ConfigError(f"engine.threads={threads}: this node has {cores} cores, and no more")
    pin_threads(threads)


@lru_cache(maxsize=1)
def _cached_job(text: str, limits: Limits) -> Job:
    """Return the job of this process; cached, so that data and model are loaded only once.

    Raises:
        DataError: the data cannot be read, or do not fit the run's settings.
    """
    job = Job(_read(text), engine="flwr", limits=limits)
    try:
        if not is_local(job.config.cfg):
            with foreign():
                _ = job.data_digest
    except ConfigError as error:  # its message may contain values of samples
        raise DataError(str(error)) from error
    return job


def foreign() -> AbstractContextManager[None]:
    """Confine a run from another machine to FEDHET_DATA_DIR; not a run that engine=flwr submits."""
    return nullcontext() if SUBMITTED in os.environ else confined()


@lru_cache(maxsize=1)
def _cached_site(text: str, own: OwnData, store: Store | Callable[[str], Store]) -> SiteClient:
    """Return the site of this process; cached, so that it reads its data once in a run."""
    return SiteClient(_read(text), own, store)


# ---- at a node of a user's own app
def client_of(
    message: Message,
    context: Context,
    task: Task | Callable[[Context], Task],
    loop: OwnLoop | None,
) -> NumPyClient:
    """Return the client that serves a message of a `Strategy`.

    Args:
        message, context: from Flower.
        task: see `fedhet.flower.train`.
        loop: the app owner's training loop; None for fedhet's.

    Raises:
        ConfigError, DataError, ImportError, OSError: the message is not from a `Strategy`, the
            node's configuration is wrong, or this machine cannot serve the run.
    """
    client = client_at(context, _read(_text_in(message)), task, store_at_site)
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
    """Return the client of a node with one client.

    Args:
        context: Flower's context of the node.
        settings: the run's settings.
        task: see `fedhet.flower.train`.
        store: the store of the client's state, or a function from the run to the store.

    Raises:
        ConfigError, DataError: the settings do not fit the node or the task.
    """
    place = place_of(context.node_config)
    check_threads(settings)
    whole = task(context) if callable(task) else task
    job = job_of(settings, whole.at(*place.values()), Limits.of(context.node_config))
    with foreign():
        sizes = dict(zip(PARTS, job.task.part_sizes[place["partition-id"]], strict=True))
        return job.client(store, place | sizes)  # with `sizes`, the node reports its samples


# ---- at the server
class ConfiguredStrategy(Strategy):
    """The strategy of a run under `flwr run`: the settings define all of it, and its run folder.

    Args:
        settings: the run's settings.

    Attributes:
        job: the objects built from the settings.

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
        if self._sites:  # by now, the sites have sent the descriptions that the strategy needs
            data = LocalData.agreed_on(job.config.cfg, self._sites.agreed_on)
            self.job = replace(job, local=data)
        return begin(self.job)


def serve(grid: Grid, context: Context) -> None:
    """Execute a run under `flwr run`; the last line of its log names the run folder.

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
        # Flower would also print the error, with a traceback and its own exit code.
        if not recorded or SUBMITTED not in os.environ or traceback_wanted():
            raise


def strategy_of(context: Context) -> ConfiguredStrategy:
    """Return the strategy of a run under `flwr run`.

    Args:
        context: Flower's context of the run.

    Raises:
        ConfigError: a setting is wrong.
    """
    terminal.log_to_stderr()
    # Flower puts empty lines between its log lines. At the end of a run, only those would follow.
    logging.getLogger("flwr").addFilter(lambda record: bool(record.getMessage().strip()))
    file = os.environ.get(SUBMITTED)
    settings = sent.load(Path(file)) if file else _composed(context)
    pin_threads(settings.run.engine.threads)
    return ConfiguredStrategy(settings)


def _composed(context: Context) -> Config:
    """Return the configuration that the run config from another machine describes.

    The run config has overrides in its text `overrides`, and some settings as keys of their own.

    Raises:
        ConfigError: a setting is wrong, is given twice, or would read a variable of this machine.
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
            raise ConfigError(
                f"{line!r}: a run from another machine must give values; ${{...}} is not allowed"
            )
    settings = compose(lines)
    experiment_file.refuse(lines)
    return settings

"""A method as a strategy of flwr.serverapp, for an app with `@app.main()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from flwr.serverapp.strategy import Strategy as FlowersStrategy
from torch import Tensor, nn

from fedhet.core import check
from fedhet.core.errors import ConfigError, RunFailed, log
from fedhet.core.limits import UNLIMITED, Limits
from fedhet.core.messages import STEPS, Broadcast, Reply
from fedhet.core.server.callbacks import Callback, Row
from fedhet.core.server.compatibility import check_cohorts
from fedhet.core.server.evaluation import Selection
from fedhet.core.server.loop import Loop, recorded_numbers
from fedhet.core.server.strategy import FedStrategy
from fedhet.core.task import Task
from fedhet.flower import wire
from fedhet.flower.adapter import CHANGED, Rounds, final_weights, global_of, means_of
from fedhet.flower.nodes import Nodes, nodes_of
from fedhet.flower.packing import RecordPacker
from fedhet.flower.transport import (
    FlowerTransport,
    GridMembers,
    message_of,
    read_message,
    settings_records,
)
from fedhet.runs.config import Config, cached
from fedhet.runs.config.lines import key_of
from fedhet.runs.job import Job, begin
from fedhet.runs.object_task import check_settings, check_task
from fedhet.runs.privacy import account
from fedhet.runs.process import pinned_threads
from fedhet.runs.record import terminal
from fedhet.runs.record.run_folder import Recorder

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
EVALUATED, SERVER = "evaluate.", "server."  # before the names of what the owner's functions score
# What the round of Flower's own `start` cannot do -> the settings that ask for it.
NOT_THERE: dict[str, Callable[[FedStrategy], object]] = {
    "replies.deadline": lambda method: method.setup.replies.deadline,
    "replies.enough": lambda method: method.setup.replies.enough,
    "early_stopping.patience": lambda method: method.setup.early_stopping.patience,
}


class Strategy(FlowersStrategy):
    """A method, with its plug-ins and settings, in the place of Flower's `FedAvg`.

    `start` runs fedhet's own round. Flower's own `start` can run the method, too, by the four
    methods that a strategy has: then the phases before the training are rounds of Flower's, which
    waits for every reply, and settings of deadlines and early stopping are refused.

    Args:
        method: its name in the configuration.
        task: model, criterion and the clients, of whom the server needs the training sizes, or
            their number alone: then it believes each node's own size. Without a global test set
            the server evaluates nothing.
        plugins: the names of plug-ins.
        overrides: settings as on the command line, such as "client.lr=0.1".
        fraction_evaluate: the share of the nodes that evaluate the global model after each round of
            the training by an evaluate function of your own, which gets Flower's messages. None:
            all clients evaluate by `fedhet.flower.evaluate`.

    Attributes:
        history: the steps of the last run, each a dictionary as in rounds.jsonl.

    Raises:
        ConfigError: the settings do not fit together, or not the task.
    """

    def __init__(
        self,
        method: str,
        task: Task,
        *,
        plugins: Sequence[str] = (),
        overrides: Sequence[str] = (),
        fraction_evaluate: float | None = None,
    ) -> None:
        own = []
        if fraction_evaluate is not None:
            check.number("fraction_evaluate", fraction_evaluate, open_low=0, high=1)
            own = ["eval.clients=false"]
        self._lines = (*lines_of(method, plugins, overrides), *own)
        self._task = task
        self._job = job_of(settings_of(self._lines), task)
        check_cohorts(self._job.strategy)
        self._own: FedAvg | None = None  # whose messages the owner's evaluate function gets
        if fraction_evaluate is not None:
            if self._job.workspace.noise or "global" not in self._job.strategy.views:
                raise ConfigError(
                    f"fraction_evaluate={fraction_evaluate}: under privacy.noise, and of a method"
                    " without a global model, no client evaluates by a function of your own"
                )
            self._own = FedAvg(
                fraction_evaluate=fraction_evaluate, min_evaluate_nodes=1, min_available_nodes=1
            )
        self.history: list[Row] = []
        self._rounds: Rounds | None = None  # of Flower's own start
        self._given = ArrayRecord()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        *,
        run_dir: str | Path | None = None,
        resume: bool = False,
    ) -> Result:
        """Run the method: Flower's arguments, and a folder.

        Args:
            grid: as Flower gives it to `@app.main()`.
            initial_arrays: the model to begin with; None for that of the task and the seed, with
                which the weights are those of `fedhet.run`.
            num_rounds: of the training, in place of the setting `rounds`. Phases before it come on
                top.
            timeout: seconds that a client may take for a message, and all nodes for an evaluation
                by a function of your own, in place of `replies.deadline`.
            train_config: what a training loop of your own gets besides the run's settings; without
                such a loop it is refused.
            evaluate_config: what an evaluate function of your own gets.
            evaluate_fn: (round, arrays) -> what you score of the global model, before the first
                round and after each.
            run_dir: a folder on the server's machine where the run is recorded, as fedhet's own
                runs are; None for nowhere.
            resume: whether the run in that folder goes on, after its last checkpoint.

        Returns:
            The final model, by the names of its state dict, and by round the means of the clients'
            metrics, of their scores, and the scores on the server. Of a method without a global
            model the arrays are what the clients share.

        Raises:
            ConfigError: the settings do not fit together, or not the arrays.
            RunFailed: too few nodes have joined, a client failed and on_failure is "stop", or no
                client succeeded.
        """
        terminal.log_to_stderr()
        if evaluate_config and self._own is None:
            raise ConfigError("evaluate_config without fraction_evaluate has no effect: set eval.*")
        if resume and run_dir is None:
            raise ConfigError("resume=True without run_dir, the folder of the run that goes on")
        if resume and not Path(str(run_dir)).is_dir():
            raise ConfigError(f"resume=True: there is no run in run_dir={run_dir}")
        more = [] if num_rounds is None else [f"rounds={num_rounds}"]
        more += [] if timeout is None else [f"replies.deadline={timeout}"]
        lines = (*self._lines, *more)
        folder = {} if run_dir is None else {"run_dir": str(run_dir), "resumes": resume}
        job = self._begun(lines, initial_arrays, run_dir_given=run_dir is not None, **folder)
        nodes = self._nodes(job)
        ask = None
        if self._own is not None:
            seconds = job.config.run.replies.deadline
            ask = partial(_evaluated, self._own, grid, evaluate_config, seconds)
        results = FlowersResult(evaluate_fn, ask)
        self.history = results.rows
        records = settings_records(job.config, train_config)
        members = GridMembers(grid, records)
        with pinned_threads(job.config.run.engine.threads):
            nodes.join(members)
            job.own_loop = nodes.own_loop
            loop = self._loop(job)
            for row in (
                row for one in loop.callbacks if isinstance(one, Recorder) for row in one.rows
            ):
                results.add(loop.method, row)  # of a run that goes on
            loop.callbacks.insert(0, results)  # so that the record has what the owner scores
            loop.run(FlowerTransport(members, nodes))
        return results.result

    def _begun(self, lines: tuple[str, ...], arrays: ArrayRecord | None, **folder: Any) -> Job:
        """The objects of a run that begins with these arrays."""
        settings = replace(settings_of(lines), **folder)
        job = job_of(settings, self._task)
        workspace = job.workspace
        given = {} if arrays is None else arrays.to_torch_state_dict()
        shapes = {name: t.shape for name, t in workspace.initial.items()}
        if given and shapes != {name: t.shape for name, t in given.items()}:
            raise ConfigError("initial_arrays have other names or shapes than the task's model")
        new = [n for n, t in given.items() if not torch.equal(t, workspace.initial[n].cpu())]
        if own := [name for name in new if name not in workspace.shared]:
            raise ConfigError(
                f"initial_arrays has other values of {own[0]!r} than the task's model, which"
                f" clients of method={job.strategy.name} are not sent: leave initial_arrays out"
            )
        if new:
            model = partial(_with, self._task.model, given)
            job = job_of(settings, replace(self._task, model=model))
        return job

    def _nodes(self, job: Job) -> Nodes:
        """Which node hosts which client; it waits for those that the job has to know."""
        return nodes_of(job.strategy)

    def _loop(self, job: Job) -> Loop:
        """The run's steps, once those nodes have joined."""
        if job.config.run_dir_given:
            return begin(job)
        account.check_run(job.strategy)
        shown = terminal.Display(nullcontext(terminal.log_step))
        callbacks = [*accounts(job), Selection(job.strategy.setup), shown]
        return Loop(job.strategy, callbacks, evaluates=job.config.run.evaluation.clients)

    def summary(self) -> None:
        """Log the settings."""
        log.info("fedhet: %s", " ".join(self._lines))

    # ---- Flower's own start
    @property
    def num_rounds(self) -> int:
        """The rounds for Flower's own `start`, with those of phases before the training."""
        return self._job.strategy.num_rounds

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """The messages of the round; none past the end of the timetable.

        Raises:
            ConfigError: before the first round, settings ask for what this cannot do.
            RunFailed: too few nodes have joined; or the arrays are not those that the method
                returned: a strategy around it has changed them, and that would have no effect.
        """
        if self._rounds is None:
            self._rounds = self._under_flower(arrays)
        elif _bytes(arrays) != _bytes(self._given):
            raise RunFailed(CHANGED)
        members = GridMembers(grid, settings_records(self._job.config, config))
        self._rounds.begin(server_round, members)
        return _messages(self._rounds, members)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The new model, and the means of the clients' metrics.

        Raises:
            RunFailed: a client failed and on_failure is "stop", or no client succeeded.
        """
        rounds = self._rounds
        if rounds is None or rounds.over:
            return None, None
        rounds.answer(self._in_order(rounds, replies))
        self._given = ArrayRecord(final_weights(self._job.strategy))
        return self._given, _metrics(rounds.last.get("metrics", {}))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Messages to all clients with data after a round for which an evaluation is due."""
        if self._own is not None:
            return list(self._own.configure_evaluate(server_round, arrays, config, grid))
        if self._rounds is None or not self._rounds.evaluating:
            return []
        return _messages(self._rounds, GridMembers(grid, settings_records(self._job.config)))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The clients' scores, named as in rounds.jsonl.

        Raises:
            RunFailed: a client failed and on_failure is "stop", or no client succeeded.
        """
        rounds = self._rounds
        if self._own is not None:
            return self._own.aggregate_evaluate(server_round, replies)
        if rounds is None or not rounds.evaluating:
            return None
        rounds.answer(self._in_order(rounds, replies))
        return _metrics(means_of(self._job.strategy, rounds.last))

    def _under_flower(self, arrays: ArrayRecord) -> Rounds:
        self._job = job = self._begun(self._lines, arrays)
        for name, asked in NOT_THERE.items():
            if (value := asked(job.strategy)) is not None:
                raise ConfigError(
                    f"{name}={value} has no effect under Flower's own start: call that of"
                    " fedhet.flower.Strategy, or leave it out"
                )
        log.warning(
            "Flower's own start runs as many rounds as it was told; %d are all of this run, with"
            " %d before the training",
            *(self.num_rounds, self.num_rounds - job.config.run.rounds),
        )
        account.check_run(job.strategy)
        rounds = Rounds(job.strategy, accounts(job))
        self.history = rounds.rows
        return rounds

    def _in_order(self, rounds: Rounds, replies: Iterable[Message]) -> Iterator[Reply]:
        """The replies of the clients that were asked: each is on a node of its own."""
        arrived = {str(reply.metadata.src_node_id): reply for reply in replies}
        more_bytes = self._job.strategy.setup.replies.max_bytes

        def read(msg: Broadcast, node: str, reply: Message) -> Reply:
            return read_message(msg, int(node), reply, more_bytes)

        return rounds.in_order(arrived, read)


def _messages(rounds: Rounds, members: GridMembers) -> list[Message]:
    """The messages that are due."""
    packer, pack = wire.MessagePacker(), RecordPacker()
    asked = rounds.hosted(members)
    return [message_of(msg, packer, pack, int(node), members.records) for node, msg in asked]


class FlowersResult(Callback):
    """Makes Flower's Result of a run.

    Args:
        evaluate_fn: as for `Strategy.start`.
        ask: (round, arrays) -> the means of what the nodes' own functions score; None: they have
            none.

    Attributes:
        result: it.
        rows: the steps, as in rounds.jsonl.
    """

    def __init__(self, evaluate_fn: EvaluateFn | None, ask: EvaluateFn | None = None) -> None:
        self._ask = ask
        self.result = Result()
        self.rows: list[Row] = []
        self._evaluate = evaluate_fn

    def begun(self, loop: Loop) -> None:
        if self._evaluate and not self.rows:
            first = self._evaluate(loop.round, ArrayRecord(final_weights(loop.method)))
            if first:
                self.result.evaluate_metrics_serverapp[loop.round] = first

    def step_ended(self, loop: Loop, row: Row) -> None:
        metrics = row["metrics"]
        asked = {EVALUATED: self._ask if row["phase"] == "train" else None, SERVER: self._evaluate}
        if any(asked.values()):
            arrays = ArrayRecord(final_weights(loop.method))
            for prefix, evaluate in asked.items():
                scores = (evaluate and evaluate(loop.round, arrays)) or {}
                metrics.update({f"{prefix}{name}": value for name, value in scores.items()})
        numbers = {n: v for n, v in metrics.items() if n != STEPS and not isinstance(v, list)}
        if numbers:
            log.info("%s", ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))
        self.add(loop.method, row | recorded_numbers(loop.current))

    def add(self, method: FedStrategy, row: Row) -> None:
        """Add a step, as it stands in rounds.jsonl."""
        self.rows.append(row)
        named = row["metrics"].items()
        evaluated, scored = (
            {name.removeprefix(prefix): value for name, value in named if name.startswith(prefix)}
            for prefix in (EVALUATED, SERVER)
        )
        trained = {n: value for n, value in named if not n.startswith((EVALUATED, SERVER))}
        for found, metrics in (
            (self.result.train_metrics_clientapp, trained),
            (self.result.evaluate_metrics_clientapp, evaluated or means_of(method, row)),
            (self.result.evaluate_metrics_serverapp, {**global_of(method, row), **scored}),
        ):
            if metrics := _metrics(metrics):
                found[row["round"]] = metrics

    def ended(self, loop: Loop, status: str, error: BaseException | None) -> None:
        self.result.arrays = ArrayRecord(final_weights(loop.method))


def _evaluated(
    own: FedAvg,
    grid: Grid,
    config: ConfigRecord | None,
    seconds: float | None,
    server_round: int,
    arrays: ArrayRecord,
) -> MetricRecord | None:
    """The means of what the nodes' own evaluate functions return within the seconds."""
    asked = own.configure_evaluate(server_round, arrays, config or ConfigRecord(), grid)
    return own.aggregate_evaluate(server_round, grid.send_and_receive(asked, timeout=seconds))


def _metrics(numbers: Mapping[str, Any]) -> MetricRecord:
    return MetricRecord({name: value for name, value in numbers.items() if value is not None})


def accounts(job: Job) -> list[Callback]:
    """What counts the releases of a run with privacy.noise."""
    return [account.Account(noise)] if (noise := job.workspace.noise) else []


def _with(build: Callable[[], nn.Module], values: Mapping[str, Tensor]) -> nn.Module:
    """A model that begins with these values."""
    model = build()
    model.load_state_dict(values)
    return model


def _bytes(arrays: ArrayRecord) -> list[bytes]:
    return [array.data for array in arrays.values()]


# ---- a run on the task of an app's owner
def lines_of(method: str, plugins: Sequence[str], overrides: Sequence[str]) -> tuple[str, ...]:
    """The settings of a run as overrides.

    Raises:
        ConfigError: a text stands for a list, or the method or the plug-ins are given twice.
    """
    for name, given in (("plugins", plugins), ("overrides", overrides)):
        if isinstance(given, str):
            raise ConfigError(f"{name}={given!r} is a text; expected a list of texts")
    twice = {"method": method, **({"plugin": list(plugins)} if plugins else {})}
    for line in overrides:
        if (key := key_of(line)) in twice:
            raise ConfigError(
                f"the strategy was made with {key}={twice[key]!r}, and its overrides have {line}:"
                " leave one out"
            )
    chosen = [f"method={method}", *([f"plugin=[{','.join(plugins)}]"] if plugins else [])]
    return (*chosen, *overrides)


def settings_of(lines: tuple[str, ...]) -> Config:
    """The settings of a run on a task of its own.

    Raises:
        ConfigError: one of the overrides is wrong, or has no effect with a task.
    """
    settings = cached(lines)
    check_settings(settings)
    return settings


def job_of(settings: Config, task: Task, limits: Limits = UNLIMITED) -> Job:
    """The objects of the run.

    Args:
        settings: the run's.
        task: what is learned.
        limits: what the node of this process allows.

    Raises:
        ConfigError: the settings do not fit together, or not the task.
    """
    job = Job(settings, task, "flwr", limits=limits)  # its clients may be real ones
    check_task(job.workspace)
    return job

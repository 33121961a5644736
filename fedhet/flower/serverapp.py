"""A method as a strategy of flwr.serverapp, for a Flower app with `@app.main()`."""

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
from fedhet.core.messages import STEPS, Reply
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
EVALUATED, SERVER = "evaluate.", "server."  # prefixes of the scores by the owner's functions
# Setting that Flower's own `start` cannot obey -> a function that returns its value in the run.
NOT_THERE: dict[str, Callable[[FedStrategy], object]] = {
    "replies.deadline": lambda method: method.setup.replies.deadline,
    "replies.enough": lambda method: method.setup.replies.enough,
    "early_stopping.patience": lambda method: method.setup.early_stopping.patience,
}


class Strategy(FlowersStrategy):
    """A method, with its plug-ins and settings, in place of Flower's `FedAvg`.

    `start` runs fedhet's own rounds. Flower's own `start` can also run the method, through the four
    methods of a Flower strategy. Then the phases before the training are Flower rounds, too, and
    Flower waits for every reply; settings for deadlines and early stopping are refused.

    Args:
        method: its name in the configuration.
        task: model, criterion and clients. The server needs the clients' training sizes. If it gets
            only the number of clients, it trusts the size that each node reports. Without a global
            test set the server evaluates nothing.
        plugins: the names of plug-ins.
        overrides: settings as on the command line, such as "client.lr=0.1".
        fraction_evaluate: the fraction of nodes that evaluate the global model after each training
            round by your own evaluate function, which gets Flower's messages. None: all clients
            evaluate by `fedhet.flower.evaluate`.

    Attributes:
        history: the steps of the last run, each a dictionary as in rounds.jsonl.

    Raises:
        ConfigError: the settings contradict each other or the task.
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
        self._own: FedAvg | None = None  # makes the messages to the owner's evaluate function
        if fraction_evaluate is not None:
            if self._job.workspace.noise or "global" not in self._job.strategy.views:
                raise ConfigError(
                    f"fraction_evaluate={fraction_evaluate}: clients cannot evaluate by your own"
                    " function under privacy.noise, or with a method without a global model; leave"
                    " it out"
                )
            self._own = FedAvg(
                fraction_evaluate=fraction_evaluate, min_evaluate_nodes=1, min_available_nodes=1
            )
        self.history: list[Row] = []
        self._rounds: Rounds | None = None  # the rounds under Flower's own start
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
        """Run the method. The arguments are Flower's, plus a run folder.

        Args:
            grid: the Grid that Flower passes to `@app.main()`.
            initial_arrays: the initial model. None: the task's model, initialised by the seed; then
                the final weights equal those of `fedhet.run`.
            num_rounds: the number of training rounds; replaces the setting `rounds`. Phases before
                the training are extra.
            timeout: replaces `replies.deadline`: the seconds for a client's reply, and for all
                nodes together in an evaluation by your own function.
            train_config: further settings for your own training loop, in addition to the run's;
                refused without such a loop.
            evaluate_config: the settings for your own evaluate function.
            evaluate_fn: a function of (round, arrays) that returns your scores of the global model.
                It is called before the first round and after each round.
            run_dir: a folder on the server's machine that records the run, like fedhet's own run
                folders; None: the run is not recorded.
            resume: whether to resume the run in that folder from its last checkpoint.

        Returns:
            The final model, by the names of its state dict. By round, the means of the clients'
            metrics and of their scores, and the scores on the server. If a method has no global
            model, the arrays are the tensors that clients share.

        Raises:
            ConfigError: the settings contradict each other or the arrays.
            RunFailed: too few nodes have joined, a client failed and on_failure is "stop", or no
                client succeeded.
        """
        terminal.log_to_stderr()
        if evaluate_config and self._own is None:
            raise ConfigError(
                "evaluate_config has no effect without fraction_evaluate; set eval.* instead"
            )
        if resume and run_dir is None:
            raise ConfigError("resume=True needs run_dir, the folder of the run to resume")
        if resume and not Path(str(run_dir)).is_dir():
            raise ConfigError(f"resume=True: there is no run in run_dir={run_dir}")
        given = {"rounds": num_rounds, "replies.deadline": timeout}
        more = (f"{key}={value}" for key, value in given.items() if value is not None)
        folder = {} if run_dir is None else {"run_dir": str(run_dir), "resumes": resume}
        job = self._begun(
            (*self._lines, *more), initial_arrays, run_dir_given=run_dir is not None, **folder
        )
        nodes = self._nodes(job)
        seconds = job.config.run.replies.deadline
        own = self._own
        ask = None if own is None else partial(_evaluated, own, grid, evaluate_config, seconds)
        results = FlowersResult(evaluate_fn, ask)
        self.history = results.rows
        members = GridMembers(grid, settings_records(job.config, train_config))
        with pinned_threads(job.config.run.engine.threads):
            nodes.join(members)
            job.own_loop = nodes.own_loop
            loop = self._loop(job)
            for row in (
                row
                for recorder in loop.callbacks
                if isinstance(recorder, Recorder)
                for row in recorder.rows
            ):
                results.add(loop.method, row)  # the earlier steps of a resumed run
            loop.callbacks.insert(0, results)  # first, so that the record gets the owner's scores
            loop.run(FlowerTransport(members, nodes))
        return results.result

    def _begun(self, lines: tuple[str, ...], arrays: ArrayRecord | None, **folder: Any) -> Job:
        """Return the objects of a run that begins with these arrays."""
        settings = replace(settings_of(lines), **folder)
        job = job_of(settings, self._task)
        workspace = job.workspace
        given = {} if arrays is None else arrays.to_torch_state_dict()
        shapes = {name: t.shape for name, t in workspace.initial.items()}
        if given and shapes != {name: t.shape for name, t in given.items()}:
            raise ConfigError(
                "initial_arrays must have the names and shapes of the task's model, and have others"
            )
        new = [n for n, t in given.items() if not torch.equal(t, workspace.initial[n].cpu())]
        if own := [name for name in new if name not in workspace.shared]:
            raise ConfigError(
                f"initial_arrays changes {own[0]!r} of the task's model, but the server of"
                f" method={job.strategy.name} does not send this tensor: leave initial_arrays out"
            )
        if new:
            model = partial(_with, self._task.model, given)
            job = job_of(settings, replace(self._task, model=model))
        return job

    def _nodes(self, job: Job) -> Nodes:
        """Return the job's nodes: which of them hosts which client."""
        return nodes_of(job.strategy)

    def _loop(self, job: Job) -> Loop:
        """Return the loop over the run's steps. The nodes have joined."""
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
        """The number of rounds for Flower's own `start`, with the phases before the training."""
        return self._job.strategy.num_rounds

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the messages of the round; none past the end of the timetable.

        Raises:
            ConfigError: before the first round, a setting has no effect under Flower's own start.
            RunFailed: too few nodes have joined; or a strategy around this one has changed the
                arrays that the method returned, which would have no effect.
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
        """Return the new model, and the means of the clients' metrics.

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
        """Return messages to all clients with data, if an evaluation is due after this round."""
        if self._own is not None:
            return list(self._own.configure_evaluate(server_round, arrays, config, grid))
        if self._rounds is None or not self._rounds.evaluating:
            return []
        return _messages(self._rounds, GridMembers(grid, settings_records(self._job.config)))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the clients' scores, named as in rounds.jsonl.

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
                    f"{name}={value} has no effect under Flower's own start: call `start` of"
                    f" fedhet.flower.Strategy, or leave {name} out"
                )
        log.warning(
            "Flower's own start runs only as many rounds as you ask for; this run needs %d"
            " rounds, and %d of them come before the training",
            *(self.num_rounds, self.num_rounds - job.config.run.rounds),
        )
        account.check_run(job.strategy)
        rounds = Rounds(job.strategy, accounts(job))
        self.history = rounds.rows
        return rounds

    def _in_order(self, rounds: Rounds, replies: Iterable[Message]) -> Iterator[Reply]:
        """Yield the replies of the clients that were asked; each has a node of its own."""
        arrived = {str(reply.metadata.src_node_id): reply for reply in replies}
        more_bytes = self._job.strategy.setup.replies.max_bytes
        return rounds.in_order(
            arrived, lambda msg, node, reply: read_message(msg, int(node), reply, more_bytes)
        )


def _messages(rounds: Rounds, members: GridMembers) -> list[Message]:
    """Return the messages that are due."""
    packer, pack = wire.MessagePacker(), RecordPacker()
    asked = rounds.hosted(members)
    return [message_of(msg, packer, pack, int(node), members.records) for node, msg in asked]


class FlowersResult(Callback):
    """Builds Flower's Result of a run.

    Args:
        evaluate_fn: see `Strategy.start`.
        ask: a function of (round, arrays) that returns the mean scores by the nodes' own evaluate
            functions; None: there are no such functions.

    Attributes:
        result: Flower's Result, filled so far.
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
        """Add a step, given as its line in rounds.jsonl."""
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
    """Return the means of the scores that the nodes' own functions send within `seconds`."""
    asked = own.configure_evaluate(server_round, arrays, config or ConfigRecord(), grid)
    return own.aggregate_evaluate(server_round, grid.send_and_receive(asked, timeout=seconds))


def _metrics(numbers: Mapping[str, Any]) -> MetricRecord:
    return MetricRecord({name: value for name, value in numbers.items() if value is not None})


def accounts(job: Job) -> list[Callback]:
    """Return the callback that counts the releases of a run with privacy.noise; [] without it."""
    return [account.Account(noise)] if (noise := job.workspace.noise) else []


def _with(build: Callable[[], nn.Module], values: Mapping[str, Tensor]) -> nn.Module:
    """Build a model with these values."""
    model = build()
    model.load_state_dict(values)
    return model


def _bytes(arrays: ArrayRecord) -> list[bytes]:
    return [array.data for array in arrays.values()]


# ---- a run on the task of an app's owner
def lines_of(method: str, plugins: Sequence[str], overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the settings of a run as overrides.

    Raises:
        ConfigError: a list is a text instead, or the method or the plug-ins are given twice.
    """
    for name, given in (("plugins", plugins), ("overrides", overrides)):
        if isinstance(given, str):
            raise ConfigError(f"{name}={given!r} is a text; expected a list of texts")
    twice = {"method": method, **({"plugin": list(plugins)} if plugins else {})}
    for line in overrides:
        if (key := key_of(line)) in twice:
            raise ConfigError(
                f"the strategy has the argument {key}={twice[key]!r}, and its overrides have"
                f" {line}: leave one of them out"
            )
    chosen = [f"method={method}", *([f"plugin=[{','.join(plugins)}]"] if plugins else [])]
    return (*chosen, *overrides)


def settings_of(lines: tuple[str, ...]) -> Config:
    """Return the settings of a run on a user's own task.

    Raises:
        ConfigError: one of the overrides is wrong, or has no effect with such a task.
    """
    settings = cached(lines)
    check_settings(settings)
    return settings


def job_of(settings: Config, task: Task, limits: Limits = UNLIMITED) -> Job:
    """Return the objects of the run.

    Args:
        settings: the run's settings.
        task: the user's task.
        limits: the limits that this process's node sets.

    Raises:
        ConfigError: the settings contradict each other or the task.
    """
    job = Job(settings, task, "flwr", limits=limits)  # "flwr": clients may be real
    check_task(job.workspace)
    return job

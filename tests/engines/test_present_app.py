"""A method as a strategy of flwr.serverapp, and its clients in @app.train() and @app.evaluate()."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from app_grid import AppGrid
from asking import answered
from contracts.runs import rows
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy as FlowersStrategy
from flwr.supercore.task_identity import TaskIdentity
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedhet.flower
from fedhet.core import trees
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.kernel import WORDS
from fedhet.core.task import Task
from fedhet.data.toy import ToyModel, toy_task
from fedhet.flower import own_loop as owner
from fedhet.flower import transport as flower_server

LINES = ["rounds=2", "client.lr=0.1", "client.epochs=1"]


@pytest.fixture(autouse=True)
def _flower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A message asks which task it belongs to, which Flower sets in a server's process."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(flower_server, "FAR_SECONDS", (0.001, 0.001))
    monkeypatch.setattr(flower_server, "START_SECONDS", 0.0)
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path / "states"))


def own_data(context: Context) -> Task:
    whole = toy_task(4)
    own = whole.clients[int(context.node_config["partition-id"])]
    return replace(whole, clients=own, sizes=[], test=None)


def app_of(task: Any = own_data, loop: Any = None) -> ClientApp:
    """An owner's client app."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        return fedhet.flower.train(msg, context, task, loop)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        return fedhet.flower.evaluate(msg, context, task)

    return app


def of_server(clients: int = 4) -> Task:
    return replace(toy_task(4), clients=clients, sizes=[])


def strategy_of(method: str, *lines: str, task: Task | None = None, **how: Any) -> Any:
    return fedhet.flower.Strategy(method, task or of_server(), overrides=[*LINES, *lines], **how)


def sha256(arrays: ArrayRecord) -> str:
    return trees.sha256({"model": arrays.to_torch_state_dict()})


@pytest.mark.parametrize(
    ("method", "plugins"),
    [("fedavg", []), ("scaffold", ["fednorm"]), ("fedprox", ["fedlex"])],
    ids=["fedavg", "scaffold+fednorm", "fedprox+fedlex"],
)
def test_the_weights_are_those_of_a_run_in_process(
    method: str, plugins: list[str], launch: Callable[..., Any]
) -> None:
    """By our own start, and by Flower's, where phases before the training are rounds."""
    lines = ["fraction=0.5"]
    chosen = [f"method={method}", *([f"plugin=[{','.join(plugins)}]"] if plugins else [])]
    run = launch(*chosen, *LINES, *lines, task=toy_task(4))
    strategy = strategy_of(method, *lines, plugins=plugins)
    assert isinstance(strategy, FlowersStrategy)
    result = strategy.start(AppGrid(app_of()))
    assert trees.sha256({"model": result.arrays.to_torch_state_dict()}) == sha256(result.arrays)
    recorded = [row["weights_sha256"] for row in rows(run)]
    assert [row["weights_sha256"] for row in strategy.history] == recorded
    trained = [row for row in rows(run) if row["phase"] == "train"]
    for found, key in (
        (result.evaluate_metrics_clientapp, "loss_clients_weighted"),
        (result.evaluate_metrics_serverapp, "loss_global"),
    ):
        name = key.removesuffix("_global")
        assert [found[row["round"]][name] for row in trained] == [row[key] for row in trained]

    other = strategy_of(method, *lines, plugins=plugins)
    arrays = ArrayRecord(other._job.strategy.weights["model"])
    under_flower = FlowersStrategy.start(
        other, AppGrid(app_of()), arrays, num_rounds=other.num_rounds + 1
    )
    assert sha256(under_flower.arrays) == sha256(result.arrays)
    assert under_flower.evaluate_metrics_clientapp == result.evaluate_metrics_clientapp


# ---- what only our own start can do
def test_a_reply_after_the_deadline_is_not_awaited() -> None:
    grid = AppGrid(app_of())
    grid.silent = {1}
    strategy = strategy_of("fedavg", "on_failure=skip", "replies.grace=0", "replies.max_lost=1")
    strategy.start(grid, timeout=0.5)
    assert [row["accepted"] for row in strategy.history] == [3, 3]
    assert {f["reason"] for row in strategy.history for f in row["failures"]} == {"late"}


def test_enough_replies_end_a_step() -> None:
    grid = AppGrid(app_of())
    grid.silent = {0, 3}
    strategy = strategy_of("fedavg", "on_failure=skip", "replies.grace=0", "replies.enough=.5")
    strategy.start(grid, num_rounds=1)
    (row,) = strategy.history
    assert {f["reason"] for f in row["failures"]} == {"not awaited"}


def test_training_stops_early() -> None:
    task = replace(toy_task(4), test=None)
    for client in task.clients:
        client._read["val"] = client.test
    own = task.clients

    def of_node(context: Context) -> Task:
        clients = own[int(context.node_config["partition-id"])]
        return replace(task, clients=clients, sizes=[])

    strategy = strategy_of("fedavg", "early_stopping.patience=1", "early_stopping.min_delta=9")
    strategy.start(AppGrid(app_of(of_node)), num_rounds=9)
    assert len(strategy.history) == 2


def test_a_run_that_was_stopped_goes_on(launch: Callable[..., Any], tmp_path: Path) -> None:
    """With the states of its clients, in another run of Flower's."""
    run = launch("method=scaffold", *LINES, "rounds=4", task=toy_task(4))
    folder = tmp_path / "run"
    lines = ["checkpoint.every=0", "rounds=4"]

    class Stops(AppGrid):
        def push_messages(self, messages: Any) -> Iterator[str]:
            if any(kind == "train" and group == "3" for kind, _, group in self.heard):
                raise KeyboardInterrupt
            return super().push_messages(messages)

    with pytest.raises(KeyboardInterrupt):
        strategy_of("scaffold", *lines).start(Stops(app_of()), run_dir=folder)
    grid, strategy = AppGrid(app_of(), first=90), strategy_of("scaffold", *lines)
    result = strategy.start(grid, run_dir=folder, resume=True)
    assert sha256(result.arrays) == run.summary["weights_sha256"]
    assert [row["round"] for row in strategy.history] == [1, 2, 3, 4]
    assert list(result.evaluate_metrics_clientapp) == [1, 2, 3, 4]
    assert min(int(group) for _, _, group in grid.heard) == 3
    assert fedhet.load_run(folder).summary["weights_sha256"] == run.summary["weights_sha256"]


# ---- Flower's arguments
def test_the_model_that_was_given_is_the_first_one(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    torch.manual_seed(5)
    given = toy_task(4).build().state_dict()
    arrays = ArrayRecord(given)

    def build() -> nn.Module:
        model = toy_task(4).build()
        model.load_state_dict(given)
        return model

    run = launch("method=scaffold", *LINES, task=replace(toy_task(4), model=build))
    scored: list[tuple[int, str]] = []

    def evaluate_fn(number: int, arrays: ArrayRecord) -> MetricRecord:
        scored.append((number, sha256(arrays)))
        return MetricRecord({"own": number, "by_class": [0.5, float(number)]})

    strategy = strategy_of("scaffold")
    folder = tmp_path / "run"
    grid = AppGrid(app_of())
    result = strategy.start(grid, arrays, evaluate_fn=evaluate_fn, run_dir=folder)
    recorded = fedhet.load_run(folder).summary["weights_sha256"]
    assert recorded == run.summary["weights_sha256"]
    assert sha256(result.arrays) == run.summary["weights_sha256"]
    assert scored[0] == (0, sha256(arrays)) and scored[-1] == (2, sha256(result.arrays))
    assert [result.evaluate_metrics_serverapp[n]["own"] for n in range(3)] == [0, 1, 2]
    assert result.evaluate_metrics_serverapp[2]["by_class"] == [0.5, 2]


def test_arguments_that_cannot_act_are_refused() -> None:
    grid = AppGrid(app_of())
    other = ArrayRecord({"body.0.weight": torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"initial_arrays .*names and shapes"):
        strategy_of("fedavg").start(grid, other)
    kept = {name: t + 1 for name, t in toy_task(4).build().state_dict().items()}
    with pytest.raises(ConfigError, match=r"initial_arrays changes 'head.*method=fedbabu .*send"):
        strategy_of("fedbabu").start(grid, ArrayRecord(kept))
    with pytest.raises(ConfigError, match=r"evaluate_config .*fraction_evaluate"):
        strategy_of("fedavg").start(grid, evaluate_config=ConfigRecord({"a": 1}))
    for method, lines in (("fedavg", ["privacy.noise=1"]), ("fedproto", [])):
        with pytest.raises(ConfigError, match=r"fraction_evaluate=1.0: .*under privacy.noise, "):
            strategy_of(method, *lines, fraction_evaluate=1.0)
    with pytest.raises(RunFailed, match=r"train_config={'lr': 1} .*effect .*training"):
        strategy_of("fedavg").start(grid, train_config=ConfigRecord({"lr": 1}))
    with pytest.raises(ConfigError, match=r"resume=True .*run_dir"):
        strategy_of("fedavg").start(grid, resume=True)
    with pytest.raises(ConfigError, match=r"resume=True: .*run .*run_dir=nowhere"):
        strategy_of("fedavg").start(grid, run_dir="nowhere", resume=True)
    with pytest.raises(ConfigError, match=r"method='fedavg', .*overrides .*method=local"):
        strategy_of("fedavg", "method=local")
    with pytest.raises(ConfigError, match=r"plugin=\['moon'\], .*overrides .*\+plugin="):
        strategy_of("fedavg", "+plugin=[drift]", plugins=["moon"])
    with pytest.raises(ConfigError, match=r"overrides='client.lr=.1' .*text; .*list"):
        fedhet.flower.Strategy("fedavg", of_server(), overrides="client.lr=.1")
    with pytest.raises(ConfigError, match="fraction_evaluate=2 "):
        strategy_of("fedavg", fraction_evaluate=2)


@pytest.mark.parametrize(
    "line", ["replies.deadline=5", "replies.enough=.5", "early_stopping.patience=3"]
)
def test_flowers_own_start_says_at_once_what_it_cannot_do(line: str) -> None:
    strategy = strategy_of("fedavg", line)
    arrays = ArrayRecord(strategy._job.strategy.weights["model"])
    grid = AppGrid(app_of())
    with pytest.raises(ConfigError, match=rf"{line.split('=')[0]}=.* under Flower's own start"):
        FlowersStrategy.start(strategy, grid, arrays)
    assert not grid.heard


def test_arrays_that_somebody_has_changed_are_refused() -> None:
    strategy = strategy_of("fedavg")
    grid, config = AppGrid(app_of()), ConfigRecord()
    arrays = ArrayRecord(strategy._job.strategy.weights["model"])
    replies = grid.send_and_receive(strategy.configure_train(1, arrays, config, grid))
    strategy.aggregate_train(1, replies)
    with pytest.raises(RunFailed, match=r"strategy around fedhet's .*changed"):
        strategy.configure_train(2, arrays, config, grid)


def test_an_app_of_other_messages_says_what_it_needs() -> None:
    reply = answered(RecordDict(), AppGrid(app_of(), 1).contexts[70], app_of())
    assert "start a fedhet.flower.Strategy" in str(reply.error.reason)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({}, "has no settings of a run"),
        ({"fedhet.settings": ["method=fedavg"]}, "has no settings of a run"),
        ({"fedhet.settings": "a" * (10**6 + 1)}, "have 1000001 characters; at most"),
        ({"fedhet.settings": "method=fedavg"}, "settings cannot be read: Expecting value"),
    ],
)
def test_a_node_checks_the_settings_of_a_server(told: Any, reason: str) -> None:
    grid = AppGrid(app_of(), 1)
    records = {"fedhet.settings": ConfigRecord(told), "fedhet.asks": ConfigRecord()}
    (reply,) = grid.send_and_receive([Message(RecordDict(records), 70, "train")])
    assert reason in str(reply.error.reason)


# ---- a training loop of the owner's
def own_loop(model: nn.Module, data: TensorDataset, config: dict[str, Any]) -> dict[str, float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    criterion, total = nn.CrossEntropyLoss(), 0.0
    for x, y in DataLoader(data, batch_size=config["batch-size"], shuffle=True):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return {"train_loss": total, "factor": config.get("factor", 0)}


WITH_OWN_LOOP = [
    ("fednorm", []),
    ("fedsa", []),
    ("fedavg", ["server_opt=fedadam"]),
    ("fedavg", ["merge=median"]),
    ("fedbabu", []),
    ("fedbn", []),
    ("fedavg", ["privacy.noise=1", "eval.clients=false"]),
]


@pytest.mark.parametrize(("method", "lines"), WITH_OWN_LOOP)
def test_a_loop_of_the_owner_is_what_trains(method: str, lines: list[str]) -> None:
    task = of_server()
    strategy = strategy_of(method, *lines, task=task)
    start = ArrayRecord(strategy._job.strategy.sent("model"))
    config = ConfigRecord({"factor": 3})
    result = strategy.start(AppGrid(app_of(loop=own_loop)), train_config=config)
    assert sha256(result.arrays) != sha256(start)
    if "privacy.noise=1" not in lines:
        assert result.train_metrics_clientapp[2]["factor"] == 3
    if method == "fednorm":
        assert "fednorm.weight_max" in strategy.history[-1]


def test_the_record_says_that_another_loop_has_trained(tmp_path: Path) -> None:
    """Also where the server's task has all data, so that it need not ask the nodes for sizes."""
    for name, task in (("sizes", of_server()), ("data", toy_task(4))):
        strategy = strategy_of("fedavg", task=task)
        strategy.start(AppGrid(app_of(loop=own_loop)), num_rounds=1, run_dir=tmp_path / name)
        environment = json.loads((tmp_path / name / "environment.json").read_text())
        assert environment["own_loop"] and not environment["bit_exact"]
        card = (tmp_path / name / "model_card.md").read_text()
        assert "trained by a loop of the app's owner" in card
        (row,) = map(json.loads, (tmp_path / name / "rounds.jsonl").read_text().splitlines())
        assert row["metrics"]["train_loss"] > 0


def test_the_mean_is_that_of_what_the_loops_return() -> None:
    """Each client adds its number to every weight."""

    def add(model: nn.Module, data: TensorDataset, config: dict[str, Any]) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p += len(data)

    strategy = strategy_of("fedavg")
    before = strategy._job.strategy.weights["model"]
    after = strategy.start(AppGrid(app_of(loop=add)), num_rounds=1).arrays.to_torch_state_dict()
    n = torch.tensor([float(size) for size in toy_task(4).sizes])
    mean = float((n * n).sum() / n.sum())
    for name, t in before.items():
        torch.testing.assert_close(after[name], t + mean)


@pytest.mark.parametrize(
    ("method", "plugins", "lines", "reason"),
    [
        (
            "scaffold",
            [],
            [],
            "method=scaffold refuses .*training loop .*your own: .*relies .*plain SGD",
        ),
        ("fednova", [], [], "method=fednova refuses .*: .*relies .*local steps .*SGD"),
        ("fedprox", [], [], "plugin 'fedprox' refuses .*: .*adds .*fedhet's local steps"),
        ("fedsgd", [], [], "method=fedsgd refuses .*: .*clients .*local steps"),
        ("fedgen", [], [], "method=fedgen refuses .*: .*adds .*fedhet's local steps"),
        ("feddyn", [], [], "training loop .*your own.*term .*kind"),
        ("fedavg", ["fednorm"], ["plugin.fednorm.z_when=last_epoch"], "term .*kind 'loss'"),
        ("fedrep", [], [], "training loop .*your own.*names="),
    ],
)
def test_methods_that_need_our_steps_refuse_it(
    method: str, plugins: list[str], lines: list[str], reason: str
) -> None:
    strategy = strategy_of(method, *lines, plugins=plugins)
    with pytest.raises(RunFailed, match=reason):
        strategy.start(AppGrid(app_of(loop=own_loop)))


def test_a_loop_returns_numbers() -> None:
    returned: list[Any] = [0.5]

    def loop(model: nn.Module, data: TensorDataset, config: dict[str, Any]) -> Any:
        return returned[0]

    result = strategy_of("fedavg").start(AppGrid(app_of(loop=loop)))
    assert result.train_metrics_clientapp[1]["train_loss"] == 0.5
    returned[0] = "much"
    with pytest.raises(RunFailed, match=r"training loop .*str; .*numbers"):
        strategy_of("fedavg").start(AppGrid(app_of(loop=loop)))


@pytest.mark.parametrize("flowers", [False, True])
def test_nodes_may_evaluate_by_a_function_of_the_owner(flowers: bool) -> None:
    """It gets Flower's messages, under Flower's own start too."""
    app = ClientApp()
    seen: list[str] = []

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        return fedhet.flower.train(msg, context, own_data)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        seen.append(sha256(msg.content.array_records["arrays"]))
        pid = context.node_config["partition-id"]
        assert msg.content.config_records["config"]["own"] == 7
        content = {"metrics": MetricRecord({"score": float(pid), "num-examples": int(pid)})}
        return Message(RecordDict(content), reply_to=msg)

    strategy = strategy_of("fedavg", fraction_evaluate=1.0)
    arrays = ArrayRecord(strategy._job.strategy.weights["model"])
    start = partial(FlowersStrategy.start, strategy) if flowers else strategy.start
    config = ConfigRecord({"own": 7})
    result = start(AppGrid(app), arrays, num_rounds=2, evaluate_config=config)
    assert seen[4:] == [sha256(result.arrays)] * 4 and len(seen) == 8
    score = (0 + 1 + 4 + 9) / 6
    for number in (1, 2):
        assert result.evaluate_metrics_clientapp[number]["score"] == pytest.approx(score)
    if not flowers:
        row = strategy.history[-1]
        assert row["metrics"]["evaluate.score"] == pytest.approx(score)


def test_an_evaluation_of_the_owner_has_a_deadline() -> None:
    grid = AppGrid(app_of())
    asked: list[float | None] = []

    def never(messages: Any, *, timeout: float | None = None) -> list[Message]:
        asked.append(timeout)
        return []

    grid.send_and_receive = never  # type: ignore[method-assign]
    result = strategy_of("fedavg", fraction_evaluate=1.0).start(grid, num_rounds=1, timeout=7)
    assert asked == [7] and not result.evaluate_metrics_clientapp


def test_a_run_that_a_failure_ends_says_what_goes_on() -> None:
    grid = AppGrid(app_of())
    grid.silent = {1}
    with pytest.raises(RunFailed, match=r"client 1 failed .*on_failure=skip continues "):
        strategy_of("fedavg", "replies.grace=0").start(grid, num_rounds=1, timeout=0.2)


def test_a_loop_may_move_the_model() -> None:
    """Which replaces its buffers. FedNorm computes its latents with those of before."""

    def norm(task: Task) -> Task:
        return replace(task, model=lambda: ToyModel(norm=True))

    def recorded(passes: bool) -> float:
        def loop(model: nn.Module, data: TensorDataset, config: dict[str, Any]) -> None:
            if passes:  # which changes the statistics of batch norm
                model(data.tensors[0])
            model.double().float()

        app = app_of(lambda context: norm(own_data(context)), loop)
        strategy = strategy_of(
            "fednorm", "plugin.fednorm.z_when=before_training", task=norm(of_server())
        )
        strategy.start(AppGrid(app), num_rounds=1)
        return float(strategy.history[0]["fednorm.weight_max"])

    assert recorded(passes=True) == recorded(passes=False)


def test_a_loop_is_refused_by_words_that_there_are() -> None:
    assert {*owner.NEEDS, *owner.BREAKS} <= WORDS.keys()

"""docs/flower.md is a whole Flower app, whose weights are those of fedhet.run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.runs import rows
from contracts.test_flower_server import Node
from flwr.common import Context, RecordDict
from flwr.server import Server
from flwr.server.client_manager import SimpleClientManager
from flwr.server.history import History

import fedhet.flower
from fedhet.core import trees
from fedhet.core.errors import ConfigError, DataError, RunFailed
from fedhet.core.strategy import FedStrategy
from fedhet.core.task import ClientData, Task
from fedhet.data.toy import ToyModel, toy_task
from fedhet.engines.flwr import SUPERLINK, _free_ports
from fedhet.engines.guard import TemporaryFolder

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "flower.md"
FILES = ("my_app/task.py", "my_app/server_app.py", "my_app/client_app.py", "pyproject.toml")
# What the page's reader does by hand: the weights of the method at the end of the run.
SAVING = """

def write(strategy):
    settle = strategy.settle

    def settling(*replies):
        settle(*replies)
        Path(PLACE).write_text(trees.sha256(strategy.weights))

    strategy.settle = settling
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """The files of the page in a folder."""
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name, content in zip(FILES, blocks, strict=True):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    (tmp_path / "my_app" / "__init__.py").touch()
    return tmp_path


def expected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The digest of the weights of fedhet.run on the page's task."""
    monkeypatch.syspath_prepend(folder)
    from my_app.task import SETTINGS, task  # type: ignore[import-not-found]

    lines = ["method=scaffold", "plugin=[fednorm]", *SETTINGS["overrides"]]
    run = fedhet.run([*lines, f"hydra.run.dir={folder / 'run'}"], task=task())
    return str(run.summary["weights_sha256"])


@pytest.mark.slow
def test_the_page_is_an_app_that_runs(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = app / "weights.txt"
    server = app / "my_app" / "server_app.py"
    saving = SAVING.replace("PLACE", repr(str(place)))
    head = "from pathlib import Path\n\nfrom fedhet.core import trees\n"
    text = server.read_text().replace("    rounds =", "    write(strategy)\n    rounds =")
    server.write_text(head + text.replace("def server_fn", f"{saving}\n\ndef server_fn"))
    whole = expected(app, monkeypatch)
    http, control = _free_ports()
    with TemporaryFolder("fedhet-flwr-") as home:
        (Path(home) / "config.toml").write_text(SUPERLINK)
        environment = {
            **os.environ,
            "FLWR_HOME": home,
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
            "FLWR_LOCAL_CONTROL_API_PORT": str(control),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PYTHONPATH": str(ROOT),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        command = re.search(r"```bash\nflwr (.*)\n```", PAGE.read_text())
        assert command
        flwr = f"{Path(sys.executable).parent / 'flwr'} {command[1]}"
        done = subprocess.run(
            flwr, shell=True, cwd=app, env=environment, capture_output=True, text=True, timeout=300
        )
        subprocess.run(["pkill", "-f", home], check=False)
    assert place.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    assert place.read_text() == whole


# ---- the two functions under Flower's own Server
class Lazily(Sequence[ClientData]):
    """The clients of a task, each of whom is read whenever it is accessed."""

    def __init__(self, task: Task) -> None:
        self.clients = task.clients
        self.sizes = task.sizes
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, pid: Any) -> Any:
        self.read.append(pid)
        return self.clients[pid]


class AppNode(Node):
    """A node with a client app, as Flower calls it: anew for each message."""

    def __init__(self, cid: str, client_fn: Any, **node_config: Any) -> None:
        super().__init__(cid, client_fn, 0, 1)
        self.context = Context(1, int(cid), node_config, RecordDict(), {})
        self.told: dict[str, Any] = {}  # in place of what the node would tell

    def _client(self, ins: Any) -> Any:
        return self._make(self.context)  # type: ignore[arg-type]

    def get_properties(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        res = self._client(ins).get_properties(ins)
        res.properties.update(self.told)
        return res


class Federation:
    """A method of fedhet in an app, under Flower's Server in this process.

    Args:
        chosen: the method, its plug-ins and settings.
        task: makes the task of a node.
        clients: how many nodes there are.
    """

    def __init__(self, chosen: dict[str, Any], task: Any, clients: int = 4) -> None:
        self.chosen = chosen
        self.nodes = SimpleClientManager()
        self.members = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flwr.client.ClientApp", lambda client_fn: client_fn)
            client_fn = fedhet.flower.client_app(**chosen, task=task)
        for pid in range(clients):
            node = AppNode(
                str(77 - pid), client_fn, **{"partition-id": pid, "num-partitions": clients}
            )
            self.members.append(node)
            self.nodes.register(node)

    def fit(self, task: Task, **how: Any) -> tuple[FedStrategy, History]:
        strategy = fedhet.flower.strategy(**self.chosen, task=task, **how)
        server = Server(client_manager=self.nodes, strategy=strategy)
        return strategy, server.fit(strategy.num_rounds, None)[0]


LINES = ["rounds=2", "client.lr=0.1", "client.epochs=1"]
FORMS = {
    "data": lambda task: task,
    "sizes": lambda task: replace(task, clients=task.sizes, sizes=[], test=None),
    "number": lambda task: replace(task, clients=len(task.sizes), sizes=[], test=None),
}


def own_data(context: Any) -> Task:
    whole = toy_task(4)
    own = whole.clients[context.node_config["partition-id"]]
    return replace(whole, clients=own, sizes=[], test=None)


@pytest.mark.parametrize(
    ("method", "plugins"),
    [("fedavg", []), ("scaffold", ["fednorm"]), ("fednova", []), ("fedprox", ["fedlex"])],
    ids=["fedavg", "scaffold+fednorm", "fednova", "fedprox+fedlex"],
)
def test_the_weights_under_flowers_own_server(
    method: str, plugins: list[str], launch: Callable[..., Any]
) -> None:
    """They are those of fedhet.run, whatever the server knows of the clients beforehand."""
    lines = [*LINES, "fraction=0.5"]
    chosen = [f"method={method}", *([f"plugin=[{','.join(plugins)}]"] if plugins else [])]
    run = launch(*chosen, *lines, task=toy_task(4))
    federation = Federation({"method": method, "plugins": plugins, "overrides": lines}, own_data)
    for form, server in FORMS.items():
        strategy, history = federation.fit(server(toy_task(4)))
        assert trees.sha256(strategy.weights) == run.summary["weights_sha256"], form
        assert bool(history.losses_centralized) == (form == "data")
        assert history.losses_distributed == [
            (row["round"], row["loss_clients_weighted"])
            for row in rows(run)
            if row.get("loss_clients_weighted") is not None
        ]


def test_a_node_reads_its_own_client_alone() -> None:
    """Where its task has all clients, too: once for each question and each message."""
    tasks: list[Lazily] = []

    def task(context: Any) -> Task:
        clients = Lazily(toy_task(4))
        tasks.append(clients)
        return replace(toy_task(4), clients=clients, sizes=clients.sizes)

    federation = Federation({"method": "fedavg", "overrides": LINES}, task)
    federation.fit(FORMS["number"](toy_task(4)))
    assert [len(clients.read) for clients in tasks] == [1] * 20  # in 2 rounds, 2 messages to each
    assert sorted(clients.read[0] for clients in tasks) == sorted([0, 1, 2, 3] * 5)


@pytest.mark.parametrize(
    ("told", "form", "message"),
    [
        (
            {"train": 10**6},
            "sizes",
            r"has 1000000 training samples, .* was told 24 before",
        ),
        ({"train": -1}, "number", r"'train': -1.*whole numbers from 0 to"),
        ({"val": 10**10}, "number", r"'val': 10000000000.*whole numbers from 0 to"),
        ({"test": "3"}, "number", r"'test': '3'.*whole numbers from 0 to"),
        ({"train": True}, "number", r"'train': True.*whole numbers from 0 to"),
        ({"num-partitions": 5}, "number", r"num-partitions=5, and the server's Task 4 clients"),
    ],
)
def test_what_a_node_tells_is_checked(told: dict[str, Any], form: str, message: str) -> None:
    federation = Federation({"method": "fedavg", "overrides": LINES}, own_data)
    federation.members[-1].told = told  # of the node that is asked first
    with pytest.raises(RunFailed, match=message):
        federation.fit(FORMS[form](toy_task(4)))


def test_clients_whose_node_has_not_joined_are_not_drawn(launch: Callable[..., Any]) -> None:
    """Of the others the weights are the same as if the missing one had no samples."""
    lines = [*LINES, "replies.min_nodes=3", "replies.join=0"]
    federation = Federation({"method": "fedavg", "overrides": lines}, own_data)
    federation.nodes.unregister(federation.members.pop())
    steps: list[Any] = []
    strategy, _ = federation.fit(
        FORMS["number"](toy_task(4)), at_end=lambda weights, history: steps.extend(history)
    )
    assert [sorted(row["cohort"]) for row in steps] == [[0, 1, 2]] * 2
    assert strategy.sizes[3] == 0 and all(strategy.sizes[:3])


def test_weights_and_history_reach_the_caller(launch: Callable[..., Any], tmp_path: Path) -> None:
    """Once, when the last round is over: a state dict in plain torch, and the lines of a run."""
    task = replace(toy_task(4), model=lambda: ToyModel(norm=True))
    ends: list[tuple[Any, Any]] = []

    def save(weights: Any, history: Any) -> None:
        torch.save(weights, tmp_path / "model.pt")
        ends.append((weights, history))

    chosen = {"method": "fedavg", "plugins": ["fednorm"], "overrides": LINES}
    run = launch("method=fedavg", "plugin=[fednorm]", *LINES, task=task)
    Federation(chosen, lambda context: task).fit(task, at_end=save)
    ((_, history),) = ends
    model = task.build()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert trees.sha256({"model": model.state_dict()}) == run.summary["weights_sha256"]

    def same(steps: Any) -> list[Any]:
        """Without the metrics, in which a simulation alone tells how many steps were taken."""
        return [{key: row[key] for key in row.keys() - {"seconds", "metrics"}} for row in steps]

    assert same(json.loads(json.dumps(history))) == same(rows(run))


def test_without_a_global_model_it_is_what_clients_share() -> None:
    task = replace(toy_task(4), model=lambda: ToyModel(norm=True))
    ends: list[Any] = []
    federation = Federation({"method": "fedbn", "overrides": LINES}, lambda context: task)
    strategy, _ = federation.fit(task, at_end=lambda weights, history: ends.append(weights))
    assert list(ends[0]) == list(strategy.sent("model")) != list(task.build().state_dict())


def test_an_error_at_the_end_ends_the_run() -> None:
    def fail(weights: Any, history: Any) -> None:
        raise OSError("the disk is full")

    federation = Federation({"method": "fedavg", "overrides": LINES}, own_data)
    with pytest.raises(OSError, match="the disk is full"):
        federation.fit(FORMS["sizes"](toy_task(4)), at_end=fail)


@pytest.mark.parametrize(
    ("node_config", "found"),
    [
        ({}, "without 'partition-id'"),
        ({"partition-id": 1}, "without 'num-partitions'"),
        ({"partition-id": "a", "num-partitions": 3}, "with partition-id='a' and num-partitions=3"),
        ({"partition-id": 0.5, "num-partitions": 3}, "with partition-id=0.5 and"),
        ({"partition-id": 3, "num-partitions": 3}, "with partition-id=3 and num-partitions=3"),
    ],
)
def test_a_node_without_its_number(node_config: dict[str, Any], found: str) -> None:
    federation = Federation({"method": "fedavg", "overrides": LINES}, own_data, 1)
    federation.members[0].context.node_config = node_config
    asked = "give it --node-config 'partition-id=0 num-partitions=3' with its own number"
    with pytest.raises(ConfigError, match=f"this SuperNode was started {found}.*; {asked}"):
        federation.members[0].get_properties(None, None, None)


# ---- what is refused beforehand
def sizes_alone(**changes: Any) -> Task:
    return replace(toy_task(4), clients=4, sizes=[], test=None, **changes)


def test_a_simulation_needs_the_data(launch: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match="client 0 are on its own node, not in this process"):
        launch("method=fedavg", *LINES, task=sizes_alone())
    with pytest.raises(ConfigError, match=r"clients is the data of one node's client"):
        launch("method=fedavg", *LINES, task=replace(toy_task(4), clients=toy_task().clients[0]))


def test_what_needs_an_input_says_so() -> None:
    needed = r"plugin 'feddisk' needs to know what a sample is like.*example="
    with pytest.raises(ConfigError, match=needed):
        fedhet.flower.strategy("feddisk", sizes_alone())
    example = toy_task().test.x[:1]  # type: ignore[union-attr]
    fedhet.flower.strategy("feddisk", sizes_alone(example=example))


def test_a_merge_that_bounds_needs_sizes() -> None:
    with pytest.raises(ConfigError, match=r"merge=krum with the number of clients alone"):
        fedhet.flower.strategy("fedavg", sizes_alone(), overrides=["merge=krum"])


@pytest.mark.parametrize(
    ("clients", "error"),
    [(0, "Task.clients=0"), ([3, -1], "Task.clients=-1"), ([0, 0], "none has a training sample")],
)
def test_impossible_sizes(clients: Any, error: str) -> None:
    with pytest.raises((ConfigError, DataError), match=error):
        replace(toy_task(4), clients=clients, sizes=[])


def test_settings_of_data_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dataset=mnist with a Task"):
        fedhet.flower.strategy("fedavg", toy_task(4), overrides=["dataset=mnist"])

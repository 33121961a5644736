"""docs/flower.md changes an app in the classic API; its weights are those of fedhet.run."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contracts.runs import rows
from contracts.test_flower_server import Node
from flwr.common import Context, RecordDict
from flwr.server import Server
from flwr.server.client_manager import SimpleClientManager
from flwr.server.history import History
from packaging.requirements import Requirement
from ports import free_ports

import fedhet.flower
from fedhet.core import trees
from fedhet.core.errors import ConfigError, DataError, RunFailed
from fedhet.core.server.strategy import FedStrategy
from fedhet.core.task import ClientData, Task
from fedhet.data.toy import ToyModel, toy_task
from fedhet.engines.flwr import SUPERLINK
from fedhet.runs.flower_commands import flower_environment
from fedhet.runs.guard import TemporaryFolder

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flower.md").read_text().partition("\n## The classic API\n")[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
FILES = ("my_app/task.py", "my_app/server_app.py", "my_app/client_app.py", "config.toml")
# What an owner's app has before: a model and pyproject.toml; and what makes the nodes' files.
APP = Path(__file__).with_name("classic_app")
BEFORE = {"my_app/model.py": "model.py", "pyproject.toml": "pyproject.toml", "make.py": "make.py"}


# ---- the page, word for word but for the path of fedhet and the ports
@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels in the place of a package index, for a machine without network.

    Those of what fedhet needs are empty, so that the packages of this environment are imported; but
    hatchling, which builds fedhet, and what it needs are whole.
    """
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("index")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        name = re.split(r"[<>=]", requirement)[0]
        version = metadata.version(name)
        about = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(folder / f"{about}-py3-none-any.whl", "w") as wheel:
            for file, text in (
                ("METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"),
                ("WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
                ("RECORD", ""),
            ):
                wheel.writestr(f"{about}.dist-info/{file}", text)
    whole = ["hatchling"]
    for name in whole:  # which grows
        builder = metadata.distribution(name)
        needed = [Requirement(line) for line in builder.requires or ()]
        active = [one.name for one in needed if one.marker is None or one.marker.evaluate()]
        whole += [one for one in active if one not in whole]
        about = f"{name.replace('-', '_')}-{builder.version}"
        with zipfile.ZipFile(folder / f"{about}-py3-none-any.whl", "w") as wheel:
            for path in builder.files or ():
                if path.suffix != ".pyc" and ".." not in path.parts:
                    wheel.write(str(path.locate()), str(path))
    return folder


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What fedhet is built from, to which a build adds files."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("fedhet", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


class App:
    """The files and commands of the page in a folder, and a home and ports of Flower for them."""

    def __init__(self, folder: Path, home: TemporaryFolder, clone: Path) -> None:
        self.folder = folder
        self.log = folder / "log.txt"
        server, *nodes, http, control = free_ports(6)
        ports = {"127.0.0.1:8000": f"127.0.0.1:{server}", "$((9094 + node))": "${ports[node]}"}
        ports["superlink --insecure"] = f"superlink --insecure --port {server}"
        self.replaced = {"/path/to/fedhet": str(clone), **ports}
        self.ports = f"ports=({' '.join(map(str, nodes))}); "
        self.server = server
        files = [text for kind, text in BLOCKS if kind in ("python", "toml")]
        texts = {name: (APP / file).read_text() for name, file in BEFORE.items()}
        for name, text in {**texts, **dict(zip(FILES, files, strict=True))}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(self._here(text))
        (Path(home.name) / "config.toml").write_text(SUPERLINK + (folder / FILES[-1]).read_text())
        self.environment = {
            **os.environ,
            **home.environment,
            **flower_environment(Path(home.name)),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
            "FLWR_LOCAL_CONTROL_API_PORT": str(control),
        }

    def offline(self, index: Path) -> None:
        """Take packages from a folder alone, and what the page has installed as it is here."""
        self.environment |= {
            "UV_FIND_LINKS": str(index),
            "UV_NO_INDEX": "1",
            "UV_OFFLINE": "1",
            "UV_CACHE_DIR": str(self.folder / "cache"),
            "PYTHONPATH": str(ROOT),
        }

    def installed(self) -> None:
        """Install in an empty environment what the page says, from the package index.

        It lies outside of the app's folder, because Flower refuses an app with folders so deep.
        """
        environment = self.folder.with_name(f"{self.folder.name}-env")
        venv.create(environment, with_pip=True)
        programs = [str(environment / "bin"), self.environment["PATH"]]
        self.environment["PATH"] = os.pathsep.join(programs)
        self.environment.pop("PYTHONPATH", None)
        assert self.start('pip install /path/to/fedhet "flwr[').wait() == 0, self.log.read_text()

    def _here(self, text: str) -> str:
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return text

    def start(self, begin: str) -> subprocess.Popen[bytes]:
        """Start the page's command that begins so."""
        ((_, command),) = [one for one in BLOCKS if one[0] == "bash" and one[1].startswith(begin)]
        line = ["bash", "-c", self.ports + self._here(command)]
        with self.log.open("a") as log:
            return subprocess.Popen(
                line, cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )

    def python(self, file: str) -> None:
        """Execute a file of the app."""
        command = ["python", file]
        subprocess.run(command, cwd=self.folder, env=self.environment, check=True, timeout=120)

    def check(self, nodes: list[dict[str, Any]]) -> None:
        """The saved model is that of `fedhet.run`, and fits the page's class; so is the history."""
        output = self.log.read_text()
        assert "App dependencies installed successfully" in output, output[-9000:]
        assert (self.folder / "model.pt").exists(), output[-9000:]
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(self.folder)
            patch.delitem(sys.modules, "my_app.model", raising=False)
            patch.delitem(sys.modules, "my_app", raising=False)
            page = runpy.run_path(str(self.folder / "my_app" / "task.py"))
        clients = [page["own_data"](SimpleNamespace(node_config=node)) for node in nodes]
        chosen = page["METHOD"]
        lines = [f"method={chosen['method']}", f"plugin=[{','.join(chosen['plugins'])}]"]
        lines += [*chosen["overrides"], f"hydra.run.dir={self.folder / 'run'}"]
        run = fedhet.run(lines, task=page["task"](clients))
        weights = torch.load(self.folder / "model.pt", weights_only=True)
        page["Net"]().load_state_dict(weights)
        assert trees.sha256({"model": weights}) == trees.sha256({"model": run.weights})
        history = json.loads((self.folder / "history.json").read_text())
        assert [row["weights_sha256"] for row in history] == [
            row["weights_sha256"] for row in rows(run)
        ]


def until_open(port: int) -> None:
    """Wait until a process listens."""
    for _ in range(600):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)


@pytest.fixture
def app(tmp_path: Path, clone: Path) -> Iterator[App]:
    home = TemporaryFolder("fedhet-flwr-")
    yield App(tmp_path, home, clone)
    home.end_processes()
    home.cleanup()


@pytest.mark.parametrize(
    "packages",
    [
        pytest.param("offline", marks=pytest.mark.slow),
        pytest.param("installed", marks=[pytest.mark.matrix, pytest.mark.timeout(1800)]),
    ],
)
def test_the_page_in_simulation(app: App, index: Path, packages: str) -> None:
    """Offline, and in an empty environment, which `make test-installed` tries alone."""
    app.offline(index) if packages == "offline" else app.installed()
    app.start("flwr run . local").wait(timeout=400)
    app.check([{"partition-id": pid, "num-partitions": 4} for pid in range(4)])


@pytest.mark.slow
@pytest.mark.deployment
def test_the_page_on_nodes_with_data_of_their_own(app: App, index: Path) -> None:
    app.offline(index)
    app.python("make.py")
    app.start("flower-superlink")
    app.start("for node in")
    until_open(app.server)
    app.start("flwr run . trial").wait(timeout=500)
    app.check([{"data": app.folder / f"node-{node}.npz"} for node in range(3)])


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
            r"1000000 training samples; .*before, 24",
        ),
        ({"train": -1}, "number", r"'train': -1.*whole numbers .*0 "),
        ({"val": 10**10}, "number", r"'val': 10000000000.*whole numbers .*0 "),
        ({"test": "3"}, "number", r"'test': '3'.*whole numbers .*0 "),
        ({"train": True}, "number", r"'train': True.*whole numbers .*0 "),
        ({"num-partitions": 5}, "number", r"num-partitions=5, .*server's Task has 4 clients"),
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

    def partly_frozen() -> ToyModel:
        model = ToyModel(norm=True)
        model.body[0].requires_grad_(False)  # does not travel, and belongs to the state dict
        return model

    task = replace(toy_task(4), model=partly_frozen)
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
    with pytest.raises(OSError, match=r"disk is full"):
        federation.fit(FORMS["sizes"](toy_task(4)), at_end=fail)


@pytest.mark.parametrize(
    ("node_config", "found"),
    [
        ({}, "'partition-id'"),
        ({"partition-id": 1}, "'num-partitions'"),
        ({"partition-id": "a", "num-partitions": 3}, "partition-id='a' .*num-partitions=3"),
        ({"partition-id": 0.5, "num-partitions": 3}, "partition-id=0.5 "),
        ({"partition-id": 3, "num-partitions": 3}, "partition-id=3 .*num-partitions=3"),
    ],
)
def test_a_node_without_its_number(node_config: dict[str, Any], found: str) -> None:
    federation = Federation({"method": "fedavg", "overrides": LINES}, own_data, 1)
    federation.members[0].context.node_config = node_config
    asked = "--node-config 'partition-id=0 num-partitions=3'.*own number"
    with pytest.raises(RunFailed, match=f"SuperNode .*started .*{found}.*; .*{asked}"):
        federation.fit(FORMS["number"](toy_task(4)))


# ---- what is refused beforehand
def sizes_alone(**changes: Any) -> Task:
    return replace(toy_task(4), clients=4, sizes=[], test=None, **changes)


def test_a_simulation_needs_the_data(launch: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match=r"client 0 .*own node, .*process"):
        launch("method=fedavg", *LINES, task=sizes_alone())
    with pytest.raises(ConfigError, match=r"clients is .*single ClientData"):
        launch("method=fedavg", *LINES, task=replace(toy_task(4), clients=toy_task().clients[0]))


def test_what_needs_an_input_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """And nothing is said about sizes that are unknown."""
    needed = r"plugin 'feddisk' .*shape .*type.*example="
    with pytest.raises(ConfigError, match=needed):
        fedhet.flower.strategy("feddisk", sizes_alone())
    example = toy_task().test.x[:1]  # type: ignore[union-attr]
    fedhet.flower.strategy("feddisk", sizes_alone(example=example))
    assert "feddisk" not in caplog.text


def test_a_merge_that_bounds_needs_sizes() -> None:
    with pytest.raises(ConfigError, match=r"merge=krum .*number .*clients alone"):
        fedhet.flower.strategy("fedavg", sizes_alone(), overrides=["merge=krum"])


@pytest.mark.parametrize(
    ("clients", "error"),
    [(0, "Task.clients=0"), ([3, -1], "Task.clients=-1"), ([0, 0], "none .*training sample")],
)
def test_impossible_sizes(clients: Any, error: str) -> None:
    with pytest.raises((ConfigError, DataError), match=error):
        replace(toy_task(4), clients=clients, sizes=[])


def test_settings_of_data_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dataset=mnist .*Task"):
        fedhet.flower.strategy("fedavg", toy_task(4), overrides=["dataset=mnist"])

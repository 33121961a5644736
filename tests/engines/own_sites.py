"""Sites with data of their own, and how they join a run, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import answered
from composing import composed
from flwr.app import ConfigRecord, Context, Message, RecordDict
from sklearn.datasets import load_digits

import fedhet
from fedhet.core.client.client import DELIVER
from fedhet.core.errors import RunFailed
from fedhet.core.groups import ReplyLimits
from fedhet.core.messages import Broadcast, Extras, Failure, Reply
from fedhet.core.server.loop import Clock
from fedhet.data.local.description import Agreement
from fedhet.flower import wire
from fedhet.flower.apps import answer, client_for
from fedhet.flower.packing import RecordPacker
from fedhet.flower.sites import SiteNodes
from fedhet.flower.transport import ASKS, read_answer, read_message, settings_records
from fedhet.runs.job import Job, begin
from fedhet.runs.local_data import LocalData, declaration
from fedhet.runs.stores import MemoryStore

RUN = [
    "dataset=local",
    "dataset.sites=[a,b,c]",
    "dataset.classes=10",
    "dataset.shape=[64]",
    "method=scaffold",
    "rounds=2",
    "client.epochs=1",
    "client.lr=.05",
    "figures=false",
]
CUTS = {"a": (0, 100), "b": (100, 250), "c": (250, 300)}


def write_sites(folder: Path) -> Path:
    """A file for each site."""
    x, y = load_digits(return_X_y=True)
    for site, (start, end) in CUTS.items():
        np.savez(folder / f"{site}.npz", x_train=x[start:end], y_train=y[start:end])
    return folder


class Node:
    """A SuperNode, by its id in Flower."""

    def __init__(
        self, folder: Path, node_id: int, overrides: list[str], **node_config: Any
    ) -> None:
        self.cid = str(node_id)
        node = {key.replace("_", "-"): value for key, value in node_config.items()}
        self.context = Context(1, node_id, node, RecordDict(), {})
        self.run = tuple(overrides)  # that its messages are of
        self.store = MemoryStore()
        self.told: dict[str, Any] | None = None  # what it says of itself, if that is known
        self.alter: Callable[[dict[str, Any]], Any] = lambda properties: properties

    def answer(self, content: RecordDict) -> Message:
        """Its reply to a message, by a new client for each, as Flower has it."""

        def app(message: Message, context: Context) -> Message:
            return answer(message, context, lambda: client_for(message, context, self.store))

        content.config_records.update(settings_records(composed(*self.run)))
        return answered(content, self.context, app)

    def who(self) -> Any:
        """What it says of itself, or why it cannot serve the run."""
        return read_answer(self.answer(RecordDict({ASKS: ConfigRecord()})))

    @property
    def problem(self) -> str:
        """Why it cannot serve the run; "" if it can."""
        who = self.who()
        return who if isinstance(who, str) else ""

    def serve(self, msg: Broadcast, agreed: Any = None) -> Reply:
        """Its reply to a message of the run."""
        content = RecordPacker()(*wire.MessagePacker(agreed)(msg))
        return read_message(msg, self.context.node_id, self.answer(content), 2**20)

    def tell(self) -> Any:
        """Who it is."""
        return self.alter(self.who() if self.told is None else self.told)


class Joined:
    """The nodes that are connected, by id."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}

    def ids(self) -> set[str]:
        return set(self.nodes)

    def ask(self, ids: Collection[str], seconds: float) -> Iterator[tuple[str, Any]]:
        for cid in ids:
            yield cid, self.nodes[cid].tell()


class Deployment:
    """Nodes of the sites a, b and c, and the server's view of them."""

    def __init__(self, folder: Path, *overrides: str, sites: str = "abc", **limits: Any) -> None:
        self.folder = folder
        self.overrides = [*RUN, *overrides]
        self.cfg = composed(*self.overrides).cfg
        self.members = Joined()
        self._limits = ReplyLimits(**{"join": 0.0, **limits})
        self.forget()
        for number, site in enumerate(sites, 1):
            self.join(site, number)

    def join(self, site: str, number: int, **node_config: Any) -> Node:
        given = {
            "site": site,
            "data": str(self.folder / f"{site}.npz"),
            "min_test": 0,
            **node_config,
        }
        node = Node(self.folder, number, self.overrides, **given)
        self.members.nodes[node.cid] = node
        return node

    def forget(self) -> None:
        """As if none of the nodes had joined yet."""
        self.nodes = SiteNodes(self._limits, declaration(self.cfg)[0])

    def agree(self) -> Agreement:
        self.nodes.join(self.members)
        return self.nodes.agreed_on

    def host(self, pid: int) -> Any:
        """The node that hosts the client, or None."""
        return self.members.nodes.get(self.nodes.hosts([pid], self.members)[pid] or "")

    def refusal(self) -> str:
        with pytest.raises(RunFailed) as refused:
            self.agree()
        return refused.value.reason


def telling(change: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What makes a node tell something else of its data: its `alter`."""

    def alter(properties: dict[str, Any]) -> dict[str, Any]:
        return {
            **properties,
            "description": json.dumps(json.loads(properties["description"]) | change),
        }

    return alter


class Sites:
    """A run on the sites a, b and c, whose messages are served by real clients of their nodes.

    Attributes:
        away: the clients whose nodes do not answer a delivery.
        models: the folder of each site, by client.
        added: extras that hostile clients add to their replies to a delivery.
        served: every message that was served, and its reply.
    """

    store = None

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        self.deployment = Deployment(write_sites(folder), *overrides)
        agreed = self.deployment.agree()
        settings = composed(*self.deployment.overrides)
        settings = replace(settings, run_dir=str(folder / "run"), run_dir_given=True)
        self.job = Job(settings, engine="flwr", local=LocalData.agreed_on(settings.cfg, agreed))
        self.away: set[int] = set()
        self.models = {pid: folder / f"models-{pid}" for pid in range(3)}
        self.added: dict[int, Extras] = {}
        self.served: list[tuple[Broadcast, Reply]] = []
        self._monkeypatch = monkeypatch

    def serve(self, msg: Broadcast) -> Reply:
        node: Any = self.deployment.host(msg.pid)
        self._monkeypatch.setenv("FEDHET_MODEL_DIR", str(self.models[msg.pid]))
        self.served.append((msg, node.serve(msg, self.deployment.nodes.agreed)))
        return self.served[-1][1]

    def exchange(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        with clock("broadcast"), clock("clients"), clock("upload"):
            pass
        for msg in plan:
            if DELIVER in msg.extras and msg.pid in self.away:
                yield Failure(msg.pid, msg.phase, msg.step, "Node Unavailable", "no reply")
                continue
            reply = self.serve(msg)
            if DELIVER in msg.extras and msg.pid in self.added:
                reply.extras |= self.added[msg.pid]  # type: ignore[union-attr]
            yield reply

    def run(self) -> dict[str, Any]:
        """The run's summary."""
        begin(self.job).run(self)
        return dict(json.loads((self.job.run_dir / "summary.json").read_text()))

    def home(self, pid: int) -> Path:
        return self.models[pid] / self.job.strategy.run_id / str(pid)


def simulated(folder: Path, *overrides: str) -> Any:
    files = "dataset.files={a:a.npz,b:b.npz,c:c.npz}"
    lines = [*RUN, files, f"data_dir={folder}", *overrides]
    return fedhet.run([*lines, f"hydra.run.dir={folder / 'expected'}"])

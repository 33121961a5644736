"""A federation in one process, which a test advances step by step.

The test uses the classes directly: there is no configuration, no engine and no run folder.

    from fedhet.methods.fedavg import FedAvg
    from fedhet.methods.fednorm import FedNormPlugin
    from fedhet.testing import Federation, toy_task

    def test_fednorm_changes_the_weights_of_the_mean():
        plain = Federation(toy_task(), FedAvg, rounds=2)
        fednorm = Federation(toy_task(), FedAvg, plugins=[FedNormPlugin()], rounds=2)
        plan = plain.step()  # one step; returns the messages that the clients got
        assert [msg.pid for msg in plan] == [3, 2, 1, 0]
        assert set(plain.model) == set(plan[0].weights)
        plain.run()  # the remaining steps
        assert fednorm.run().sha256 != plain.sha256
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fedhet.core import trees
from fedhet.core.client.client import FedClient
from fedhet.core.groups import OFF, Evaluation, Noise
from fedhet.core.kernel import Method, Plugin
from fedhet.core.messages import Broadcast, LocalSettings, Reply
from fedhet.core.server.loop import Loop
from fedhet.core.server.phases import OpenStep, locate
from fedhet.core.server.run_setup import RunSetup
from fedhet.core.server.strategy import FedStrategy
from fedhet.core.task import Task
from fedhet.core.workspace import Workspace
from fedhet.runs.privacy.account import Account, release
from fedhet.runs.stores import MemoryStore

Plugins = Sequence[Plugin] | Callable[[], Sequence[Plugin]]
Alter = Callable[[list[Broadcast], list[Reply]], Iterable[Reply]]


def _plugins(cls: type[Method], given: Plugins | None) -> list[Plugin]:
    """Return the given plug-ins, or by default the plug-in that the method requires."""
    if given is None:
        return [cls.requires()] if cls.requires else []
    made = given() if callable(given) else given
    if not isinstance(made, Sequence) or not all(isinstance(one, Plugin) for one in made):
        raise TypeError(f"plugins={made!r}: expected a list such as [FedNormPlugin(temperature=1)]")
    return list(made)


class Federation:
    """A method's strategy and its clients in one process.

    Args:
        task: the model, the criterion and the clients' data; `fedhet.data.toy.toy_task()` is the
            smallest.
        cls: the method.
        plugins: the plug-ins, or a function that makes them; by default the plug-in that a preset
            such as FedNorm requires.
        seed: the run's seed.
        buffers: how buffers are treated: "average", "local" or "frozen".
        noise: the noise on the clients' replies (privacy.noise).
        min_count: clients send no statistic of fewer samples.
        evaluation: when and what the run evaluates.
        workspace: further arguments of `fedhet.core.workspace.Workspace`, such as `limits`.
        options: the method's own options, such as {"lr_g": 0.5}.
        lr: the learning rate of the first round.
        epochs: the number of local epochs.
        batch_size: the number of samples in a local batch.
        local: further LocalSettings, such as {"momentum": 0.9}.
        setup: further arguments of `fedhet.core.server.run_setup.RunSetup`: `rounds`, `fraction`,
            `on_failure`, `server_opt`, ...

    Attributes:
        workspace: the task, the model and the prepared data.
        strategy: the server half.
        account: counts the releases of noised replies.
        store: the clients' states; a test may replace it by another store.
        client: makes the client that serves one message.
        round: the number of steps so far.
    """

    def __init__(
        self,
        task: Task,
        cls: type[Method],
        *,
        plugins: Plugins | None = None,
        seed: int = 0,
        buffers: str = "average",
        noise: Noise = OFF,
        min_count: int = 0,
        evaluation: Evaluation = Evaluation(),
        workspace: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        lr: float = 0.1,
        epochs: int = 1,
        batch_size: int = 4,
        local: dict[str, Any] | None = None,
        **setup: Any,
    ) -> None:
        method = cls(**options or {})
        self.workspace = Workspace(
            task,
            device=torch.device("cpu"),
            seed=seed,
            buffers=buffers,
            scope=cls.scope,
            noise=noise,
            release=release,
            min_count=min_count,
            evaluation=evaluation,
            **workspace or {},
        )
        settings = LocalSettings(lr=lr, epochs=epochs, batch_size=batch_size, **local or {})
        built_with = RunSetup(self.workspace, settings, plugins=_plugins(cls, plugins), **setup)
        self.strategy = FedStrategy(built_with, method)
        self.account = Account(noise)
        self._loop = Loop(self.strategy, [self.account] if noise else [])
        self.store: Any = MemoryStore()
        self.client: Callable[[], FedClient] = lambda: FedClient(
            self.workspace, method, _plugins(cls, plugins), self.store
        )
        self.round = 0

    @property
    def current(self) -> OpenStep:
        """The step that began last, with its failures and its record."""
        return self._loop.current

    def plan(self) -> list[Broadcast]:
        """Begin the next step and return its messages."""
        self._loop.begin(self.strategy.plan(self.round + 1))
        return self.current.messages

    def finish_step(self, replies: Iterable[Reply]) -> None:
        """Aggregate the replies to the step that began last."""
        self.round += 1
        self.strategy.finish_step(self.current, replies, self._loop.accept)

    def step(self, alter: Alter | None = None) -> list[Broadcast]:
        """Take one step and return its messages.

        Args:
            alter: (the messages, the clients' replies) -> the replies that the server receives.
        """
        plan = self.plan()
        replies = [self.client().handle(msg) for msg in plan]
        self.finish_step(alter(plan, replies) if alter else replies)
        return plan

    def run(self, alter: Alter | None = None) -> Federation:
        """Take all remaining steps of the timetable."""
        while locate(self.strategy.timetable, self.round + 1):
            self.step(alter)
        return self

    @property
    def model(self) -> trees.Tree:
        """The global model's tensors."""
        return self.strategy.weights["model"]

    @property
    def sha256(self) -> str:
        """A hash of all weights that the server keeps, to compare runs bit for bit."""
        return trees.sha256(self.strategy.weights)

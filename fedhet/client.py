"""FedClient: the one adapter between Flower's NumPyClient and a method's client half. It trains as
training.py says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from flwr.client import NumPyClient
from torch import nn

from fedhet import messages
from fedhet.flower import wire
from fedhet.messages import Broadcast, Extras, Failure, Reply, Update
from fedhet.metrics import score
from fedhet.plugin import Plugin
from fedhet.site import Site
from fedhet.state import ClientState, Store
from fedhet.task import Samples
from fedhet.training import LocalTraining
from fedhet.trees import AnyTree

log = logging.getLogger("fedhet")
Done = TypeVar("Done")
KEPT = "client.kept"  # state: tensors that are trained here and never shared
STATE = "bytes.state"  # metric: the size of what the client now remembers
FINETUNE = "eval.finetune_epochs"


class FedClient(LocalTraining, NumPyClient):
    """Serves one message. Its defaults are FedAvg; a method overrides `start`, `losses`,
    `gradient`, ... or adds a phase.

    Attributes, set when a message has arrived: `pid`, `msg`, `local` (this step's settings),
    `state` (what the client remembers), `data` (its prepared training set), `model`, and after
    training `steps`, the optimiser steps taken."""

    state: ClientState
    data: Samples
    model: nn.Module
    steps: int

    def __init__(
        self,
        site: Site,
        plugins: Sequence[Plugin],
        store: Store,
        properties: dict[str, Any] | None = None,
    ) -> None:
        self.site, self.plugins, self.store = site, list(plugins), store
        self._properties = properties or {}
        for plugin in self.plugins:
            plugin.client = self

    # ---- Flower's side
    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return self._properties

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, Any]
    ) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        return wire.reply_arrays(self.handle(wire.read_broadcast(parameters, config)))

    def evaluate(
        self, parameters: list[np.ndarray], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        _, examples, metrics = wire.reply_arrays(
            self.assess(wire.read_broadcast(parameters, config))
        )
        return 0.0, examples, metrics

    # ---- one message
    def handle(self, msg: Broadcast) -> Reply:
        """Serve a phase. An exception becomes a Failure that says who, where and why; the state is
        then as before."""
        return self._guarded(msg, self._serve)

    def assess(self, msg: Broadcast) -> Reply:
        """Evaluate the views of the model on the client's own validation and test parts; nothing is
        changed."""
        return self._guarded(msg, self._assess)

    def _guarded(self, msg: Broadcast, work: Callable[[Broadcast], Update]) -> Reply:
        return self.guarded(msg, lambda: work(msg.on(self.site.device)))

    def guarded(self, msg: Broadcast, work: Callable[[], Done]) -> Done | Failure:
        """What the work returns, with the message's own random draws, or why it has failed."""
        try:
            with self.site.seeded("torch", msg.phase, msg.step, msg.pid):
                return work()
        except Exception as error:  # whatever it is, the server must learn which client it was
            log.debug("client %d", msg.pid, exc_info=True)
            return Failure(msg.pid, msg.phase, msg.step, f"{type(error).__name__}: {error}")

    def _arrive(self, msg: Broadcast) -> None:
        mine = {plugin.name: plugin.digest() for plugin in self.plugins}
        if msg.plugins != mine:
            raise ValueError(
                "server and client differ in their plug-ins or the plug-ins' settings:"
                f" {msg.plugins} there, {mine} here"
            )
        self.msg, self.pid, self.local = msg, msg.pid, msg.local
        self.state = ClientState(self.store, msg.pid, msg.version, self.site.device)
        self.steps = 0
        self._activate([])

    def _serve(self, msg: Broadcast) -> Update:
        task = self.open(msg)
        began = time.perf_counter()
        update = task(msg)
        return self.close(update, time.perf_counter() - began)

    def open(self, msg: Broadcast) -> Callable[[Broadcast], Update]:
        """What precedes the work of a phase. Returns the method that does it."""
        began = time.perf_counter()
        self._arrive(msg)
        piece, _, phase = msg.phase.rpartition(".")
        owner = next((p for p in self.plugins if p.name == piece), None) if piece else self
        task = getattr(owner, phase, None)
        if task is None:
            raise ValueError(
                f"phase {msg.phase!r} is not served here; the plug-ins are"
                f" {[p.name for p in self.plugins]}"
            )
        self._activate(self.plugins if msg.trains else [p for p in self.plugins if p is owner])
        self.data = self._train_data()
        for plugin in self.active:
            plugin.received(msg)
        self._opening = time.perf_counter() - began
        found: Callable[[Broadcast], Update] = task
        return found

    def close(self, update: Update, seconds: float) -> Update:
        """What follows the work, which took so many seconds."""
        began = time.perf_counter()
        for plugin in reversed(self.active):
            plugin.sending(update)
        messages.check_extras(update.extras, update.metrics)
        update.keeps = self.state.commit(self.msg.round)
        if update.keeps:
            update.metrics[STATE] = float(self.state.nbytes)
        update.metrics |= {
            "seconds.train": seconds,
            "seconds.extras": self._opening + time.perf_counter() - began,
        }
        return update

    def _activate(self, plugins: list[Plugin]) -> None:
        self.active = plugins
        self._hooks = self.overridden(plugins)

    def _train_data(self) -> Samples:
        changing = [p for p in self.active if type(p).data is not Plugin.data]
        if not changing:
            return self.site.train_data(self.pid)
        raw = self.site.floating(self.site.task.clients[self.pid].train)
        for plugin in changing:
            raw = plugin.data(raw)
        return Samples(self.site.transformed(raw.x), raw.y)

    # ---- what a method overrides
    def train(self, msg: Broadcast) -> Update:
        """The phase `train`: start, local epochs, reply."""
        self.model = self.site.load(self.start(msg))
        self.steps = self.train_model(self.model, self.data, epochs=self.local.epochs)
        return self.reply()

    def start(self, msg: Broadcast) -> AnyTree:
        """Where training starts: the received weights, and what this client keeps (or the common
        initial value)."""
        assert msg.weights is not None
        return (
            {**self._own(), **msg.weights}
            if len(msg.weights) < len(self.site.initial)
            else msg.weights
        )

    def _own(self) -> AnyTree:
        return {**self.site.initial, **(self.state.get(KEPT) or {})}

    def reply(self, extras: Extras | None = None) -> Update:
        """The update with the model as it now stands; what is never shared stays here."""
        if self.site.kept:
            self.state.put(KEPT, self.site.read(self.site.kept))
        return Update(self.pid, self.num_examples, self.site.read(self.site.shared), extras or {})

    @property
    def num_examples(self) -> int:
        """The real training samples, also where a plug-in has added others."""
        return self.site.task.sizes[self.pid]

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        """The models to evaluate: "global", "personal"."""
        return {"global": lambda: self.site.load(self.start(msg))}

    # ---- evaluation
    def _assess(self, msg: Broadcast) -> Update:
        self._arrive(msg)
        own = self.site.task.clients[self.pid]
        metrics: dict[str, float] = {}
        views = self.views(msg)
        if epochs := msg.extras.get(FINETUNE):
            views = {**views, "finetuned": lambda: self._tuned(views["global"](), int(epochs))}  # type: ignore[arg-type]
        for view, build in views.items():
            model = build()
            for split, samples in (("val", own.val), ("test", own.test)):
                if samples is not None and len(samples):
                    found = score(model, self.site.prepared(samples), self.site.task)
                    metrics |= {f"{split}.{view}.{name}": value for name, value in found.items()}
        return Update(self.pid, self.num_examples, metrics=metrics)

    def _tuned(self, model: nn.Module, epochs: int) -> nn.Module:
        """The model after so many epochs of plain training on the client's own data; the next
        `load` overwrites it."""
        plain = FedClient(self.site, [], self.store)  # neither the method's terms nor the plug-ins'
        plain.msg, plain.pid, plain.local = self.msg, self.pid, self.local
        plain._activate([])
        plain.train_model(model, self.site.train_data(self.pid), epochs=epochs, hooks=False)
        return model

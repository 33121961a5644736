"""FedClient: the client half of a method. Flower calls `fit`, everything else calls `handle`.

`handle` serves a message: receive, prepare, do the work of the phase (`train`, or a method of the
phase's name) or evaluate, and finish the reply. training.py has the local training.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from flwr.client import NumPyClient
from torch import Tensor, nn

from fedhet.core import messages, trees
from fedhet.core.descent import descend
from fedhet.core.errors import LostState, traceback_wanted
from fedhet.core.hosted import AnyPlugin, hosted
from fedhet.core.interruptions import time_limit
from fedhet.core.kernel import Term
from fedhet.core.messages import (
    EVALUATE,
    LOST,
    STATE_BYTES,
    STEPS,
    Broadcast,
    Extras,
    Failure,
    Update,
)
from fedhet.core.metrics import assess
from fedhet.core.optimizers import Optimizer
from fedhet.core.parts import own_tensors
from fedhet.core.site import Fitted
from fedhet.core.state import UNSHARED, ClientState, Store
from fedhet.core.task import Samples
from fedhet.core.timing import now
from fedhet.core.training import LocalTraining, only, trained
from fedhet.core.trees import AnyTree, Tree
from fedhet.core.workspace import Workspace

log = logging.getLogger("fedhet")
TRAIN_TOO = "eval.train"  # extra: the training data are evaluated as well
KEEP = "eval.keep"  # extra: the views, joined by commas, whose models the reply is to carry
DELIVER = "eval.deliver"  # extra: the site is to keep the models; the digest of the global one


def evaluated_views(views: Iterable[str], workspace: Workspace) -> dict[str, str]:
    """Which of a method's views are evaluated: the name of each in the record -> its own name.

    Without a global model, "global" becomes "personal": the shared weights with the client's own
    statistics. A method's own "personal" view takes precedence, unless eval.personal=false.
    """
    names = [name for name in views if workspace.evaluation.personal or name != "personal"]
    if not workspace.local_statistics:
        return {name: name for name in names}
    if "personal" in names:
        return {name: name for name in names if name != "global"}
    return {"personal" if name == "global" else name: name for name in names}


def serves(owner: object, phase: str, base: type) -> bool:
    """Whether the owner has a method for this phase.

    A message must not be able to call whatever has its name: the methods of the base class are no
    phases, except `train`.
    """
    if phase.startswith("_") or not inspect.isfunction(getattr(type(owner), phase, None)):
        return False
    return phase == "train" or not hasattr(base, phase)


class FedClient(LocalTraining, NumPyClient):
    """Serves one message. Its defaults are FedAvg.

    A method overrides `start`, `losses`, `gradient`, ..., or adds a method for a phase of its own.

    Attributes, of which all but `public` are set when a message has been received:
        public: extras, or "<extra>.<tensor>", that reveal no more of the data than their number, so
            that they need no noise.
        state: what the client remembers between rounds.
        data: its prepared training set.
        model: the model, in the phase "train".
        properties: the number of its node, and how many there are, as `partition-id` and
            `num-partitions`; empty where one process has all clients.
        site_name: of a site with data of its own, as its operator has named it; else None.
        adapter: answers Flower's messages; fedhet.flower.wire attaches it.
    """

    public: ClassVar[tuple[str, ...]] = ()
    state: ClientState
    data: Samples
    model: nn.Module
    site_name: str | None = None
    adapter: NumPyClient
    delivery: Callable[[FedClient], Update] | None = None  # keeps the final models at a site

    def __init__(
        self,
        workspace: Workspace,
        plugins: Sequence[AnyPlugin],
        store: Store | Callable[[str], Store],
        properties: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(workspace)
        self.plugins = [hosted(plugin) for plugin in plugins]
        self.store = store
        self.properties = properties or {}
        for plugin in self.plugins:
            plugin.client = self

    # ---- one message
    def handle(self, msg: Broadcast) -> Update | Failure:
        """Serve a message, with a random stream of its own.

        Returns:
            The update, or a Failure that says who failed, where and why;
            the state is then unchanged.
        """
        try:
            with (
                time_limit(msg.deadline),
                self.workspace.seeded("torch", msg.phase, msg.step, msg.pid),
            ):
                self.receive(msg)
                if DELIVER in msg.extras and msg.phase == EVALUATE:
                    if self.delivery is None:
                        raise ValueError(
                            "the server delivers a model, and this client is at no site"
                        )
                    return self.delivery(self)
                if msg.phase == EVALUATE:
                    return self.assess()
                serve = self.begin()
                began = now()
                update = serve(self.msg)
                return self.finish(update, now() - began)
        except Exception as error:  # whatever it is, the server must learn whose it was
            level = logging.WARNING if traceback_wanted() else logging.DEBUG
            log.log(level, "client %d", msg.pid, exc_info=True)
            reason = LOST if isinstance(error, LostState) else "failed"
            return Failure(msg.pid, msg.phase, msg.step, f"{type(error).__name__}: {error}", reason)

    def receive(self, msg: Broadcast) -> None:
        """Take the message and open the state that it names.

        Raises:
            ValueError: the message is for a client of another node, or the server's plug-ins or
                their settings are not those of this client.
        """
        clients, device = len(self.workspace.task.sizes), self.workspace.device
        nodes = self.properties.get("num-partitions", 1)
        here = self.properties.get("partition-id", 0)
        if not 0 <= msg.pid < clients or msg.pid % nodes != here:
            raise ValueError(
                f"the message is for client {msg.pid}; this node has partition-id {here} of"
                f" {nodes}, the run {clients} clients"
            )
        own = {plugin.name: plugin.digest() for plugin in self.plugins}
        if msg.plugins != own:
            raise ValueError(
                "server and client differ in their plug-ins or in the plug-ins' settings:"
                f" {msg.plugins} on the server, {own} here"
            )
        self._complete: AnyTree | None = None
        self._held: AnyTree | None = None
        self._fitted: Fitted | None = None
        weights = {name: t.to(device) for name, t in msg.weights.items()}
        extras = {name: messages.on_device(value, device) for name, value in msg.extras.items()}
        super().receive(replace(msg, weights=weights, extras=extras))
        store = self.store(msg.run_id) if callable(self.store) else self.store
        self.state = ClientState(store, msg.pid, msg.version, device, msg.pinned)

    def begin(self) -> Callable[[Broadcast], Update]:
        """Get ready for the phase, and return the method that does its work."""
        began = now()
        msg = self.msg
        name, _, phase = msg.phase.rpartition(".")
        owner = next((plugin for plugin in self.plugins if plugin.name == name), None)
        work = None
        if not name:
            work = self.served(phase)
        elif owner is not None:
            work = owner.served(phase)
        if work is None:
            raise ValueError(
                f"phase {msg.phase!r} is not served here; the plug-ins are"
                f" {[plugin.name for plugin in self.plugins]}"
            )
        self.activate(self.plugins if msg.trains else [p for p in self.plugins if p is owner])
        changing = [plugin for plugin in self.active if plugin.changes_data]
        if changing:
            raw = self.workspace.floating(self.workspace.task.clients[self.pid].train)
            for plugin in changing:
                raw = plugin.data(raw)
            self.data = Samples(self.workspace.transformed(raw.x), raw.y)
        else:
            self.data = self.workspace.train_data(self.pid)
        self._check_batch("client.batch_size", self.local.batch_size, self.data)
        for i, plugin in enumerate(self.active):
            self._prepared[i] |= plugin.prepare(msg) or {}
            self._terms[i] = plugin.terms(msg)
        self._preparing = now() - began
        return work

    def served(self, phase: str) -> Callable[[Broadcast], Update] | None:
        """What serves the method's phase of this name; None for nothing."""
        return getattr(self, phase) if serves(self, phase, FedClient) else None

    def _check_batch(self, setting: str, size: int, data: Samples) -> None:
        """Refuse batches of so many of the samples if this node does not make them.

        Raises:
            ConfigError: it does not, and what the setting is.
        """
        shape = min(size, len(data)), *data.stored.shape[1:]
        self.workspace.limits.check_array(f"{setting}={size}", *shape)

    def finish(self, update: Update, seconds: float) -> Update:
        """Complete the reply after work that took `seconds`, and commit the state."""
        began = now()
        for plugin in reversed(self.active):
            plugin.finish(update)
        if self.workspace.simulated:  # a real client's would tell how many samples were generated
            update.metrics[STEPS] = float(self.steps)
        messages.check_extras(update.extras, update.metrics)
        if self.workspace.noise:
            self.workspace.release(self, update)
        update.keeps = self.state.commit(self.msg.round)
        if update.keeps and not self.workspace.noise:  # the size may depend on the data
            # The size of some of it would reveal the counts of classes.
            hidden = [key for plugin in self.plugins for key in plugin.unsized]
            size = self.state.nbytes(hidden if self.workspace.min_count else ())
            update.metrics[STATE_BYTES] = float(size)
        update.metrics["seconds.train"] = seconds
        update.metrics["seconds.extras"] = self._preparing + now() - began
        return update

    # ---- what a method overrides
    def train(self, msg: Broadcast) -> Update:
        """The phase `train`: start from the received weights, train as `local` says, reply."""
        self.model = self.workspace.load(self.start(msg))
        self.train_model(self.model, self.data, self.prepare(msg))
        return self.reply()

    def start(self, msg: Broadcast) -> AnyTree:
        """Where training starts: the received weights."""
        return self.received_weights(msg)

    def received_weights(self, msg: Broadcast) -> AnyTree:
        """All of the model as received: names that are not shared have the values kept here."""
        if len(msg.weights) == len(self.workspace.initial):
            return msg.weights
        return {**self.workspace.initial, **(self.state.get(UNSHARED) or {}), **msg.weights}

    # ---- for a Site
    def holding(self, params: AnyTree) -> nn.Module:
        """The workspace's model with these values."""
        if params is not self._held:
            self._held = None
            self.workspace.load(params)
            self._held = params
        return self.workspace.model

    def train_from(
        self,
        start: AnyTree,
        terms: Sequence[Term],
        *,
        data: Samples,
        loss: Term | None,
        epochs: int | None,
        patience: int | None,
        lr: float | None,
        names: Sequence[str] | None,
        beside: dict[str, nn.Parameter],
        momentum: Tree | None,
        stream: str,
        alone: bool,
    ) -> Fitted:
        """As `Site.fit`."""
        workspace, msg = self.workspace, self.msg
        model = self.holding(start)
        self._held = None
        own_stream = (
            workspace.seeded(stream, msg.phase, msg.step, msg.pid) if stream else nullcontext()
        )
        local = self.local
        if lr is not None:
            self.local = replace(local, lr=lr)
        if momentum is not None:
            momentum = {name: t.clone() for name, t in momentum.items()}
        with own_stream, nullcontext() if names is None else only(model, names):
            steps = self.train_model(
                model,
                data,
                beside=beside,
                epochs=epochs,
                patience=patience,
                hooks=not alone,
                terms=terms,
                loss=loss,
                momentum=momentum,
            )
        self.local = local
        params = self._held = workspace.read(list(workspace.initial))
        records = {} if alone else {name: self.recorded(name) for name in self._records}
        fitted = Fitted(params, steps, records, start, beside, momentum or {})
        if not alone:
            self._fitted = fitted
        return fitted

    def adapt(
        self,
        start: AnyTree,
        names: Sequence[str],
        optimizer: Callable[[list[Tensor]], Optimizer],
        *,
        index: Tensor,
        epochs: int,
        until: Callable[[list[float]], bool],
        stream: str,
    ) -> None:
        """As `Site.adapt`."""
        workspace, msg = self.workspace, self.msg
        with workspace.seeded(stream, msg.phase, msg.step, msg.pid):
            model = self.holding(start)
            self._held = None
            descent = self.descent(model, workspace.train_data(self.pid), hooks=False)
            params = trees.pick(descent.params, names)
            steps = optimizer(list(params.values()))
            descent = replace(descent, params=params, optimizer=steps, clip=None)
            used = self.train_mode(model, len(index), self.local.batch_size)
            index = index[:used].to(workspace.device)
            losses: list[float] = []
            while len(losses) < epochs and not (losses and until(losses)):
                losses.append(float(descend(descent, [index], workspace.performer)) / used)

    def gradient_at(
        self, params: AnyTree, index: Tensor, chunk: int, *, changed: bool
    ) -> tuple[Tree, AnyTree]:
        """As `Site.gradient`."""
        model = self.holding(params)
        self._held = None
        grads = self.full_gradient(model, self.data, index, chunk)
        if changed:
            with torch.no_grad():
                self.apply_gradient_hooks(grads, trained(model))
        after = self._held = self.workspace.read(list(self.workspace.initial))
        self._fitted = Fitted(after, 0, {}, params)
        return grads, after

    @property
    def fitted(self) -> Fitted:
        """What the training has made whose result is sent."""
        if self._fitted is None:  # by a method of the old form
            params = self.workspace.read(list(self.workspace.initial))
            records = {name: self.recorded(name) for name in self._records}
            self._fitted = Fitted(params, self.steps, records, self.start(self.msg))
            self._held = params
        return self._fitted

    def complete(self, msg: Broadcast) -> AnyTree:
        """The weights of a message; those of the model with what this client keeps."""
        if msg.slot != "model":
            return msg.weights
        if self._complete is None:
            self._complete = self.received_weights(msg)
        return self._complete

    def reply(self, extras: Extras | None = None) -> Update:
        """The update with the model as it is now; what is never shared goes into the state."""
        if self.workspace.kept:
            self.state.put(UNSHARED, self.workspace.read(self.workspace.kept))
        weights = self.workspace.read(self.workspace.shared)
        return Update(self.pid, self.num_examples, weights, extras=extras or {})

    def released(self, update: Update) -> None:
        """Called after the noise: make the extras what the server accepts, from them alone."""

    @property
    def num_examples(self) -> int:
        """The real training samples, also where a plug-in has added generated ones."""
        return self.workspace.task.sizes[self.pid]

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        """The models to evaluate, by name ("global", "personal"); each is built when it is due.

        "global" is the received model; a run that has none evaluates it as "personal".
        """
        return {"global": lambda: self.workspace.load(self.received_weights(msg))}

    @classmethod
    def personal_module(cls, model: nn.Module) -> nn.Module:
        """The module that the view "personal" evaluates, around any such model.

        It is the model itself, unless the method adds something to it that its state dict holds,
        such as a second head. `fedhet.load` puts a client's values into it.
        """
        return model

    # ---- evaluation
    def assess(self, visit: Callable[[str, nn.Module], None] | None = None) -> Update:
        """Score every view on the client's own data; nothing is changed.

        Where the message requests models, the reply has what they differ in from the received one.

        Args:
            visit: is given each view's name and its model, where the reply with all the scores
                stays at the site. None: the reply has what may leave the site.

        Raises:
            ValueError: the message requests what the run's settings here do not have.
        """
        workspace, leaves = self.workspace, visit is None
        if leaves:
            if workspace.noise:
                raise ValueError("privacy.noise: no scores leave a client; set eval.clients=false")
            if not workspace.evaluation.clients:
                raise ValueError("the server requests scores, and the run has eval.clients=false")
            if TRAIN_TOO in self.msg.extras and not workspace.evaluation.train:
                raise ValueError(
                    "the server requests training scores, and the run has eval.train=false"
                )
            if not workspace.limits.evaluate:
                return Update(self.pid, self.num_examples)
        kept = self.msg.text(KEEP).split(",") if KEEP in self.msg.extras else []
        if kept and not workspace.simulated:
            raise ValueError("the server requests personal models, which never leave their site")
        given = self.views(self.msg)
        views = {name: given[own] for name, own in evaluated_views(given, workspace).items()}
        if workspace.evaluation.finetune_epochs and leaves:
            views["finetuned"] = lambda: self._finetuned(given["global"]())
        names = ["val", "test"]
        if TRAIN_TOO in self.msg.extras and self.num_examples >= workspace.min_count:
            names.append("train")
        parts = workspace.parts(self.pid, *names)
        least = workspace.limits.min_test if leaves else 0
        parts = {part: samples for part, samples in parts.items() if len(samples) >= least}
        metrics: dict[str, float] = {}
        models: Extras = {}
        tallies: Extras = {}
        for view, build in views.items():
            model = build()
            for part, samples in parts.items():
                scores, tally = assess(model, samples, workspace.task, workspace.performer)
                if least:
                    scores, tally = workspace.task.scoring.releasable(
                        tally, samples.y, workspace.min_count
                    )
                if scores:
                    scores |= {"n": float(len(samples))}
                    metrics |= {f"{part}.{view}.{name}": value for name, value in scores.items()}
                    tallies[f"{part}.{view}"] = tally
            if visit:
                visit(view, model)
            if view in kept:
                common = {**workspace.initial, **self.msg.weights}
                models[f"{KEEP}.{view}"] = own_tensors(model, workspace.model, common)
        extras = {**models, **(tallies if workspace.task.scoring.tallied else {})}
        return Update(self.pid, self.num_examples, metrics=metrics, extras=extras)

    def _finetuned(self, model: nn.Module) -> nn.Module:
        """The model after plain training on the client's own data, without method or plug-ins.

        It is the workspace's model, which the next `load` overwrites.
        """
        plain = LocalTraining(self.workspace)
        plain.receive(self.msg)
        epochs, data = (
            self.workspace.evaluation.finetune_epochs,
            self.workspace.train_data(self.pid),
        )
        self._check_batch("client.batch_size", self.local.batch_size, data)
        plain.train_model(model, data, epochs=epochs, hooks=False)
        return model

    # ---- Flower's methods
    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return self.adapter.get_properties(config)

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        return self.adapter.fit(parameters, config)

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        return self.adapter.evaluate(parameters, config)

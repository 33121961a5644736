"""FedClient answers the server's messages. Flower calls `fit` or `evaluate`; others call `handle`.

context.py has the local training, and fedhet/core/owners.py the view of a message that a method
gets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from flwr.client import NumPyClient
from torch import nn

from fedhet.core import kernel, messages, trees
from fedhet.core.client.context import ClientContext, Fitted
from fedhet.core.client.state import UNSHARED, ClientState, StateView, Store
from fedhet.core.errors import (
    ConfigError,
    LostState,
    Rejected,
    clean,
    log,
    public_text,
    traceback_wanted,
)
from fedhet.core.interruptions import time_limit
from fedhet.core.kernel import BREAKS, Component, Method, Plugin, Step
from fedhet.core.messages import (
    EVALUATE,
    LOST,
    STATE_BYTES,
    STEPS,
    Broadcast,
    Extras,
    Failure,
    Upload,
)
from fedhet.core.metrics import assess
from fedhet.core.owners import (
    prefixed,
    public_names,
    repair,
    seen_message,
    sent_extras,
    withhold,
)
from fedhet.core.task import Samples
from fedhet.core.timing import now
from fedhet.core.trees import AnyTree, Tree
from fedhet.core.workspace import Workspace

TRAIN_TOO = "eval.train"  # extra: the client also evaluates its training data
KEEP = "eval.keep"  # extra: names of views, joined by commas; the reply carries their models
DELIVER = "eval.deliver"  # extra: the digest of the global model; the site keeps the models


def evaluated_views(views: Iterable[str], workspace: Workspace) -> dict[str, str]:
    """Return the views to evaluate as a dict from names in the record to names in the method.

    If there is no global model, the view "global" is recorded as "personal": its model has the
    shared weights and the client's own statistics. A method's own "personal" view takes precedence,
    unless eval.personal=false.
    """
    names = [name for name in views if workspace.evaluation.personal or name != "personal"]
    if not workspace.local_statistics:
        return {name: name for name in names}
    if "personal" in names:
        return {name: name for name in names if name != "global"}
    return {"personal" if name == "global" else name: name for name in names}


class FedClient(NumPyClient):
    """Serves messages with a method and its plug-ins.

    Args:
        workspace: the objects that the clients of the process share.
        method: the method; its client half does the work.
        plugins: the plug-ins, in their order.
        store: keeps the states of clients; or a function from a run's id to its store.
        properties: the number of this node as `partition-id`, and the number of nodes as
            `num-partitions`. Neither is set if one process has all clients.

    Attributes:
        site_name: the name that the operator gave to a site with data of its own; else None.
        adapter: answers Flower's messages; fedhet.flower.wire attaches it.
        delivery: keeps the final models at a site.
        context_of: makes the context of a message; by default `ClientContext`.
        msg, pid, state: the message that is being served, its client, and the client's state.
    """

    site_name: str | None = None
    adapter: NumPyClient
    delivery: Callable[[FedClient], Upload] | None = None
    context_of: Callable[..., ClientContext] = ClientContext
    msg: Broadcast
    pid: int
    state: ClientState

    def __init__(
        self,
        workspace: Workspace,
        method: Method,
        plugins: Sequence[Plugin],
        store: Store | Callable[[str], Store],
        properties: dict[str, Any] | None = None,
    ) -> None:
        self.workspace = workspace
        self.method = method
        self.half = method.client(method)
        self.plugins = list(plugins)
        self.store = store
        self.properties = properties or {}
        self._digests = {p.name: p.digest for p in self.plugins} | {method.GROUP: method.digest}

    # ---- one message
    def handle(self, msg: Broadcast) -> Upload | Failure:
        """Answer a message, with a random stream of its own.

        Returns:
            The update; or, after an error, a Failure that says who failed, where and why. The
            client's state is then unchanged.
        """
        try:
            with (
                time_limit(msg.deadline),
                self.workspace.seeded("torch", msg.phase, msg.step, msg.pid),
            ):
                self.receive(msg)
                if msg.phase != EVALUATE:
                    return self._work()
                if DELIVER not in msg.extras:
                    return self.assess()
                if self.delivery is None:
                    raise ConfigError(
                        "the server delivers a model, but this client does not run at a site"
                    )
                return self.delivery(self)
        except Exception as error:  # for every error, the server must learn which client had it
            level = logging.WARNING if traceback_wanted() else logging.DEBUG
            log.log(level, "client %d", msg.pid, exc_info=True)
            reason = LOST if isinstance(error, LostState) else "failed"
            text, simulated = f"{type(error).__name__}: {error}", self.workspace.simulated
            if not simulated:  # the server is another machine, so it gets only the public text
                log.error("client %d: %s", msg.pid, clean(text))
            return Failure(
                msg.pid, msg.phase, msg.step, text if simulated else public_text(error), reason
            )

    def receive(self, msg: Broadcast) -> None:
        """Take the message and open the state that it names.

        Raises:
            Rejected: the message is for a client of another node.
            ConfigError: server and client differ in their method, plug-ins or settings.
        """
        clients, device = len(self.workspace.task.sizes), self.workspace.device
        nodes = self.properties.get("num-partitions", 1)
        here = self.properties.get("partition-id", 0)
        if not 0 <= msg.pid < clients or msg.pid % nodes != here:
            raise Rejected(
                "wrong content",
                f"the message is for client {msg.pid}; this node has partition-id {here} of"
                f" {nodes}, and the run has {clients} clients",
            )
        if msg.plugins != self._digests:
            raise ConfigError(
                "server and client differ in their method, their plug-ins or the settings of"
                f" these: {msg.plugins} on the server, {self._digests} here"
            )
        weights = {name: t.to(device) for name, t in msg.weights.items()}
        extras = {name: messages.on_device(value, device) for name, value in msg.extras.items()}
        self.msg, self.pid = replace(msg, weights=weights, extras=extras), msg.pid
        store = self.store(msg.run_id) if callable(self.store) else self.store
        self.state = ClientState(store, msg.pid, msg.version, device, msg.pinned)
        identity = type(self.method), tuple(sorted(self._digests.items()))
        self.ctx = self.context_of(self.workspace, self.msg, identity)
        self._complete: AnyTree | None = None

    def _work(self) -> Upload:
        """Do the work of a phase, let the plug-ins finish it, and return the complete reply."""
        began, msg = now(), self.msg
        name, _, phase = msg.phase.rpartition(".")
        owner = next((plugin for plugin in self.plugins if plugin.name == name), None)
        serve = getattr(owner if name else self.half, phase, None)
        if not getattr(serve, "serves", False):
            raise Rejected(
                "wrong content",
                f"phase {msg.phase!r} is not served here; the plug-ins are"
                f" {[plugin.name for plugin in self.plugins]}",
            )
        plugins = self.plugins if msg.trains else []
        self.ctx.data = self._data(plugins)
        for plugin in plugins:
            terms = plugin.terms(*self._seen(plugin))
            for words in {BREAKS[term.kind] for term in terms if term.kind in BREAKS}:
                if not plugin.breaks.keys() & words:
                    raise TypeError(
                        f"{type(plugin).__qualname__} must state {words[0]!r} in `breaks`"
                    )
            self.ctx.terms += terms
        prepared = now()
        component: Component = owner or self.method
        update = self._update(component, self._result(component, serve))
        update.metrics |= self.ctx.metrics
        worked = now()
        for plugin in reversed([plugin for plugin in plugins if plugin.overrides("finish")]):
            if self.ctx.fitted is None:
                raise ValueError(f"method={self.method.name} trained nothing for this message")
            result = self._result(plugin, plugin.finish, self.ctx.fitted)
            update.extras |= sent_extras(plugin, result)
            update.metrics |= result.metrics
        self._release([*plugins, *([] if component in plugins else [component])], update)
        update.metrics["seconds.train"] = worked - prepared
        update.metrics["seconds.extras"] = prepared - began + now() - worked
        return update

    def _data(self, plugins: Sequence[Plugin]) -> Samples:
        """Return the training set, changed by the plug-ins and ready for the model."""
        workspace = self.workspace
        changing = [plugin for plugin in plugins if plugin.overrides("data")]
        data = workspace.train_data(self.pid)
        if changing:
            raw = workspace.floating(workspace.task.clients[self.pid].train)
            for plugin in changing:
                raw = plugin.data(raw, StateView(self.state, plugin.name))
            data = Samples(workspace.transformed(raw.x), raw.y)
        self._check_batch(data)
        return data

    def _check_batch(self, data: Samples) -> None:
        """Refuse a batch size that this node does not allow for these samples.

        Raises:
            ConfigError: a batch is larger than the node's limit.
        """
        size = self.msg.local.batch_size
        shape = min(size, len(data)), *data.x.shape[1:]
        self.workspace.limits.check_array(f"client.batch_size={size}", *shape)

    def _result(self, component: Component, work: Any, *given: Fitted) -> kernel.Result:
        """Return the result of the component's work, and keep its new state."""
        seen, state, ctx = self._seen(component)
        result, after = work(seen, state, ctx, *given)
        state.keep(after)
        return result  # type: ignore[no-any-return]

    def _seen(self, component: Component) -> tuple[kernel.Message, StateView, ClientContext]:
        """Return the message and the state as a component sees them, and its context."""
        seen = seen_message(component.name, self.msg, self.complete())
        return seen, StateView(self.state, component.name), self.ctx

    def complete(self) -> AnyTree:
        """Return the weights of the message.

        For the slot "model", add the tensors that the message lacks: from the client's state, or,
        if the state has none, the initial values.
        """
        msg, initial = self.msg, self.workspace.initial
        if msg.slot != "model" or len(msg.weights) == len(initial):
            return msg.weights
        if self._complete is None:
            self._complete = {**initial, **(self.state.get(UNSHARED) or {}), **msg.weights}
        return self._complete

    def _update(self, component: Component, result: kernel.Result) -> Upload:
        """Build the update from the shared tensors of a result.

        The other tensors that training changes are stored in the client's state.
        """
        weights: Tree = dict(result.weights)
        if weights and self.msg.slot == "model":
            if self.workspace.kept:
                self.state.put(UNSHARED, trees.pick(weights, self.workspace.kept))
            sends = "weights" not in self.method.breaks
            weights = trees.pick(weights, self.workspace.shared) if sends else {}
        update = Upload(self.pid, self.num_examples, weights, dict(result.metrics))
        update.extras = sent_extras(component, result)
        return update

    def _release(self, components: Sequence[Component], update: Upload) -> None:
        """Reduce the update to what may leave the client, and commit the state."""
        workspace, msg = self.workspace, self.msg
        # A real client does not send its number of steps, which would reveal how many samples a
        # plug-in has generated.
        if workspace.simulated:
            update.metrics[STEPS] = float(self.ctx.steps)
        messages.check_extras(update.extras, update.metrics)
        few = self.num_examples < workspace.min_count
        step = self._step()
        expected: dict[str, kernel.Expected] = {}
        for component in components if few or workspace.noise else ():
            expected |= prefixed(component.name, component.expects(step))
        if few:
            withhold(expected, update, workspace.device)
        if workspace.noise:
            workspace.release(self, update, public_names(expected))
            repair(expected, update)
        update.keeps = self.state.commit(msg.round)
        # Under noise, the client sends no size, because the size may depend on the data.
        if update.keeps and not workspace.noise:
            # The size of generated samples would reveal the counts of classes.
            hidden = [plugin.name for plugin in self.plugins if plugin.overrides("data")]
            size = self.state.nbytes(hidden if workspace.min_count else ())
            update.metrics[STATE_BYTES] = float(size)

    def _step(self) -> Step:
        """Return the step as a client knows it: without cohort, slots and state."""
        msg = self.msg
        return Step(
            workspace=self.workspace,
            phase=msg.phase.rpartition(".")[2],
            number=msg.step,
            round=msg.round,
            local=msg.local,
            trains=msg.trains,
        )

    @property
    def num_examples(self) -> int:
        """The number of real training samples, without those that a plug-in generated."""
        return self.workspace.task.sizes[self.pid]

    def views(self) -> dict[str, Callable[[], nn.Module]]:
        """Return a dict from the method's views ("global", "personal") to functions.

        Each function builds the model of its view. A run without a global model evaluates "global"
        as "personal".
        """
        return self.half.views(*self._seen(self.method))

    # ---- evaluation
    def assess(self, visit: Callable[[str, nn.Module], None] | None = None) -> Upload:
        """Score each view on the client's own data, without changing the client's state.

        If the message requests models, the reply has the tensors of each model that differ from the
        received model.

        Args:
            visit: is called with each view's name and its model, except for the view "finetuned",
                which is then not scored. The reply has all scores, and must stay at the site. None:
                the reply has only the scores that the node's limits let leave the site.

        Raises:
            ConfigError: the message requests something that the settings here do not allow.
        """
        workspace, requested, for_server = self.workspace, self.msg.extras, visit is None
        evaluation = workspace.evaluation
        kept = self.msg.text(KEEP).split(",") if KEEP in requested else []
        refused = {
            "privacy.noise: no scores leave a client; set eval.clients=false": (
                for_server and workspace.noise
            ),
            "the server requests scores, but the run has eval.clients=false": (
                for_server and not evaluation.clients
            ),
            "the server requests training scores, but the run has eval.train=false": (
                for_server and TRAIN_TOO in requested and not evaluation.train
            ),
            "the server requests personal models, but these never leave their site": (
                kept and not workspace.simulated
            ),
        }
        for why in (why for why, is_so in refused.items() if is_so):
            raise ConfigError(why)
        if for_server and not workspace.limits.evaluate:
            return Upload(self.pid, self.num_examples)
        by_view = self.views()
        views = {name: by_view[view] for name, view in evaluated_views(by_view, workspace).items()}
        if evaluation.finetune_epochs and for_server:
            views["finetuned"] = self._finetuned
        names = ["val", "test"]
        if TRAIN_TOO in requested and self.num_examples >= workspace.min_count:
            names.append("train")
        parts = workspace.parts(self.pid, *names)
        min_test = workspace.limits.min_test if for_server else 0
        parts = {part: samples for part, samples in parts.items() if len(samples) >= min_test}
        metrics: dict[str, float] = {}
        models: Extras = {}
        tallies: Extras = {}
        for view, build in views.items():
            model = build()
            found = assess(model, [*parts.values()], workspace.task, workspace.batcher)
            for (part, samples), (scores, tally) in zip(parts.items(), found, strict=True):
                if min_test:
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
                models[f"{KEEP}.{view}"] = trees.own_tensors(model, workspace.model, common)
        extras = {**models, **(tallies if workspace.task.scoring.tallied else {})}
        return Upload(self.pid, self.num_examples, metrics=metrics, extras=extras)

    def _finetuned(self) -> nn.Module:
        """Return the received model after plain training on the client's own data."""
        ctx = self.ctx
        self._check_batch(ctx.own)
        epochs = self.workspace.evaluation.finetune_epochs
        return ctx.model(ctx.fit(self.complete(), data=ctx.own, epochs=epochs, alone=True).params)

    # ---- Flower's methods
    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return self.adapter.get_properties(config)

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        return self.adapter.fit(parameters, config)

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        return self.adapter.evaluate(parameters, config)

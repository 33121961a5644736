"""FedClient serves the messages to a client. Flower calls `fit`, everything else calls `handle`.

site.py has the local training, and what a method sees of all this.
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


class FedClient(NumPyClient):
    """Serves messages by a method and its plug-ins.

    Args:
        workspace: what the clients of the process share.
        method: the method; its client half does the work.
        plugins: the plug-ins, in their order.
        store: where the states of clients are kept; or run_id -> that.
        properties: the number of its node, and how many there are, as `partition-id` and
            `num-partitions`; none where one process has all clients.

    Attributes:
        site_name: of a site with data of its own, as its operator has named it; else None.
        adapter: answers Flower's messages; fedhet.flower.wire attaches it.
        delivery: keeps the final models at a site.
        context_of: makes the site of a message; by default `ClientContext`.
        msg, pid, state: of the message that is being served.
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
        self._digests = {plugin.name: plugin.digest for plugin in self.plugins}
        self._digests["method"] = method.digest

    # ---- one message
    def handle(self, msg: Broadcast) -> Upload | Failure:
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
                if msg.phase != EVALUATE:
                    return self._work()
                if DELIVER not in msg.extras:
                    return self.assess()
                if self.delivery is None:
                    raise ConfigError("the server delivers a model, and this client is at no site")
                return self.delivery(self)
        except Exception as error:  # whatever it is, the server must learn whose it was
            level = logging.WARNING if traceback_wanted() else logging.DEBUG
            log.log(level, "client %d", msg.pid, exc_info=True)
            reason = LOST if isinstance(error, LostState) else "failed"
            whole, near = f"{type(error).__name__}: {error}", self.workspace.simulated
            if not near:  # the server is another machine, and does not learn all
                log.error("client %d: %s", msg.pid, clean(whole))
            return Failure(
                msg.pid, msg.phase, msg.step, whole if near else public_text(error), reason
            )

    def receive(self, msg: Broadcast) -> None:
        """Take the message and open the state that it names.

        Raises:
            Rejected: the message is for a client of another node.
            ConfigError: the server's method or plug-ins, or their settings, are not those of this
                client.
        """
        clients, device = len(self.workspace.task.sizes), self.workspace.device
        nodes = self.properties.get("num-partitions", 1)
        here = self.properties.get("partition-id", 0)
        if not 0 <= msg.pid < clients or msg.pid % nodes != here:
            raise Rejected(
                "wrong content",
                f"the message is for client {msg.pid}; this node has partition-id {here} of"
                f" {nodes}, the run {clients} clients",
            )
        if msg.plugins != self._digests:
            raise ConfigError(
                "server and client differ in their method, in their plug-ins or in the settings of"
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
        """Do the work of a phase, and complete the reply."""
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
                        f"{type(plugin).__qualname__} has to state {words[0]!r} in `breaks`"
                    )
            self.ctx.terms += terms
        prepared = now()
        component: Component = owner or self.method
        update = self._update(component, self._result(component, serve))
        update.metrics |= self.ctx.metrics
        worked = now()
        for plugin in reversed([one for one in plugins if one.overrides("finish")]):
            if self.ctx.fitted is None:
                raise ValueError(f"method={self.method.name} has trained nothing in this message")
            result = self._result(plugin, plugin.finish, self.ctx.fitted)
            update.extras |= sent_extras(plugin, result)
            update.metrics |= result.metrics
        self._release([*plugins, *([] if component in plugins else [component])], update)
        update.metrics["seconds.train"] = worked - prepared
        update.metrics["seconds.extras"] = prepared - began + now() - worked
        return update

    def _data(self, plugins: Sequence[Plugin]) -> Samples:
        """The training set, ready for the model, as the plug-ins change it."""
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
        """Refuse batches of these samples that are larger than this node makes.

        Raises:
            ConfigError: they are.
        """
        size = self.msg.local.batch_size
        shape = min(size, len(data)), *data.x.shape[1:]
        self.workspace.limits.check_array(f"client.batch_size={size}", *shape)

    def _result(self, component: Component, work: Any, *given: Fitted) -> kernel.Result:
        """What the piece's work returns; its new state is kept."""
        seen, state, ctx = self._seen(component)
        result, after = work(seen, state, ctx, *given)
        state.keep(after)
        return result  # type: ignore[no-any-return]

    def _seen(self, component: Component) -> tuple[kernel.Message, StateView, ClientContext]:
        """The message and the state as a piece sees them, and its site."""
        seen = seen_message(component.name, self.msg, self.complete())
        return seen, StateView(self.state, component.name), self.ctx

    def complete(self) -> AnyTree:
        """The weights of the message; those of the model with what this client keeps."""
        msg, initial = self.msg, self.workspace.initial
        if msg.slot != "model" or len(msg.weights) == len(initial):
            return msg.weights
        if self._complete is None:
            self._complete = {**initial, **(self.state.get(UNSHARED) or {}), **msg.weights}
        return self._complete

    def _update(self, component: Component, result: kernel.Result) -> Upload:
        """The update with what is shared of a result; what is never shared goes into the state."""
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
        """Make of the update what may leave, and commit the state."""
        workspace, msg = self.workspace, self.msg
        if workspace.simulated:  # a real client's would tell how many samples were generated
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
        if update.keeps and not workspace.noise:  # the size may depend on the data
            # The size of generated samples would reveal the counts of classes.
            hidden = [plugin.name for plugin in self.plugins if plugin.overrides("data")]
            size = self.state.nbytes(hidden if workspace.min_count else ())
            update.metrics[STATE_BYTES] = float(size)

    def _step(self) -> Step:
        """What the client knows of the step."""
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
        """The real training samples, also where a plug-in has added generated ones."""
        return self.workspace.task.sizes[self.pid]

    def views(self) -> dict[str, Callable[[], nn.Module]]:
        """The models to evaluate, by name ("global", "personal"); each is built when it is due.

        A run without a global model evaluates "global" as "personal".
        """
        return self.half.views(*self._seen(self.method))

    # ---- evaluation
    def assess(self, visit: Callable[[str, nn.Module], None] | None = None) -> Upload:
        """Score every view on the client's own data; nothing is changed.

        Where the message requests models, the reply has what they differ in from the received one.

        Args:
            visit: is given each view's name and its model, where the reply with all the scores
                stays at the site. None: the reply has what may leave the site.

        Raises:
            ConfigError: the message requests what the run's settings here do not have.
        """
        workspace, asked, leaves = self.workspace, self.msg.extras, visit is None
        evaluation = workspace.evaluation
        kept = self.msg.text(KEEP).split(",") if KEEP in asked else []
        refused = {
            "privacy.noise: no scores leave a client; set eval.clients=false": (
                leaves and workspace.noise
            ),
            "the server requests scores, and the run has eval.clients=false": (
                leaves and not evaluation.clients
            ),
            "the server requests training scores, and the run has eval.train=false": (
                leaves and TRAIN_TOO in asked and not evaluation.train
            ),
            "the server requests personal models, which never leave their site": (
                kept and not workspace.simulated
            ),
        }
        for why in (why for why, is_so in refused.items() if is_so):
            raise ConfigError(why)
        if leaves and not workspace.limits.evaluate:
            return Upload(self.pid, self.num_examples)
        given = self.views()
        views = {name: given[own] for name, own in evaluated_views(given, workspace).items()}
        if evaluation.finetune_epochs and leaves:
            views["finetuned"] = self._finetuned
        names = ["val", "test"]
        if TRAIN_TOO in asked and self.num_examples >= workspace.min_count:
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
                scores, tally = assess(model, samples, workspace.task, workspace.batcher)
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
                models[f"{KEEP}.{view}"] = trees.own_tensors(model, workspace.model, common)
        extras = {**models, **(tallies if workspace.task.scoring.tallied else {})}
        return Upload(self.pid, self.num_examples, metrics=metrics, extras=extras)

    def _finetuned(self) -> nn.Module:
        """The received model after plain training on the client's own data."""
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

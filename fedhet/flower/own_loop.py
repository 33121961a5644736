"""The app owner's training loop, in place of fedhet's local steps.

The loop works with every method that needs only the trained models from its clients. Further
values that plug-ins send, such as FedNorm's latents, are computed after the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from numbers import Real
from typing import Any

from torch import nn
from torch.utils.data import TensorDataset

from fedhet.core.client.context import ClientContext, Fitted
from fedhet.core.errors import ConfigError
from fedhet.core.kernel import Client, Component, Method, Term
from fedhet.core.messages import Broadcast
from fedhet.core.trees import AnyTree
from fedhet.core.workspace import Workspace

# A function of (model, data, config) that returns metrics.
OwnLoop = Callable[[nn.Module, TensorDataset, dict[str, Any]], Mapping[str, float] | float | None]
LOSS = "train_loss"  # the name of a single number that a loop returns
REFUSES = "refuses a training loop of your own:"
# Word of fedhet.core.kernel.WORDS -> why a component that needs this property, or a method that
# breaks it, refuses the loop.
NEEDS = {
    "local steps": "it adds to fedhet's local steps",
    "sgd steps": "it relies on local steps of SGD",
    "plain steps": "it relies on plain SGD along the gradient of the local loss",
}
BREAKS = {"local steps": "its clients take no local steps"}


def check_own_loop(method: Method, plugins: Sequence[Component]) -> None:
    """Refuse components that need fedhet's local steps.

    Raises:
        ConfigError: a component needs them; the message names the component and the reason.
    """
    reasons = [
        (
            f"plugin {component.name!r}" if component is not method else f"method={component.name}",
            why,
        )
        for component in (method, *plugins)
        for word, why in NEEDS.items()
        if word in component.needs
    ]
    reasons += [(f"method={method.name}", why) for w, why in BREAKS.items() if w in method.breaks]
    if method.client.terms is not Client.terms:
        reasons.append((f"method={method.name}", NEEDS["local steps"]))
    for name, why in reasons:
        raise ConfigError(f"{name} {REFUSES} {why}; without one, fedhet trains")


class OwnersContext(ClientContext):
    """Calls the owner's loop when a method's client would take local steps.

    fedhet still does all training with results that stay at the client, such as FedBABU's
    fine-tuning.

    Args:
        workspace, msg, identity: see `ClientContext`.
        loop: the owner's loop.
        config: the `train_config` that the owner has given to `Strategy.start`.
    """

    def __init__(
        self,
        workspace: Workspace,
        msg: Broadcast,
        identity: Hashable,
        *,
        loop: OwnLoop,
        config: Mapping[str, Any],
    ) -> None:
        super().__init__(workspace, msg, identity)
        self._config = {
            "server-round": msg.round,
            "lr": msg.local.lr,
            "local-epochs": msg.local.epochs,
            "batch-size": msg.local.batch_size,
            **config,
        }
        self._loop = loop

    def fit(
        self, start: AnyTree, terms: Sequence[Term] = (), *, alone: bool = False, **how: Any
    ) -> Fitted:
        """Train as `ClientContext.fit` does, but by the owner's loop.

        Raises:
            ConfigError: the method wants more than plain training of the model on the client's
                samples, or the loop returns something other than numbers.
        """
        if alone:
            return super().fit(start, terms, alone=True, **how)
        changed = [f"a term of the kind {term.kind!r}" for term in (*terms, *self.terms)]
        changed += [f"{name}=..." for name, value in how.items() if value not in (None, "")]
        if changed:
            raise ConfigError(
                f"the method, or a plug-in, {REFUSES} it trains with {changed[0]}; without one,"
                " fedhet trains"
            )
        # Train a copy, because moving a model to another device replaces its buffers.
        model = deepcopy(self.model(start)).train()
        metrics = self._loop(model, TensorDataset(self.data.x, self.data.y), dict(self._config))
        if isinstance(metrics, Real):
            metrics = {LOSS: metrics}
        if not isinstance(metrics, Mapping | None):
            raise ConfigError(
                f"your training loop returned a {type(metrics).__name__}; expected numbers by name,"
                " a number, or None"
            )
        self.metrics = {name: float(value) for name, value in (metrics or {}).items()}
        device = self.workspace.device
        params = {n: t.detach().to(device).clone() for n, t in model.state_dict().items()}
        self.fitted = Fitted(params, 0, {}, start)
        return self.fitted

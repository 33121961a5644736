"""A training loop of the app's owner in the place of fedhet's local steps.

It serves every method whose server needs no more of the clients than what they have trained. What
plug-ins send besides, such as FedNorm's latents, is computed after it.
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

# (model, data, config) -> metrics
OwnLoop = Callable[[nn.Module, TensorDataset, dict[str, Any]], Mapping[str, float] | float | None]
LOSS = "train_loss"  # the name of a single number that a loop returns
REFUSES = "refuses a training loop of your own:"
# Why, by the words of fedhet.core.kernel.WORDS that a piece needs, and that a method breaks.
NEEDS = {
    "local steps": "it adds to fedhet's local steps",
    "sgd steps": "it relies on local steps of SGD",
    "plain steps": "it relies on plain SGD along the gradient of the local loss",
}
BREAKS = {"local steps": "its clients take no local steps"}


def check_own_loop(method: Method, plugins: Sequence[Component]) -> None:
    """Refuse pieces that need local steps of fedhet's.

    Raises:
        ConfigError: it names the piece, and the reason.
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
    """Calls the owner's loop where the clients of a method take local steps.

    Training whose result is not sent, such as FedBABU's fine-tuning, is fedhet's.

    Args:
        workspace, msg, identity: as for `ClientContext`.
        loop: the owner's loop.
        config: what the owner has given to `Strategy.start` for it.
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
        local = {
            "server-round": msg.round,
            "lr": msg.local.lr,
            "local-epochs": msg.local.epochs,
            "batch-size": msg.local.batch_size,
        }
        self._config = {**local, **config}
        self._loop = loop

    def fit(
        self, start: AnyTree, terms: Sequence[Term] = (), *, alone: bool = False, **how: Any
    ) -> Fitted:
        """As `ClientContext.fit`, by the owner's loop.

        Raises:
            ConfigError: the training is not plainly of the model on the client's samples, or the
                loop returns something else than numbers.
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
        # A copy: moving a model to another device replaces its buffers.
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

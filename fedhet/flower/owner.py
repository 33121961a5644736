"""A training loop of the app's owner in the place of fedhet's local steps.

It serves every method whose server needs no more of the clients than what they have trained. What
plug-ins send besides, such as FedNorm's latents, is computed after it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import nn
from torch.utils.data import TensorDataset

from fedhet.core.client.training import Fitted, Trainer
from fedhet.core.errors import ConfigError
from fedhet.core.kernel import WORDS, Method, Piece, Term
from fedhet.core.messages import Broadcast
from fedhet.core.trees import AnyTree
from fedhet.core.workspace import Workspace

# (model, data, config) -> metrics
OwnLoop = Callable[[nn.Module, TensorDataset, dict[str, Any]], Mapping[str, float] | None]
STEPS = ("local steps", "sgd steps", "plain steps", "known steps")  # of WORDS, which nobody knows
WITHOUT = ("local steps", "own data")  # and what a method must have for a loop to be called


def check_own_loop(method: Method, plugins: Sequence[Piece]) -> None:
    """Refuse pieces that need local steps of fedhet's.

    Raises:
        ConfigError: it names the piece, and the reason.
    """
    for piece in (method, *plugins):
        for word in (word for word in STEPS if word in piece.needs):
            raise ConfigError(f"{_named(piece)} {_REFUSES} it needs that {WORDS[word]}")
    for word in (word for word in WITHOUT if word in method.breaks):
        raise ConfigError(f"{_named(method)} {_REFUSES} it is not so that {WORDS[word]}")


_REFUSES = "refuses a training loop of your own, leave it out:"


def _named(piece: Piece) -> str:
    return f"method={piece.name}" if isinstance(piece, Method) else f"plugin {piece.name!r}"


class OwnersTrainer(Trainer):
    """Calls the owner's loop where the clients of a method take local steps.

    Training whose result is not sent, such as FedBABU's fine-tuning, is fedhet's.

    Args:
        workspace, msg, identity: as for `Trainer`.
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
        """As `Trainer.fit`, by the owner's loop.

        Raises:
            ValueError: the training is not plainly of the model on the client's samples.
        """
        if alone:
            return super().fit(start, terms, alone=True, **how)
        changed = [f"a term of the kind {term.kind!r}" for term in (*terms, *self.terms)]
        changed += [f"{name}=..." for name, value in how.items() if value not in (None, "")]
        if changed:
            raise ValueError(f"the method or a plug-in {_REFUSES} it trains with {changed[0]}")
        # A copy: moving a model to another device replaces its buffers.
        model = deepcopy(self.holding(start)).train()
        metrics = self._loop(model, TensorDataset(self.data.x, self.data.y), dict(self._config))
        if not isinstance(metrics, Mapping | None):
            raise TypeError(
                f"your training loop returned a {type(metrics).__name__}; expected numbers by name,"
                " or None"
            )
        self.metrics = {name: float(value) for name, value in (metrics or {}).items()}
        device = self.workspace.device
        params = {n: t.detach().to(device).clone() for n, t in model.state_dict().items()}
        self.fitted = Fitted(params, 0, {}, start)
        return self.fitted

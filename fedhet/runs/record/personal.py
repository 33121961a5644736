"""Stores the clients' own models in the folder `personal/` of the run folder.

Of a client's model, only the values that differ from the shared weights are stored:

    personal/round-000020/shared.safetensors        the weights sent in the evaluation of round 20
    personal/round-000020/personal/3.safetensors    client 3's own values in the view "personal"

There are such folders for the last evaluation, and for the best evaluation of each view by its own
validation. The server asks the clients for their models only after the training. Until then, each
client keeps the states that its best models need.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedhet.core import trees
from fedhet.core.check import integer
from fedhet.core.client.client import KEEP
from fedhet.core.errors import ConfigError, log
from fedhet.core.kernel import Client
from fedhet.core.messages import Broadcast, Failure, Upload
from fedhet.core.server.callbacks import Callback, Row
from fedhet.core.server.evaluation import Moment, evaluation_messages, evaluation_moment
from fedhet.core.server.loop import Loop
from fedhet.core.server.strategy import FedStrategy
from fedhet.data.storage import fitting, read_tensors, save_tensors

MB = 1e6
LAST, BEST = "last", "best_val"
SHARED = "shared.safetensors"
Choice = tuple[str, str]  # a view, and which of its evaluations: LAST or BEST


class PersonalModels(Callback):
    """Asks the clients for their models, and stores them.

    From the beginning of the run, `personal_models` in summary.json says which models are not kept,
    and why. At the end it also names the models that are kept, their rounds and their size.

    Args:
        strategy: the run's strategy.
        folder: the run folder.
    """

    name = "personal"
    memory = ("_best", "_chosen")

    def __init__(self, strategy: FedStrategy, folder: Path) -> None:
        self._strategy = strategy
        self._home = folder / "personal"
        self._wanted: list[Choice] = []
        self._best: dict[str, float] = {}
        self._chosen: dict[str, Moment] = {}  # "view.which" -> the evaluation of these models
        self._record: dict[str, Any] = {"kept": {}, "not_kept": {}, "bytes": 0}

    def begun(self, loop: Loop) -> None:
        """Decide before the first step which models are kept: first the last, then the best."""
        loop.notes["personal_models"] = self._record
        workspace = self._strategy.workspace
        limit = workspace.evaluation.personal_mb
        left = math.inf if limit is None else limit * MB
        views = [view for view in self._strategy.views if view != "global"]
        for view, which in [(view, which) for which in (LAST, BEST) for view in views]:
            size = sum(n > 0 for n in self._strategy.sizes) * self._largest(view)
            reasons = {
                "eval.clients=false": not loop.evaluates,
                "under engine=flwr they stay at their clients' sites": not workspace.simulated,
                # They are the shared weights, and readers would take them for personal models.
                "eval.personal=false": view == "personal" and not workspace.evaluation.personal,
                "eval.personal_mb=0": limit == 0,
            }
            if reason := next((reason for reason, holds in reasons.items() if holds), None):
                self._refuse(view, which, reason)
            elif size > left:
                reason = f"they can take {size / MB:.1f} MB, with eval.personal_mb={limit:g}"
                if left < float(limit or 0) * MB:
                    reason += f" and only {left / MB:.1f} MB left"
                self._refuse(view, which, reason)
                log.warning("the %s models (%s) are not kept: %s", view, which, reason)
            else:
                left -= size
                self._wanted.append((view, which))

    def _largest(self, view: str) -> int:
        """Return the most bytes in which a client's model can differ from the shared weights."""
        strategy = self._strategy
        state = _module(strategy.method.client, view, strategy.workspace.model)[0].state_dict()
        # If the method has no personal models: shared weights with the client's own statistics.
        names = {"personal": (), **strategy.method.evaluates(strategy.workspace)}.get(view)
        if names is None:
            return trees.nbytes(state)
        kept = trees.pick(strategy.workspace.initial, strategy.workspace.kept)
        return trees.nbytes(trees.pick(state, names)) + trees.nbytes(kept)

    def _refuse(self, view: str, which: str, reason: str) -> None:
        self._record["not_kept"][f"{view}.{which}"] = reason

    # ---- during the run
    def evaluated(self, loop: Loop, row: Row, updates: Sequence[Upload]) -> None:
        """Note the evaluation that was just made as the last one, and as the best one if it is."""
        moment = evaluation_moment(self._strategy)
        for view, which in self._wanted:
            if which == LAST:
                self._chosen[f"{view}.{which}"] = moment
                continue
            value = row.get(self._strategy.workspace.task.scoring.key(f"{view}_val_weighted"))
            if value is None:  # no score, or no validation samples
                value = -row.get(f"loss_{view}_val_weighted", math.inf)
            if value > self._best.get(view, -math.inf):
                self._best[view] = value
                self._chosen[f"{view}.{which}"] = moment
                self._strategy.pin(view)

    def ended(self, loop: Loop, status: str, error: BaseException | None) -> None:
        """Ask the clients for the models, after the training."""
        if status != "ok":
            return
        moments = {moment["round"]: moment for moment in self._chosen.values()}
        for round, moment in sorted(moments.items()):
            asked = {view for view, which in self._wanted if self._round(view, which) == round}
            if not asked:
                continue
            plan = evaluation_messages(self._strategy, moment)
            for msg in plan:
                msg.extras = {**msg.extras, KEEP: ",".join(sorted(asked))}
            for reply in loop.exchange(plan):
                if isinstance(reply, Failure):
                    loop.failures.append({"round": round, **vars(reply)})
                    log.warning("round %d: %s", round, reply)
                else:
                    self._store(plan[0], reply, asked)
        for view, which in self._wanted:
            if round_kept := self._round(view, which):
                self._record["kept"].setdefault(view, {})[which] = round_kept
        self._record["bytes"] = sum(file.stat().st_size for file in self._home.glob("**/*.*"))

    def _round(self, view: str, which: str) -> int | None:
        """Return the round of the evaluation of these models; None if there was none."""
        moment = self._chosen.get(f"{view}.{which}")
        return moment["round"] if moment else None

    def _store(self, msg: Broadcast, update: Upload, views: set[str]) -> None:
        """Store the models in a client's reply; if one cannot be stored, give up its view."""
        workspace = self._strategy.workspace
        common = {**workspace.initial, **msg.weights}
        folder = self._home / f"round-{msg.round:06d}"
        for view in sorted(views):
            # Only the names in the model are used.
            modules = _module(self._strategy.method.client, view, workspace.model)
            try:
                own = update.tree(f"{KEEP}.{view}")
                trees.whole_module(*modules, common, own)  # checks that it can be loaded
                save_tensors(folder / view / f"{update.pid}.safetensors", own)
                if not (folder / SHARED).exists():
                    save_tensors(folder / SHARED, common)
            except (ValueError, OSError) as error:
                views.remove(view)
                self._drop(view, f"client {update.pid}: {error}")

    def _drop(self, view: str, reason: str) -> None:
        """Remove all models of the view; the run still ends with success."""
        for choice in [choice for choice in self._wanted if choice[0] == view]:
            self._wanted.remove(choice)
            self._refuse(*choice, reason)
            log.warning("the %s models (%s) are not kept: %s", *choice, reason)
        for partial in self._home.glob(f"*/{view}"):
            shutil.rmtree(partial, ignore_errors=True)


def _module(half: type[Client], view: str, model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the module that the view evaluates, built around this model, and the model."""
    return (half.personal_module(model) if view == "personal" else model), model


# ---- reading
def load(
    folder: Path,
    summary: dict[str, Any],
    weights: str,
    client: int,
    half: type[Client],
    model: nn.Module,
) -> nn.Module:
    """Return the module that a client evaluated, with its values.

    Args:
        folder: the run folder.
        summary: the content of its summary.json.
        weights: the name of a view for its last evaluation; "<view>_best_val" for its best
            evaluation; or "best_val" for the best evaluation of the first view of own models.
        client: the client's number.
        half: the client half of the method.
        model: a model like the run's model; its values are replaced.

    Raises:
        ConfigError: the run has not kept this model; the message says why.
        DataError: a file is damaged.
    """
    views = [view for view in summary.get("models") or () if view != "global"]
    which = BEST if weights.endswith(BEST) else LAST
    view = weights.removesuffix(BEST).rstrip("_") or next(iter(views), "personal")
    round = _round(folder, summary, view, which)
    home = folder / "personal" / f"round-{round:06d}"
    path = home / view / f"{integer('client', client, low=0)}.safetensors"
    if not path.exists():
        raise ConfigError(
            f"client={client}: {path} is missing; a client has no model if it has no data or failed"
            f" in this evaluation. The clients are 0 to"
            f" {summary['partition']['clients'] - 1}"
        )
    module, model = _module(half, view, model)
    common, own = (read_tensors(file) for file in (home / SHARED, path))
    with fitting(path):
        module.load_state_dict(trees.whole_module(module, model, common, own))
    return module


def _round(folder: Path, summary: dict[str, Any], view: str, which: str) -> int:
    """Return the round from which the models are kept.

    Raises:
        ConfigError: none are kept; the message says why.
    """
    problem = f"{folder}: no {view} models ({which}) are kept: "
    record = summary.get("personal_models") or {}
    if (round := ((record.get("kept") or {}).get(view) or {}).get(which)) is not None:
        return int(round)
    views = summary.get("models")
    if summary["status"] != "ok":
        reason = f"a run writes them if it ends with status ok; this run is {summary['status']}"
    elif views and view not in views:
        reason = f"method={summary['method']} was evaluated by {', '.join(views)} models only"
    else:
        default = "no client has validation samples (partition.split)"
        reason = (record.get("not_kept") or {}).get(f"{view}.{which}", default)
    raise ConfigError(problem + reason)

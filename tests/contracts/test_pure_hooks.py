"""The terms of a step are functions: those of two clients can be computed as one.

Every call of a term's function in the last step of a short run is noted. What the clients' calls
got is then stacked and given to one of the two functions, while the live model holds NaN: to losses
and penalties under torch.func.vmap, to those of gradients as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from composing import composed
from contracts.short import SETTINGS, SHORT
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from fedhet.core.client.context import ClientContext
from fedhet.core.client.descent import Descent
from fedhet.core.client.functional import Frozen
from fedhet.core.client.training import Batch
from fedhet.core.kernel import Term
from fedhet.core.messages import Broadcast, Reply
from fedhet.core.server.phases import locate
from fedhet.core.workspace import Workspace
from fedhet.data.toy import toy_task
from fedhet.models import CharLSTM
from fedhet.runs.config import catalogue
from fedhet.runs.job import Job
from fedhet.runs.stores import MemoryStore

VALUES = ("loss", "penalty")
# What cannot be computed for many clients at once is called outside of the steps: `data`, and the
# terms "weight" and "step", with FedGMM's mixtures by scikit-learn and FedDisk's networks.
OUTSIDE = ("weight", "step")
# Terms that are off by default.
OPTIONS = {"fedgen": ["method.kl=1"], "fednorm": ["plugin.fednorm.z_when=last_epoch"]}
# A step of pooled training has one client.
CASES = [(method, "") for method in catalogue.choices("method") if method != "pooled"]
CASES += [("fedavg", plugin) for plugin in catalogue.choices("plugin")]
WITH_TERMS = {
    *("ditto", "feddyn", "fedgen", "fedlex", "fednorm", "fedntd", "fedpcl", "fedproto", "fedprox"),
    *("fedrod", "moon", "scaffold"),
}


def parts(arg: Any) -> Any:
    """The tensors of a batch in the order of its fields, or a tree as a dict; [] for no batch."""
    if arg is None:
        return []
    if isinstance(arg, Batch):
        return [arg.x, arg.y, arg.index, arg.features, arg.logits]
    return dict(arg)


def copied(tree: Any) -> Any:
    """The tree, all of whose leaves are tensors, without the graph and apart from later changes."""
    return tree_map(lambda t: t.detach().clone(), tree)


def attributes(owner: Any) -> dict[str, Any]:
    """What shows a change of an attribute, of a container in one, or of a tensor in one."""
    return (
        {
            name: (id(value), [(id(t), getattr(t, "_version", 0)) for t in tree_leaves(value)])
            for name, value in vars(owner).items()
        }
        if hasattr(owner, "__dict__")
        else {}
    )


class Noted:
    """The calls of what changes the steps of one client, by (the function's name, its kind)."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], Callable[..., Any]] = {}
        self.calls: dict[tuple[str, str], list[Any]] = defaultdict(list)

    def reply(self, client: Any, msg: Broadcast) -> Reply:
        """The client's reply, for which the terms of all that it trains are noted."""
        descent = ClientContext._descent

        def noting(
            ctx: ClientContext,
            model: Any,
            data: Any,
            local: Any,
            terms: Sequence[Term],
            loss: Term | None = None,
            *how: Any,
        ) -> Descent:
            noted = [self._noted(term) for term in terms]
            return descent(ctx, model, data, local, noted, loss and self._noted(loss), *how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ClientContext, "_descent", noting)
            reply: Reply = client.handle(msg)
        return reply

    def _noted(self, term: Term) -> Term:
        if term.kind in OUTSIDE:
            return term
        key = f"{term.f.__module__}.{term.f.__qualname__}", term.kind
        owner = getattr(term.f, "__self__", None)
        self.functions[key] = term.f

        def noting(*args: Any) -> Any:
            given = copied([parts(arg) for arg in args])
            before = attributes(owner)
            result = term.f(*args)
            assert attributes(owner) == before, f"{key} has changed an attribute"
            self.calls[key].append((given, copied(result)))
            return result

        return replace(term, f=noting)


def last_step(method: str, plugin: str) -> tuple[Job, list[Noted]]:
    """The clients' calls in the last of two rounds, of two clients with as many samples.

    In the first round they would not be alike: MOON has no model of an earlier one there.
    """
    short = {line for name in (method, plugin) for line in SHORT.get(name, [])}
    options = [*OPTIONS.get(method, []), *OPTIONS.get(plugin, [])]
    settings = [*SETTINGS, "fraction=1", "privacy.min_count=0", *short, *options]
    job = Job(
        composed(f"method={method}", f"plugin=[{plugin}]", *settings), toy_task(2, equal=True)
    )
    store = MemoryStore()
    number = 1
    while locate(job.strategy.timetable, number):
        step = job.strategy.plan(number)
        plan = step.messages
        noted = [Noted() for _ in plan]
        replies = [one.reply(job.client(store), msg) for one, msg in zip(noted, plan, strict=True)]
        job.strategy.finish_step(step, replies)
        number += 1
    return job, noted


def at_once(kind: str, function: Callable[..., Any], args: Any, workspace: Workspace) -> Any:
    """What it makes of stacked arguments: values, or a tree."""
    if kind in VALUES:
        return vmap(lambda params, batch, own: function(params, Batch(*batch, workspace), own))(
            *args
        )
    return function(*args)


@pytest.mark.parametrize(("method", "plugin"), CASES)
def test_the_terms_of_two_clients_are_computed_as_one(method: str, plugin: str) -> None:
    job, (one, two) = last_step(method, plugin)
    assert one.functions or (plugin or method) not in WITH_TERMS
    with torch.no_grad():
        for t in job.workspace.model.state_dict().values():
            t.fill_(torch.nan)
    for key, function in one.functions.items():
        assert one.calls[key], f"{key} was not called"
        for pair in zip(one.calls[key], two.calls[key], strict=True):
            args, expected = tree_map(lambda *t: torch.stack(t), *pair)
            result = at_once(key[1], function, args, job.workspace)
            torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-7)


def test_a_recurrent_model_is_a_function_of_its_tensors() -> None:
    """Its layers keep a second list of their weights."""

    def model() -> CharLSTM:
        return CharLSTM(shape=(6,), classes=9, embedding=3, hidden=5, layers=2).eval()

    one, two, given = model(), model(), model()
    frozen = Frozen(given)
    x = torch.randint(0, 9, (4, 6))
    with torch.no_grad():
        for expected in (one, two, one):
            result: Tensor = frozen(expected.state_dict())(x)
            assert torch.equal(result, expected(x))

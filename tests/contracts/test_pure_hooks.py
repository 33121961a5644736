"""The terms of a step are functions: those of two clients can be computed as one.

Every call of a term's function, or of a hook of the old form, in the last step of a short run is
noted. What the clients' calls got is then stacked and given to one of the two objects, while the
live model holds NaN: to losses and penalties under torch.func.vmap, to those of gradients as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from composing import composed
from contracts.short import SETTINGS, SHORT
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from fedhet.config import catalogue
from fedhet.core.functional import Frozen
from fedhet.core.kernel import Plugin, Term, overrides
from fedhet.core.phases import locate
from fedhet.core.training import Batch, LocalTraining
from fedhet.core.workspace import Workspace
from fedhet.data.toy import toy_task
from fedhet.job import Job
from fedhet.models import CharLSTM
from fedhet.stores import MemoryStore

VALUES = ("losses", "penalty", "loss")
IN_PLACE = ("gradient", "scale")  # hooks of the old form
HOOKS = ("losses", "penalty", *IN_PLACE)
# None of these is an exception. What cannot be computed for many clients at once is called outside
# of the steps (`data`, and the terms "weight" and "step", with FedGMM's mixtures by scikit-learn
# and FedDisk's networks) or holds the state of an optimiser (`optimizer` of the old form).
OUTSIDE = ("weight", "step")
# Clients whose trees differ in their names are not alike: MOON's first participation has no tree.
OPTIONS = {"fedgen": ["method.kl=1"]}  # a term that is off by default
# A step of pooled training has one client.
CASES = [(method, "") for method in catalogue.choices("method") if method != "pooled"]
CASES += [("fedavg", plugin) for plugin in catalogue.choices("plugin")]


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
    """The calls of what changes the steps of one client, by (the owner or function, its kind)."""

    def __init__(self, client: Any) -> None:
        self.hooks: dict[tuple[str, str], Callable[..., Any]] = {}
        self.calls: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for owner in (client, *client.plugins):
            base = Plugin if isinstance(owner, Plugin) else LocalTraining
            for hook in HOOKS:
                if hasattr(base, hook) and overrides(owner, base, hook):
                    key = getattr(owner, "name", "method"), hook
                    setattr(owner, hook, self._noting(key, getattr(owner, hook), owner))
        self._note_terms(client)

    def _note_terms(self, client: Any) -> None:
        descent = client.descent

        def noting(*args: Any, terms: Any = (), loss: Term | None = None, **how: Any) -> Any:
            usual = client._terms
            client._terms = [[*map(self._noted, some)] for some in usual]
            own = {"terms": [*map(self._noted, terms)], "loss": loss and self._noted(loss)}
            try:
                return descent(*args, **own, **how)
            finally:
                client._terms = usual

        client.descent = noting

    def _noted(self, term: Term) -> Term:
        if term.kind in OUTSIDE:
            return term
        key = f"{term.f.__module__}.{term.f.__qualname__}", term.kind
        return replace(term, f=self._noting(key, term.f, getattr(term.f, "__self__", None)))

    def _noting(
        self, key: tuple[str, str], function: Callable[..., Any], owner: Any
    ) -> Callable[..., Any]:
        self.hooks[key] = function

        def noting(*args: Any) -> Any:
            given = copied([parts(arg) for arg in args])
            before = attributes(owner)
            result = function(*args)
            assert attributes(owner) == before, f"{key} has changed an attribute"
            made = args[0] if result is None else result
            self.calls[key].append((given, copied(made)))
            return result

        return noting


def last_step(method: str, plugin: str) -> tuple[Job, list[Noted]]:
    """The clients' calls in the last of two rounds, of two clients with as many samples."""
    short = {line for name in (method, plugin) for line in SHORT.get(name, [])}
    settings = [*SETTINGS, "fraction=1", "privacy.min_count=0", *short, *OPTIONS.get(method, [])]
    job = Job(
        composed(f"method={method}", f"plugin=[{plugin}]", *settings), toy_task(2, equal=True)
    )
    store = MemoryStore()
    number = 1
    while locate(job.strategy.timetable, number):
        plan = job.strategy.plan(number)
        clients = [job.client(store) for _ in plan]
        noted = [Noted(client) for client in clients]
        replies = [client.handle(msg) for client, msg in zip(clients, plan, strict=True)]
        job.strategy.settle(replies)
        number += 1
    return job, noted


def at_once(kind: str, function: Callable[..., Any], args: Any, workspace: Workspace) -> Any:
    """What it makes of stacked arguments: values, or a tree."""
    if kind in VALUES:
        return vmap(lambda params, batch, own: function(params, Batch(*batch, workspace), own))(
            *args
        )
    result = function(*args)
    return args[0] if result is None else result  # the gradients that it has changed


@pytest.mark.parametrize(("method", "plugin"), CASES)
def test_the_hooks_of_two_clients_are_computed_as_one(method: str, plugin: str) -> None:
    job, (one, two) = last_step(method, plugin)
    with torch.no_grad():
        for t in job.workspace.model.state_dict().values():
            t.fill_(torch.nan)
    for key, function in one.hooks.items():
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

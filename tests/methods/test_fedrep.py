"""FedRep and FedPer: rounds by hand, what travels, and the reductions to FedAvg and FedBABU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from methods.by_hand import DATA, EPOCHS, LR, SIZES, Case, Weights, case, gradient, mean, same
from methods.readouts import arrays, client_state, step_and_replies
from torch import Tensor, nn

from fedhet.core import trees
from fedhet.core.client.client import UNSHARED
from fedhet.core.client.context import ClientContext
from fedhet.core.client.training import only
from fedhet.core.errors import ConfigError
from fedhet.core.kernel import Message, Plugin, State, Term
from fedhet.core.server.evaluation import evaluation_messages, global_scores
from fedhet.core.task import Samples
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedbabu import FedBABU
from fedhet.methods.fedrep import FedRep

__all__ = ["case"]
Federation = Callable[..., Any]


def stepped(w: Weights, pid: int, part: str, epochs: int) -> Weights:
    """The weights after so many steps of the tensors whose names begin with `part`."""
    for _ in range(epochs):
        g = gradient(w, *DATA[pid])
        w = {name: a - LR * g[name] if name.startswith(part) else a for name, a in w.items()}
    return w


def head(tree: Weights) -> Weights:
    return {name: a for name, a in tree.items() if name.startswith("head.")}


@pytest.mark.parametrize("joint", [False, True], ids=["fedrep", "fedper"])
def test_by_hand(case: Callable[..., Case], joint: bool) -> None:
    """Collins et al., algorithm 1: the head, then the body. Arivazhagan et al.: both at once."""
    running = case(FedRep, options={"head_epochs": 2, "joint": joint})
    heads = [head(running.weights)] * len(SIZES)
    for x, cohort, merged in running.rounds():
        ends = []
        for k in cohort:
            w = {**x, **heads[k]}
            if joint:
                w = stepped(w, k, "", EPOCHS)
            else:
                w = stepped(stepped(w, k, "head.", 2), k, "body.", EPOCHS)
            heads[k] = head(w)
            ends.append(w)
        expected = mean(ends, [SIZES[k] if joint else 1 for k in cohort])
        same(merged, {**expected, **head(x)})  # the server's own head is never trained
        for k in range(len(SIZES)):
            same(arrays(client_state(running.run, k, UNSHARED)) or heads[k], heads[k])


def test_the_steps_of_a_head_are_counted(federation: Federation) -> None:
    """A client takes as many in each epoch of its head as in one of its body."""

    def steps(head_epochs: int) -> float:
        options = {"head_epochs": head_epochs}
        _, replies = step_and_replies(federation(toy_task(), FedRep, options=options, epochs=2))
        return sum(reply.metrics["steps"] for reply in replies)

    assert steps(3) == 2.5 * steps(0) > 0


@dataclass(frozen=True)
class Loud(Plugin):
    """Changes whatever terms can change in a step."""

    name = "loud"
    breaks = dict.fromkeys(("plain steps", "sgd steps"), "it scales gradients and steps")

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        w = torch.full((len(ctx.data),), 3.0)
        return [
            Term("weight", lambda params, batch, own: own["w"], {"w": w}),
            Term("loss", lambda params, batch, own: batch.logits.square().sum(1)),
            Term("penalty", lambda params, batch, own: sum(map(squared, params.values()))),
            Term("gradient", lambda params, batch, own: trees.map(torch.ones_like, params)),
            Term("scale", lambda params, batch, own: trees.map(doubling, params)),
            Term("step", lambda params, batch, own: trees.map(doubling, params)),
        ]


def squared(p: Tensor) -> Tensor:
    return p.square().sum()


def doubling(p: Tensor) -> Tensor:
    return torch.full_like(p, 2.0)


@dataclass(frozen=True)
class Dark(Plugin):
    """Trains on other inputs."""

    name = "dark"

    def data(self, samples: Samples, state: State) -> Samples:
        return Samples(samples.x / 2, samples.y)


def test_plugins_change_the_data_of_a_heads_epochs_and_nothing_else(
    federation: Federation,
) -> None:
    """All act on the body."""

    def ends(*plugins: type[Plugin]) -> tuple[Any, Any]:
        options = {"plugins": lambda: [plugin() for plugin in plugins], "epochs": 2}
        run = federation(toy_task(), FedRep, rounds=1, **options)
        run.step()
        body = {name: t for name, t in run.model.items() if not name.startswith("head.")}
        heads = [client_state(run, pid, UNSHARED) for pid in range(4)]
        return *body.values(), *(t for own in heads for t in own.values())

    plain, loud, dark = ends(), ends(Loud), ends(Dark)
    assert [torch.equal(*pair) for pair in zip(plain, loud, strict=True)] == [False] * 2 + [
        True
    ] * 8
    assert not any(torch.equal(*pair) for pair in zip(plain, dark, strict=True))


@pytest.mark.parametrize("joint", [False, True])
def test_no_head_travels(federation: Federation, joint: bool) -> None:
    run = federation(toy_task(norm=True), FedRep, options={"joint": joint}, rounds=2, fraction=0.5)
    for _ in range(2):
        plan, replies = step_and_replies(run)
        for message in [*plan, *replies, *evaluation_messages(run.strategy)]:
            assert not any(name.startswith("head.") for name in message.weights)
            assert not any("head." in name for name in message.extras)
    assert global_scores(run.strategy) == {}


def test_without_epochs_of_the_head_it_is_fedbabu(federation: Federation) -> None:
    """Whose head nobody trains either; clients of equal size, since FedRep has a plain mean."""
    settings: dict[str, Any] = {"rounds": 3, "lr": 0.1, "epochs": 2, "local": {"momentum": 0.5}}
    task = toy_task(equal=True, norm=True)
    babu = federation(task, FedBABU, **settings).run()
    rep = federation(task, FedRep, options={"head_epochs": 0}, **settings).run()
    assert rep.sha256 == babu.sha256
    trained = federation(task, FedRep, options={"head_epochs": 1}, **settings).run()
    assert trained.sha256 != babu.sha256


def test_the_first_bodies_of_fedper_are_those_of_fedavg(federation: Federation) -> None:
    """All heads are the common one in the first round; later FedAvg's are averaged."""
    settings: dict[str, Any] = {"rounds": 2, "lr": 0.1, "epochs": 2}
    per = federation(toy_task(), FedRep, options={"joint": True}, **settings)
    avg = federation(toy_task(), FedAvg, **settings)
    for equal in (True, False):
        per.step()
        avg.step()
        bodies = [name for name in per.model if not name.startswith("head.")]
        assert all(torch.equal(per.model[name], avg.model[name]) for name in bodies) is equal


def test_fedper_with_one_client_is_fedavg(federation: Federation) -> None:
    """Bit for bit: the head that it keeps is the one that FedAvg would send back to it."""
    settings: dict[str, Any] = {"rounds": 3, "lr": 0.1, "epochs": 2}
    per = federation(toy_task(1), FedRep, options={"joint": True}, **settings).run()
    avg = federation(toy_task(1), FedAvg, **settings).run()
    own = {**per.model, **client_state(per, 0, UNSHARED)}
    assert all(torch.equal(own[name], t) for name, t in avg.model.items())


def test_a_client_is_evaluated_with_its_own_head(federation: Federation) -> None:
    """With the common one where it has never taken part."""
    run = federation(toy_task(), FedRep, rounds=2, fraction=0.5, lr=0.5, epochs=2)
    cohort = {msg.pid for msg in run.step()}
    assert 0 < len(cohort) < 4
    for msg in evaluation_messages(run.strategy):
        metrics = run.client().handle(msg).metrics
        model = run.workspace.load({**run.model, **client_state(run, msg.pid, UNSHARED)}).eval()
        test = run.workspace.parts(msg.pid, "test")["test"]
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(test.x), test.y))
        assert metrics["test.personal.loss"] == pytest.approx(loss, rel=1e-5)
        assert bool(client_state(run, msg.pid, UNSHARED)) is (msg.pid in cohort)


def test_only_trains_what_it_names_and_restores_the_rest() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].bias.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    with pytest.raises(KeyError), only(model, {"1.weight"}):
        assert [n for n, p in model.named_parameters() if p.requires_grad] == ["1.weight"]
        raise KeyError
    assert [p.requires_grad for p in model.parameters()] == before


def test_refusals(federation: Federation) -> None:
    with pytest.raises(ConfigError, match=r"method=fedrep keeps .*head.*Linear .*none"):
        FedRep.scope(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"method\.head_epochs=-1 "):
        federation(toy_task(), FedRep, options={"head_epochs": -1})

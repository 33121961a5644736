"""FedALA: what it shares with FedAvg, what clients keep, and its options."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from maths.cases import named_case
from methods.by_hand import same
from methods.plugs import noisy, spy
from methods.readouts import arrays, client_state, step_and_replies

from fedhet.core.client.context import ClientContext
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.kernel import Plugin
from fedhet.core.server.evaluation import evaluation_messages
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.methods.fedala import FedALA
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fedprox import FedProxPlugin

Federation = Callable[..., Any]
LOCAL, WEIGHTS = "fedala.w", "fedala.A"  # client state


def with_plugins() -> list[Plugin]:
    return [FedNormPlugin(temperature=0.05), FedProxPlugin(mu=0.5)]


@pytest.mark.parametrize(
    ("plugins", "buffers"),
    [(list, "average"), (with_plugins, "local"), (with_plugins, "frozen")],
    ids=["average", "local", "frozen"],
)
def test_eta_0_is_fedavg(federation: Federation, plugins: Any, buffers: str) -> None:
    """Bit for bit, although A_k = 1 is learnt each time in train mode."""
    settings = {
        "plugins": plugins,
        "buffers": buffers,
        "rounds": 4,
        "fraction": 0.75,
        "epochs": 2,
        "local": {"momentum": 0.9},
    }
    fixed = federation(noisy(), FedALA, options={"eta": 0.0, "p": "all"}, **settings).run()
    assert any(client_state(fixed, pid, WEIGHTS) for pid in range(4))
    fedavg = federation(noisy(), FedAvg, **settings).run()
    learning = federation(noisy(), FedALA, **settings).run()
    assert fixed.sha256 == fedavg.sha256 != learning.sha256


def test_one_client_is_fedavg(federation: Federation) -> None:
    """It receives what it has sent, so there is nothing to mix."""
    ala, fedavg = (
        federation(toy_task(1, norm=True), cls, rounds=4).run() for cls in (FedALA, FedAvg)
    )
    assert ala.sha256 == fedavg.sha256
    assert client_state(ala, 0, LOCAL) and not client_state(ala, 0, WEIGHTS)


def test_unchanged_means_every_entry(federation: Federation) -> None:
    """A received layer is changed if one entry of its bias differs, even with an equal sum."""
    run = federation(toy_task(1), FedALA, rounds=2)
    run.step()
    msg = run.strategy.plan(2).messages[0]
    for change in (torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.1]), torch.tensor([0.1, -0.1])):
        client = run.client()
        weights = {**msg.weights, "head.bias": msg.weights["head.bias"] + change}
        client.handle(replace(msg, weights=weights))
        assert (client.state.get(WEIGHTS) is not None) == bool(change.any())


def test_two_clients_that_alternate_keep_their_own(federation: Federation) -> None:
    """Each round changes the state of its client only, and w_k is what that client has sent."""
    run = federation(toy_task(2, norm=True), FedALA, options={"eta": 50.0}, rounds=12, fraction=0.5)
    before: list[Any] = [{LOCAL: {}, WEIGHTS: {}}, {LOCAL: {}, WEIGHTS: {}}]
    served = set()
    for _ in range(12):
        (msg,), (update,) = step_and_replies(run)
        served.add(msg.pid)
        now = [
            {key: arrays(client_state(run, pid, key)) for key in (LOCAL, WEIGHTS)}
            for pid in range(2)
        ]
        other = 1 - msg.pid
        same(now[other][LOCAL], before[other][LOCAL])
        same(now[other][WEIGHTS], before[other][WEIGHTS])
        sent = {name: update.weights[name].numpy() for name in ("head.weight", "head.bias")}
        same(now[msg.pid][LOCAL], sent)
        before = now
    assert served == {0, 1}
    assert not np.array_equal(before[0][WEIGHTS]["head.weight"], before[1][WEIGHTS]["head.weight"])


def test_p_counts_layers(federation: Federation) -> None:
    """A weight and its bias are one layer; statistics are not mixed."""
    cases = [
        (1, ["head"]),
        (2, ["body.1", "head"]),
        (3, ["body.0", "body.1", "head"]),
        (9, ["body.0", "body.1", "head"]),
        ("all", ["body.0", "body.1", "head"]),
    ]
    for p, modules in cases:
        with named_case(p, modules):
            run = federation(toy_task(norm=True), FedALA, options={"p": p}).run()
            expected = [f"{module}.{name}" for module in modules for name in ("weight", "bias")]
            assert list(client_state(run, 0, LOCAL)) == expected
            assert run.strategy.method.evaluates(run.workspace)["personal"] == expected


def test_evaluation_leaves_no_trace(federation: Federation) -> None:
    """Neither in the weights nor in what clients keep."""
    watched, alone = (
        federation(noisy(), FedALA, options={"eta": 20.0}, rounds=4, fraction=0.75)
        for _ in range(2)
    )
    for _ in range(4):
        watched.step()
        alone.step()
        for msg in evaluation_messages(watched.strategy):
            watched.client().handle(msg)
        assert watched.sha256 == alone.sha256
        for pid in range(4):
            for key in (LOCAL, WEIGHTS):
                same(arrays(client_state(watched, pid, key)), arrays(client_state(alone, pid, key)))


def test_the_samples_are_drawn_afresh(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """s % of a client's own samples, each once: others in each round, the same in its epochs."""
    learnings: list[list[torch.Tensor]] = []
    original = ClientContext.adapt

    def adapt(self: Any, *given: Any, **more: Any) -> None:
        batches: list[torch.Tensor] = []
        learnings.append(batches)
        descent = self._descent

        def noting(*of: Any) -> Any:
            found = descent(*of)

            def noted(module: Any, params: Any, own: Any, columns: Any) -> Any:
                batches.append(columns[2])
                return found.terms(module, params, own, columns)

            return replace(found, terms=noted)

        self._descent = noting
        original(self, *given, **more)
        del self._descent

    monkeypatch.setattr(ClientContext, "adapt", adapt)
    federation(
        toy_task(3, equal=True),
        FedALA,
        options={"s": 50, "threshold": 0.0, "max_epochs": 4},
        rounds=3,
        batch_size=4,
    ).run()
    # 6 of 12 samples, in batches of 4 and 2
    assert [len(batches) for batches in learnings] == 3 * [2 * 4] + 3 * [2]
    drawn = [torch.cat(batches[:2]) for batches in learnings]
    for samples, batches in zip(drawn, learnings, strict=True):
        positions = samples.tolist()
        assert len(set(positions)) == 6 and min(positions) >= 0 and max(positions) < 12
        for first in range(0, len(batches), 2):
            assert torch.equal(torch.cat(batches[first : first + 2]), samples)
    assert len({frozenset(samples.tolist()) for samples in drawn}) == 6


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_learning(federation: Federation, loss: float) -> None:
    """It cannot settle. The client's reply is then refused; an evaluation reports the loss."""
    factor = [1.0]
    plain = toy_task(2)
    run = federation(
        replace(plain, criterion=lambda output, y: plain.criterion(output, y) * factor[0]),
        FedALA,
        rounds=2,
    )
    run.step()
    factor[0] = loss
    for msg in evaluation_messages(run.strategy):
        assert run.client().handle(msg).metrics["test.personal.loss"] == np.inf
    with pytest.raises(RunFailed, match="NaN "):
        run.step()


def test_plugins_stay_out_of_the_learning(federation: Federation) -> None:
    """They see each training sample once in each round."""
    seen: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    equal = toy_task(3, equal=True)
    run = federation(equal, FedALA, plugins=lambda: [spy(seen)], rounds=3).run()
    assert client_state(run, 0, WEIGHTS)
    for step, pid in itertools.product((1, 2, 3), range(3)):
        assert sorted(itertools.chain(*seen[step, pid])) == list(range(12))


def test_nothing_of_it_travels(federation: Federation) -> None:
    """A client packs what FedAvg's would: weights of the same sizes, and no extras."""
    packed = {}
    for cls in (FedALA, FedAvg):
        run = federation(toy_task(norm=True), cls, rounds=2)
        run.step()
        msg = run.strategy.plan(2).messages[0]
        reply = run.client().handle(msg)
        assert not reply.extras
        packed[cls] = [array.shape for array in wire.reply_arrays(msg, reply)[0]]
    assert packed[FedALA] == packed[FedAvg]


def test_bad_options_are_named(federation: Federation) -> None:
    cases = [
        {"eta": -1},
        {"s": 0},
        {"s": 101},
        {"p": 0},
        {"p": "top"},
        {"p": 1.5},
        {"threshold": -0.1},
        {"max_epochs": 0},
    ]
    for options in cases:
        with named_case(options):
            alternative = "or all" if "p" in options else ""
            with pytest.raises(
                ConfigError, match=rf"method\.{next(iter(options))}=.*{alternative}"
            ):
                federation(toy_task(), FedALA, options=options)

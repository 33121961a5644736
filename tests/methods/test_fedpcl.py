"""FedPCL: what travels, what stays with the clients, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from asking import packed_weights
from maths.cases import named_case
from torch import nn

from fedhet.core import trees
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.messages import Failure
from fedhet.core.server.evaluation import evaluation_messages, global_scores
from fedhet.core.server.server_opt import FedAvgM
from fedhet.data.toy import toy_task
from fedhet.methods.fedpcl import FedPCL
from fedhet.methods.fedprox import FedProxPlugin

PROTOTYPES = "fedpcl.prototypes"


def test_only_prototypes_travel(federation: Callable[..., Any]) -> None:
    """2 classes x 3 features in float32, and which classes; the packed messages have no weights."""
    run = federation(toy_task(norm=True), FedPCL, rounds=2, fraction=0.5)
    means = 2 * 3 * 4
    one_set = means + 2
    previous_cohort = {2: 4, 3: 2}  # by step

    def look(plan: list[Any], replies: list[Any]) -> list[Any]:
        for msg, reply in zip(plan, replies, strict=True):
            assert packed_weights(msg, reply) == ([], [])
            assert set(reply.extras) == {PROTOTYPES}
        return replies

    for step in (1, 2, 3):
        plan = run.step(alter=look)
        sizes = run.current.bytes
        assert sizes["up"] == {PROTOTYPES: len(plan) * one_set}
        down = 0 if step == 1 else len(plan) * (one_set + previous_cohort[step] * means)
        assert sizes["down"].get(PROTOTYPES, 0) == down
    assert "accuracy" not in global_scores(run.strategy)


def test_models_belong_to_their_clients_in_any_order(federation: Callable[..., Any]) -> None:
    """Clients that are served in another order have the same prototypes and states.

    A client that has not taken part keeps its initial model.
    """
    forwards, backwards = (
        federation(toy_task(norm=True), FedPCL, rounds=3, fraction=0.5, local={"momentum": 0.5})
        for _ in range(2)
    )
    forwards.run()
    while backwards.round < 4:
        plan = backwards.plan()
        replies = {msg.pid: backwards.client().handle(msg) for msg in reversed(plan)}
        backwards.finish_step([replies[msg.pid] for msg in plan])
    assert forwards.sha256 == backwards.sha256
    states, other_states = (
        [run.store.load(pid, run.strategy.run.versions[pid]) for pid in range(4)]
        for run in (forwards, backwards)
    )
    hashes = [trees.sha256({"": state}) for state in states]
    assert hashes == [trees.sha256({"": state}) for state in other_states]
    assert len(set(hashes)) == 4
    trained = [any(name.startswith("client.kept/") for name in state) for state in states]
    assert sum(trained) >= 2
    assert not any("head." in name for state in states for name in state)


def test_evaluation_leaves_no_trace(federation: Callable[..., Any]) -> None:
    watched, alone = (
        federation(toy_task(norm=True), FedPCL, rounds=2, fraction=0.5) for _ in range(2)
    )
    for _ in range(3):
        watched.step()
        alone.step()
        replies = [watched.client().handle(msg) for msg in evaluation_messages(watched.strategy)]
        assert [reply.pid for reply in replies] == [0, 1, 2, 3]
        assert not any(isinstance(reply, Failure) for reply in replies)
        assert {name.split(".")[1] for reply in replies for name in reply.metrics} == {"personal"}
    assert watched.sha256 == alone.sha256


def test_the_loss_falls(federation: Callable[..., Any]) -> None:
    run = federation(toy_task(), FedPCL, options={"tau": 0.5}, rounds=8, lr=0.1, epochs=2)
    means = []
    for _ in range(9):
        run.step()
        replies = [run.client().handle(msg) for msg in evaluation_messages(run.strategy)]
        means.append(np.mean([reply.metrics["test.personal.loss"] for reply in replies]))
    assert means[-1] < means[0] - 0.02


@pytest.mark.parametrize("workers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_prototypes_are_recorded_and_workers_agree(
    launch: Callable[..., Any], workers: bool
) -> None:
    lines = ["method=fedpcl", "rounds=2", "eval.every=2"]
    run = launch(*lines, task=toy_task(norm=True))
    if workers:
        parallel = launch(*lines, "engine.workers=2", task=toy_task(norm=True))
        assert run.summary["weights_sha256"] == parallel.summary["weights_sha256"]
    assert run.summary["accuracy"]["last"] is None
    assert (run.dir / "prototypes.safetensors").exists()


def test_clip(federation: Callable[..., Any]) -> None:
    for own, client, sent in [
        (10.0, None, 10.0),
        (10.0, 0.5, 0.5),
        (None, None, None),
        (2.0, None, 2.0),
    ]:
        with named_case(own, client, sent):
            run = federation(toy_task(), FedPCL, options={"clip": own}, local={"clip": client})
            assert {msg.local.clip for msg in run.step()} == {sent}


def test_bad_prototypes_are_the_clients_failure(federation: Callable[..., Any]) -> None:
    cases = [
        None,
        {"mean": torch.zeros(2, 3)},
        {"mean": torch.zeros(2, 4), "has": torch.ones(2, dtype=torch.bool)},
        {"mean": torch.full((2, 3), float("nan")), "has": torch.ones(2, dtype=torch.bool)},
        {"mean": torch.full((2, 3), 0.6), "has": torch.ones(2, dtype=torch.bool)},  # norm 1.04
    ]
    for extra in cases:
        with named_case(extra):

            def falsify(plan: list[Any], replies: list[Any], extra: Any = extra) -> list[Any]:
                replies[-1].extras = {} if extra is None else {PROTOTYPES: extra}
                return replies

            with pytest.raises(RunFailed, match=r"client 0 .*'collect'.*fedpcl.prototypes"):
                federation(toy_task(), FedPCL).step(alter=falsify)


def test_what_needs_a_global_model_is_refused(federation: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="method=fedpcl refuses plugin 'fedprox'"):
        federation(toy_task(), FedPCL, plugins=lambda: [FedProxPlugin()])
    with pytest.raises(ConfigError, match=r"method=fedpcl .*global model"):
        federation(toy_task(), FedPCL, server_opt=FedAvgM())


class NoFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)


def test_an_unsuitable_model_is_refused(federation: Callable[..., Any]) -> None:
    for model in (lambda: nn.Sequential(nn.Linear(4, 2)), NoFeatures):
        message = rf"method=fedpcl .*features\(x\).*`head`.* {type(model()).__name__}"
        with named_case(model), pytest.raises(ConfigError, match=message):
            federation(replace(toy_task(), model=model), FedPCL)


def test_bad_options_are_named(federation: Callable[..., Any]) -> None:
    for options in [
        {"tau": 0},
        {"clip": 0},
        {"denominator": "own"},
        {"renormalise": 1},
        {"unseen": "own"},
    ]:
        with (
            named_case(options),
            pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}="),
        ):
            federation(toy_task(), FedPCL, options=options)

"""FedPCL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methods.by_hand import DATA, EPOCHS, LR, SIZES, Weights, latents, same, task
from torch import Tensor, nn

from fedhet import trees
from fedhet.data.toy import ToyModel, toy_task
from fedhet.engines.vectorized import obstacle
from fedhet.errors import ConfigError, RunFailed
from fedhet.evaluation import evaluation_messages, global_scores
from fedhet.flower import wire
from fedhet.messages import Failure
from fedhet.methods.fedpcl import PROTOTYPES, FedPCL
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.server_opt import FedAvgM
from fedhet.task import ClientData, Samples

# ---- two rounds by hand


def length(a: np.ndarray) -> np.ndarray:
    """1 instead of 0: a ReLU may leave no feature."""
    found = np.linalg.norm(a, axis=-1, keepdims=True)
    return np.where(found == 0, 1, found)


def unit(a: np.ndarray) -> np.ndarray:
    return a / length(a)


def by_class(w: Weights, pid: int) -> np.ndarray:
    """NaN for a class that the client does not have."""
    x, y = DATA[pid]
    return np.stack(
        [unit(latents(w, x))[y == c].mean(0) if c in y else np.full(4, np.nan) for c in (0, 1)]
    )


def stepped(
    w: Weights, pid: int, mean: np.ndarray, sets: list[np.ndarray], tau: float, clip: float
) -> Weights:
    """One step on the two contrasts, through the normalisation and the ReLU."""
    x, y = DATA[pid]
    f = latents(w, x)
    z = unit(f)
    dz = np.zeros_like(z)
    for rows, share in [(mean, 1.0), *((rows, 1 / len(sets)) for rows in sets)]:
        p = np.exp(z @ rows.T / tau)
        p = p / p.sum(1, keepdims=True) - np.eye(2)[y]
        dz += share * p @ rows / tau / len(y)
    df = (dz - z * (dz * z).sum(1, keepdims=True)) / length(f) * (f > 0)
    g = {"body.weight": df.T @ x, "body.bias": df.sum(0)}
    norm = np.sqrt(sum((a**2).sum() for a in g.values()))
    g = {name: a * min(1.0, clip / (norm + 1e-6)) for name, a in g.items()}
    return {name: t - LR * g[name] if name in g else t for name, t in w.items()}


def cosine_accuracy(w: Weights, pid: int, rows: np.ndarray) -> float:
    x, y = DATA[pid]
    return float(np.mean(np.nan_to_num(unit(latents(w, x)) @ unit(rows).T, nan=-9).argmax(1) == y))


def test_rounds_by_hand(federation: Callable[..., Any]) -> None:
    """Tan et al., algorithm 1: collect; then local steps on both contrasts, new prototypes up,
    their means down; models stay at home."""
    assert {len(np.unique(y)) for _, y in DATA} == {1, 2}
    own = replace(task(), clients=[ClientData(c.train, None, c.train) for c in task().clients])
    tau, clip = 0.5, 0.4
    run = federation(
        own,
        FedPCL,
        options={"tau": tau, "clip": clip},
        lr=LR,
        epochs=EPOCHS,
        batch_size=max(SIZES),
        rounds=3,
        fraction=0.6,
    )
    initial = {name: t.numpy().copy() for name, t in run.model.items()}
    models, cohort = [initial] * 5, list(range(5))
    assert [msg.pid for msg in run.step()] == sorted(cohort, key=lambda k: (-SIZES[k], k))
    kept = {k: by_class(initial, k) for k in cohort}
    for _ in range(3):
        mean = np.nanmean([kept[k] for k in cohort], 0)
        sets = [np.where(np.isnan(kept[k]), mean, kept[k]) for k in cohort]
        same({"mean": run.strategy.weights["prototypes"]["mean"].numpy()}, {"mean": mean})
        cohort = [msg.pid for msg in run.step()]
        for k in cohort:
            for _ in range(EPOCHS):
                models[k] = stepped(models[k], k, mean, sets, tau, clip)
            kept[k] = by_class(models[k], k)
            state = run.store.load(k, run.strategy.versions[k])
            same(
                {
                    name: state[f"client.kept/{name}"].numpy()
                    for name in ("body.weight", "body.bias")
                },
                {name: models[k][name] for name in ("body.weight", "body.bias")},
            )
        for msg in evaluation_messages(run.strategy):
            metrics = run.client().handle(msg).metrics
            assert metrics["test.personal.accuracy"] == pytest.approx(
                cosine_accuracy(models[msg.pid], msg.pid, kept[msg.pid])
            )
    assert all(np.array_equal(t.numpy(), initial[name]) for name, t in run.model.items())


# ---- what travels, and what stays


def test_only_prototypes_travel(federation: Callable[..., Any]) -> None:
    """2 classes x 3 features in float32 and which classes; never a weight, on the packed
    messages."""
    run = federation(toy_task(norm=True), FedPCL, rounds=2, fraction=0.5)
    one, K = 2 * 3 * 4 + 2, {1: 4, 2: 4, 3: 2}

    def look(plan: list[Any], replies: list[Any]) -> list[Any]:
        for msg, reply in zip(plan, replies, strict=True):
            assert wire.write_broadcast(msg)[0] == [] and wire.reply_arrays(reply)[0] == []
            assert set(reply.extras) == {PROTOTYPES}
        return replies

    for step in (1, 2, 3):
        plan = run.step(alter=look)
        found = run.strategy.current.bytes
        assert found["up"] == {PROTOTYPES: len(plan) * one}
        assert found["down"].get(PROTOTYPES, 0) == (
            0 if step == 1 else len(plan) * (one + K[step] * 24)
        )
    assert "accuracy" not in global_scores(run.strategy)


def test_models_belong_to_their_clients_whatever_the_order(federation: Callable[..., Any]) -> None:
    """Served in another order, the same prototypes and states; a client that has not taken part
    keeps its initial model."""
    runs = [
        federation(toy_task(norm=True), FedPCL, rounds=3, fraction=0.5, local={"momentum": 0.5})
        for _ in range(2)
    ]
    runs[0].run()
    while runs[1].round < 4:
        runs[1].round += 1
        plan = runs[1].strategy.plan(runs[1].round)
        replies = {msg.pid: runs[1].client().handle(msg) for msg in reversed(plan)}
        runs[1].strategy.settle([replies[msg.pid] for msg in plan])
    assert runs[0].sha256 == runs[1].sha256
    kept = [[run.store.load(pid, run.strategy.versions[pid]) for pid in range(4)] for run in runs]
    assert all(trees.sha256({"": a}) == trees.sha256({"": b}) for a, b in zip(*kept, strict=True))
    trained = [any(name.startswith("client.kept/") for name in state) for state in kept[0]]
    assert sum(trained) >= 2 and len({trees.sha256({"": state}) for state in kept[0]}) == 4
    assert not any("head." in name for state in kept[0] for name in state)


def test_prototypes_are_taken_in_eval_mode(federation: Callable[..., Any]) -> None:
    """With the running statistics that the client's predictions use."""
    run = federation(toy_task(norm=True), FedPCL, rounds=1).run()
    for pid, client in enumerate(run.site.task.clients):
        state = run.store.load(pid, run.strategy.versions[pid])
        model = run.site.task.model().eval()
        model.load_state_dict(
            {**run.site.initial, **{name: state[f"client.kept/{name}"] for name in run.site.kept}}
        )
        z = nn.functional.normalize(model.features(client.train.x)).detach()
        expected = torch.stack([z[client.train.y == c].mean(0) for c in range(2)])
        torch.testing.assert_close(state["fedpcl.own/mean"], expected, rtol=1e-5, atol=1e-6)


def test_evaluation_leaves_no_trace(federation: Callable[..., Any]) -> None:
    watched, alone = (
        federation(toy_task(norm=True), FedPCL, rounds=2, fraction=0.5) for _ in range(2)
    )
    for _ in range(3):
        watched.step()
        alone.step()
        replies = [watched.client().handle(msg) for msg in evaluation_messages(watched.strategy)]
        assert [reply.pid for reply in replies] == [0, 1, 2, 3] and not any(
            isinstance(reply, Failure) for reply in replies
        )
        assert {name.split(".")[1] for reply in replies for name in reply.metrics} == {"personal"}
    assert watched.sha256 == alone.sha256


def one_label_each(labels: tuple[int, ...], tests: int | None = None) -> Any:
    """Client k has one label only; each tests on `tests`."""
    plain = toy_task(len(labels), equal=True)
    clients = []
    for k, c in zip(labels, plain.clients, strict=True):
        assert c.test is not None
        test = None if tests is None else Samples(c.test.x, torch.full_like(c.test.y, tests))
        clients.append(ClientData(Samples(c.train.x, torch.full_like(c.train.y, k)), None, test))
    return replace(plain, clients=clients)


def test_a_class_that_no_participant_has_keeps_its_prototype(
    federation: Callable[..., Any],
) -> None:
    run = federation(one_label_each((0, 1)), FedPCL, rounds=3, fraction=0.5)
    run.step()
    for _ in range(3):
        before = run.strategy.weights["prototypes"]["mean"].clone()
        (msg,) = run.step()
        slot = run.strategy.weights["prototypes"]
        assert slot["has"].all() and torch.equal(slot["mean"][1 - msg.pid], before[1 - msg.pid])
        assert not torch.equal(slot["mean"][msg.pid], before[msg.pid])
        # the filled row of its own set
        assert torch.equal(run.strategy._clients[0, 1 - msg.pid], before[1 - msg.pid])


@pytest.mark.parametrize("unseen", ["exclude", "global"])
def test_classes_that_a_client_has_not_seen(federation: Callable[..., Any], unseen: str) -> None:
    """By its own prototypes client 0 never says 1; by the global one it may."""
    run = federation(
        one_label_each((0, 1), tests=1),
        FedPCL,
        options={"unseen": unseen},
        rounds=1,
        lr=0.5,
        epochs=30,
    )
    run.run()
    msg = evaluation_messages(run.strategy)[0]
    client = run.client()
    client.receive(msg)
    scores = client.views(msg)["personal"]().eval()(torch.rand(20, 4)).detach()
    assert scores.shape == (20, 2) and float(scores.abs()[:, 0].max()) <= 1 + 1e-6
    assert (
        torch.isinf(scores[:, 1]).all()
        if unseen == "exclude"
        else float(scores.abs()[:, 1].max()) <= 1 + 1e-6
    )
    assert (client.handle(msg).metrics["test.personal.loss"] == float("inf")) is (
        unseen == "exclude"
    )


def test_a_client_whose_collecting_failed_goes_on(federation: Callable[..., Any]) -> None:
    """Nobody else has its class: its samples have no loss until it has sent prototypes; it is
    evaluated by those of its model."""
    run = federation(one_label_each((0, 1, 1)), FedPCL, rounds=2, on_failure="skip")
    run.step(
        alter=lambda plan, replies: [
            Failure(0, "collect", 1, "gone") if reply.pid == 0 else reply for reply in replies
        ]
    )
    assert run.strategy.weights["prototypes"]["has"].tolist() == [False, True]
    run.step()
    state = run.store.load(0, run.strategy.versions[0])
    initial = run.site.initial
    assert all(torch.equal(state[f"client.kept/{name}"], initial[name]) for name in run.site.kept)
    assert run.strategy.weights["prototypes"]["has"].all()
    run.step()
    assert not torch.equal(
        run.store.load(0, run.strategy.versions[0])["client.kept/body.0.weight"],
        initial["body.0.weight"],
    )


def test_renormalised_prototypes_have_length_one(federation: Callable[..., Any]) -> None:
    for renormalise in (False, True):
        run = federation(toy_task(), FedPCL, options={"renormalise": renormalise}, rounds=1)
        run.run()
        for rows in (
            run.strategy.weights["prototypes"]["mean"],
            run.strategy._clients.flatten(0, 1),
        ):
            assert torch.allclose(rows.norm(dim=1), torch.ones(len(rows)), atol=1e-6) is renormalise


class Frozen(ToyModel):
    """The paper's setting: a frozen encoder, a trained projection at the end of `features`."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(3, 5)
        self.head = nn.Linear(5, 2)
        self.body.requires_grad_(False)

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.projection(self.body(x))
        return found


def test_a_frozen_encoder_with_a_projection(federation: Callable[..., Any]) -> None:
    run = federation(replace(toy_task(), model=Frozen), FedPCL, rounds=2).run()
    assert run.site.trained == ["projection.weight", "projection.bias"] and run.strategy.weights[
        "prototypes"
    ]["mean"].shape == (2, 5)


def test_the_loss_falls(federation: Callable[..., Any]) -> None:
    run = federation(toy_task(), FedPCL, options={"tau": 0.5}, rounds=8, lr=0.1, epochs=2)
    found = []
    for _ in range(9):
        run.step()
        found.append(
            np.mean(
                [
                    run.client().handle(msg).metrics["test.personal.loss"]
                    for msg in evaluation_messages(run.strategy)
                ]
            )
        )
    assert found[-1] < found[0] - 0.02


def test_engines_agree(launch: Callable[..., Any]) -> None:
    lines = ["method=fedpcl", "rounds=2", "eval.every=2"]
    runs = [launch(*lines, *more, task=toy_task(norm=True)) for more in ([], ["engine.workers=2"])]
    assert len({run.summary["weights_sha256"] for run in runs}) == 1
    assert (
        runs[0].summary["accuracy"]["last"] is None
        and (runs[0].dir / "prototypes.safetensors").exists()
    )


def test_it_is_trained_one_by_one(federation: Callable[..., Any]) -> None:
    run = federation(toy_task(), FedPCL)
    assert "FedPCLClient has its own train" in str(obstacle(run.client(), run.strategy.local))


@pytest.mark.parametrize(
    ("own", "client", "sent"),
    [(10.0, None, 10.0), (10.0, 0.5, 0.5), (None, None, None), (2.0, None, 2.0)],
)
def test_clip(
    federation: Callable[..., Any], own: float | None, client: float | None, sent: float | None
) -> None:
    run = federation(toy_task(), FedPCL, options={"clip": own}, local={"clip": client})
    assert {msg.local.clip for msg in run.step()} == {sent}


# ---- refusals


@pytest.mark.parametrize(
    "extra",
    [
        None,
        {"mean": torch.zeros(2, 3)},
        {"mean": torch.zeros(2, 4), "has": torch.ones(2, dtype=torch.bool)},
        {"mean": torch.full((2, 3), float("nan")), "has": torch.ones(2, dtype=torch.bool)},
    ],
    ids=range(4),
)
def test_bad_prototypes_are_the_clients_failure(federation: Callable[..., Any], extra: Any) -> None:
    def lie(plan: list[Any], replies: list[Any]) -> list[Any]:
        replies[-1].extras = {} if extra is None else {PROTOTYPES: extra}
        return replies

    with pytest.raises(RunFailed, match=r"client 0 failed in phase 'collect'.*fedpcl.prototypes"):
        federation(toy_task(), FedPCL).step(alter=lie)


def test_what_needs_a_global_model_is_refused(federation: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="method=fedpcl refuses plugin 'fedprox'"):
        federation(toy_task(), FedPCL, plugins=lambda: [FedProxPlugin()])
    with pytest.raises(ConfigError, match="method=fedpcl has no global model"):
        federation(toy_task(), FedPCL, server_opt=FedAvgM())


class NoFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)


@pytest.mark.parametrize(
    "changes",
    [{"model": lambda: nn.Sequential(nn.Linear(4, 2))}, {"model": NoFeatures}, {"classes": 0}],
    ids=["no head", "no features", "no classes"],
)
def test_what_it_needs_is_said(federation: Callable[..., Any], changes: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"method=fedpcl .*features\(x\).*`head`; this is \w+ with \d classes"
    ):
        federation(replace(toy_task(), **changes), FedPCL)


@pytest.mark.parametrize(
    "options",
    [{"tau": 0}, {"clip": 0}, {"denominator": "own"}, {"renormalise": 1}, {"unseen": "own"}],
    ids=str,
)
def test_bad_options_are_named(federation: Callable[..., Any], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}="):
        federation(toy_task(), FedPCL, options=options)

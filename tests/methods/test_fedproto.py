"""FedProto: its equations by loops, rounds by hand, what travels and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from asking import packed_weights
from methods.by_hand import EPOCHS, LR, SIZES, Weights, each
from methods.readouts import arrays, client_state, step_and_replies
from methods.three_classes import CLASSES, DATA, backward, error, features, logits, task
from privacy.few import COUNTS as FEW
from privacy.few import LEAST, few

from fedhet.core.client.client import UNSHARED
from fedhet.core.counts import suppressed
from fedhet.core.errors import RunFailed
from fedhet.core.server.evaluation import evaluation_messages, global_scores
from fedhet.data.toy import toy_task
from fedhet.methods.ditto import Ditto
from fedhet.methods.fedproto import FedProto, distances, nearness

Federation = Callable[..., Any]
LAM = 0.7
PROTOTYPES, COUNTS = "fedproto.prototypes", "fedproto.counts"


def means(w: Weights, pid: int) -> dict[int, np.ndarray]:
    """Eq. 3: the mean features of the client's classes."""
    x, y = DATA[pid]
    return {int(c): features(w, x)[y == c].mean(0) for c in np.unique(y)}


def trained(w: Weights, pid: int, known: dict[int, np.ndarray]) -> Weights:
    """EPOCHS steps on the cross entropy plus LAM times the sum of L2 distances (eq. 7, 8)."""
    x, y = DATA[pid]
    for _ in range(EPOCHS):
        pulls = np.zeros((len(y), w["body.bias"].size))
        for c, mine in means(w, pid).items():
            if c in known:
                away = mine - known[c]
                # d|m - C|/dz_i = (m - C) / |m - C| / n_c; `backward` divides by n
                pulls[y == c] = away / np.linalg.norm(away) / (y == c).sum() * len(y)
        g = backward(w, x, error(logits(w, x), y), LAM * pulls)
        w = each(lambda a, b: a - LR * b, w, g)
    return w


def running(federation: Federation, **settings: Any) -> Any:
    how = {"lr": LR, "epochs": EPOCHS, "batch_size": max(SIZES), "rounds": 3, "fraction": 0.6}
    return federation(task(), FedProto, options={"lam": LAM}, **{**how, **settings})


def test_by_hand(federation: Federation) -> None:
    """Tan et al., algorithm 1, with three of the five clients in each round."""
    run = running(federation)
    initial = {name: a.copy() for name, a in arrays(run.model).items()}
    own = [initial] * len(SIZES)
    known: dict[int, np.ndarray] = {}
    for _ in range(3):
        cohort = [msg.pid for msg in run.step()]
        for k in cohort:
            own[k] = trained(own[k], k, known)
        new = {}
        for c in range(CLASSES):
            sets = [
                (means(own[k], k)[c], (DATA[k][1] == c).sum()) for k in cohort if c in DATA[k][1]
            ]
            if sets:
                new[c] = np.average([m for m, _ in sets], axis=0, weights=[n for _, n in sets])
        known |= new
        slot = run.strategy.weights["prototypes"]
        assert slot["has"].tolist() == [c in known for c in range(CLASSES)]
        for c, prototype in known.items():
            np.testing.assert_allclose(slot["mean"][c], prototype, rtol=1e-9)
        for k in range(len(SIZES)):
            kept = arrays(client_state(run, k, UNSHARED)) or initial
            for name, a in own[k].items():
                np.testing.assert_allclose(kept[name], a, rtol=1e-8, atol=1e-10)
    assert all(np.array_equal(a, initial[name]) for name, a in arrays(run.model).items())
    # Eq. 4, for every client, whether or not it has taken part last.
    for msg in evaluation_messages(run.strategy):
        x, y = DATA[msg.pid]
        z = features(own[msg.pid], x)
        far = np.stack([np.linalg.norm(z - known[c], axis=1) for c in range(CLASSES)], 1)
        found = run.client().handle(msg).metrics["test.personal.accuracy"]
        assert found == pytest.approx((far.argmin(1) == y).mean())


def test_only_prototypes_and_counts_travel(federation: Federation) -> None:
    run = federation(toy_task(norm=True), FedProto, rounds=2, fraction=0.5)
    for _ in range(2):
        plan, replies = step_and_replies(run)
        for msg, reply in zip(plan, replies, strict=True):
            assert packed_weights(msg, reply) == ([], [])
            assert set(reply.extras) == {PROTOTYPES, COUNTS}
    assert global_scores(run.strategy) == {}


def test_without_the_term_clients_train_alone(federation: Federation) -> None:
    """lam = 0 is the local training of Ditto without its pull, bit for bit."""
    settings: dict[str, Any] = {"rounds": 3, "lr": 0.1, "epochs": 2, "local": {"momentum": 0.5}}
    alone, ditto, drawn = (
        federation(toy_task(), cls, options=options, **settings).run()
        for cls, options in [
            (FedProto, {"lam": 0.0}),
            (Ditto, {"lam": 0.0, "plocal_epochs": 2}),
            (FedProto, {"lam": 1.0}),
        ]
    )
    for pid in range(4):
        own = client_state(alone, pid, UNSHARED)
        other = client_state(ditto, pid, "ditto.v")
        assert all(torch.equal(t, other[name]) for name, t in own.items())
        pulled = client_state(drawn, pid, UNSHARED)
        assert not all(torch.equal(t, pulled[name]) for name, t in own.items())


def test_the_distance_by_loops() -> None:
    draw = np.random.default_rng(0)
    z, prototypes = draw.normal(size=(6, 3)), draw.normal(size=(4, 3))
    y, known = np.array([0, 1, 1, 3, 3, 3]), [True, False, True, True]  # 2 is not in the batch
    expected = sum(np.linalg.norm(z[y == c].mean(0) - prototypes[c]) for c in (0, 3))
    tensors = [torch.from_numpy(a) for a in (z, y, prototypes)]
    assert float(distances(*tensors, torch.tensor(known))) == pytest.approx(expected)  # type: ignore[call-arg]


def test_the_distance_has_a_gradient_of_zero_where_it_is_zero() -> None:
    z = torch.ones(2, 3, requires_grad=True)
    far = distances(z, torch.tensor([0, 0]), torch.ones(2, 3), torch.tensor([True, True]))
    (grad,) = torch.autograd.grad(far, z)
    assert float(far.detach()) == 0 and not grad.any()


def test_the_nearest_class_has_the_largest_score() -> None:
    draws = torch.Generator().manual_seed(0)
    z, prototypes = torch.randn(50, 3, generator=draws), torch.randn(4, 3, generator=draws)
    known = torch.tensor([True, True, False, True])
    scores = nearness(z, prototypes, known)
    far = torch.cdist(z, prototypes).masked_fill(~known, torch.inf)
    assert torch.equal(scores.argmax(1), far.argmin(1))
    torch.testing.assert_close((z.square().sum(1)[:, None] - scores)[:, known], far[:, known] ** 2)
    assert (scores[:, 2] <= scores[:, known].amin(1) - 1).all() and scores.isfinite().all()
    assert nearness(z, prototypes, known & False).isfinite().all()


def test_classes_of_few_samples_are_not_sent(federation: Federation) -> None:
    """Neither the mean nor the count, nor one that would follow from the number of samples."""
    run = federation(few(), FedProto, min_count=LEAST, rounds=2)
    for _ in range(2):
        for reply in step_and_replies(run)[1]:
            expected = suppressed(torch.tensor(FEW[reply.pid]), LEAST)
            assert torch.equal(reply.extras[COUNTS], expected)
            sent = reply.extras[PROTOTYPES]["mean"]
            assert torch.equal(sent.any(1), expected > 0)
    assert any(min(n) < LEAST for n in FEW)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda extras: extras[COUNTS].add_(1), r"fedproto\.counts"),
        (lambda extras: extras[COUNTS].neg_(), r"fedproto\.counts"),
        (lambda extras: extras.update({COUNTS: extras[COUNTS].float()}), r"fedproto\.counts"),
        (lambda extras: extras[PROTOTYPES]["mean"].fill_(torch.nan), "fedproto.prototypes"),
        (lambda extras: extras[PROTOTYPES].update(mean=torch.zeros(1)), "fedproto.prototypes"),
        (lambda extras: extras[PROTOTYPES].update(more=torch.zeros(1)), "fedproto.prototypes"),
    ],
)
def test_bad_replies_are_refused(
    federation: Federation, change: Callable[[Any], object], message: str
) -> None:
    run = federation(toy_task(), FedProto)

    def alter(plan: list[Any], replies: list[Any]) -> list[Any]:
        change(replies[0].extras)
        return replies

    with pytest.raises(RunFailed, match=message):
        run.step(alter=alter)

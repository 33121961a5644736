"""What the scores that leave a site tell of few samples, whatever model the server sends."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedhet.core.client.client import TRAIN_TOO
from fedhet.core.counts import coarse, counts_few
from fedhet.core.groups import Evaluation
from fedhet.core.limits import Limits
from fedhet.core.messages import Broadcast, Failure, Upload
from fedhet.core.server.evaluation import evaluation_messages, received
from fedhet.core.targets import make
from fedhet.core.targets.number import Number
from fedhet.core.task import ClientData, Samples, Task
from fedhet.methods.fedavg import FedAvg
from fedhet.testing import Federation

CLASSES = 10
COUNTS = [3, 1, 12, 0, 4, 30, 7, 2, 22, 19]  # of each class in the test part
SITE = Limits(min_count=5, min_test=20)


def samples(counts: list[int]) -> Samples:
    y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return Samples(torch.rand(len(y), 4, generator=torch.Generator().manual_seed(0)), y)


def labelled(n: int, target: str) -> Samples:
    draw = torch.Generator().manual_seed(1)
    y = torch.randn(n, 2, generator=draw)
    return Samples(torch.randn(n, 4, generator=draw), y if target == "number" else (y > 1).float())


def workspace(*data: Samples, target: str = "class", **asked: Any) -> Federation:
    """A federation of one site."""
    outputs = CLASSES if target == "class" else 2
    kind = make(target, outputs)
    clients = [ClientData(*data)]
    task = Task(lambda: nn.Linear(4, outputs), kind.losses, clients, None, outputs, target=target)
    limits = asked.pop("limits", SITE)
    how = {"evaluation": Evaluation(**asked), "workspace": {"limits": limits}}
    return Federation(task, FedAvg, min_count=limits.min_count, **how)


def asked(run: Federation, weights: dict[str, torch.Tensor] | None = None) -> Broadcast:
    """What the server sends for an evaluation, of a model of its own choice."""
    (msg,) = evaluation_messages(run.strategy)
    return msg if weights is None else replace(msg, weights=weights)


def constant(label: int) -> dict[str, torch.Tensor]:
    """A model that predicts one class for all samples, with a loss by which they can be counted."""
    bias = torch.full((CLASSES,), -1e3)
    bias[label] = 0.0
    return {"weight": torch.zeros(CLASSES, 4), "bias": bias}


def test_constant_models_give_no_count_of_few_test_samples() -> None:
    """Ten of them gave the exact histogram of the labels, whatever privacy.min_count was."""
    run = workspace(samples([9] * CLASSES), samples([1] * CLASSES), samples(COUNTS))
    msg, n = asked(run), sum(COUNTS)
    told = []
    for label in range(CLASSES):
        reply = run.client().handle(replace(msg, weights=constant(label)))
        assert isinstance(reply, Upload)
        assert set(reply.metrics) == {"test.global.n", "test.global.accuracy"}
        assert not reply.extras
        told.append(round(n * reply.metrics["test.global.accuracy"]))
    assert told == [0, 0, 10, 0, 0, 30, 5, 0, 20, 15]
    # What the server can conclude: each count is in its interval, and they add up to n.
    least = told
    most = [value + 4 for value in least]
    for label in (label for label, count in enumerate(COUNTS) if count < 5):
        rest = sum(least) - least[label], sum(most) - most[label]
        assert n - rest[1] <= 0 and n - rest[0] >= 4  # none, one, ..., four of them


def test_constant_models_give_no_more_with_all_scores() -> None:
    """Confusion, bins and the scores from them are those of coarse counts of the classes."""
    run = workspace(*[samples([9] * CLASSES)] * 2, samples(COUNTS), scores="all")
    msg, rounded = asked(run), [0, 0, 10, 0, 0, 30, 5, 0, 20, 15]
    for label in range(CLASSES):
        (reply,) = received(
            [run.client().handle(replace(msg, weights=constant(label)))], run.strategy
        )
        tally = reply.extras["test.global"]
        assert tally["confusion"][:, label].tolist() == rounded
        assert tally["confusion"].sum() == sum(rounded)
        assert tally["hits"].sum() == rounded[label] and tally["bins"].sum() == sum(COUNTS)
        told = {name.rpartition(".")[2]: value for name, value in reply.metrics.items()}
        assert told.keys() >= {"accuracy", "ece", "n"} and "f1" not in told and "loss" not in told
        assert told["accuracy"] == rounded[label] / sum(COUNTS)
        middle = 14.5 / 15  # of the bin of the only confidence, 1
        assert tally["confidence"].sum() == pytest.approx(sum(COUNTS) * middle)


def test_the_roc_curve_of_a_site_has_no_few_samples() -> None:
    """Each point is coarse, so that no class of few samples has one."""
    x = torch.linspace(-3, 3, 60)[:, None].expand(-1, 4)
    for few in (0, 4, 5):
        y = (torch.arange(60) < few).long()
        target = make("class", 2, detailed=True)
        sent = target.releasable(target.tally(torch.stack([-x[:, 0], x[:, 0]], 1), y), y, 5)[1]
        assert (sent["above"] % 5 == 0).all()
        assert sent["above"][1, 0] == (5 if few == 5 else 0)
        assert sent["above"][0].unique().tolist()[:2] == [0, 5]
        target.check(sent)


def test_the_number_of_right_predictions_and_that_of_wrong_ones_tell_the_same() -> None:
    for n, least in itertools.product((1, 4, 5, 20, 23, 40), (0, 1, 2, 5, 50)):
        counts = torch.arange(n + 1)
        told = coarse(counts, n, least)
        half = 2 * counts == n
        assert torch.equal(told[~half], (n - coarse(n - counts, n, least))[~half])
        assert (told.diff() >= 0).all() and ((told - counts).abs() < max(1, least)).all()
        few = torch.minimum(counts, n - counts) < least
        assert set(told[few].tolist()) <= {0, n}
        if least < 2:
            assert torch.equal(told, counts)


@pytest.mark.parametrize("target", ["class", "number", "labels"])
def test_parts_of_fewer_samples_than_min_test_have_no_score(target: str) -> None:
    def part(n: int) -> Samples:
        return samples([n // 2, n - n // 2]) if target == "class" else labelled(n, target)

    run = workspace(part(40), part(19), part(20), target=target, train=True)
    (reply,) = received([run.client().handle(asked(run))], run.strategy)
    told = {name.partition(".")[0] for name in reply.metrics}
    assert told == {"train", "test"}
    exact = workspace(part(40), part(19), part(20), target=target, limits=Limits())
    (reply,) = received([exact.client().handle(asked(exact))], exact.strategy)
    assert {name.partition(".")[0] for name in reply.metrics} == {"val", "test"}


def test_the_labels_of_few_samples_are_in_no_tally() -> None:
    y = torch.zeros(40, 2)
    y[:3, 0] = 1
    y[:38, 1] = 1
    run = workspace(labelled(30, "labels"), None, Samples(torch.randn(40, 4), y), target="labels")
    model = {"weight": torch.zeros(2, 4), "bias": torch.tensor([1.0, 1.0])}
    (reply,) = received([run.client().handle(asked(run, model))], run.strategy)
    tally = reply.extras["test.global"]
    assert tally["targets"].tolist() == tally["hits"].tolist() == [0, 40]
    assert "test.global.loss" not in reply.metrics


def test_numbers_have_no_absolute_error_and_rare_ones_no_score() -> None:
    run = workspace(labelled(30, "number"), None, labelled(40, "number"), target="number")
    (reply,) = received([run.client().handle(asked(run))], run.strategy)
    assert {name.rpartition(".")[2] for name in reply.metrics} == {"n", "r2", "rmse"}
    all_of_it: Any = [Number(2).tally(torch.zeros(5, 2), torch.rand(5, 2))]
    assert "mae" not in Number(2).scores(Number(2).joined([*all_of_it, *reply.extras.values()]))
    y = torch.zeros(40, 2)
    y[:, 0] = torch.rand(40)
    y[:4, 1] = 1
    run = workspace(labelled(30, "number"), None, Samples(torch.randn(40, 4), y), target="number")
    (reply,) = received([run.client().handle(asked(run))], run.strategy)
    assert not reply.metrics and not reply.extras


def test_a_site_that_does_not_evaluate_is_no_failure() -> None:
    data = [samples([9] * CLASSES)] * 3
    run = workspace(*data, limits=Limits(evaluate=False))
    (reply,) = received([run.client().handle(asked(run))], run.strategy)
    assert not reply.metrics and not reply.extras


def test_a_site_reads_its_own_scores_as_they_are() -> None:
    """What `deliver=true` writes to its disk."""
    run = workspace(*[samples([9] * CLASSES)] * 2, samples([1, 2]), limits=Limits(False, 50, 50))
    client = run.client()
    client.receive(asked(run))
    assert {"val.global.f1", "test.global.loss"} <= set(client.assess(lambda *_: None).metrics)


@pytest.mark.parametrize(
    ("own", "extras", "message"),
    [
        ({"clients": False}, {}, "eval.clients=false"),
        ({}, {TRAIN_TOO: 1}, "eval.train=false"),
    ],
)
def test_a_client_refuses_an_evaluation_that_its_own_settings_do_not_have(
    own: dict[str, Any], extras: dict[str, Any], message: str
) -> None:
    """A dishonest server asked for it, and got it."""
    run = workspace(*[samples([9] * CLASSES)] * 3, limits=Limits(), **own)
    msg = asked(run)
    reply = run.client().handle(replace(msg, extras={**msg.extras, **extras}))
    assert isinstance(reply, Failure) and message in reply.cause


def test_fine_tuning_takes_the_epochs_of_the_clients_own_settings() -> None:
    run = workspace(*[samples([9] * CLASSES)] * 3, limits=Limits())
    msg = asked(run)
    reply = run.client().handle(replace(msg, extras={"eval.finetune_epochs": 10**6}))
    assert isinstance(reply, Upload)
    assert {name.split(".")[1] for name in reply.metrics} == {"global"}


@pytest.mark.parametrize(
    ("column", "few"),
    [
        ([0] * 47 + [1] * 3, True),
        ([0] * 45 + [1] * 5, False),
        ([0] * 50, True),  # as a rare value that happens not to occur
        ([0] * 20 + [1] * 27 + [2] * 3, True),
        ([0] * 30 + [1] * 15 + [2, 3, 4, 5, 6], False),  # several numbers are possible
        ([0] * 47 + [1, 5, 9], True),
        ([0] * 30 + [1] * 17 + [1000] * 2 + [10**6], True),  # the sum has a digit for each
        (list(range(50)), False),
    ],
)
def test_columns_whose_moments_are_counts_of_few(column: list[int], few: bool) -> None:
    values = np.array([column, list(range(50))], np.float32).T
    assert counts_few(values, 5) == [few, False]
    assert counts_few(values, 0) == [False, False]


def test_a_rare_pixel_counts_by_the_images_that_have_it() -> None:
    images = np.zeros((50, 2, 8, 8), np.uint8)
    images[:4, 0] = 255
    images[:5, 1, 3, 3] = 255
    assert counts_few(images, 5) == [True, False]

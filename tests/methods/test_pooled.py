"""Pooled training, the reference with all data in one place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from composing import composed
from methods.by_hand import DATA, EPOCHS, LR, each, gradient, same, task
from methods.plugs import Half, noisy
from methods.readouts import copied

import fedhet
from fedhet.core.errors import ConfigError
from fedhet.data.toy import toy_task
from fedhet.methods.pooled import Pooled
from fedhet.runs.job import Job

Federation = Callable[..., Any]


def test_by_hand(federation: Federation) -> None:
    """Gradient descent on the samples of all clients, whatever share of them would take part."""
    how = {"lr": LR, "epochs": EPOCHS, "batch_size": 99, "rounds": 3, "fraction": 0.4}
    run = federation(task(), Pooled, **how)
    union = [np.concatenate(column) for column in zip(*DATA, strict=True)]
    for _ in range(3):
        w = copied(run.model)
        assert len(run.step()) == 1
        for _ in range(EPOCHS):
            w = each(lambda a, g: a - LR * g, w, gradient(w, *union))
        same(copied(run.model), w)


@pytest.mark.parametrize("given", ["digits", "objects"])
def test_with_one_client_it_is_fedavg(launch: Callable[..., fedhet.Run], given: str) -> None:
    """Bit for bit, all scores included."""
    lines = ["rounds=2", "client.momentum=.9", "client.epochs=2"]
    lines += ["partition.clients=1"] if given == "digits" else []
    alone = replace(toy_task(1), model=noisy().model) if given == "objects" else None
    pooled, fedavg = (
        launch(f"method={name}", *lines, task=alone).rounds for name in ("pooled", "fedavg")
    )
    compared = [name for name in pooled if not name.startswith("seconds")]
    assert {"acc_global", "loss_clients_mean", "weights_sha256"} <= set(compared)
    assert pooled[compared].equals(fedavg[compared])


def test_with_only_one_client_it_is_gradient_descent_on_its_data(federation: Federation) -> None:
    """Whoever carries out the step."""
    how = {"lr": LR, "epochs": EPOCHS, "batch_size": 99, "rounds": 3}
    run = federation(task(), Pooled, options={"only": 1}, **how)
    w = copied(run.model)
    run.run()
    for _ in range(3 * EPOCHS):
        w = each(lambda a, g: a - LR * g, w, gradient(w, *DATA[1]))
    same(copied(run.model), w)


@pytest.mark.parametrize(("only", "why"), [(-1, "number >= 0"), (9, "one .*4 clients")])
def test_a_client_that_is_not_there_is_refused(federation: Federation, only: int, why: str) -> None:
    with pytest.raises(ConfigError, match=f"method.only={only}.*{why}"):
        federation(toy_task(), Pooled, options={"only": only})


def test_what_it_takes_is_rounds_times_epochs_of_all_samples(federation: Federation) -> None:
    """The steps of batch norm, which count batches, are those of the union."""
    run = federation(toy_task(norm=True), Pooled, rounds=2, epochs=3, batch_size=4).run()
    assert int(run.model["body.1.num_batches_tracked"]) == 2 * 3 * (12 + 16 + 20 + 24) / 4


def test_it_is_for_simulations(
    launch: Callable[..., fedhet.Run], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = composed("method=pooled")
    with pytest.raises(ConfigError, match=r"method=pooled pools .*raw data.*engine=local"):
        _ = Job(settings, toy_task(), engine="flwr").strategy
    with caplog.at_level(logging.WARNING, logger="fedhet"):
        _ = Job(settings, toy_task(), engine="ray").strategy
    assert "not federated learning" in caplog.text
    for ctx in "ab":
        (tmp_path / f"{ctx}.csv").write_text("x,y\n" + "0,0\n1,1\n" * 20)
    files = ",".join(f"{ctx}:'{tmp_path / ctx}.csv'" for ctx in "ab")
    sites = ["dataset=local", "dataset.sites=[a,b]", f"dataset.files={{{files}}}"]
    sites += ["dataset.features=[x]", "dataset.label=y", "dataset.classes=2"]
    with pytest.raises(ConfigError, match=r"never leave .*site.*dataset .*local"):
        launch("method=pooled", *sites)


def test_it_takes_no_plugin(federation: Federation) -> None:
    with pytest.raises(ConfigError, match=r"method=pooled refuses plugin 'half': .*acts "):
        federation(toy_task(), Pooled, plugins=lambda: [Half()])

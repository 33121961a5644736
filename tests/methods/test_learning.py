"""Every method learns, with settings that are small enough for a test.

    make test-all ONLY=methods/test_learning.py

The loss falls from the first evaluation to the last, and the accuracy ends above a bound, on the
embedded digits and on MNIST. Methods without a global model are judged by the means over the
clients' own tests. FedLEx has masks of mean 1: with the literal equation it hardly trains at a
host's learning rate.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from composing import composed

import fedhet
from fedhet.runs.config import catalogue
from fedhet.runs.job import Job

ROOT = Path(__file__).parents[2]
MNIST = Path(os.environ.get("FEDHET_TEST_DATA") or ROOT.parent / "shared" / "data")
LEAST_ACCURACY = 0.3
COMMON = ["partition.clients=12", "rounds=10", "client.lr=0.1", "client.epochs=2"]
# What a method needs besides, or in place of these settings.
OWN = {
    "fedadagrad": ["server_opt.lr=0.03"],
    "fedadam": ["server_opt.lr=0.03"],
    "fedyogi": ["server_opt.lr=0.03"],
    "fedavgm": ["server_opt.lr=0.3"],  # with beta .9 the step approaches ten times the rate
    "fedbn": ["method.server_bn=average", "model.norm=batch"],
    "feddisk": [
        # A few epochs, with a larger rate than the default one, so that they suffice.
        "plugin.feddisk.hidden=30",
        "plugin.feddisk.made_lr=0.01",
        "plugin.feddisk.made_max_rounds=10",
        "plugin.feddisk.local_max_epochs=20",
        "plugin.feddisk.clf_max_epochs=50",
    ],
    "feddiskab": ["plugin.feddisk.clf_max_epochs=50"],
    "fedgen": ["method.noise_dim=32", "method.hidden=64", "method.server_steps=100"],
    "fedgmm": [
        # The client of the paper.
        *("client.lr=0.05", "client.epochs=1", "client.batch_size=32", "fraction=0.5"),
        *("client.momentum=0.9", "client.weight_decay=1e-4"),
    ],
    "fedlex": [
        *("client.lr=0.03", "plugin.fedlex.rescale=mean1"),
        *("plugin.fedlex.c_exp=6", "plugin.fedlex.e_exp=10"),
    ],
    # Momentum makes the weights of unequal numbers of steps count.
    "fednova": ["client.lr=0.05", "client.momentum=0.5"],
    # Otherwise the loss of a class that a client can never predict would be infinite.
    "fedpcl": ["method.unseen=global"],
    # It takes one step per round.
    "fedsgd": ["rounds=60", "client.lr=0.3", "eval.every=10"],
    "sgdm": ["client.lr=0.02"],  # with gamma .9 a step approaches ten times the rate
}


@pytest.mark.matrix
@pytest.mark.parametrize("dataset", ["digits", "mnist"])
@pytest.mark.parametrize("method", catalogue.built_in("method"))
def test_the_loss_falls(
    method: str, dataset: str, launch: Callable[..., fedhet.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    if dataset == "mnist" and not (MNIST / "MNIST").is_dir():
        pytest.skip("needs MNIST: set FEDHET_TEST_DATA to its folder")
    monkeypatch.setenv("FEDHET_DATA_DIR", str(MNIST))
    own = OWN.get(method, [])
    set_by_own = {line.partition("=")[0] for line in own}
    common = [line for line in COMMON if line.partition("=")[0] not in set_by_own]
    lines = [f"method={method}", f"dataset={dataset}", *common, *own]
    view = Job(composed(*lines)).strategy.evaluates[0]
    run = launch(*lines, f"eval.clients={str(view != 'global').lower()}")
    results = fedhet.results(str(run.dir))
    if view == "global":
        rounds = results.rounds.dropna(subset="acc_global")
        losses, accuracies = rounds["loss_global"], rounds["acc_global"]
    else:
        own = results.clients.query("split == 'test' and model == @view")
        means = own.groupby(["metric", "round"])["value"].mean()
        losses, accuracies = means["loss"], means["accuracy"]
    assert losses.iloc[-1] < losses.iloc[0]
    assert accuracies.iloc[-1] >= LEAST_ACCURACY

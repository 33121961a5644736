"""Every method learns, with the settings of conf/experiment/smoke/<method>.yaml.

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
from fedhet.config import catalogue
from fedhet.job import Job

ROOT = Path(__file__).parents[2]
MNIST = Path(os.environ.get("FEDHET_TEST_DATA") or ROOT.parent / "shared" / "data")
LEAST_ACCURACY = 0.3


@pytest.mark.matrix
@pytest.mark.parametrize("dataset", ["digits", "mnist"])
@pytest.mark.parametrize("method", catalogue.built_in("method"))
def test_the_loss_falls(
    method: str, dataset: str, launch: Callable[..., fedhet.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    if dataset == "mnist" and not (MNIST / "MNIST").is_dir():
        pytest.skip("needs MNIST: set FEDHET_TEST_DATA to its folder")
    monkeypatch.setenv("FEDHET_DATA_DIR", str(MNIST))
    lines = [f"experiment=smoke/{method}", f"dataset={dataset}"]
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

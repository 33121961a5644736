"""FedGMM: what it warns of, and what it refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from maths.cases import named_case
from methods.fedgmm_task import CLASSES, COUNTS_BY_CLIENT, DATA, GENERATED, kept, task
from sklearn.mixture import GaussianMixture

from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.messages import Broadcast, Failure
from fedhet.methods.fedgmm import COUNTS, FedGMMPlugin
from fedhet.methods.fedgmm.mixtures import MIXTURES

Launch = Callable[..., Any]
Change = Callable[[dict[str, Any]], Any]


# ---- warnings


def test_missing_and_thin_mixtures_are_reported_once(
    fedgmm: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    """Classes of which no client has a mixture, and mixtures of few samples."""
    with caplog.at_level(logging.WARNING, logger="fedhet"):
        run = fedgmm()
        run.step()
        recorded = run.current.recorded["fedgmm"]
        run.run()
    lines = [record.getMessage() for record in caplog.records]
    privacy = "privacy: 5 of 5 mixtures have fewer than 10 samples"
    assert sum("mixture of the classes [3]" in line for line in lines) == 1
    assert sum(privacy in line for line in lines) == 1
    assert recorded["thin"] == recorded["components"] == 5
    assert recorded["absent"] == 1
    assert recorded["counts"].tolist() == COUNTS_BY_CLIENT.tolist()
    assert recorded["pids"].tolist() == [0, 1, 2]


def test_em_that_has_not_converged_is_reported_and_used(
    fedgmm: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sklearn.mixture.GaussianMixture", partial(GaussianMixture, max_iter=1))
    run = fedgmm(options={"components": 2})
    run.step()
    assert "client 2, class 1: EM has not converged" in caplog.text
    assert run.current.metrics["fedgmm.not_converged"] > 0
    run.run()


# ---- uploads


def altered(pid: int, change: Change) -> Callable[..., Any]:
    """Change the extras of one client's reply."""

    def alter(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        change(next(reply for reply in replies if reply.pid == pid).extras)
        return replies

    return alter


def in_mixtures(name: str, at: Any, value: float) -> Change:
    def change(extras: dict[str, Any]) -> None:
        extras[MIXTURES][name][at] = value

    return change


def narrower(extras: dict[str, Any]) -> None:
    extras[MIXTURES] |= {name: extras[MIXTURES][name][:, :3] for name in ("mu", "var")}


def more_components(extras: dict[str, Any]) -> None:
    tree = {name: t[[0, 0, *range(1, len(t))]] for name, t in extras[MIXTURES].items()}
    tree["pi"][:2] = 0.5
    extras[MIXTURES] = tree


def fewer_components(extras: dict[str, Any]) -> None:
    extras[MIXTURES] = {name: t[1:] for name, t in extras[MIXTURES].items()}


BAD: dict[str, tuple[Change, str]] = {
    "variance": (in_mixtures("var", (1, 2), 0.0), "class 1: the smallest variance is 0.0"),
    "negative": (in_mixtures("var", (0, 0), -1.0), "class 0: the smallest variance is -1.0"),
    "weights": (in_mixtures("pi", 0, 0.9), "class 0: the weights .* sum to 1"),
    "nan": (in_mixtures("mu", (1, 1), float("nan")), "class 1: mu holds NaN"),
    "wide": (in_mixtures("var", (1, 2), 0.26), r"class 1: a variance of 0\.26; .*at most 0\.25"),
    "low": (in_mixtures("mu", (0, 0), -0.01), r"class 0: means from -0\.01 .*in \[0, 1\]"),
    "high": (in_mixtures("mu", (0, 0), 1.01), r"class 0: means .*to 1\.01; .*in \[0, 1\]"),
    "dimension": (narrower, r"class 0: mu \(1, 3\), .* \(1, 4\) is expected"),
    "label": (in_mixtures("label", 0, 7), "class 7; classes go from 0 to 3"),
    "more": (more_components, "class 0: 2 components of 2 samples; .*at most 1"),
    "lacking": (fewer_components, "class 0: 0 components of 2 samples; .*at least 1"),
    "lengths": (lambda extras: extras[MIXTURES].update(pi=torch.ones(9)), r"pi \(K,\)"),
    "shapes": (lambda extras: extras[MIXTURES].update(pi=torch.tensor(1.0)), r"pi \(K,\)"),
    "no label": (lambda extras: extras[MIXTURES].update(label=torch.zeros(2)), "integer label"),
    "keys": (lambda extras: extras[MIXTURES].pop("var"), r"var \(K, d\) are expected"),
    "missing": (lambda extras: extras.pop(MIXTURES), "'fedgmm.mixtures' is missing"),
    "no tree": (
        lambda extras: extras.update({MIXTURES: torch.zeros(2)}),
        "'fedgmm.mixtures' is a torch.float32 tensor.*tree",
    ),
    "counts": (
        lambda extras: extras.update({COUNTS: torch.tensor([2, 6, 0, 0])}),
        "with the sum 7",
    ),
    "negative counts": (
        lambda extras: extras.update({COUNTS: torch.tensor([-2, 9, 0, 0])}),
        "whole numbers",
    ),
    "no counts": (lambda extras: extras.pop(COUNTS), "'fedgmm.counts' is missing"),
}


def test_a_bad_upload_is_that_clients_failure(fedgmm: Launch) -> None:
    for how in BAD:
        with named_case(how):
            change, reason = BAD[how]
            failure = rf"client 1 .*'fedgmm.fit', step 1: .*{reason.removesuffix('$')}"
            with pytest.raises(RunFailed, match=failure):
                fedgmm(options={"components": 5}).step(alter=altered(1, change))


def test_a_skipped_upload_is_left_out_of_the_mixtures(fedgmm: Launch) -> None:
    """Its client generates samples all the same."""
    run = fedgmm(on_failure="skip")
    run.step(alter=altered(1, BAD["nan"][0]))
    shared = run.step()[0].extras[MIXTURES]
    assert shared["label"].tolist() == [0, 1, 2]
    assert shared["pi"].tolist() == [1, 1, 1]
    run.run()
    assert kept(run, 1)["y"].bincount(minlength=CLASSES).tolist() == [3, 0, 5, 0]


def test_a_client_that_missed_share_does_not_train(fedgmm: Launch) -> None:
    def away(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        if plan[0].phase != "fedgmm.share":
            return replies
        missed = Failure(1, "fedgmm.share", 1, "away")
        return [missed if reply.pid == 1 else reply for reply in replies]

    run = fedgmm(on_failure="skip", rounds=2).run(alter=away)
    failures = run.current.failures
    assert [(f.pid, f.phase, f.step) for f in failures] == [(1, "train", 2)]
    assert "phase 'fedgmm.share'" in failures[0].cause


def test_a_bad_number_of_generated_samples_is_refused(fedgmm: Launch) -> None:
    for number in [-1, 3.7]:
        run = fedgmm()
        run.step()
        alter = altered(0, partial(dict.update, **{GENERATED: number}))
        failure = rf"client 0 .*'fedgmm.share', step 1: .*'fedgmm.generated' .*{number}"
        with named_case(number), pytest.raises(RunFailed, match=failure):
            run.step(alter=alter)


# ---- data
PIXELS = r"client 1 has inputs outside \[0, 1\]; densities .* only$"  # and no value of them


def test_bad_samples_are_named(fedgmm: Launch) -> None:
    cases = [
        ({"c1": (DATA[1][0] * 3, DATA[1][1])}, PIXELS),
        ({"c1": (DATA[1][0] * np.nan, DATA[1][1])}, PIXELS),
        ({"c1": (DATA[1][0], DATA[1][1] + 3)}, "client 1 has labels from .* from 0 to 3$"),
        ({"c1": (DATA[1][0], DATA[1][1] - 1)}, "client 1 has labels from -1 .* from 0 to 3$"),
        ({"c1": (DATA[1][0], DATA[1][1] + 0.5)}, r"client 1 .*torch\.float64 .* from 0 to 3$"),
    ]
    for data, reason in cases:
        with named_case(data, reason):
            failure = rf"client 1 .*'fedgmm.fit', step 1: .*{reason.removesuffix('$')}"
            with pytest.raises(RunFailed, match=failure):
                fedgmm(task(**data)).step()


def test_too_large_mixtures_are_refused(fedgmm: Launch) -> None:
    """A client's own: 2 components of 8 + 4 (2 * 4 + 1) bytes; those of all: 5."""
    own = r"client 2 .*client .*2 components .*4 .*max_payload_mb=8e-05"
    with pytest.raises(RunFailed, match=own):
        fedgmm(options={"max_payload_mb": 80e-6}).step()
    of_all = r"clients .*5 components .*4 .*max_payload_mb=0.0002"
    with pytest.raises(RunFailed, match=of_all):
        fedgmm(options={"max_payload_mb": 200e-6}).step()
    run = fedgmm(options={"max_payload_mb": 220e-6})
    run.step()
    megabytes = run.current.recorded["fedgmm"]["megabytes"]
    assert run.current.bytes["up"][MIXTURES] == 220 == 1e6 * megabytes


def test_too_large_mixtures_of_a_client_are_left_out_or_those_of_all_stop_the_run(
    fedgmm: Launch,
) -> None:
    run = fedgmm(options={"max_payload_mb": 80e-6}, on_failure="skip")
    run.step()
    assert [f.pid for f in run.current.failures] == [2, 1]
    assert run.step()[0].extras[MIXTURES]["label"].tolist() == [0]  # client 0's
    with pytest.raises(RunFailed, match=r"mixtures .*clients"):
        fedgmm(options={"max_payload_mb": 200e-6}, on_failure="skip").step()


def test_a_task_without_classes_is_refused(fedgmm: Launch) -> None:
    without = task()
    without.target = "number"
    with pytest.raises(ConfigError, match=r"fedgmm.*class .*target=number"):
        fedgmm(without)


# ---- options


def test_bad_options_are_named() -> None:
    cases = [
        ("components", 0),
        ("reg_covar", 0.0),
        ("psi", 1.0),
        ("psi", -0.1),
        ("gen_weight", -1.0),
        ("target", "max"),
        ("target", -1),
        ("target", 2.5),
        ("min_class_samples", 0),
        ("max_components", 0),
        ("agg_count", "real"),
        ("gen_weight", -1.0),
        ("max_payload_mb", 0),
    ]
    for key, value in cases:
        with named_case(key, value), pytest.raises(ConfigError, match=rf"plugin\.fedgmm\.{key}="):
            FedGMMPlugin(**{key: value})  # type: ignore[arg-type]

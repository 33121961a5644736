"""FedDisk: bad data, bad options, and clients without weights."""

from __future__ import annotations

from typing import Any

import pytest
from maths.cases import named_case
from methods.feddisk_task import Make, kinds, plugins, task_of

from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.messages import Broadcast, Failure
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.feddisk import FedDisk, FedDiskPlugin

# ---- data and replies


def test_inputs_outside_the_unit_interval_name_client_and_phase(federation: Make) -> None:
    """Under ratio=raw, client 0 is the first to read the data of client 1."""
    for bad in [1.2, -0.1, float("nan")]:
        for ratio in ["sampled", "raw"]:
            with named_case(bad, ratio):
                first = kinds(20, 20, 0)
                second = kinds(20, 20, 1)
                second[3, 1] = bad
                run = federation(task_of(first, second), FedDisk, plugins=plugins(ratio=ratio))
                reader, phase = (0, "weigh") if ratio == "raw" else (1, "density")
                failure = (
                    rf"client {reader} .*feddisk\.{phase}.*client 1 has inputs outside \[0, 1\]"
                )
                with pytest.raises(RunFailed, match=failure):
                    run.step()


def test_a_client_that_weighs_must_send_its_effective_size(federation: Make) -> None:
    def silent(plan: list[Any], replies: list[Any]) -> list[Any]:
        replies[1].metrics.clear()
        return replies

    failure = r"client \d .*feddisk\.weigh.*lacks .*'feddisk\.ess'"
    with pytest.raises(RunFailed, match=failure):
        federation(toy_task(), FedAvg, plugins=plugins(ratio="raw")).step(alter=silent)


def test_a_client_without_weights_does_not_train(federation: Make) -> None:
    def drop(plan: list[Any], replies: list[Any]) -> list[Any]:
        if plan[0].phase != "feddisk.weigh":
            return replies
        missed = Failure(2, "feddisk.weigh", 1, "away")
        return [missed if reply.pid == 2 else reply for reply in replies]

    run = federation(toy_task(), FedDisk, plugins=plugins(), on_failure="skip").run(alter=drop)
    failures = run.current.failures
    assert [(f.pid, f.phase) for f in failures] == [(2, "train")]
    assert "no sample weights" in failures[0].cause


def test_a_message_before_the_weights_is_a_failure(federation: Make) -> None:
    run = federation(toy_task(), FedDisk, plugins=plugins())
    msg = Broadcast(
        phase="train",
        step=1,
        round=1,
        local=run.strategy.setup.local,
        slot="model",
        weights=run.model,
        trains=True,
        plugins=run.strategy.digests,
        pid=0,
    )
    reply = run.client().handle(msg)
    assert isinstance(reply, Failure)
    assert "phase 'feddisk.weigh'" in reply.cause


# ---- options


def test_bad_options_are_named() -> None:
    cases = [
        {"ratio": "pixels"},
        {"masks": "natural"},
        {"features": "x"},
        {"normalise": "sum"},
        {"binarise": 1},
        {"hidden": 0},
        {"made_lr": 0},
        {"made_optimizer": "lbfgs"},
        {"made_batch_size": 0},
        {"made_local_epochs": 0},
        {"made_patience": 0},
        {"made_max_rounds": 0},
        {"local_patience": 0},
        {"local_max_epochs": 0},
        {"clf_hidden": 0},
        {"clf_lr": -1},
        {"clf_batch_size": 1.5},
        {"clf_patience": 0},
        {"clf_tolerance": -1e-9},
        {"clf_max_epochs": 0},
        {"lo": 0},
        {"lo": 1.1},
        {"hi": 0.9},
        {"eps": 0.5},
        {"eps": 0},
        {"min_samples": 1},
        {"binarise": True, "ratio": "raw"},
    ]
    for options in cases:
        with (
            named_case(options),
            pytest.raises(ConfigError, match=rf"plugin\.feddisk\.{next(iter(options))}="),
        ):
            FedDiskPlugin(**options)

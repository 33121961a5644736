"""FedDiskAb: FedDisk with weights from pooled raw data, for simulations only."""

from __future__ import annotations

import logging

import pytest
from composing import composed
from maths.cases import named_case
from methods.feddisk_task import COMMON, LINES, Make

from fedhet.core.errors import ConfigError
from fedhet.data.toy import toy_task
from fedhet.runs.job import Job


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["method=feddiskab"], ["method=feddisk", "plugin.feddisk.ratio=raw"]),
        pytest.param(
            ["method=feddiskab"], ["method=feddiskab", "engine.workers=2"], marks=pytest.mark.slow
        ),
    ],
    ids=["feddisk", "workers"],
)
def test_same_bytes(launch: Make, one: list[str], other: list[str]) -> None:
    first, second = (launch(*COMMON, *LINES, *lines, task=toy_task()) for lines in (one, other))
    assert first.summary["weights_sha256"] == second.summary["weights_sha256"]


def test_only_the_classifier_travels(launch: Make) -> None:
    run = launch(*COMMON, *LINES, "method=feddiskab", task=toy_task())
    assert set(run.summary["bytes"]["up"]) == set(run.summary["bytes"]["down"]) == {"model"}
    assert [phase["name"] for phase in run.summary["phases"]] == ["feddisk.weigh", "train"]


def test_pooling_is_for_simulations(caplog: pytest.LogCaptureFixture) -> None:
    settings = composed("method=feddiskab")
    with pytest.raises(ConfigError, match="raw data"):
        _ = Job(settings, toy_task(), engine="flwr").strategy
    with caplog.at_level(logging.WARNING, logger="fedhet"):
        _ = Job(settings, toy_task(), engine="ray").strategy
    assert "not federated learning" in caplog.text


def test_another_ratio_than_raw_is_refused() -> None:
    for line in ("plugin=[feddisk]", "plugin.feddisk.ratio=outputs"):
        settings = composed("method=feddiskab", line)
        refusal = r"method=feddiskab .*plugin\.feddisk\.ratio=raw"
        with named_case(line), pytest.raises(ConfigError, match=refusal):
            _ = Job(settings, toy_task()).strategy
    preset = composed("method=feddiskab", "plugin.feddisk.lo=.2").cfg.plugin.feddisk
    assert (preset.ratio, preset.lo) == ("raw", 0.2)

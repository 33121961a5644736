"""FedDiskAb: FedDisk with weights from pooled raw data, for simulations only."""

from __future__ import annotations

import logging

import pytest
from methods.feddisk_task import COMMON, LINES, Make

from fedhet import config
from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError
from fedhet.job import Job


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["method=feddiskab"], ["method=feddisk", "plugin.feddisk.ratio=raw"]),
        (["method=feddiskab"], ["method=feddiskab", "engine.workers=2"]),
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
    settings = config.compose(["method=feddiskab"])
    with pytest.raises(ConfigError, match="pools the clients' raw data"):
        _ = Job(settings, toy_task(), engine="flwr").strategy
    with caplog.at_level(logging.WARNING, logger="fedhet"):
        _ = Job(settings, toy_task(), engine="ray").strategy
    assert "not federated learning" in caplog.text


@pytest.mark.parametrize("lines", [["plugin=[feddisk]"], ["plugin.feddisk.ratio=outputs"]])
def test_another_ratio_than_raw_is_refused(lines: list[str]) -> None:
    refusal = r"method=feddiskab is FedDisk with plugin\.feddisk\.ratio=raw"
    with pytest.raises(ConfigError, match=refusal):
        _ = Job(config.compose(["method=feddiskab", *lines]), toy_task()).strategy
    preset = config.compose(["method=feddiskab", "plugin.feddisk.lo=.2"]).cfg.plugin.feddisk
    assert (preset.ratio, preset.lo) == ("raw", 0.2)

"""A setting that two sides of an experiment set is refused, and never one of them ignored."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedhet.core.errors import ConfigError
from fedhet.study import cells, definition

Write = Callable[..., None]
LABELS = """
rounds: 3
client: {lr: 0.7}
axes:
  method:
    A: method=fedavg client.lr=0.3
    P: method=fedprox client=adam
  seed: [0, 1]
scales: {small: [client.lr=0.5]}
"""


def values(key: str, *lines: str) -> list[str | None]:
    """The override of the key in each run."""
    experiment = definition.read(["experiment=mine", *lines])
    assert experiment is not None
    runs = [dict(line.split("=", 1) for line in run.overrides) for run in cells.runs(experiment)]
    return [run.get(key) for run in runs]


@pytest.mark.parametrize(
    "text, lines, message",
    [
        (LABELS, ["client.lr=0.5"], "'client.lr=0.5': axes.method.A sets client.lr as well"),
        (LABELS, ["+client.lr=0.5"], "client.lr=0.5': axes.method.A sets client.lr as well"),
        (LABELS, ["client=sgd"], "'client=sgd': axes.method.P sets client as well"),
        (LABELS, ["client={lr: 0.5}"], "'client.lr=0.5': axes.method.A sets client.lr as well"),
        (LABELS.replace("client.lr=0.3", "client={lr:0.3}"), ["client.lr=0.5"], "sets client.lr"),
        (
            "axes: {client: [{lr: .1}, {lr: .2}]}",
            ["client.lr=0.5"],
            "'client.lr=0.5': axes.client.{\"lr\": 0.1} sets client.lr as well",
        ),
        (
            "axes: {client.lr: [.1, .2]}",
            ["client={lr: 0.5},{lr: 0.6}"],
            'axes.client.lr.0.1 and axes.client.{"lr": 0.5} both set client.lr',
        ),
        (LABELS, ["client.lr=0.1,0.5"], "axes.method.A and axes.client.lr.0.1 both set client.lr"),
        (
            f"{LABELS}\ntune: {{seeds: [9], space: {{client.lr: [1, 2]}}}}",
            [],
            "tune.space: client.lr is tuned, but axes.method.A sets it as well",
        ),
        (
            f"{LABELS}\ntune: {{seeds: [9], own: {{A: {{client.lr: [1, 2]}}}}}}",
            [],
            "tune.own: client.lr is tuned, but axes.method.A sets it as well",
        ),
        (
            "axes: {a: {x: rounds=2}, b: {y: seed=1, z: rounds=3}}",
            [],
            "axes.a.x and axes.b.z both set rounds",
        ),
    ],
)
def test_the_label_and_the_setting_are_named(
    write: Write, text: str, lines: list[str], message: str
) -> None:
    write(text)
    with pytest.raises(ConfigError) as error:
        definition.read(["experiment=mine", *lines])
    assert message in str(error.value)


def test_a_label_overrides_the_file_and_its_scale(write: Write) -> None:
    write(LABELS)
    assert values("client.lr") == ["0.3", "0.3", None, None]
    assert values("client.lr", "scale=small") == ["0.3", "0.3", "0.5", "0.5"]


def test_what_no_run_has_twice_is_allowed(write: Write) -> None:
    """Labels that are not in use, groups that include a setting, and tuning of other labels."""
    write(f"{LABELS}\ntune: {{seeds: [9], own: {{P: {{client.lr: [1, 2]}}}}}}")
    definition.read(["experiment=mine"])
    assert values("client.lr", "method=P", "client.lr=0.5") == ["0.5", "0.5"]


def test_settings_of_a_mapping_count_like_single_ones(write: Write) -> None:
    """They are not tuned, replace an axis of their name, and leave the choice of the group."""
    tuned = "tune: {seeds: [9], space: {client.lr: [1, 2], client.epochs: [1, 2]}}"
    write(f"axes: {{method: [fedavg, fedprox], seed: [0]}}\n{tuned}")
    experiment = definition.read(["experiment=mine", "client={lr: 0.5}"])
    assert experiment is not None and experiment.tuning is not None
    assert list(experiment.tuning.space) == ["client.epochs"]
    assert values("client.lr", "client={lr: 0.5}") == ["0.5", "0.5"]
    assert values("client", "client=adam", "client={lr: 0.5}") == ["adam", "adam"]
    assert values("plugin.fedprox.mu", "plugin={fedprox: {mu: 0.5}}") == ["0.5", "0.5"]
    write("axes: {client.lr: [.1, .2], seed: [0, 1]}")
    assert values("client.lr", "client={lr: 0.5, epochs: 1}") == ["0.5", "0.5"]


def test_two_labels_of_one_run_are_refused(write: Write) -> None:
    write("axes: {how: {slow: client.lr=0.1, low: client.lr=0.1}}")
    experiment = definition.read(["experiment=mine"])
    assert experiment is not None
    with pytest.raises(ConfigError, match=r"how=slow .*how=low"):
        cells.check(cells.runs(experiment))

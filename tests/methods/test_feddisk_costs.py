"""FedDisk: what travels, and what it costs."""

from __future__ import annotations

import json

import pytest
from methods.feddisk_task import COMMON, LINES, Make

from fedhet.data.toy import toy_task

MADE = 2 * 4 * 8 + 8 + 4  # the numbers of a MADE with 4 inputs and 8 hidden units
MODEL = 4 * 3 + 3 + 3 * 2 + 2
CLIENTS = 4


def test_only_the_made_and_the_classifier_travel(launch: Make) -> None:
    """Equation 19 is the bytes that one client sends and receives in the rounds of both kinds.

    The weights w, the effective sample sizes and the local MADE cost nothing.
    """
    run = launch(*COMMON, *LINES, "method=feddisk", task=toy_task())
    sizes = run.summary["bytes"]
    assert sizes["up"] == {
        "density": 4 * MADE * 3 * CLIENTS,
        "model": 4 * MODEL * 2 * CLIENTS,
        "feddisk.val": 8 * 3 * CLIENTS,
    }
    assert sizes["down"] == {
        "density": 4 * MADE * (3 + 1) * CLIENTS,  # `weigh` needs the final MADE
        "model": 4 * MODEL * 2 * CLIENTS,
    }
    assert [phase["rounds"] for phase in run.summary["phases"]] == [3, 1, 2]
    rows = [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]
    done = [(1, 0), (2, 0), (3, 0), (3, 0), (3, 1), (3, 2)]
    costs = [2 * (MADE * e1 + MODEL * e2) for e1, e2 in done]
    assert [row["feddisk.E1"] for row in rows] == [e1 for e1, _ in done]
    assert [row["feddisk.cost"] for row in rows] == costs
    assert (run.dir / "arrays" / "feddisk.weigh-1.safetensors").exists()


@pytest.mark.parametrize(
    ("method", "options", "before", "numbers"),
    [
        ("fedavg", [], 0, 0),
        ("feddisk", LINES, 3, 3 * MADE),
        pytest.param("feddiskab", LINES, 0, 0, marks=pytest.mark.slow),
        pytest.param("fedgmm", [], 2, 0, marks=pytest.mark.slow),
        ("fedlex", ["plugin.fedlex.e_exp=1"], 1, 0),
    ],
    ids=["fedavg", "feddisk", "feddiskab", "fedgmm", "fedlex"],
)
def test_effective_rounds_count_what_is_sent_up(
    launch: Make, method: str, options: list[str], before: int, numbers: int
) -> None:
    """E_1 plus the first training round with the best accuracy.

    `weigh` is no communication; exploring and sending mixtures are.
    """
    run = launch(
        *COMMON,
        *options,
        f"method={method}",
        "rounds=4",
        "eval.every=1",
        "client.lr=1",
        task=toy_task(),
    )
    rows = [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]
    accuracies = [row["acc_global"] for row in rows if row["phase"] == "train"]
    first = 1 + accuracies.index(max(accuracies))
    assert first > 1
    assert run.summary["communication"] == {
        "effective_rounds": before + first,
        "cost": 2 * (numbers + MODEL * first),
    }

"""Every method and plug-in of conf/ on numbers and on labels: it learns, or refuses in a sentence.

A new method or plug-in is included without a new test.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from composing import composed
from contracts.short import SHORT
from contracts.test_compositions import METHODS, PLUGINS
from targets.tasks import task_of

from fedhet.core.errors import ConfigError
from fedhet.runs.job import Job
from fedhet.testing import run_quietly

NEEDS_CLASSES = {"fedgen", "fedgmm", "fedntd", "fedpcl", "fedproto", "fedrod"}
SETTINGS = ["rounds=8", "client.lr=0.2", "client.epochs=2", "client.batch_size=8", "device=cpu"]
PIECES = [(f"method={name}", name) for name in METHODS]
PIECES += [(f"method=fedavg plugin=[{name}]", name) for name in PLUGINS]
# The cheapest that differ in what they do with outputs and targets; the others are slow.
FAST = {
    ("number", "method=fedavg"),
    ("labels", "method=fedavg"),
    ("number", "method=ditto"),
    ("labels", "method=moon"),
    ("labels", "method=feddisk"),
    ("number", "method=fedrod"),
    ("labels", "method=fedntd"),
    ("labels", "method=fedavg plugin=[fedgmm]"),
}
CASES = [
    pytest.param(
        *(choice, name, target),
        id=f"{choice}-{target}",
        marks=() if (target, choice) in FAST else pytest.mark.slow,
    )
    for choice, name in PIECES
    for target in ("number", "labels")
]
# FedLEx's mask divides the steps by ten to a thousand; a client alone has few samples.
FASTER = {"fedlex": ["plugin.fedlex.rescale=mean1"], "local": ["client.lr=1"]}


@pytest.mark.parametrize(("choice", "name", "target"), CASES)
def test_it_learns_or_refuses(
    choice: str, name: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedhet.runs.record.figures.draw", lambda *args: [])
    lines = [*choice.split(), *SETTINGS, *SHORT.get(name, []), *FASTER.get(name, [])]
    settings = composed(*lines)
    task = task_of(target)
    if name in NEEDS_CLASSES:
        message = rf"(method=|plugin '){name}'? .*class.*task .*target={target}"
        with pytest.raises(ConfigError, match=message):
            run_quietly(settings, tmp_path / "refused", task)
        assert not (tmp_path / "refused").exists()
        return
    before = initial_loss(Job(settings, task))
    done = run_quietly(settings, tmp_path / "run", task)
    last = json.loads((done.dir / "rounds.jsonl").read_text().splitlines()[-1])
    assert last["loss_clients_weighted"] < 0.98 * before
    score = done.summary[done.summary["score"]]
    if "global" in done.summary["models"]:
        assert score["last"] is not None
    else:
        assert done.summary["personal"]["last"] is not None


def initial_loss(job: Job) -> float:
    """The loss of the initial model over the clients' test data."""
    task = job.task
    x = torch.cat([client.test.x for client in task.clients])
    y = torch.cat([client.test.y for client in task.clients])
    with torch.no_grad():
        return float(task.criterion(job.workspace.load(job.workspace.initial)(x), y).mean())

"""A run in which every kind of fault happens all the time, and what it leaves behind.

FEDHET_SOAK=200x100 makes it long, with 200 steps of 100 clients; `pytest -s` shows what is found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from engines import all_faults

ROOT = Path(__file__).parents[2]
ROUNDS, CLIENTS = map(int, os.environ.get("FEDHET_SOAK", "8x60").split("x"))
LOOK_SECONDS = 0.5
DEADLINE = 0.5  # seconds per message
FLAT = 1.02  # memory is flat if its mean in the last quarter of the steps is at most so many
# times that in the second quarter: the record of a run in memory grows a little with each failure
SAME = ("cohort", "accepted", "client_state", "weights_sha256")  # of each step in both runs


def settings(rounds: int, clients: int) -> list[str]:
    """Ditto with FedNorm, so that clients remember something and send an extra."""
    return [
        "method=ditto",
        "plugin=[fednorm]",
        "plugin.fednorm._target_=engines.all_faults.Faulty",
        "client.lr=.05",
        f"partition.clients={clients}",
        "partition.min_size=5",
        f"rounds={rounds}",
        "replies.least=5",  # fewer are too easily outliers by half
        "engine.workers=2",
        "eval.every=10",
        "eval.clients=false",
        "on_failure=skip",
        "on_lost_state=restart",
        "replies.max_lost=1",
        "replies.bad_steps=20",
        "replies.grace=0",
        "merge=norm_filter",
        "merge.factor=100",
    ]


def run(overrides: list[str], folder: Path, failed: Path) -> dict[str, Any]:
    """Run them in a process of their own, and watch its memory.

    Returns:
        `mib`: of the server's process, by step, until the last one, after which it draws figures;
        `left`: processes that it has left behind; `files`: what is left in the temporary folder.
    """
    temporary = folder.with_suffix(".tmp")
    temporary.mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "FEDHET_TRUST": "engines.all_faults",
        all_faults.FAILED: str(failed),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)]),
    }
    command = [sys.executable, "-m", "engines.wired", *overrides, f"hydra.run.dir={folder}"]
    log = folder.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    mib: dict[int, float] = {}
    try:
        server = psutil.Process(process.pid)
        while process.poll() is None:
            with suppress(psutil.Error):  # it has just ended
                mib[len(steps(folder))] = server.memory_info().rss / 2**20
            time.sleep(LOOK_SECONDS)
    finally:
        process.kill()  # it has ended, unless we are interrupted
        code = process.wait()
    assert code == 0, log.read_text()
    mib.pop(max(mib, default=0), None)
    left = [one.pid for one in psutil.process_iter() if _temporary(one) == str(temporary)]
    files = [path.name for path in temporary.iterdir()]
    return {"mib": mib, "left": left, "files": files}


def steps(folder: Path) -> list[dict[str, Any]]:
    """The steps that the run has recorded."""
    path = folder / "rounds.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _temporary(process: psutil.Process) -> str | None:
    """The temporary folder of a process, which tells the processes of one run from all others."""
    try:
        return process.environ().get("TMPDIR")
    except psutil.Error:  # it has ended, or is another user's
        return None


def first_difference(faulty: list[dict[str, Any]], clean: list[dict[str, Any]]) -> Any:
    """The first step in which the two runs are not the same, with both versions of it, or None."""
    for one, other in zip(faulty, clean, strict=True):
        differing = {key: (one[key], other[key]) for key in SAME if one[key] != other[key]}
        if differing:
            return {"step": one["step"], **differing}
    return None


def accepted_outliers(row: dict[str, Any]) -> int:
    """How many the step has merged: no filter helps where half of its replies are outliers."""
    merged = set(row["cohort"]) - {one["pid"] for one in row["failures"]}
    hit = sum("an outlier" in all_faults.drawn(pid, row["step"]) for pid in merged)
    return hit if row["accepted"] else 0


@pytest.mark.matrix
def test_all_faults_at_once(tmp_path: Path) -> None:
    """And the weights are those of a run without the clients that the faults hit."""
    common = settings(ROUNDS, CLIENTS)
    faulty, clean, failed = tmp_path / "faulty", tmp_path / "clean", tmp_path / "failed.json"
    watched = run([*common, f"replies.deadline={DEADLINE}"], faulty, failed)
    rows = steps(faulty)
    lost = [(one["pid"], one["step"], one["reason"]) for row in rows for one in row["failures"]]
    failed.write_text(json.dumps(lost))
    # Without a deadline, which on a busy machine would make others late in this run.
    run([*common, "plugin.fednorm.z_when=absent"], clean, failed)
    assert (len(rows), sum(len(row["cohort"]) for row in rows)) == (ROUNDS, ROUNDS * CLIENTS)
    assert 0 < sum(row["accepted"] for row in rows) < ROUNDS * CLIENTS
    reasons = Counter(reason for _, _, reason in lost)
    assert set(reasons) >= {"failed", "late", "refused", "outlier"}
    assert set(reasons) >= {"lost state", "corrupt", "too large", "replayed"}
    assert sum(map(accepted_outliers, rows)) == 0
    assert first_difference(rows, steps(clean)) is None
    accuracy = [
        json.loads((folder / "summary.json").read_text())["accuracy"]["last"]
        for folder in (faulty, clean)
    ]
    assert accuracy[0] == accuracy[1] > 0.2  # of ten classes: something was learned
    assert watched["left"] == watched["files"] == []
    mib = pd.Series(watched["mib"])
    second, last = mib.loc[ROUNDS // 4 : ROUNDS // 2].mean(), mib.loc[3 * ROUNDS // 4 :].mean()
    assert last > 0 and (ROUNDS < 100 or last <= FLAT * second)
    unhit = sum(not all_faults.drawn(pid, step) for pid, step, _ in lost)
    print(f"failures {dict(reasons.most_common())}, of clients that no fault hit {unhit}")
    print(f"accuracy {accuracy}, MiB of the second and the last quarter {second:.1f} {last:.1f}")

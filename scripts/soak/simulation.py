"""A long run in which every kind of fault happens all the time, and what it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pieces
import psutil

HERE = Path(__file__).parent
LOOK_SECONDS = 0.5


def settings(rounds: int, clients: int, fraction: float, deadline: float) -> list[str]:
    """Ditto with FedNorm, so that clients remember something and send an extra."""
    return [
        "method=ditto",
        "plugin=[fednorm]",
        "plugin.fednorm._target_=pieces.Faulty",
        "client.lr=.05",
        f"partition.clients={clients}",
        "partition.min_size=5",
        f"rounds={rounds}",
        f"fraction={fraction}",
        "replies.least=5",  # no filter helps where half of the replies are outliers
        "engine.workers=2",
        "eval.every=10",
        "eval.clients=false",
        "on_failure=skip",
        "replies.max_lost=1",
        "replies.bad_steps=20",
        f"replies.deadline={deadline}",
        "replies.grace=0",
        "merge=norm_filter",
        "merge.factor=100",
    ]


def run(overrides: list[str], folder: Path, failed: Path) -> dict[str, Any]:
    """Run them in a process of their own, and watch its memory.

    Returns:
        `mib`: of the server's process, by step; `left`: processes that it has left behind.

    Raises:
        SystemExit: the run has failed.
    """
    environment = {
        **os.environ,
        "FEDHET_TRUST": "pieces",
        pieces.FAILED: str(failed),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "fedhet", *overrides, f"hydra.run.dir={folder}"]
    began = time.perf_counter()
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
    if code:
        sys.exit(f"the run has ended with {code}:\n{log.read_text()[-2000:]}")
    seconds = time.perf_counter() - began
    left = [one.pid for one in psutil.process_iter() if _session(one) == process.pid]
    return {"seconds": seconds, "mib": mib, "left": left}


def steps(folder: Path) -> list[dict[str, Any]]:
    """The steps that the run has recorded."""
    path = folder / "rounds.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def soak(rounds: int, clients: int, fraction: float, deadline: float) -> dict[str, Any]:
    """Run with the faults, and then without the clients that they hit."""
    common = settings(rounds, clients, fraction, deadline)
    with tempfile.TemporaryDirectory() as home:
        faulty, clean = Path(home, "faulty"), Path(home, "clean")
        failed = Path(home, "failed.json")
        watched = run(common, faulty, failed)
        rows = steps(faulty)
        lost = [(one["pid"], one["step"]) for row in rows for one in row["failures"]]
        failed.write_text(json.dumps(lost))
        run([*common, "plugin.fednorm.z_when=absent"], clean, failed)
        summaries = [
            json.loads((folder / "summary.json").read_text()) for folder in (faulty, clean)
        ]
        reasons = Counter(failure["reason"] for row in rows for failure in row["failures"])
    mib = watched["mib"]
    early = [mib[step] for step in sorted(mib) if 10 <= step <= 30]
    return {
        "steps": len(rows),
        "messages": sum(len(row["cohort"]) for row in rows),
        "accepted": sum(row["accepted"] for row in rows),
        "failures": dict(reasons.most_common()),
        "failures of clients that no fault hit": sum(not pieces.drawn(*one) for one in lost),
        "accuracy": [one["accuracy"]["last"] for one in summaries],
        "the same weights": len({one["weights_sha256"] for one in summaries}) == 1,
        "MiB after 10 to 30 steps, at most": round(max(early, default=0.0)),
        "MiB in the last 20 steps, at most": round(max(mib[n] for n in mib if n > rounds - 20)),
        "processes left": len(watched["left"]),
        "seconds": round(watched["seconds"]),
    }

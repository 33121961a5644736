"""tracker=wandb: the offline folder of the real package holds what rounds.jsonl holds."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trackers.following import LINES, Steps, check, killed

import fedhet

pytest.importorskip("wandb")
pytestmark = pytest.mark.slow
BLOCK, HEAD, MAGIC = 2**15, 7, 7  # of a .wandb file: LevelDB's log, after 7 bytes of its own


def records(file: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), MAGIC, b""
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEAD])
        if not kind:
            break
        whole += data[at + HEAD : at + HEAD + size]
        at += HEAD + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


def offline(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*"))


def every(folder: Path, kind: str) -> list[Any]:
    """The records of a kind, once W&B's own process has written the last one."""
    (home,) = offline(folder)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = list(records(next(home.glob("*.wandb"))))
        if found and found[-1].WhichOneof("record_type") == "exit":
            break
        time.sleep(0.1)
    return [getattr(one, kind) for one in found if one.WhichOneof("record_type") == kind]


def history(folder: Path) -> Steps:
    steps: Steps = defaultdict(dict)
    for row in every(folder, "history"):
        values = {
            (item.key or ".".join(item.nested_key)): json.loads(item.value_json)
            for item in row.item
        }
        number = values.pop("_step")
        for name, value in values.items():
            if not name.startswith("_"):
                assert name not in steps[number], f"{name} twice in step {number}"
                steps[number][name] = float(value)
    return dict(sorted(steps.items()))


def test_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary7f3a" * 4)
    run = fedhet.run([*LINES, "tracker=wandb", f"hydra.run.dir={tmp_path}/run"])
    check(history(run.dir), run.dir)
    first = every(run.dir, "run")[0]
    assert first.run_id == json.loads((run.dir / "tracker.json").read_text())["id"]
    assert (first.project, first.display_name) == ("fedhet", "run")
    settings = {item.key: item.value_json for item in first.config.update}
    assert settings["client.lr"] == "0.2"
    (artifact,) = every(run.dir, "artifact")
    sums = {file.path: file.digest for file in artifact.manifest.contents}
    for name in ("model.safetensors", "config.yaml", "summary.json", "figures/accuracy.png"):
        digest = hashlib.md5((run.dir / name).read_bytes()).digest()
        assert sums[name] == base64.b64encode(digest).decode()
    for file in run.dir.rglob("*"):
        assert not file.is_file() or b"canary7f3a" not in file.read_bytes(), file
    plain = fedhet.run([*LINES, f"hydra.run.dir={tmp_path}/plain"])
    assert run.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert set(run.summary) == set(plain.summary)


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed(folder, "tracker=wandb")
    (before,) = offline(folder)
    run = fedhet.run([f"resume={folder}"])
    (after,) = offline(folder)
    assert before.name.rpartition("-")[2] == after.name.rpartition("-")[2]
    check(history(folder), run.dir)


def test_a_sweep_is_a_group(tmp_path: Path) -> None:
    (tmp_path / "alphas").mkdir()
    (tmp_path / "alphas" / "multirun.yaml").touch()
    run = fedhet.run([*LINES, "tracker=wandb", f"hydra.run.dir={tmp_path}/alphas/one"])
    assert every(run.dir, "run")[0].run_group == "alphas"

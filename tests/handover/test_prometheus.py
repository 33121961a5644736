"""The text files for Prometheus say what the run folder says; nothing else depends on them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import fedhet
from fedhet.runs.record import prometheus
from fedhet.runs.record.outcome import read_json

LINES = ["method=fedavg", "model=logistic", "partition.clients=3", "rounds=2", "figures=false"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHET_METRICS_DIR", str(tmp_path / "prom"))


def read(file: Path) -> dict[str, float]:
    """Each line as the format has it: a name, labels in braces, and a number."""
    found = {}
    for line in file.read_text().splitlines():
        if not line.startswith("# "):
            match = re.fullmatch(r'(\w+(?:\{(?:\w+="[^"\\]*",?)+\})?) (\S+)', line)
            assert match, line
            found[match[1]] = float(match[2])
    return found


def test_the_servers_file(tmp_path: Path) -> None:
    run = fedhet.run([*LINES, f"hydra.run.dir={tmp_path}/run"])
    assert [path.name for path in (tmp_path / "prom").iterdir()] == ["fedhet-server.prom"]
    found = read(tmp_path / "prom" / "fedhet-server.prom")
    assert found["fedhet_round"] == 2
    score = found['fedhet_score{score="accuracy",on="global"}']
    assert score == pytest.approx(run.summary["accuracy"]["last"])
    for way in ("up", "down"):
        sent = found[f'fedhet_bytes_total{{direction="{way}",kind="model"}}']
        assert sent == run.summary["bytes"][way]["model"]
    assert found['fedhet_run_status{status="ok"}'] == 1
    assert found['fedhet_run_status{status="running"}'] == 0


def test_the_collector_can_read_what_a_service_with_a_strict_umask_writes(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        prometheus.update({"rounds": 1}, [], [], "running")
    finally:
        os.umask(before)
    assert (tmp_path / "prom" / "fedhet-server.prom").stat().st_mode & 0o777 == 0o644


def test_failures_are_counted_by_reason(tmp_path: Path) -> None:
    with pytest.raises(fedhet.RunFailed):
        fedhet.run([*LINES, "client.lr=1e30", f"hydra.run.dir={tmp_path}/run"])
    found = read(tmp_path / "prom" / "fedhet-server.prom")
    assert found['fedhet_run_status{status="failed"}'] == 1
    summary = read_json(tmp_path / "run", "summary.json")
    assert summary["rejected"]
    for reason, count in summary["rejected"].items():
        assert found[f'fedhet_failures_total{{reason="{reason}"}}'] == count


def test_a_folder_that_cannot_be_written_fails_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDHET_METRICS_DIR", str(tmp_path / "file"))
    run = fedhet.run([*LINES, f"hydra.run.dir={tmp_path}/run"])
    assert run.summary["status"] == "ok"
    assert caplog.text.count("FEDHET_METRICS_DIR") == 1

"""The final models at the sites (deliver=true), in this process."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from own_sites import RUN, Sites, simulated, write_sites

import fedhet
from fedhet.core.client.client import DELIVER
from fedhet.core.messages import Failure
from fedhet.core.server.evaluation import evaluation_messages
from fedhet.handover import export, predict
from fedhet.runs import config


def predicted(capsys: pytest.CaptureFixture[str], *arguments: str) -> torch.Tensor:
    capsys.readouterr()
    assert predict.main([*arguments, "--array", "x_train", "--format", "json"]) == 0
    samples = json.loads(capsys.readouterr().out)
    return torch.tensor([list(one["probabilities"].values()) for one in samples])


def expected(run: fedhet.Run, x: np.ndarray, **which: Any) -> torch.Tensor:
    """The probabilities by a model of a simulation, with its normalisation by hand."""
    known = json.loads((run.dir / "partition.json").read_text())["normalised"]
    mean, std = (torch.tensor(known[key]) for key in ("mean", "std"))
    with torch.no_grad():
        return fedhet.load(run, **which)((torch.tensor(x).float() - mean) / std).softmax(1)


def test_each_site_gets_the_final_model_and_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `predict` says at a site is what the models of the same run, simulated, say."""
    sites = Sites(tmp_path, monkeypatch, "deliver=true", "method=ditto")
    summary = sites.run()
    assert (summary["status"], summary["failures"]) == ("ok", [])
    same = simulated(tmp_path, "method=ditto")
    assert summary["weights_sha256"] == same.summary["weights_sha256"]
    assert summary["delivery"]["clients"] == [0, 1, 2] and not summary["delivery"]["failed"]
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    for pid in range(3):
        assert (sites.home(pid) / "model.safetensors").read_bytes() == model
    for pid, site in ((0, "a"), (2, "c")):
        home = sites.home(pid)
        x = np.load(tmp_path / f"{site}.npz")["x_train"]
        files = (str(home), str(tmp_path / f"{site}.npz"))
        assert torch.allclose(predicted(capsys, *files), expected(same, x), atol=1e-6)
        own = predicted(capsys, *files, "--view", "personal")
        wanted = expected(same, x, weights="personal", client=pid)
        assert torch.allclose(own, wanted, atol=1e-6)
        assert not torch.allclose(own, expected(same, x), atol=1e-3)
        about = json.loads((home / "summary.json").read_text())
        frame = pandas.read_parquet(tmp_path / "run" / "clients" / "round-000002.parquet")
        frame = frame[(frame.client == pid) & (frame.split == "test")].set_index("model")
        for view, score in frame[frame.metric == "accuracy"].value.items():
            assert about["scores"][f"test.{view}.accuracy"] == score
        with pytest.raises(fedhet.ConfigError, match="delivered"):
            fedhet.load(home, "personal", client=pid + 1)
        with pytest.raises(fedhet.ConfigError, match="delivered"):
            fedhet.load(home, "best_val")


def test_without_a_global_model_a_site_keeps_its_own_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sites = Sites(tmp_path, monkeypatch, "deliver=true", "method=fedpcl")
    assert sites.run()["delivery"]["model_sha256"] is None
    home = sites.home(2)
    assert [file.name for file in home.glob("*.safetensors")] == ["personal.safetensors"]
    same = simulated(tmp_path, "method=fedpcl")
    x = np.load(tmp_path / "c.npz")["x_train"]
    wanted = expected(same, x, weights="personal", client=2)
    assert torch.allclose(predicted(capsys, str(home), str(tmp_path / "c.npz")), wanted, atol=1e-6)


@pytest.mark.slow
def test_a_site_exports_its_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Sites(tmp_path, monkeypatch, "deliver=true", "method=fedpcl")
    sites.run()
    home = sites.home(2)
    x = np.load(tmp_path / "c.npz")["x_train"]
    wanted = expected(simulated(tmp_path, "method=fedpcl"), x, weights="personal", client=2)
    assert export.main([str(home), "--to", "pt2"]) == 0
    program = torch.export.load(home / "personal.pt2").module()
    assert torch.allclose(program(torch.tensor(x).float()), wanted, atol=1e-6)


def test_a_site_that_is_away_or_has_no_room_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sites = Sites(tmp_path, monkeypatch, "deliver=true", "method=fedavg")
    sites.away = {2}
    (tmp_path / "file").write_text("")
    sites.models[1] = tmp_path / "file" / "models"
    with caplog.at_level(logging.INFO, "fedhet"):
        summary = sites.run()
    assert (summary["status"], summary["degraded"]) == ("ok", False)
    assert summary["delivery"]["clients"] == [0]
    failed = summary["delivery"]["failed"]
    assert failed["1"].startswith("WriteError;") and "Node Unavailable" in failed["2"]
    assert str(tmp_path) not in failed["1"]  # the server learns no folder of a site
    assert "cannot be written" in caplog.text  # and the site's operator does
    assert str(tmp_path / "file") in caplog.text
    assert [failure["pid"] for failure in summary["failures"]] == [1, 2]
    assert "final model is at 1 of 3 clients" in caplog.text


def test_a_second_delivery_replaces_the_first_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a run that is resumed for more rounds."""
    sites = Sites(tmp_path, monkeypatch, "deliver=true", "method=ditto", "rounds=1")
    sites.run()
    home = sites.home(0)
    (home / "from-before").write_text("")
    plan = evaluation_messages(sites.job.strategy)
    digest = json.loads((home / "summary.json").read_text())["weights_sha256"]
    offer = replace(plan[0], extras={**plan[0].extras, DELIVER: digest})
    before = (home / "model.safetensors").read_bytes()

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("fedhet.data.storage.sync", full)
        reply = sites.serve(offer)
    assert isinstance(reply, Failure) and "WriteError" in reply.cause
    assert (home / "from-before").exists()
    # A process was killed; another one has its number.
    home.with_name(f".0.{os.getpid()}.part").mkdir()
    assert not isinstance(sites.serve(offer), Failure)
    assert not (home / "from-before").exists()
    assert (home / "model.safetensors").read_bytes() == before
    assert [each.name for each in home.parent.iterdir()] == ["0"]


@pytest.mark.parametrize(
    ("alter", "cause"),
    [
        (lambda msg: replace(msg, extras={**msg.extras, DELIVER: "0" * 64}), "digest"),
        (lambda msg: replace(msg, extras={**msg.extras, DELIVER: 1.0}), "a text is expected"),
        (lambda msg: replace(msg, weights={}), "final model"),
        (
            lambda msg: replace(msg, weights={n: t * torch.nan for n, t in msg.weights.items()}),
            "NaN",
        ),
    ],
)
def test_a_site_refuses_another_model_than_the_servers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alter: Any,
    cause: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sites = Sites(tmp_path, monkeypatch, "deliver=true", "method=fedavg")
    msg = evaluation_messages(_begun(sites))[0]
    reply = sites.serve(alter(replace(msg, extras={DELIVER: "f" * 64})))
    assert isinstance(reply, Failure) and cause in caplog.text
    assert not list(sites.models[0].glob("**/*"))


def test_a_relative_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Sites(tmp_path, monkeypatch, "deliver=true", "method=fedpcl")
    sites.models[0] = Path("models")
    msg = evaluation_messages(_begun(sites))[0]
    reply = sites.serve(replace(msg, extras={**msg.extras, DELIVER: ""}))
    assert isinstance(reply, Failure) and "FEDHET_MODEL_DIR must be an absolute path" in reply.cause


def test_what_the_settings_do_not_say_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = Sites(tmp_path, monkeypatch)
    msg = evaluation_messages(_begun(sites))[0]
    reply = sites.serve(replace(msg, extras={**msg.extras, DELIVER: "f" * 64}))
    assert isinstance(reply, Failure) and "deliver=false" in reply.cause


def test_a_reply_to_a_delivery_brings_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = Sites(tmp_path, monkeypatch, "deliver=true", "method=fedavg", "rounds=1")
    sites.added = {1: {"eval.keep.personal": {"w": torch.ones(1)}}}
    summary = sites.run()
    assert summary["delivery"]["clients"] == [0, 2]
    assert "has content" in summary["delivery"]["failed"]["1"]
    assert summary["rejected"] == {"refused": 1}


def test_a_simulation_has_no_sites(tmp_path: Path) -> None:
    with pytest.raises(fedhet.ConfigError, match=r"deliver=true .*engine=local"):
        simulated(write_sites(tmp_path), "deliver=true")
    with pytest.raises(fedhet.ConfigError, match="deliver=3"):
        config.compose([*RUN, "deliver=3"])


def _begun(sites: Sites) -> Any:
    """The strategy after its first round, without a run folder."""
    strategy = sites.job.strategy
    step = strategy.plan(1)
    strategy.finish_step(step, [sites.serve(msg) for msg in step.messages])
    return strategy

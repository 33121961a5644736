"""What the server learns of an error at a site: no cell, no file of a folder, no other path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas
import pytest
from asking import answered
from flwr.app import Context, RecordDict
from own_sites import Node, Sites
from PIL import Image
from targets.test_texts import save_tokenizer

from fedhet.core.client.client import DELIVER
from fedhet.core.errors import (
    SUBMITTED,
    ConfigError,
    DataError,
    LostState,
    MachineError,
    Rejected,
    public_text,
)
from fedhet.core.kernel import Client, serves
from fedhet.core.messages import LOST, Failure
from fedhet.core.server.evaluation import evaluation_messages
from fedhet.flower import apps
from fedhet.runs import config
from fedhet.runs.job import Job
from fedhet.runs.stores import MemoryStore, store_at_site

CELLS = ("John Smith", "Ann Lee", "61234")
TOLD = "the node of site 'a' cannot serve this run: DataError; the log on that node has the details"
ONE = ("dataset=local", "dataset.sites=[a]", "dataset.shape=[1]")
TABLE = (*ONE[:2], "dataset.features=[age]", "dataset.label=name")


def problem(folder: Path, data: Path | str, *lines: str) -> str:
    node = Node(folder, 1, list(lines), site="a", data=str(data))
    return node.problem


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        ({"age": [1.0, 2.0], "name": CELLS[:2]}, (*TABLE, "dataset.classes=[x,y]")),
        ({"age": [1, 2], "name": [61234, 61234]}, (*TABLE, "dataset.classes=2")),
        ({"age": [1.0, 2.0], "name": [61234.5, 1]}, (*TABLE, "dataset.classes=2")),
        ({"age": [1, 2], "name": CELLS[:2]}, (*TABLE, "dataset.target=number")),
        ({"age": CELLS[:2], "name": ["x", "y"]}, (*TABLE, "dataset.classes=[x,y]")),
        (
            {"age": [1, 2], "name": [[CELLS[0]], [CELLS[1]]]},
            (*TABLE, "dataset.classes=[x,y]", "dataset.target=labels"),
        ),
        (
            {"age": [1, 2], "p": [61234, 0], "q": [0, 1]},
            (*TABLE[:-1], "dataset.label=[p,q]", "dataset.classes=[p,q]", "dataset.target=labels"),
        ),
        ({CELLS[0]: [1, 2], CELLS[1]: [2, 3]}, (*TABLE, "dataset.classes=[x,y]")),
    ],
    ids=["class", "whole", "fraction", "number", "input", "sets", "columns", "no header"],
)
def test_no_cell_of_a_table(
    tmp_path: Path, columns: Any, lines: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "t.parquet"
    pandas.DataFrame(columns).to_parquet(file, index=False)
    reason = problem(tmp_path, file, *lines)
    assert reason == TOLD
    assert not any(cell in reason for cell in CELLS)
    assert any(cell in caplog.text for cell in CELLS)  # the operator of the site learns it


def test_no_cell_of_a_table_of_texts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tokenizers", reason="texts need the package tokenizers")
    import hashlib

    save_tokenizer(tmp_path)
    digest = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    pandas.DataFrame({"note": ["so", "so"], "name": CELLS[:2]}).to_csv(tmp_path / "t.csv")
    lines = (
        *("dataset=local", "dataset.sites=[a]", "dataset.classes=[x,y]", "dataset.text=note"),
        *("dataset.label=name", f"dataset.tokenizer={digest}", "dataset.shape=[6]"),
        *("dataset.dtype=int64", "dataset.vocabulary=15", "dataset.padding=1"),
    )
    reason = problem(tmp_path, tmp_path / "t.csv", *lines)
    assert "log on that node" in reason and CELLS[0] not in reason and CELLS[0] in caplog.text


def test_no_token_of_a_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = np.array([[1, 2], [3, 61234]])
    np.savez(tmp_path / "t.npz", x=tokens, y=np.array([1, 61234]))
    lines = (
        *("dataset=local", "dataset.sites=[a]", "dataset.classes=9", "dataset.shape=[2]"),
        *("dataset.dtype=int64", "dataset.target=next_char", "dataset.vocabulary=9"),
    )
    reason = problem(tmp_path, tmp_path / "t.npz", *lines)
    assert "log on that node" in reason and "61234" not in reason and "61234" in caplog.text


@pytest.mark.parametrize(
    "name", ["A/John_Smith.png", "John_Smith/ok.png", "A/John_Smith.PNG/x.png"]
)
def test_no_file_or_folder_of_images(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One image is damaged, or there is a folder that is no declared class, or no image."""
    for path in ("A/ok.png", "B/ok.png", name):
        (tmp_path / "img" / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "img" / path)
    if name.startswith("A"):
        (tmp_path / "img" / name).write_bytes(b"none")
    lines = ("dataset=local", "dataset.sites=[a]", "dataset.classes=[A,B]")
    reason = problem(tmp_path, tmp_path / "img", *lines, "dataset.shape=[1,8,8]")
    if "John_Smith.PNG" not in name:
        assert "John_Smith" in caplog.text
    assert "John_Smith" not in reason and str(tmp_path) not in reason


@pytest.mark.parametrize(
    "data",
    [
        "secret-ward/x.npz",
        "/secret-ward",
        "/secret-ward/of John's/x.npz",
        "/secret-ward/tab\t/x.npz",
        "/secret-ward/" + "/".join("y" * 200 for _ in range(8)) + "/x.npz",
    ],
    ids=["relative", "root", "space", "tab", "long"],
)
def test_no_folder_of_the_data(tmp_path: Path, data: str) -> None:
    reason = problem(tmp_path, data, *ONE, "dataset.classes=2")
    hidden = ("secret-ward/", "/secret", "John", "tab", "yyy")
    assert not any(part in reason for part in hidden)
    assert "log on that node" in reason


@pytest.mark.parametrize("at", ["secret ward/state", "file/state"])
def test_no_folder_of_the_states(
    tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The state is damaged, or its folder cannot be used."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path / at))
    sites = Sites(tmp_path, monkeypatch)  # SCAFFOLD has states
    for node in sites.deployment.members.nodes.values():
        cast("Node", node).store = store_at_site  # type: ignore[assignment]
    msg = sites.job.strategy.plan(1).messages[0]
    reply = sites.serve(msg)
    if at.startswith("secret"):
        assert not isinstance(reply, Failure)
        (state,) = (tmp_path / at).glob("**/1.safetensors")
        state.write_bytes(b"damaged")
        reply = sites.serve(replace(msg, version=1, round=2))
        assert isinstance(reply, Failure) and reply.reason == LOST
    assert isinstance(reply, Failure)
    assert not any(part in reply.cause for part in (str(tmp_path), "ward", "state/"))
    assert "is damaged" in caplog.text or str(tmp_path / at) in caplog.text


def test_no_folder_of_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FEDHET_MODEL_DIR is not set, and the default folder cannot be used."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path / "file"))
    sites = Sites(tmp_path, monkeypatch, "deliver=true", "method=fedpcl")
    step = sites.job.strategy.plan(1)
    sites.job.strategy.finish_step(step, [sites.serve(msg) for msg in step.messages])
    msg = evaluation_messages(sites.job.strategy)[0]
    sites.models[0] = cast("Path", "")
    reply = sites.serve(replace(msg, extras={**msg.extras, DELIVER: ""}))
    assert isinstance(reply, Failure)
    assert reply.cause == "NotADirectoryError; the log on that node has the details"


def test_no_path_in_an_exception_that_flower_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import client_app

    def raising(*arguments: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path / "own" / "x"))

    monkeypatch.setattr(apps, "client_for", raising)
    node = {"site": "a", "data": str(tmp_path / "own")}
    context = Context(1, 1, cast("Any", node), RecordDict(), {})
    reply = answered(RecordDict(), context, client_app.app)
    assert reply.error.reason == TOLD.replace("DataError", "PermissionError")
    assert str(tmp_path) in caplog.text


def test_a_simulation_keeps_its_messages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @serves
    def damaged(self: Client, msg: Any, state: Any, site: Any) -> Any:
        raise LostState(f"{tmp_path}/x is damaged")

    monkeypatch.setattr(Client, "train", damaged)
    job = Job(config.compose(["method=fedavg", "partition.clients=2"]))
    reply = job.client(MemoryStore()).handle(job.strategy.plan(1).messages[0])
    assert isinstance(reply, Failure) and str(tmp_path) in reply.cause


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError("client.lr=-1: must be >= 0"), "ConfigError: client.lr=-1: must be >= 0"),
        (Rejected("corrupt", "no header"), "Rejected: no header"),
        (LostState("client 1: its state is missing"), "LostState: client 1: its state is missing"),
        (
            MachineError("/srv/x: no such folder"),
            "MachineError; the log on that node has the details",
        ),
        (DataError("row 7 of /srv/x"), "DataError; the log on that node has the details"),
        (OSError(2, "none", "/srv/x"), "FileNotFoundError; the log on that node has the details"),
        (KeyError("John Smith"), "KeyError; the log on that node has the details"),
    ],
)
def test_an_error_is_told_by_its_class(error: Exception, text: str) -> None:
    assert public_text(error) == text


def test_a_run_of_this_machine_learns_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SUBMITTED, "1")
    assert public_text(DataError("row 7 of /srv/x")) == "DataError: row 7 of /srv/x"

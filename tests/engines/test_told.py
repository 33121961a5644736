"""What the server learns of an error at a site: no cell, no file of a folder, no other path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas
import pytest
from flwr.common import Context, RecordDict
from own_sites import Node, Sites
from PIL import Image
from targets.test_texts import save_tokenizer

from fedhet import config
from fedhet.core.client.client import DELIVER
from fedhet.core.errors import LostState
from fedhet.core.kernel import Client, serves
from fedhet.core.messages import LOST, Failure
from fedhet.core.server.evaluation import evaluation_messages
from fedhet.flower import apps
from fedhet.flower.wire import told
from fedhet.job import Job
from fedhet.stores import MemoryStore, store_at_site

CELLS = ("John Smith", "Ann Lee", "61234")
ONE = ("dataset=local", "dataset.sites=[a]", "dataset.shape=[1]")
TABLE = (*ONE[:2], "dataset.features=[age]", "dataset.label=name")


def problem(folder: Path, data: Path | str, *lines: str) -> str:
    node = Node(folder, 1, list(lines), site="a", data=str(data))
    return str(node.client.get_properties({})["problem"])


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
    assert "site 'a' does not fit" in reason and "own log" in reason
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
    assert "own log" in reason and CELLS[0] not in reason and CELLS[0] in caplog.text


def test_no_token_of_a_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = np.array([[1, 2], [3, 61234]])
    np.savez(tmp_path / "t.npz", x=tokens, y=np.array([1, 61234]))
    lines = (
        *("dataset=local", "dataset.sites=[a]", "dataset.classes=9", "dataset.shape=[2]"),
        *("dataset.dtype=int64", "dataset.target=next_char", "dataset.vocabulary=9"),
    )
    reason = problem(tmp_path, tmp_path / "t.npz", *lines)
    assert "own log" in reason and "61234" not in reason and "61234" in caplog.text


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
    assert Path(data).name in reason


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
    assert str(tmp_path / at) in caplog.text


def test_no_folder_of_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FEDHET_MODEL_DIR is not set, and the default folder cannot be used."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path / "file"))
    sites = Sites(tmp_path, monkeypatch, "deliver=true", "method=fedpcl")
    step = sites.job.strategy.plan(1)
    sites.job.strategy.settle(step, [sites.serve(msg) for msg in step.messages])
    msg = evaluation_messages(sites.job.strategy)[0]
    sites.models[0] = cast("Path", "")
    reply = sites.serve(replace(msg, extras={**msg.extras, DELIVER: ""}))
    assert isinstance(reply, Failure) and "NotADirectoryError" in reply.cause
    assert str(tmp_path) not in reply.cause


def test_no_path_in_an_exception_that_flower_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import client_app

    def raising(*arguments: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path / "own" / "x"))

    monkeypatch.setattr(apps, "client_for", raising)
    node = {"site": "a", "data": str(tmp_path / "own")}
    context = Context(1, 1, cast("Any", node), RecordDict(), {})
    metadata = SimpleNamespace(message_type="train")
    message: Any = SimpleNamespace(metadata=metadata, content=RecordDict())
    with pytest.raises(RuntimeError, match="PermissionError") as raised:
        client_app.app(message, context)
    assert str(tmp_path) not in str(raised.value)
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
    ("text", "short"),
    [
        ("/a/b.npz: there is no such file", "<path>: there is no such file"),
        ("[Errno 2] No such file: '/a b/c d'", "[Errno 2] No such file: '<path>'"),
        ("file:///a/b, //a/b and (/a/b)", "file:<path>, <path> and (<path>)"),
        ("x={'a': \"/b c's\"}", "x={'a': \"<path>\"}"),
        ("train/val, 1 / 2, and/or a/<class>/*.png", None),
        ("see https://example.org/a/b", None),
    ],
)
def test_paths_and_what_is_none(text: str, short: str | None) -> None:
    assert told(text) == (text if short is None else short)


def test_a_folder_of_the_environment_with_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHET_STATE_DIR", "my wards/seven b")
    text = "my wards/seven b/12/3.safetensors is damaged"
    assert told(text) == "<path> is damaged"
    assert told("'my wards/seven b/John Smith'") == "'<path>'"
    named = [Path("/data/w 7/t.csv"), Path("my wards")]
    assert told("/data/w 7/t.csv of /data/w 7, my wards", named) == "t.csv of <path>, my wards"

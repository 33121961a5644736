"""Texts of another process in logs, records and on the terminal: one line, short, no controls."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from asking import answered, packed_message
from contracts.hostile import Federation, skipping
from contracts.short import slow
from flwr.app import ConfigRecord, RecordDict
from flwr.common import Code, GetPropertiesRes, Status

import fedhet
from fedhet.core.errors import RunFailed, reason_of
from fedhet.core.groups import ReplyLimits
from fedhet.core.kernel import Client, serves
from fedhet.core.messages import Failure
from fedhet.data.toy import toy_task
from fedhet.flower import transport, wire
from fedhet.flower.adapter import ManagerMembers, StrategyAdapter
from fedhet.flower.apps import answer, client_for
from fedhet.flower.nodes import Nodes
from fedhet.flower.transport import read_message
from fedhet.runs.record import terminal

EVIL = "first\nfedhet: run folder: /forged\r\x1b[2J\x1b]0;title\x07\u202e\ud800[/red]\x85\u2028"
LONG = EVIL * (2**20 // len(EVIL))
CANARY = "canary-51c7e0"
RUN = ["method=fedavg", "rounds=1", "partition.clients=3", "on_failure=skip", "client.epochs=1"]


def is_clean(text: str, most: int = 2500) -> bool:
    return text.isprintable() and len(text) <= most


@pytest.mark.parametrize("text", [EVIL, LONG], ids=["evil", "long"])
def test_a_cause_is_one_short_line(text: str) -> None:
    failure = Failure(3, "train", 1, text)
    for one in (failure, pickle.loads(pickle.dumps(failure))):
        assert is_clean(one.cause) and is_clean(str(one), 2600)
        assert one.cause.startswith("first\\nfedhet")  # it is still readable
    assert is_clean(reason_of(RuntimeError(text)), 25_000)
    assert is_clean(reason_of(RunFailed(text)), 25_000)


def dying(text: str) -> Callable[..., Any]:
    @serves
    def train(self: Client, msg: Any, state: Any, ctx: Any) -> Any:
        if msg.pid == 1:
            raise ValueError(text)
        return original(self, msg, state, ctx)

    original = Client.train
    return train


def everything(folder: Path) -> dict[str, bytes]:
    files = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert any(name.endswith("rounds.jsonl") for name in files)
    return files


@pytest.mark.parametrize("workers", [1, *slow(2)])
def test_a_client_s_words_in_a_run(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Client, "train", dying(LONG))
    logging.getLogger("fedhet").addHandler(handler := logging.StreamHandler())
    try:
        run = fedhet.run([*RUN, f"engine.workers={workers}", f"hydra.run.dir={tmp_path}/run"])
        terminal.print_summary(run.summary, run.dir)
    finally:
        logging.getLogger("fedhet").removeHandler(handler)
    (failure,) = run.summary["failures"]
    assert is_clean(failure["cause"]) and "first" in failure["cause"]
    written = capfd.readouterr()
    assert "client 1 failed" in written.err
    for line in (written.err + written.out).splitlines():
        assert is_clean(line) and not line.startswith("fedhet: run folder: /forged")
    for name, content in everything(run.dir).items():
        assert b"\x1b" not in content or name.endswith((".png", ".pdf", ".safetensors", ".parquet"))
        if name.endswith((".json", ".jsonl", ".yaml")):
            assert len(content) < 100_000


def test_names_that_a_client_chooses_are_no_kinds_of_bytes(federation: Federation) -> None:
    def alter(plan: Any, replies: list[Any]) -> list[Any]:
        replies[1].extras[EVIL] = 1.0
        return replies

    run = skipping(federation)
    run.step(alter=alter)
    kinds = run.current.bytes["up"]
    assert all(map(is_clean, kinds)) and kinds["refused"] > kinds["model"] / 3
    (failure,) = run.current.failures
    assert failure.pid == 1 and is_clean(failure.cause)


def test_a_table_has_no_markup(
    launch: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = launch("method=fedavg", "rounds=1", "client.epochs=1", task=toy_task())
    capsys.readouterr()
    kinds = {"up": {"[/red]x": 3, "[bold]y": 4}, "down": {}}
    terminal.print_summary({**run.summary, "bytes": kinds}, run.dir)
    written = capsys.readouterr().out
    assert "[/red]x" in written and "[bold]y" in written


def test_a_log_line_is_one_line() -> None:
    form = terminal.OneLine("fedhet: %(message)s")
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        info: Any = (type(error), error, error.__traceback__)
    record = logging.LogRecord("fedhet", logging.INFO, "", 1, "%s", (EVIL,), info)
    first, *others = form.format(record).split("\n")
    assert is_clean(first) and first.startswith("fedhet: first\\n")
    assert all(is_clean(line) and line.startswith("  ") for line in others)
    assert any("ValueError" in line for line in others)


# ---- Flower's own texts
class Proxy:
    cid = "1"
    node_id = 1

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def get_properties(self, ins: Any, timeout: float, group_id: int) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def telling(**properties: Any) -> GetPropertiesRes:
    return GetPropertiesRes(Status(Code.OK, ""), properties)


ALL = telling(**{"partition-id": 0, "num-partitions": 1})


@pytest.mark.parametrize(
    "answer",
    [
        ValueError(EVIL),
        KeyError(EVIL),
        TypeError(LONG),
        GetPropertiesRes(Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, LONG), {}),
        telling(**{"partition-id": LONG, "num-partitions": EVIL}),
        telling(**{"partition-id": 0, "num-partitions": 2**60}),
    ],
    ids=["left", "unreadable", "long", "status", "properties", "a world of nodes"],
)
def test_what_a_node_says_of_itself(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    manager: Any = SimpleNamespace(num_available=lambda: 1, all=lambda: {"1": Proxy(answer)})
    members = ManagerMembers(manager)
    with pytest.raises(RunFailed) as failed:
        Nodes(ReplyLimits(join=0.01)).hosts([0], members)
    assert failed.value.reason.startswith("node 1: ") and is_clean(failed.value.reason)
    nodes = Nodes(ReplyLimits(join=0.01))
    nodes._begun = True
    nodes._total = 1
    with caplog.at_level(logging.WARNING, logger="fedhet"):
        assert nodes.hosts([0], members)[0] is None
    assert all(is_clean(record.getMessage()) for record in caplog.records)
    assert "continues without this node" in caplog.text


def test_an_error_of_flower_and_of_its_grid(federation: Federation) -> None:
    run = skipping(federation)
    msg = run.strategy.plan(1).messages[0]
    replies = [
        SimpleNamespace(has_error=lambda: True, error=SimpleNamespace(code=0, reason=LONG)),
        SimpleNamespace(has_error=lambda: False, content={EVIL: EVIL}),
    ]
    for reply in replies:
        failure = read_message(msg, 7, cast("Any", reply), 0)
        assert isinstance(failure, Failure) and is_clean(failure.cause)
    adapter = StrategyAdapter(run.strategy)
    manager: Any = SimpleNamespace(num_available=lambda: 1, all=lambda: {"1": Proxy(ALL)})
    adapter.begin(1, ManagerMembers(manager))
    failures = list(adapter._in_order([], [RuntimeError(LONG)] * 20))
    assert len(failures) == 3
    assert all(is_clean(one.cause) for one in failures if isinstance(one, Failure))


# ---- the server's texts at a client
def test_a_server_s_words_in_a_node_s_log(caplog: pytest.LogCaptureFixture) -> None:
    context: Any = SimpleNamespace(
        run_config={}, node_config={"partition-id": 0, "num-partitions": 1}
    )
    settings = {"cfg": {"method": {"_target_": EVIL}}, "choices": {"method": EVIL}}
    records = {transport.SETTINGS: ConfigRecord({transport.SETTINGS: json.dumps(settings)})}

    def app(message: Any, context: Any) -> Any:
        return answer(message, context, lambda: client_for(message, context, cast("Any", None)))

    with caplog.at_level(logging.ERROR, logger="fedhet"):
        reply = answered(RecordDict(records), context, app)
    assert is_clean(str(reply.error.reason))
    assert caplog.records and all(is_clean(record.getMessage()) for record in caplog.records)


# ---- secrets
@pytest.mark.parametrize("workers", [2, *slow(1)])
def test_the_environment_is_in_no_file_and_no_message(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDHET_CANARY", CANARY)
    monkeypatch.setenv("FEDHET_TRACEBACK", "1")
    monkeypatch.setattr(Client, "train", dying("it fails"))
    run = fedhet.run([*RUN, f"engine.workers={workers}", f"hydra.run.dir={tmp_path}/run"])
    written = capfd.readouterr()
    assert "it fails" in written.err + json.dumps(run.summary)
    for text in (written.out, written.err):
        assert CANARY not in text
    for name, content in everything(run.dir).items():
        assert CANARY.encode() not in content, name


def test_the_environment_is_in_no_message_of_a_node(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FEDHET_CANARY", CANARY)
    monkeypatch.setenv("FEDHET_TRACEBACK", "1")
    run = skipping(federation)
    messages = [run.strategy.plan(1).messages[pid] for pid in range(3)]
    messages[1].plugins = {}  # this client refuses
    for msg in messages:
        sent = packed_message(msg)
        arrays, _, metrics = wire.Adapter(run.client()).fit(*sent)
        for part in (sent, metrics, [array.tobytes() for array in arrays]):
            assert CANARY not in str(part)
    assert "plug-ins" in caplog.text and CANARY not in caplog.text

"""A run that is killed after any of its steps goes on to the same end, byte for byte."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contracts.short import SHORT, slow_unless

import fedhet
from fedhet.core import trees
from fedhet.core.client.context import ClientContext
from fedhet.core.kernel import Client, Message, Result, State, serves
from fedhet.core.memory import MemoryPacker
from fedhet.data.toy import toy_task
from fedhet.methods.scaffold import ScaffoldClient
from fedhet.runs import config
from fedhet.runs.config import catalogue, composition
from fedhet.runs.record.outcome import Run
from fedhet.testing import check_equal, check_resume, run_quietly

STEPS = ["rounds=3", "fraction=.75", "client.epochs=1", "client.batch_size=5", "client.lr=.1"]
METHODS = catalogue.choices("method")
COMPOSITIONS = [
    "method=scaffold plugin=[fednorm] method.control=gradient",
    "method=fedbn method.server_bn=average plugin=[moon]",
    "method=fedavg plugin=[fedgmm,fedlex] plugin.fedgmm.agg_count=augmented server_opt=fedavgm",
    "method=fedala eval.every=2 eval.train=true eval.finetune_epochs=1 buffers=local",
    "method=fednova plugin=[fedprox] client.schedule=cosine client.lr_decay=.9",
    "method=fedsgd server_opt=fedyogi plugin=[fednorm]",
    "method=fedrod buffers=frozen rounds=4 early_stopping.patience=1 early_stopping.min_delta=1",
    "method=fedgen plugin=[feddisk] server_opt=fedadagrad",
]


@pytest.fixture(scope="module", autouse=True)
def _composed_once() -> Iterator[None]:
    """Hydra composes the choices of a method once, as in a sweep, and each run has its values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "_hydra_config", composition.of_sweep())
        yield


def shortened(line: str) -> list[str]:
    """The settings, with those that make phases before the training short."""
    given = line.split()
    short = {one for name, lines in SHORT.items() if name in line for one in lines}
    return [*STEPS, *sorted(short), *given]


# What remembers something of its own on the server.
FAST = {"fedadam", "feddiskab", "fedgen", "fedgmm", "fedlex", "fedpcl", "scaffold", "sgdm"}


def cases() -> Iterator[Any]:
    yield from slow_unless({f"method={name}" for name in FAST}, map("method={}".format, METHODS))
    for i, line in enumerate(COMPOSITIONS):
        marks = [] if "early_stopping" in line else [pytest.mark.slow]
        yield pytest.param(line, marks=[pytest.mark.matrix] if i % 2 else marks)


@pytest.mark.parametrize("line", list(cases()))
def test_every_method(line: str) -> None:
    check_resume(*shortened(line), task=toy_task(norm=True))


@pytest.mark.parametrize("method", slow_unless(["scaffold"], ["fedavg", "scaffold", "ditto"]))
def test_with_krum(method: str) -> None:
    """Which clients it has left out decides which state of a client is the current one."""
    line = shortened(f"method={method} rounds=3 fraction=1 merge=krum merge.attackers=1")
    check_resume(*line, task=toy_task(6, norm=True))


@pytest.mark.parametrize(("first", "then"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_with_other_workers(first: int, then: int) -> None:
    line = shortened(f"method=scaffold rounds=2 engine.workers={first}")
    check_resume(*line, task=toy_task(), again=(f"engine.workers={then}",))


@pytest.mark.matrix
@pytest.mark.parametrize("engines", [("ray", "ray"), ("local", "ray"), ("ray", "local")])
def test_under_ray(engines: tuple[str, str]) -> None:
    line = "method=ditto rounds=2 partition.clients=4"
    check_resume(*shortened(line), f"engine={engines[0]}", again=(f"engine={engines[1]}",))


@pytest.mark.parametrize("part", ["states", "versions", "state_bytes"])
def test_what_a_checkpoint_lacks_is_noticed(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    stored = MemoryPacker.value

    def lacking(packer: MemoryPacker, value: Any, path: str) -> Any:
        if path == "run":
            states = value["states"]
            forgotten = {"method": {"total": trees.zeros(states["method"]["total"]), "lambda": {}}}
            value = {**value, part: {**states, **forgotten} if part == "states" else {}}
        return stored(packer, value, path)

    monkeypatch.setattr(MemoryPacker, "value", lacking)
    with pytest.raises(AssertionError, match=r"^killed after step 1: "):
        check_resume(*shortened("method=scaffold"), task=toy_task())


def test_what_a_client_keeps_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that have lost their personal models get other ones."""
    monkeypatch.setattr("fedhet.runs.checkpoint.DiskStore.load", lambda *args: {})
    with pytest.raises(AssertionError, match=r"^killed after step 1: round 2\..*personal"):
        check_resume(*shortened("method=ditto"), task=toy_task())


def test_steps_and_replies_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many steps in a row changed nothing is remembered too, and who failed when."""
    train = Client.train

    @serves
    def failing(
        client: Client, msg: Message, state: State, ctx: ClientContext
    ) -> tuple[Result, State]:
        if msg.step in (1, 3) or msg.pid == msg.step:
            raise ValueError(f"step {msg.step}")
        return train(client, msg, state, ctx)

    monkeypatch.setattr(Client, "train", failing)
    line = "rounds=5 on_failure=skip replies.bad_steps=1 replies.max_lost=1 eval.clients=false"
    check_resume(*shortened(f"method=fedavg {line}"), task=toy_task())


@pytest.mark.parametrize("part", ["train", "views"])  # before and in the evaluation
def test_a_run_that_failed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    lines = [*shortened("method=scaffold"), "checkpoint.every=0"]
    whole = run_quietly(config.compose(lines), tmp_path / "whole", toy_task())
    work = getattr(ScaffoldClient, part)

    @serves
    def failing(client: Client, msg: Message, state: State, ctx: ClientContext) -> Any:
        if msg.step == 3:
            raise ValueError("out of memory")
        return work(client, msg, state, ctx)

    with monkeypatch.context() as patch, pytest.raises(fedhet.RunFailed, match="out of memory"):
        patch.setattr(ScaffoldClient, part, failing)
        run_quietly(config.compose(lines), tmp_path / "failed", toy_task())
    resumed = resume(tmp_path / "failed")
    check_equal(whole, resumed, "failed in step 3")
    environment = json.loads((resumed.dir / "environment.json").read_text())
    assert [again["round"] for again in environment["resumed"]] == [2]


def resume(folder: Path, *given: str, task: Any = None) -> Run:
    return run_quietly(config.compose([f"resume={folder}", *given]), folder, task or toy_task())


@pytest.mark.parametrize(
    "line",
    slow_unless(["method=scaffold"], ["method=scaffold", "method=ditto", "method=fedlex"]),
)
def test_a_run_that_has_ended_takes_more_rounds(tmp_path: Path, line: str) -> None:
    settings = [
        config.compose([*shortened(line), "checkpoint.every=0", f"rounds={n}"]) for n in (4, 2)
    ]
    whole = run_quietly(settings[0], tmp_path / "4", toy_task())
    run_quietly(settings[1], tmp_path / "2", toy_task())
    resumed = resume(tmp_path / "2", "rounds=4")
    check_equal(whole, resumed, "two rounds more")
    assert "rounds=4" in (resumed.dir / "overrides.yaml").read_text()


def test_what_comes_after_a_checkpoint_is_removed(tmp_path: Path) -> None:
    """Also where the run that goes on is shorter, so that it does not write it again."""
    lines = [*shortened("method=fedavg plugin=[fednorm] rounds=5"), "checkpoint.every=0"]
    whole = run_quietly(config.compose([*lines, "rounds=4"]), tmp_path / "4", toy_task())
    folder = tmp_path / "5"
    run_quietly(config.compose(lines), folder, toy_task())
    (folder / "checkpoints" / "000005" / "values.json").unlink()
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "status": "interrupted"}))
    check_equal(whole, resume(folder, "rounds=4"), "a round less")


def test_a_run_without_checkpoints_starts_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run of less than a minute has none by default, and pays nothing for them."""
    lines = shortened("method=scaffold rounds=2")
    whole = run_quietly(config.compose([*lines, "rounds=3"]), tmp_path / "whole", toy_task())
    assert not (whole.dir / "checkpoints").exists()
    run_quietly(config.compose(lines), tmp_path / "run", toy_task())
    resumed = resume(tmp_path / "run", "rounds=3")
    assert "it starts from its beginning" in caplog.text
    check_equal(whole, resumed, "from the beginning")


def test_checkpoints_are_written_when_they_are_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps take 20 s each: one is due after the third, and the last step has one as well."""
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr("fedhet.runs.checkpoint.time.monotonic", lambda: float(next(clock)) * 2)
    written = []
    monkeypatch.setattr(
        "fedhet.runs.checkpoint.Checkpoints._write",
        lambda self, loop: (written.append(loop.round), vars(self).update(_written=True)),
    )
    lines = shortened("method=fedavg rounds=8")
    run_quietly(config.compose(lines), tmp_path / "run", toy_task())
    assert written == [3, 6, 8]
    run_quietly(config.compose([*lines, "checkpoint.every=null"]), tmp_path / "never", toy_task())
    assert written == [3, 6, 8]


def test_the_task_must_be_given_again(tmp_path: Path) -> None:
    lines = [*shortened("method=scaffold"), "checkpoint.every=0"]
    run_quietly(config.compose(lines), tmp_path / "run", toy_task())
    given = config.compose([f"resume={tmp_path / 'run'}", "rounds=5"])
    with pytest.raises(fedhet.ConfigError, match="task="):
        run_quietly(given, tmp_path / "run")
    with pytest.raises(fedhet.ConfigError, match=r"data .*partition\.json"):
        run_quietly(given, tmp_path / "run", toy_task(equal=True))
    other = replace(toy_task(), transform=lambda x: x)
    with pytest.raises(fedhet.ConfigError, match=r"task\.transform .*None "):
        run_quietly(given, tmp_path / "run", other)


def refusals() -> list[tuple[list[str], str]]:
    return [
        ([], r"rounds=<more than 3>"),
        (["rounds=3"], r"rounds=<more than 3>"),
        (["seed=1"], r"'seed=1' with resume=.*only rounds, engine and engine\.\*"),
        (["hydra.run.dir=x"], r"only rounds, engine and engine\.\*"),
        (["rounds=4", "resume=there"], "resume is given twice"),
        (["rounds=0"], "rounds=0"),
    ]


@pytest.mark.parametrize(("given", "reason"), refusals())
def test_what_is_refused(
    tmp_path: Path, finished: Callable[[], Path], given: list[str], reason: str
) -> None:
    folder = finished()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(fedhet.ConfigError, match=reason):
        resume(folder, *given)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    folder = tmp_path_factory.mktemp("finished") / "run"
    lines = [*shortened("method=scaffold"), "checkpoint.every=0"]
    run_quietly(config.compose(lines), folder, toy_task())
    return lambda: folder


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(fedhet.ConfigError, match=r"overrides\.yaml: No such file"):
        fedhet.run([f"resume={tmp_path}"])
    os.mkfifo(tmp_path / "overrides.yaml")
    with pytest.raises(fedhet.ConfigError, match=r"overrides\.yaml .*damaged"):
        fedhet.run([f"resume={tmp_path}"])

"""On a device that is not the CPU: the CPU's bytes, and no local step that copies or waits.

The device is a pretended one (tests/pretend_device), so no GPU is needed. Every method is found
in conf/: a new one is tested here without a new test.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.runs import rows, validated
from contracts.short import SHORT, shortened, slow, slow_unless
from contracts.tasks import with_dropout
from contracts.test_compositions import METHODS, pairs, refusals
from engines.fast import images
from pretend_device import Copies, count_copies, pretend_device
from torch import Tensor

from fedhet.core import trees
from fedhet.core.client.client import FedClient
from fedhet.core.errors import RunFailed
from fedhet.core.kernel import Client, Term
from fedhet.core.targets import cross_entropy
from fedhet.core.task import ClientData, Task
from fedhet.core.trees import AnyTree, Tree
from fedhet.data.federation import CropFlip
from fedhet.data.toy import toy_task
from fedhet.engines.fused.passes import Pass
from fedhet.engines.fused.steps import Training
from fedhet.models import CharLSTM
from fedhet.testing import Apart

Launch = Callable[..., Any]
LINES = ["rounds=2", "fraction=0.67", "client.epochs=1", "client.batch_size=5", "eval.every=2"]
# More steps in as many epochs, of the model and of what a method trains in a loop of its own.
MORE_STEPS = {
    "": ["client.batch_size=3"],
    "feddisk": ["plugin.feddisk.made_batch_size=8", "plugin.feddisk.clf_batch_size=8"],
}
# How often a loop runs must not depend on what it learns, or else copies could not be compared.
FIXED = {"fedala": ["method.max_epochs=2", "method.threshold=0"]}


@contextmanager
def on_the_device() -> Iterator[Copies]:
    """Let runs train on the pretended device, and count the copies of the clients' work."""
    copies: Copies = Counter()

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            with count_copies() as own:
                result = work(*args)
            copies.update(own)
            return result

        return counting

    with pretend_device() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedhet.runs.job.choose_device", lambda name: device)
        patch.setattr(FedClient, "handle", counted(FedClient.handle))
        for cls in (Training, Pass):
            patch.setattr(cls, "perform", staticmethod(counted(cls.perform)))
        yield copies


def timeless(value: Any) -> Any:
    """What was recorded, without what is measured in seconds."""
    if not isinstance(value, dict):
        return value
    return {key: timeless(item) for key, item in value.items() if not key.startswith("seconds")}


def assert_same_record(run: Any, expected: Any) -> None:
    environment = json.loads((run.dir / "environment.json").read_text())
    assert environment["device"] == "pretend"
    assert run.summary["weights_sha256"] == expected.summary["weights_sha256"]
    assert list(map(timeless, rows(run))) == list(map(timeless, rows(expected)))
    best, expected_best = (
        [path.read_bytes() for path in folder.glob("best_val.*")]
        for folder in (run.dir, expected.dir)
    )
    assert best == expected_best


def more_copies(few: Copies, many: Copies) -> str:
    """What a run with more steps copies, or waits for, more often, line by line.

    What is drawn at random on the CPU may be sent in a step, with non_blocking=True: the CPU does
    not wait for it.
    """
    return "\n".join(
        f"{many[copy] - few[copy]} more of {copy.operation} ({copy.way}): {copy.place}"
        for copy in many
        if many[copy] > few[copy] and copy.way != "cpu -> pretend:0, asynchronous"
    )


def check(launch: Launch, lines: list[str], task: Task) -> None:
    """The run has the CPU's record, and its copies do not depend on the number of its steps."""
    expected = launch(*lines, task=task)
    with on_the_device() as few:
        assert_same_record(launch(*lines, task=task), expected)
    more = [line for part, own in MORE_STEPS.items() if part in " ".join(lines) for line in own]
    with on_the_device() as many:
        launch(*lines, *more, task=task)
    assert few.total() > 0
    found = more_copies(few, many)
    hint = "more local steps must not copy more between the devices (docs/extending.md, Devices)"
    assert not found, f"{hint}:\n{found}"


# What has tensors of its own in or around the local training.
FAST = {"fedala", "feddisk", "fedgen", "fedgmm", "fedpcl", "fedrod", "fedsa", "scaffold", "sgdm"}


@pytest.mark.parametrize("method", slow_unless(FAST, METHODS))
def test_every_method(launch: Launch, method: str) -> None:
    lines = [f"method={method}", *LINES, *SHORT.get(method, []), *FIXED.get(method, [])]
    check(launch, lines, toy_task(3, norm=True))


def test_what_fedavg_copies(launch: Launch) -> None:
    """Its data once for each client, and the order of the samples in each epoch."""
    lines = ["method=fedavg", *LINES, "fraction=1", "client.epochs=4", "eval.clients=false"]
    with on_the_device() as copies:
        launch(*lines, task=toy_task(3))
    by_function: Copies = Counter()
    for (_, way, line), number in copies.items():
        by_function[way, line.partition(",")[0], line.rpartition(" ")[2]] += number
    assert by_function == {
        ("cpu -> pretend:0", "fedhet/core/task.py", "to"): 2 * 3,  # x and y
        ("cpu -> pretend:0, asynchronous", "fedhet/core/client/descent.py", "steps"): 2 * 3 * 4,
    }


@pytest.mark.matrix
@pytest.mark.parametrize(("method", "plugin"), [pair.values for pair in pairs()])
def test_every_pair(launch: Launch, method: str, plugin: str | None) -> None:
    if plugin is None or (method, plugin) in refusals():
        return
    short = {line for name in (method, plugin) for line in (SHORT | FIXED).get(name, [])}
    lines = [f"method={method}", f"plugin=[{plugin}]", *LINES, *sorted(short)]
    check(launch, lines, toy_task(3, norm=True))


DISK = " ".join(SHORT["feddisk"])
GENERATOR = " ".join(SHORT["fedgen"])


@pytest.mark.parametrize(
    "settings",
    [
        "method=fednova plugin=[fednorm,fedntd,moon] client.momentum=.9",
        *slow(
            "method=scaffold plugin=[fedgmm] method.control=gradient method.control_weights=uniform"
        ),
        "method=ditto server_opt=fedavgm server_opt.nesterov=true client=adam client.clip=.1",
        "method=fedavg buffers=local eval.finetune_epochs=1 client.clip=.1",
        "method=fedbn method.server_bn=average server_opt=fedyogi",
        *slow(
            "method=fedavg buffers=frozen client.steps=7 client.schedule=cosine",
            "method=fedala method.p=all method.max_epochs=2 method.threshold=0",
            "method=fedlex plugin.fedlex.patience=2 plugin.fedlex.e_exp=2 client=adam",
            "method=fedpcl method.denominator=others method.renormalise=true method.unseen=global",
            f"method=fedgen method.kl=1 method.ensemble=samples method.noise=uniform {GENERATOR}",
            f"method=feddisk plugin.feddisk.ratio=outputs plugin.feddisk.binarise=true {DISK}",
            f"method=feddisk plugin.feddisk.features=conditional plugin.feddisk.masks=random"
            f" {DISK}",
        ),
    ],
    ids=lambda settings: settings.removesuffix(DISK).removesuffix(GENERATOR),
)
def test_settings(launch: Launch, settings: str) -> None:
    task = replace(validated(3), model=toy_task(norm=True).model)
    check(launch, [*LINES, *settings.split()], task)


def test_model_selection(launch: Launch) -> None:
    lines = ["method=fedavg", *LINES, "rounds=6", "eval.every=1", "early_stopping.patience=1"]
    expected = launch(*lines, task=validated(3))
    assert len(rows(expected)) < 6 and (expected.dir / "best_val.safetensors").exists()
    with on_the_device():
        assert_same_record(launch(*lines, task=validated(3)), expected)


def texts() -> Task:
    """Windows of six characters out of nine, and the character that follows."""
    draw = torch.Generator().manual_seed(0)
    samples = [torch.randint(9, (n, 7), generator=draw, dtype=torch.int16) for n in (7, 13, 10)]
    return Task(
        model=lambda: CharLSTM(shape=(6,), classes=9, embedding=3, hidden=5, layers=2),
        criterion=cross_entropy,
        clients=[ClientData((x[:, :6], x[:, 6].long())) for x in samples],
        test=None,
        classes=9,
    )


def arrays() -> Task:
    """The toy federation in NumPy's arrays, with a transform."""
    task = toy_task(3)
    clients = [ClientData((c.train.x.numpy(), c.train.y.numpy())) for c in task.clients]
    return replace(task, clients=clients, transform=lambda x: (x - 0.5) / 0.2)


@pytest.mark.parametrize(
    ("task", "more"),
    [
        (images(augment=CropFlip((-1.0,))), ["method=fedprox"]),
        (texts(), ["method=fedavg", "client=adam"]),
        *slow((arrays(), ["method=fednorm"])),
        *slow((with_dropout(), ["method=moon"])),
        *slow((images(), ["method=sgdm", "engine.channels_last=true"])),
        (toy_task(3), ["method=fedavg", "engine.fused=2", "client.clip=.1"]),
        *slow((toy_task(3), ["method=feddisk", *SHORT["feddisk"], "engine.fused=3"])),
    ],
    ids=[
        "augmentation",
        "text",
        "arrays",
        "dropout",
        "channels_last",
        "fused",
        "fused_and_weights",
    ],
)
def test_tasks_and_engines(launch: Launch, task: Task, more: list[str]) -> None:
    check(launch, [*LINES, *more], task)


BY_WIRE = {"fedala", "feddisk", "fedgen", "fedgmm", "fedpcl", "scaffold"}


@pytest.mark.parametrize(
    "method",
    [
        *("fedgmm", "fedpcl", "scaffold"),
        *slow("fedala", "feddisk", "fedgen"),
        *(pytest.param(m, marks=pytest.mark.matrix) for m in METHODS if m not in BY_WIRE),
    ],
)
def test_messages_and_states_may_come_from_the_cpu(method: str, tmp_path: Path) -> None:
    """As under Flower: what arrives is on the CPU, and states are read from files."""
    settings = shortened(method, None)
    task = toy_task(3)
    expected = Apart(settings, task, tmp_path / "cpu").run().strategy
    with on_the_device():
        run = Apart(settings, task, tmp_path / "device").run().strategy
    assert run.workspace.device.type == "pretend"
    assert trees.sha256(run.weights) == trees.sha256(expected.weights)


# ---- the contract can fail
def on_the_cpu(params: AnyTree, batch: None, own: Tree) -> Tree:
    first = next(iter(params.values()))
    return {"body.0.weight": first + torch.zeros(first.shape)}


def test_a_method_that_mixes_devices_is_told_where(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    term = Term("gradient", on_the_cpu)
    monkeypatch.setattr(Client, "terms", lambda self, msg, state, ctx: [term])
    launch("method=fedavg", *LINES, task=toy_task(3))
    expected = (
        r"client 2 .*'train', step 1: RuntimeError: add\.Tensor: .* pretend:0.*torch\.float32"
        r" .*\(3, 4\).* cpu: tests/contracts/test_devices\.py, line \d+, in on_the_cpu"
    )
    with on_the_device(), pytest.raises(RunFailed, match=expected):
        launch("method=fedavg", *LINES, task=toy_task(3))


@pytest.mark.parametrize(
    ("looks", "found"),
    [
        (lambda p: p.norm().item(), r"_local_scalar_dense \(pretend:0 -> cpu\)"),
        (lambda p: p[p > 9], r"index\.Tensor \(wait\)"),
        (lambda p: torch.ones(3).to(p.device), r"copy_ \(cpu -> pretend:0\)"),
        (lambda p: torch.ones(3).to(p.device, non_blocking=True), None),
        *slow(
            (lambda p: p.cpu(), r"_to_copy \(pretend:0 -> cpu\)"),
            (
                lambda p: p.norm() > 9 and 1,
                r"_local_scalar_dense \(pretend:0 -> cpu\)",
            ),
            (lambda p: p[[0, 1]], r"index\.Tensor \(cpu -> pretend:0\)"),
            (lambda p: p.detach().clone().copy_(p.detach().cpu()), r"copy_ \(cpu -> pretend:0\)"),
            (lambda p: p.detach().clone().mul_(torch.tensor(1.0)), None),
        ),
    ],
)
def test_a_step_that_copies_or_waits_is_found(
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
    looks: Callable[[Tensor], object],
    found: str | None,
) -> None:
    def gradient(params: AnyTree, batch: None, own: Tree) -> Tree:
        looks(next(iter(params.values())))
        return {}

    term = Term("gradient", gradient)
    monkeypatch.setattr(Client, "terms", lambda self, msg, state, ctx: [term])
    lines = ["method=fedavg", *LINES, "eval.clients=false"]
    if found is None:
        check(launch, lines, toy_task(3))
        return
    with pytest.raises(
        AssertionError, match=rf"(?s)must not copy.*\d+ more of {found}: tests/cont"
    ):
        check(launch, lines, toy_task(3))

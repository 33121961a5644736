"""engine.fused on an accelerator, which is pretended: what is copied to it, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from contracts.short import slow
from contracts.test_devices import LINES, check, on_the_device
from engines.fast import images
from pretend_device import count_copies, pretend_device

from fedhet.core.client.descent import Descent
from fedhet.core.client.optimizers import SGD
from fedhet.core.messages import LocalSettings
from fedhet.core.task import ClientData, Samples, Task
from fedhet.data.federation import CropFlip, Normalize
from fedhet.data.toy import toy_task
from fedhet.engines.fused.steps import Training

Launch = Callable[..., Any]


def pixels(**how: Any) -> Task:
    """Small grey images as uint8, with sets for training, validation and testing."""
    given = images()
    parts = [Samples((255 * one.train.x).to(torch.uint8), one.train.y) for one in given.clients]
    clients = [ClientData(part, Samples(part.x[:4], part.y[:4]), part) for part in parts]
    normalize = Normalize((0.4,), (0.3,))
    return replace(given, **{"clients": clients, "test": parts[0], "transform": normalize, **how})


@pytest.mark.parametrize(
    ("task", "lines"),
    [
        (pixels(), ["method=fedprox"]),
        (pixels(augment=CropFlip((-1.0,))), ["method=fedavg", "client=adam"]),
        (toy_task(3), ["method=fedavg", "client.momentum=.9"]),
        # Batches of one size at a time, because the draws are those of a batch.
        (toy_task(3), ["method=fedrod"]),
        *slow(
            (pixels(transform=lambda x: x - x.mean()), ["method=fedavg"]),
            (pixels(), ["method=scaffold", "method.control=gradient"]),
        ),
    ],
    ids=lambda value: None if isinstance(value, Task) else " ".join(value),
)
def test_the_cpus_record_and_no_step_that_copies(
    launch: Launch, task: Task, lines: list[str]
) -> None:
    check(launch, [*LINES, *lines, "engine.fused=3"], task)


def test_rates_that_differ_are_sent_once() -> None:
    """As those of two runs do that share their steps."""

    def terms(module: Any, params: Any, own: Any, columns: Any) -> Any:
        return (columns[0] @ params["w"] - columns[1]).square(), None, {}

    def trained(device: torch.device, epochs: int) -> list[torch.Tensor]:
        x = torch.arange(12.0).view(6, 2).div(12).to(device)
        asked = []
        for lr in (0.1, 0.2):
            w = torch.zeros(2, device=device, requires_grad=True)
            optimizer = SGD([w], LocalSettings(lr))
            descent = Descent({"w": w}, (x, x.sum(1)), terms, optimizer, 2)
            asked.append(Training(descent, [torch.arange(6)] * epochs))
        Training.perform(asked)
        return [one.descent.params["w"].detach().cpu() for one in asked]

    expected = trained(torch.device("cpu"), 3)
    with pretend_device() as device:
        trained(device, 1)  # a first training compares a gradient
        with count_copies() as few:
            trained(device, 2)
        with count_copies() as many:
            assert all(map(torch.equal, trained(device, 3), expected))
    assert few == many and not torch.equal(*expected)


def test_draws_are_sent_at_once(launch: Launch) -> None:
    """Those of all clients in a step, and those of all steps of the server."""

    def sent(clients: int, server_steps: int) -> int:
        lines = ["method=fedgen", f"method.server_steps={server_steps}", *LINES, "fraction=1"]
        task = toy_task(clients, equal=True)
        with on_the_device(), count_copies() as copies:
            launch(*lines, "engine.fused=4", "checkpoint.every=null", "method.hidden=8", task=task)
        files = ("fedhet/engines/fused/steps.py", "fedhet/methods/fedgen.py")
        return sum(
            number
            for copy, number in copies.items()
            if copy.way.startswith("cpu") and copy.place.startswith(files)
            and not copy.place.endswith(("in terms", "in <dictcomp>"))
        )  # fmt: skip

    assert sent(2, 2) == sent(4, 2) == sent(2, 5) > 0


def test_what_is_copied(launch: Launch) -> None:
    """Pixels once for each client, indices once for each training."""
    lines = ["method=fedavg", *LINES, "fraction=1", "client.epochs=4", "engine.fused=3"]
    lines += ["rounds=2", "eval.every=1"]
    with on_the_device(), count_copies() as copies:
        launch(*lines, task=pixels())
    by_function: Counter[tuple[str, str]] = Counter()
    for (_, way, line), number in copies.items():
        if line.startswith(("fedhet/core/task.py", "fedhet/engines/fused")):
            by_function[way, line.rpartition(" ")[2]] += number
    parts, clients, rounds = 3, 3, 2
    assert by_function == {
        # x and y, also of the global test set, and of some samples before the run
        ("cpu -> pretend:0", "to"): 2 * (parts * clients + 2),
        ("cpu -> pretend:0, asynchronous", "__init__"): 3 * rounds,  # positions, counts, lengths
        ("cpu -> pretend:0, asynchronous", "<lambda>"): rounds,  # rates
        ("pretend:0 -> cpu", "_check"): 1,
        ("pretend:0 -> cpu", "perform"): rounds,  # whether all evaluated models are equal
    }

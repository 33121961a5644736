"""Options that make the local steps faster: what they compute is what the plain loop computes, up
to rounding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedhet
from fedhet import trees
from fedhet.data.toy import toy_task
from fedhet.engines import vectorized
from fedhet.errors import ConfigError, RunFailed
from fedhet.models import CNN
from fedhet.site import Site
from fedhet.training import derivative

Launch = Callable[..., Any]
COMMON = [
    "rounds=3",
    "fraction=0.75",
    "client.epochs=2",
    "client.batch_size=5",
    "client.lr=0.1",
    "eval.clients=false",
    "seed=1",
]


def images(**how: Any) -> fedhet.Task:
    """Small grey images for a convolutional model; the clients' sizes differ."""
    draw = torch.Generator().manual_seed(0)
    pairs = [
        (torch.rand(n, 1, 8, 8, generator=draw), torch.randint(3, (n,), generator=draw))
        for n in (7, 13, 10)
    ]
    clients = [fedhet.ClientData(train=pair) for pair in pairs]
    return fedhet.Task(
        model=lambda: CNN(shape=(1, 8, 8), classes=3),
        criterion=nn.CrossEntropyLoss(reduction="none"),
        clients=clients,
        test=None,
        classes=3,
        **how,
    )


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


LOCAL = ["client.momentum=0.5", "client.weight_decay=0.01", "client.clip=0.3"]
DENSITY = [
    f"plugin.feddisk.{key}=2" for key in ("made_max_rounds", "local_max_epochs", "clf_max_epochs")
]


@pytest.mark.parametrize(
    "lines",
    [
        ["method=fedavg"],
        ["method=fedavg", *LOCAL],
        ["method=fednorm"],
        ["method=fedbabu"],
        ["method=fedsa"],
        ["method=fedgmm"],
        ["method=feddisk", *DENSITY],
        ["method=fedadam", "server_opt.lr=0.01"],
    ],
    ids=lambda lines: lines[0].removeprefix("method=") + ("+local" if LOCAL[0] in lines else ""),
)
@pytest.mark.parametrize("k", [2, pytest.param(5, marks=pytest.mark.matrix)])
def test_clients_trained_as_one_give_the_sequential_result(
    launch: Launch, k: int, lines: list[str]
) -> None:
    """Clients of unequal sizes, last batches that are smaller, groups that do not fill."""
    one_by_one, together = (
        launch(*COMMON, *lines, f"engine.vectorize={n}", task=toy_task(6)) for n in (0, k)
    )
    assert largest_difference(one_by_one.weights, together.weights) < 1e-5
    assert largest_difference(one_by_one.weights, toy_task(6).model().state_dict()) > 1e-2
    assert together.summary["bytes"] == one_by_one.summary["bytes"]


def test_convolutions_too(launch: Launch) -> None:
    one_by_one, together = (
        launch(*COMMON, "method=fedavg", f"engine.vectorize={n}", task=images()) for n in (0, 3)
    )
    assert largest_difference(one_by_one.weights, together.weights) < 1e-5


def test_they_are_really_trained_as_one(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    inner = vectorized.train_together
    monkeypatch.setattr(
        vectorized, "train_together", lambda group: sizes.append(len(group)) or inner(group)
    )
    launch(
        *COMMON, "method=fedavg", "fraction=1", "rounds=1", "engine.vectorize=4", task=toy_task(6)
    )
    assert sizes == [4, 2]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["method=scaffold"], "ScaffoldClient has its own train"),
        (["method=ditto"], "DittoClient has its own train"),
        (["method=fedala"], "FedALAClient has its own train"),
        (["method=fedavg", "plugin=[fedprox]"], "plugin 'fedprox' has the hook gradient"),
        (["method=fedavg", "client=adam"], "client.optimizer=adam"),
    ],
)
def test_what_cannot_be_one_is_refused_with_its_reason(
    launch: Launch, lines: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.vectorize=2.*{reason}"):
        launch(*COMMON, *lines, "engine.vectorize=2", task=toy_task())
    assert (
        launch(*COMMON, *lines, "engine.vectorize=auto", task=toy_task()).summary["status"] == "ok"
    )


def test_batch_norm_and_workers_are_refused(launch: Launch) -> None:
    with pytest.raises(ConfigError, match="the model has buffers"):
        launch(*COMMON, "method=fedavg", "engine.vectorize=2", task=toy_task(norm=True))
    with pytest.raises(ConfigError, match=r"engine\.vectorize=2 with engine\.workers=2"):
        launch(*COMMON, "method=fedavg", "engine.vectorize=2", "engine.workers=2", task=toy_task())


def test_dropout_is_refused_unless_it_drops_nothing(launch: Launch) -> None:
    def run(p: float, k: int) -> Any:
        task = toy_task()
        task.model = lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(p), nn.Linear(3, 2))
        return launch(*COMMON, "method=fedavg", "rounds=1", f"engine.vectorize={k}", task=task)

    with pytest.raises(ConfigError, match="dropout would draw other numbers"):
        run(0.5, 2)
    assert largest_difference(run(0, 2).weights, run(0, 0).weights) < 1e-5


def test_a_group_that_fails_names_its_clients(launch: Launch) -> None:
    def criterion(output: Tensor, y: Tensor) -> Tensor:
        if len(y) > 1:
            raise ValueError("one sample at a time")
        return nn.functional.cross_entropy(output, y, reduction="none")

    task = toy_task(4)
    task.criterion = criterion
    with pytest.raises(RunFailed, match=r"client \d failed.*in a group of 2"):
        launch(*COMMON, "method=fedavg", "engine.vectorize=2", task=task)


@pytest.mark.parametrize(
    "lines",
    [["method=fedavg"], ["method=fednorm", *LOCAL], ["method=feddisk", *DENSITY]],
    ids=["fedavg", "fednorm", "feddisk"],
)
def test_the_functional_gradient_is_that_of_the_loop(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    """What engine.compile compiles, here uncompiled; batch norm and partial last batches
    included."""
    monkeypatch.setattr(torch, "compile", lambda f, **how: f)
    plain, functional = (
        launch(*COMMON, *lines, f"engine.compile={on}", task=toy_task(5, norm=True))
        for on in ("false", "true")
    )
    assert largest_difference(plain.weights, functional.weights) < 1e-5


@pytest.mark.matrix
def test_compiled_steps(launch: Launch) -> None:
    plain, compiled = (
        launch(*COMMON, "method=fedavg", f"engine.compile={on}", task=images())
        for on in ("false", "true")
    )
    assert largest_difference(plain.weights, compiled.weights) < 1e-5


def test_a_loss_of_its_own_is_not_compiled(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in's gradient hook works on what the compiled function returns; the step is
    FedProx's."""
    monkeypatch.setattr(torch, "compile", lambda f, **how: f)
    plain, functional = (
        launch(
            *COMMON,
            "method=fedprox",
            "plugin.fedprox.mu=1",
            f"engine.compile={on}",
            task=toy_task(),
        )
        for on in ("false", "true")
    )
    assert largest_difference(plain.weights, functional.weights) < 1e-5


@pytest.mark.parametrize("finetune", ["full", "head", "body"])
def test_fine_tuning_other_parameters_is_not_compiled(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, finetune: str
) -> None:
    monkeypatch.setattr(torch, "compile", lambda f, **how: f)
    lines = [
        *COMMON,
        "eval.clients=true",
        "method=fedbabu",
        f"method.finetune={finetune}",
        "method.finetune_epochs=1",
    ]
    plain, functional = (
        launch(*lines, f"engine.compile={on}", task=toy_task(4)) for on in ("false", "true")
    )
    assert largest_difference(plain.weights, functional.weights) < 1e-5
    assert functional.summary["failures"] == []


@pytest.mark.matrix
def test_workers_with_threads_of_their_own(tmp_path: Path) -> None:
    """They are not forked: OpenMP's threads do not survive that, and the first large product would
    wait for ever."""
    code = (
        "import fedhet\nif __name__ == '__main__':\n fedhet.run(['method=fedavg', 'rounds=1',"
        " 'model=cnn', 'engine.workers=2', 'engine.threads=2', 'eval.clients=false',"
        " 'client.epochs=1', 'partition.clients=3', 'hydra.run.dir=run'])\n"
    )
    (tmp_path / "main.py").write_text(code)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env=environment,
        check=True,
        timeout=120,
        capture_output=True,
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "ok"


def test_a_loss_for_each_pixel_has_the_gradient_of_its_mean() -> None:
    w, x = torch.ones(3, requires_grad=True), torch.arange(12.0).reshape(4, 3)
    torch.testing.assert_close(
        derivative(w * x, None, [w])[0], torch.autograd.grad((w * x).mean(), w)[0]
    )


def test_gradients_that_share_memory_are_told_apart() -> None:
    """Of a sum autograd hands out one tensor for both terms, of a mean a broadcast one: a decay in
    place would hit both, or fail."""
    a, b, c = (torch.ones(3, requires_grad=True) for _ in range(3))
    grads = derivative((a + b) ** 2, c.sum(), [a, b, c])
    torch._foreach_add_(grads, [a, 2 * b, 3 * c])
    for got, expected in zip(grads, (4 / 3 + 1, 4 / 3 + 2, 4.0), strict=True):
        torch.testing.assert_close(got, torch.full((3,), float(expected)))


def test_unused_parameters_get_zeros_and_a_loss_without_parameters_is_refused() -> None:
    a, b = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    losses = a**2 * 2
    for penalty in (None, torch.ones(())):  # also a constant one
        used, unused = derivative(a * 4, penalty, [a, b])
        assert torch.equal(used, torch.full((3,), 4 / 3)) and torch.equal(unused, torch.zeros(2))
    used, unused = derivative(losses, None, [a, b])
    assert not used.requires_grad and not unused.requires_grad
    with pytest.raises(RuntimeError, match="second time"):  # the graph is freed
        derivative(losses, None, [a, b])
    with pytest.raises(RuntimeError, match="does not require grad"):
        derivative(torch.ones(4), None, [a])


def test_what_torch_cannot_vectorise_is_told_at_the_start(launch: Launch) -> None:
    def criterion(output: Tensor, y: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(output, y, reduction="none")
        return losses if float(losses.detach().sum()) > 0 else losses * 0

    task = toy_task(3)
    task.criterion = criterion
    with pytest.raises(ConfigError, match=r"engine\.vectorize=2: .*torch says: .*item\(\)"):
        launch(*COMMON, "method=fedavg", "engine.vectorize=2", task=task)
    with pytest.raises(ConfigError, match=r"engine\.compile=true: use one of the two"):
        launch(*COMMON, "method=fedavg", "engine.vectorize=2", "engine.compile=true", task=task)


def test_tied_parameters_are_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.b.weight = self.a.weight

    task = toy_task(2)
    task.model = Tied
    with pytest.raises(ConfigError, match=r"'b\.weight' tied"):
        Site(task, device=torch.device("cpu"), seed=0)


@pytest.mark.parametrize("option", ["amp", "channels_last"])
def test_amp_and_channels_last(launch: Launch, option: str) -> None:
    plain, fast = (
        launch(*COMMON, "method=fednorm", f"engine.{option}={on}", task=images())
        for on in ("false", "true")
    )
    apart = largest_difference(plain.weights, fast.weights)
    assert (1e-6 < apart < 0.05) if option == "amp" else apart < 1e-5
    assert (
        all(t.is_contiguous() and t.dtype == torch.float32 for t in fast.weights.values())
        and trees.first_nonfinite(fast.weights) is None
    )


def test_channels_last_reaches_the_convolutions(launch: Launch) -> None:
    seen = []

    class Seeing(CNN):
        def features(self, x: Tensor) -> Tensor:
            seen.append(
                (
                    x.is_contiguous(memory_format=torch.channels_last),
                    self.body[3].weight.is_contiguous(memory_format=torch.channels_last),
                )
            )
            return super().features(x)

    task = images()
    task.model = lambda: Seeing(shape=(1, 8, 8), classes=3)
    launch(*COMMON, "method=fedavg", "engine.channels_last=true", task=task)
    assert seen and all(weight for _, weight in seen) and any(x for x, _ in seen)


@pytest.mark.parametrize(
    ("option", "exact"),
    [
        ("engine.compile=false", True),
        ("engine.amp=true", False),
        ("engine.vectorize=2", False),
        ("engine.channels_last=true", False),
    ],
)
def test_the_record_says_whether_bits_are_promised(
    launch: Launch, option: str, exact: bool
) -> None:
    run = launch(*COMMON, "method=fedavg", option, task=toy_task())
    assert json.loads((run.dir / "environment.json").read_text())["bit_exact"] is exact

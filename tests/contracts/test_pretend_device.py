"""tests/pretend_device refuses what CUDA refuses, and allows what CUDA allows.

There is no GPU to compare with. The second opinion is torch's own: its FakeTensorMode, which has no
values, knows on which devices CUDA's operations work.
"""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pretend_device import count_copies, pretend_device
from pretend_device.rules import unchecked
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

Expression = Callable[[Tensor, Tensor, Tensor], Any]


@pytest.fixture
def device() -> Iterator[torch.device]:
    with pretend_device() as made:
        yield made


def index(*values: int) -> Tensor:
    return torch.tensor(values)


def mask() -> Tensor:
    return torch.tensor([True, False, True])


def assigned(x: Tensor, at: Any, value: Any) -> Tensor:
    x[at] = value
    return x


# Of x (3,) on the device, and of y (3,) and the number n () on the CPU.
REFUSED: dict[str, Expression] = {
    "arithmetic": lambda x, y, n: x + y,
    "arithmetic, the other way round": lambda x, y, n: y * x,
    "in place": lambda x, y, n: x.add_(y),
    "in place, on the CPU": lambda x, y, n: y.add_(x),
    "a number of the device": lambda x, y, n: y + x[0],
    "out": lambda x, y, n: torch.add(x, x, out=y),
    "comparison": lambda x, y, n: x > y,
    "where": lambda x, y, n: torch.where(mask(), x, x),
    "linear": lambda x, y, n: functional.linear(x, y[None]),
    "stack": lambda x, y, n: torch.stack([x, y]),
    "cat": lambda x, y, n: torch.cat([x, y]),
    "a loss": lambda x, y, n: functional.cross_entropy(x[None], index(0)),
    "gather": lambda x, y, n: x.gather(0, index(0)),
    "index_select": lambda x, y, n: x.index_select(0, index(0)),
    "scatter": lambda x, y, n: x.scatter(0, index(0), 1.0),
    "masked_fill": lambda x, y, n: x.masked_fill(mask(), 0.0),
    "embedding": lambda x, y, n: functional.embedding(index(0), x[:, None]),
    "values at an index": lambda x, y, n: assigned(x, index(0, 1), y[:2]),
    "foreach": lambda x, y, n: torch._foreach_add([x], [y]),
    "vmap": lambda x, y, n: torch.func.vmap(lambda row: row + y)(x[None]),
    # Here there is no second opinion, or it is that these are allowed.
    "equal": lambda x, y, n: torch.equal(x, y),
    "foreach in place": lambda x, y, n: torch._foreach_mul_([x], [y]),
    "one that is indexed on the CPU": lambda x, y, n: y[x.long()],
    "stack of numbers": lambda x, y, n: torch.stack([x[0], n]),
    "clamp by a number": lambda x, y, n: x.clamp(max=n),
    "foreach and a number": lambda x, y, n: torch._foreach_add_([x], n, alpha=1.0),
    "two numbers": lambda x, y, n: torch.addcmul(x, n, n),
    "out, a number": lambda x, y, n: torch.add(x[0], x[0], out=n),
    "a number in place": lambda x, y, n: n.add_(x[0]),
    "NumPy": lambda x, y, n: x.numpy(),
    "an array": lambda x, y, n: np.asarray(x),
    "from NumPy": lambda x, y, n: x * torch.from_numpy(np.ones(3)),
    "the CPU's generator": lambda x, y, n: x.normal_(generator=torch.Generator()),
    "the CPU's generator, new": lambda x, y, n: torch.rand(
        3, device=x.device, generator=torch.Generator()
    ),
}
NO_SECOND_OPINION = {*list(REFUSED)[list(REFUSED).index("equal") :], "a list"}
ALLOWED: dict[str, Expression] = {
    "arithmetic": lambda x, y, n: x * x + 1,
    "a number": lambda x, y, n: x * n,
    "a number in place": lambda x, y, n: x.mul_(n),
    "where with a number": lambda x, y, n: torch.where(x > 1, x, n),
    "where with two": lambda x, y, n: torch.where(x > 1, n, n),
    "masked_fill with a number": lambda x, y, n: x.masked_fill(x > 1, n),
    "fill with a number": lambda x, y, n: x.fill_(n),
    "an index": lambda x, y, n: x[index(0, 2)],
    "a mask": lambda x, y, n: assigned(x, mask(), n),
    "a list": lambda x, y, n: x[[0, 2]],
    "a number at an index": lambda x, y, n: assigned(x, index(0, 2), n),
    "a value at a position": lambda x, y, n: assigned(x, 0, y[1]),
    "values at a slice": lambda x, y, n: assigned(x, slice(2), y[1:]),
    "to and fro": lambda x, y, n: (y.to(x.device) + x).to("cpu") + y,
    "another dtype": lambda x, y, n: x.to(x.device, torch.float64) + x.double(),
    "copy_": lambda x, y, n: x.copy_(y),
    "copy_ to the CPU": lambda x, y, n: y.copy_(x),
    "foreach_copy": lambda x, y, n: torch._foreach_copy_([x], [y])[0],
    "foreach and a number": lambda x, y, n: torch._foreach_mul([x], n)[0],
    "a shape in common": lambda x, y, n: x.view_as(y).expand_as(y),
    "new tensors": lambda x, y, n: x.new_zeros(3) + torch.arange(3, device=x.device) + x,
    "like the CPU's": lambda x, y, n: torch.ones_like(y, device=x.device) + x,
    "out, resized": lambda x, y, n: torch.add(x, x, out=torch.empty(0, device=x.device)),
    "a dimension in place": lambda x, y, n: x.unsqueeze_(0) + x,
    "an einsum": lambda x, y, n: torch.einsum("i,j->ij", x, x),
}


def without_values(device: torch.device, expression: Expression) -> None:
    """Work out on which devices the results are, as torch knows it."""
    with FakeTensorMode():
        expression(torch.arange(3.0, device=device), torch.arange(3.0), torch.tensor(2.0))


def error_of(work: Callable[[], Any]) -> str:
    """What an operation was refused with, or nothing."""
    try:
        work()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return ""


def test_refused(device: torch.device) -> None:
    """A refused operation has no effect, and the error says where it is."""
    offenders = []
    for name, expression in REFUSED.items():
        x, y, n = torch.arange(3.0, device=device), torch.arange(3.0), torch.tensor(2.0)
        said = error_of(partial(expression, x, y, n))
        second = "" if name in NO_SECOND_OPINION else "device"
        if not (
            re.search(r"pretend.*test_pretend_device\.py, line", said)
            and torch.equal(y, torch.arange(3.0))
            and n == 2
            and second in error_of(partial(without_values, device, expression))
        ):
            offenders.append((name, said))
    assert not offenders


def test_allowed(device: torch.device) -> None:
    """With the CPU's result, bit for bit."""
    offenders = []
    for name, expression in ALLOWED.items():
        x, y, n = torch.arange(3.0), torch.arange(3.0), torch.tensor(2.0)
        result = expression(x.to(device), y.clone(), n)
        expected = expression(x, y.clone(), n)
        if name not in NO_SECOND_OPINION:
            without_values(device, expression)
        if not torch.equal(result.cpu(), expected) or result.shape != expected.shape:
            offenders.append(name)
    assert not offenders


def test_torchs_table_is_understood() -> None:
    assert {"add.Tensor", "add_.Tensor", "copy_", "index.Tensor", "where.self"} <= unchecked()
    assert not {"mm", "cat", "index_select", "clamp.Tensor", "nll_loss_forward"} & unchecked()


# ---- modules, gradients, copies of tensors
def test_a_module_moves_with_its_parameters_identities(device: torch.device) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    before = list(module.parameters())
    state = {name: t.clone() for name, t in module.state_dict().items()}
    optimizer = torch.optim.Adam(module.parameters())
    assert module.to(device) is module
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))
    assert module[2].weight is module[0].weight
    assert {str(t.device) for t in module.state_dict().values()} == {"pretend:0"}
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in before)
    module(torch.ones(2, 3, device=device)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(module[0].weight.cpu(), state["0.weight"])
    module.load_state_dict(state)  # from the CPU
    assert torch.equal(module[0].weight.cpu(), state["0.weight"])
    with pytest.raises(RuntimeError, match=r"tensors .*pretend:0"):
        module(torch.ones(2, 3))


IMAGES, STEPS, ROWS = (2, 3, 6, 6), (2, 5, 4), (2, 4)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), IMAGES),
        (nn.Sequential(nn.GroupNorm(1, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)), IMAGES),
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), STEPS),
        (nn.LSTM(4, 3, 2, batch_first=True), STEPS),
        (nn.GRU(4, 3), STEPS),
        (nn.RNN(4, 3), STEPS),
        (nn.LSTMCell(4, 3), ROWS),
        (nn.GRUCell(4, 3), ROWS),
    ],
    ids=lambda value: type(value).__name__,
)
def test_modules_compute_the_cpus_bits(
    device: torch.device, module: nn.Module, shape: tuple[int, ...]
) -> None:
    """Outputs and gradients."""
    results = []
    for place in (torch.device("cpu"), device):
        moved = copy.deepcopy(module).to(place)
        x = torch.ones(shape).cumsum(-1).to(place).requires_grad_()
        torch.manual_seed(0)
        output = moved(x)
        while isinstance(output, tuple):
            output = output[0]
        output.square().sum().backward()
        results.append([t.cpu() for t in (output, x.grad, *(p.grad for p in moved.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_stay_on_the_device(device: torch.device) -> None:
    w = torch.ones(3, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad((w * w).sum(), w)
    assert gradient.device.type == "pretend" and gradient.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="device type 'cpu'"):
        w.grad = torch.ones(3)

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * torch.ones(3)

    with pytest.raises(RuntimeError, match=r"mul\.Tensor.*pretend:0.*line \d+, in backward"):
        Wrong.apply(w).sum().backward()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_copies_of_tensors(device: torch.device, clone: Callable[[Tensor], Tensor]) -> None:
    for t in (torch.ones(3, device=device), nn.Parameter(torch.ones(3, device=device))):
        made = clone(t)
        assert made.device.type == "pretend" and made.requires_grad == t.requires_grad
        assert isinstance(made, nn.Parameter) == isinstance(t, nn.Parameter)
        with torch.no_grad():
            made.add_(1)
        assert (made.tolist(), t.tolist()) == ([2, 2, 2], [1, 1, 1])


def test_views_share_memory(device: torch.device) -> None:
    x = torch.zeros(2, 2, device=device)
    x[0].add_(1)
    x.T[1] = 5
    assert x.tolist() == [[1, 5], [0, 5]]
    assert x[1:].data_ptr() == x.data_ptr() + 8


def test_random_draws_are_those_of_the_cpu(device: torch.device) -> None:
    draws = []
    for place in (device, torch.device("cpu")):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            draws.append(torch.rand(3, device=place).tolist())
    assert draws[0] == draws[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd has threads for the GPU")
def test_a_process_that_has_used_it_can_be_forked(device: torch.device) -> None:
    """fedhet's workers are forked, and they train: autograd must have no thread of the device."""
    torch.ones(1, device=device, requires_grad=True).sum().backward()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: torch.ones(1, requires_grad=True).sum().backward())
    child.start()
    child.join(60)
    assert child.exitcode == 0


# ---- copies are counted
COUNTED: list[tuple[Expression, list[str]]] = [
    (lambda x, y, n: x * n + x.to(x.device), []),
    (lambda x, y, n: x.double().to(x.device, torch.float16), []),
    (lambda x, y, n: y.to(x.device), ["cpu -> pretend:0"]),
    (lambda x, y, n: y.to(x.device, non_blocking=True), ["cpu -> pretend:0, asynchronous"]),
    (lambda x, y, n: torch.tensor([1.0], device=x.device), ["cpu -> pretend:0"]),
    (lambda x, y, n: x.new_tensor([1.0]), ["cpu -> pretend:0"]),
    (lambda x, y, n: torch._foreach_copy_([x, x], [y, x]), ["cpu -> pretend:0"]),
    (lambda x, y, n: x[index(0)], ["cpu -> pretend:0"]),
    (lambda x, y, n: assigned(x, [0], 1.0), ["cpu -> pretend:0"]),
    (lambda x, y, n: x.cpu(), ["pretend:0 -> cpu"]),
    (lambda x, y, n: y.copy_(x), ["pretend:0 -> cpu"]),
    (lambda x, y, n: x.to("cpu", non_blocking=True), ["pretend:0 -> cpu, asynchronous"]),
    (lambda x, y, n: x.tolist(), ["pretend:0 -> cpu"]),
    (lambda x, y, n: x[0].item(), ["pretend:0 -> cpu"]),
    (lambda x, y, n: float(x.sum()), ["pretend:0 -> cpu"]),
    (lambda x, y, n: bool((x > 5).any()), ["pretend:0 -> cpu"]),
    (lambda x, y, n: f"{x.sum():.3f}", ["pretend:0 -> cpu"]),
    (lambda x, y, n: x[x > 1], ["wait"]),
    (lambda x, y, n: x.nonzero(), ["wait"]),
    (lambda x, y, n: x.unique(), ["wait"]),
    (lambda x, y, n: x.long().bincount(), ["wait"]),
    (lambda x, y, n: torch.equal(x, x), ["wait"]),
]


def test_counted(device: torch.device) -> None:
    """Only what happens inside the block is counted, with its place."""
    offenders = []
    for i, (expression, ways) in enumerate(COUNTED):
        x, y, n = torch.arange(3.0, device=device), torch.arange(3.0), torch.tensor(2.0)
        with count_copies() as copies:
            expression(x, y, n)
        x.cpu()
        found = [copy.way for copy in copies.elements()]
        place = "tests/contracts/test_pretend_device.py, line "
        if found != ways or not all(each.place.startswith(place) for each in copies):
            offenders.append((i, ways, copies))
    assert not offenders

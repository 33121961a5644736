"""Data sets of any library that are given as objects: what is read, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
)
from torchvision import transforms
from torchvision.datasets import FakeData

from fedhet.core.errors import DataError
from fedhet.core.task import ClientData, Samples, Task
from fedhet.data.toy import toy_task

X = torch.arange(24.0).reshape(6, 4)
Y = torch.tensor([0, 1, 1, 0, 1, 0])


def task(*clients: ClientData, test: Any = None) -> Task:
    toy = toy_task()
    return Task(toy.model, toy.criterion, list(clients), test, 2)


def read(train: Any) -> Samples:
    """What client 1 of a task trains on."""
    return task(ClientData((X, Y)), ClientData(train)).clients[1].train


class Pairs(Dataset[Any]):
    """A data set whose items a function makes; counts how often each is read."""

    def __init__(self, item: Callable[[int], Any], n: int = 6) -> None:
        self.item = item
        self.reads = [0] * n

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        return self.item(index)


def hugging_face(**columns: Any) -> Any:
    import datasets

    return datasets.Dataset.from_dict(columns)


SAME: dict[str, Callable[[], Any]] = {
    "pair": lambda: (X, Y),
    "samples": lambda: Samples(X, Y),
    "arrays": lambda: (X.double().numpy(), Y.numpy().astype(np.int32)),
    "reversed arrays": lambda: (np.flip(X.flip(0).numpy(), 0), np.flip(Y.flip(0).numpy(), 0)),
    "lists": lambda: (X.tolist(), Y.tolist()),
    "lists of tensors": lambda: (list(X), list(Y)),
    "a table of pandas": lambda: (pandas.DataFrame(X.numpy()), pandas.Series(Y.numpy())),
    "TensorDataset": lambda: TensorDataset(X, Y),
    "Subset": lambda: Subset(TensorDataset(X.flip(0), Y.flip(0)), [5, 4, 3, 2, 1, 0]),
    "Subset by a tensor": lambda: Subset(
        TensorDataset(X.flip(0), Y.flip(0)), torch.arange(6).flip(0)
    ),  # type: ignore[arg-type]
    "ConcatDataset": lambda: ConcatDataset(
        [TensorDataset(X[:2], Y[:2]), TensorDataset(X[2:], Y[2:])]
    ),
    "a list of pairs": lambda: [(x, int(y)) for x, y in zip(X, Y, strict=True)],
    "arrays and numbers": lambda: Pairs(lambda i: (X[i].double().numpy(), np.int64(Y[i]))),
    "lists and numbers": lambda: Pairs(lambda i: [X[i].tolist(), int(Y[i])]),
    "Hugging Face": lambda: hugging_face(x=X.tolist(), label=Y.tolist()).with_format("torch"),
    "label first": lambda: hugging_face(label=Y.tolist(), x=X.tolist()).with_format("numpy"),
}


@pytest.mark.parametrize("given", SAME.values(), ids=SAME)
def test_the_same_samples_in_every_form(given: Callable[[], Any]) -> None:
    samples = read(given())
    assert torch.equal(samples.x.float(), X) and torch.equal(samples.y, Y)
    assert samples.x.is_floating_point() and samples.y.dtype == torch.int64


def test_two_pairs_are_two_samples_and_not_a_pair() -> None:
    samples = read([(X[0], 1), (X[1], 0)])
    assert torch.equal(samples.x, X[:2]) and samples.y.tolist() == [1, 0]
    assert torch.equal(read(((X[0], 1), (X[1], 0))).x, X[:2])
    assert torch.equal(read([{"x": X[0], "label": 1}, {"x": X[1], "label": 0}]).x, X[:2])


def test_images_of_torchvision(tmp_path: Path) -> None:
    images = FakeData(6, (3, 8, 8), 2, transform=transforms.ToTensor())
    samples = read(images)
    assert (samples.x.shape, samples.x.dtype) == ((6, 3, 8, 8), torch.float32)
    for index in range(6):
        x, y = images[index]
        assert torch.equal(samples.x[index], x) and int(samples.y[index]) == int(y)


def test_every_part_and_the_global_test_set() -> None:
    data = TensorDataset(X, Y)
    parts = [Subset(data, rows) for rows in ([0, 1], [2], [3, 4, 5], [1, 2])]
    built = task(ClientData(*parts[:3]), test=parts[3])
    client = built.clients[0]
    for samples, part in zip(
        (client.train, client.val, client.test, built.test), parts, strict=True
    ):
        assert samples is not None and torch.equal(samples.x, X[part.indices])
    assert built.sizes == [2]
    outside = ClientData(*parts[:3])  # without a task
    assert outside.val is not None and torch.equal(outside.val.y, Y[2:3])


def test_each_sample_is_read_once() -> None:
    data = Pairs(lambda i: (X[i], int(Y[i])))
    client = ClientData(data)
    assert sum(data.reads) == 0
    built = task(client, ClientData((X, Y)))
    for _ in range(2):
        assert len(built.clients[0].train) == 6
    assert data.reads == [1] * 6


def test_random_draws_are_fedhets_own() -> None:
    """They depend on client and part, and neither on nor for the caller's random state."""

    def noisy(index: int) -> tuple[Tensor, int]:
        return X[index] + torch.rand(4) + random.random() + float(np.random.rand()), int(Y[index])

    def drawn(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        built = task(*(ClientData(Pairs(noisy), Pairs(noisy)) for _ in range(2)))
        after = float(torch.rand(())), random.random(), float(np.random.rand())
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        assert after == (float(torch.rand(())), random.random(), float(np.random.rand()))
        parts = [part for client in built.clients for part in (client.train, client.val)]
        return [part.x for part in parts if part is not None]

    first, second = drawn(0), drawn(1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len({tuple(x.flatten().tolist()) for x in first}) == 4


def test_empty_parts() -> None:
    empty = Subset(TensorDataset(X, Y), [])
    client = task(ClientData((X, Y), empty, (X[:0], Y[:0]))).clients[0]
    assert client.val is None and client.test is None
    assert task(ClientData((X, Y)), test=(X[:0], Y[:0])).test is None
    assert task(ClientData((X, Y)), ClientData((X[:0], Y[:0]))).sizes == [6, 0]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield X[0], 0


def fails_at_three(index: int) -> Any:
    if index == 3:
        raise OSError("cannot read image 3.png")
    return X[index], 0


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "ragged": (
        lambda: Pairs(lambda i: (torch.zeros(4 + i // 3), 0)),
        r", sample 3: x .*Tensor .*shape \(5,\).* sample 0 .*Tensor .*shape \(4,\)",
    ),
    "ragged targets": (
        lambda: Pairs(lambda i: (X[i], [0, 1] if i == 2 else 0)),
        r", sample 2: y .*Tensor .*shape \(2,\).* sample 0 .*Tensor .*shape \(\)",
    ),
    "other types": (
        lambda: Pairs(lambda i: ([1, 2] if i < 5 else [1.5, 2], 0)),
        ", sample 5: x .*float64.* sample 0 .*int64",
    ),
    "ragged list": (
        lambda: ([X[0], X[0, :2]], [0, 1]),
        r": x\[1\] is .*\(2,\).* sample 0 .*\(4,\)",
    ),
    "lengths": (lambda: (X, Y[:5]), ": 6 inputs .*5 targets"),
    "image without ToTensor": (
        lambda: FakeData(6, (3, 8, 8), 2),
        r", sample 0: x is of type Image; .*ToTensor\(\)",
    ),
    "text": (lambda: [("good", 1), ("bad", 0), ("fine", 1)], ", sample 0: x .*text 'good'"),
    "no target": (lambda: TensorDataset(X), r", sample 0 .*type tuple .*1; .*pair"),
    "no pairs": (lambda: X, r"Tensor .*shape \(6, 4\).*; .*pair \(x, y\)"),
    "three columns": (
        lambda: hugging_face(a=[1.0], b=[2.0], label=[0]),
        ", sample 0 is of type dict; expected a pair",
    ),
    "all splits": (
        lambda: {"train": (X, Y)},
        " is of type dict; .*one of its splits",
    ),
    "stream": (Stream, " is of type Stream; expected a pair"),
    "generator": (lambda: (pair for pair in [(X, Y)]), " is of type generator; .*list"),
    "loader": (lambda: DataLoader(TensorDataset(X, Y)), " is of type DataLoader; .*`dataset`"),
    "path": (lambda: "my/folder", " is the text 'my/folder'; expected a pair"),
    "Path": (lambda: Path("my/folder"), " is of type PosixPath; expected a pair"),
    "nothing": (lambda: None, " is of type NoneType"),
    "empty": (lambda: Subset(TensorDataset(X, Y), []), ": the data set is empty"),
    "damaged": (
        lambda: Pairs(fails_at_three),
        ", sample 3: .*data set, .*type Pairs, raised OSError: .*read image 3.png",
    ),
    "objects": (lambda: (np.array([{}, {}]), [0, 1]), ": x .*ndarray .*type object"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_names_client_part_and_sample(
    given: Callable[[], Any], message: str
) -> None:
    with pytest.raises(DataError, match=f"^client 1, train.*{message}"):
        read(given())
    if given() is not None:
        with pytest.raises(DataError, match=f"^the .*test set.*{message}"):
            task(ClientData((X, Y)), test=given())


def test_clients_are_client_data() -> None:
    with pytest.raises(DataError, match=r"client 0 .*type tuple; .*fedhet\.ClientData"):
        task((X, Y))  # type: ignore[arg-type]
    toy = toy_task()
    with pytest.raises(DataError, match=r"sizes=\[5\], .*clients .*\[6\]"):
        Task(toy.model, toy.criterion, [ClientData((X, Y))], None, 2, sizes=[5])

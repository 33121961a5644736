"""Clients' data: the split, the samples, noise, normalisation, and counts."""

from __future__ import annotations

import math
import multiprocessing

import numpy as np
import pytest
import torch

from fedhet.core.errors import ConfigError
from fedhet.core.task import Samples
from fedhet.core.workspace import Workspace
from fedhet.data.dataset import Dataset
from fedhet.data.federation import FederatedData, Normalize, class_counts, split, transform
from fedhet.data.partition import Partition
from fedhet.data.toy import toy_task

FRACTIONS = [
    [0.8, 0.1, 0.1],
    [1, 0, 0],
    [0.2, 0.4, 0.4],
    [0.75, 0, 0.25],
    [0.001, 0.999, 0],
    [0.85, 0.15, 0.0],
]


@pytest.mark.parametrize("fractions", FRACTIONS)
def test_split_is_disjoint_and_complete(fractions: list[float]) -> None:
    for n in (0, 1, 2, 3, 5, 14, 15, 100):
        parts = split(n, fractions, seed=0, pid=0)
        assert sorted(np.concatenate(parts).tolist()) == list(range(n))
        train, val, test = map(len, parts)
        wanted_val, wanted_test = (math.floor(n * fraction + 0.5) for fraction in fractions[1:])
        if n - wanted_val - wanted_test >= 1:
            assert (val, test) == (wanted_val, wanted_test)
        else:  # train keeps one, taken from the others
            assert train == min(n, 1) and val <= wanted_val and test <= wanted_test


def test_split_has_a_stream_per_client_and_seed() -> None:
    def order(**keys: int) -> list[int]:
        return np.concatenate(split(50, [0.8, 0.1, 0.1], **keys)).tolist()

    assert order(seed=0, pid=0) == order(seed=0, pid=0) != list(range(50))
    assert len({tuple(order(seed=seed, pid=pid)) for seed in range(3) for pid in range(3)}) == 9


@pytest.mark.parametrize(
    "fractions", [[0.8, 0.2], [0.8, 0.1, 0.2], [0, 0.5, 0.5], [1.2, -0.1, -0.1], []]
)
def test_wrong_fractions(fractions: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"partition\.split="):
        split(10, fractions, seed=0, pid=0)


def toy(n: int = 40) -> Dataset:
    """Sample i is a 2x1x3 image of value i, in class i mod 4."""
    x = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1).expand(n, 2, 1, 3)
    y = torch.arange(n) % 4
    return Dataset("toy", x, y, Samples(x[:4], y[:4]), ("a", "b", "c", "d"), (0.1, 0.2), (0.5, 2.0))


def four_clients(n: int = 40) -> Partition:
    """Clients with 20, 1, 0 and 18 random samples."""
    indices = np.random.default_rng(0).permutation(n)
    return Partition("toy", [indices[:20], indices[20:21], indices[21:21], indices[21:39]])


def test_clients_hold_their_own_samples() -> None:
    data, partition = toy(), four_clients()
    federation = FederatedData(data, partition, [0.8, 0.1, 0.1], seed=7)
    assert len(federation) == 4
    for pid, client in enumerate(federation):
        held = [part for part in (client.train, client.val, client.test) if part is not None]
        rows = torch.cat([part.x[:, 0, 0, 0] for part in held]).long()
        assert sorted(rows.tolist()) == sorted(partition.indices[pid].tolist())
        assert torch.equal(torch.cat([part.y for part in held]), rows % 4)
        for part in held:
            assert (part.x.dtype, part.y.dtype) == (torch.uint8, torch.int64)
            assert part.x.shape[1:] == data.shape
    assert [len(client.train) for client in federation] == federation.sizes == [16, 1, 0, 14]
    assert federation[1].val is None and federation[1].test is None
    # the same client, not another stream
    assert torch.equal(federation[-1].train.x, federation[3].train.x)
    with pytest.raises(IndexError):
        federation[4]


def noisy(
    partition: Partition,
    seed: int = 7,
    fractions: tuple[float, ...] = (0.8, 0.1, 0.1),
    value: float = 0.5,
) -> FederatedData:
    """All samples are grey images of one value, float32."""
    x = torch.full((40_000, 1, 4, 4), value)
    y = torch.arange(len(x)) % 4
    data = Dataset("grey", x, y, Samples(x[:4], y[:4]), ("a", "b", "c", "d"))
    return FederatedData(data, partition, fractions, seed, noise=0.01)


def test_noise_has_the_variance_of_its_client() -> None:
    federation = noisy(Partition("toy", np.array_split(np.arange(40_000), 4)))
    for pid, client in enumerate(federation):
        assert federation.noise_sd(pid) == pytest.approx(math.sqrt(0.01 * (pid + 1) / 4))
        # the client's noise is in every part
        for part in (client.train, client.val, client.test):
            assert part is not None and part.x.dtype == torch.float32
            # 5 standard deviations of the smallest part
            assert float(part.x.mean()) == pytest.approx(0.5, abs=0.004)
            assert float(part.x.var()) == pytest.approx(0.01 * (pid + 1) / 4, rel=0.06)
    # the shared samples are unchanged
    assert torch.equal(federation._dataset.x.unique(), torch.tensor([0.5]))


def test_noise_is_clipped_and_starts_from_the_pixels() -> None:
    few = Partition("toy", [np.arange(1000)])
    bright = noisy(few, value=1.0)[0].train.x
    assert float(bright.max()) == 1
    assert float((bright == 1).float().mean()) == pytest.approx(0.5, abs=0.03)
    data = toy()
    mixed = FederatedData(data, four_clients(), [1, 0, 0], seed=0, noise=1e-8)[0].train
    plain = FederatedData(data, four_clients(), [1, 0, 0], seed=0)[0].train
    assert torch.allclose(mixed.x, plain.x / 255, atol=1e-3)
    assert torch.equal(mixed.y, plain.y)


def test_noise_has_a_stream_per_client_and_seed_and_is_drawn_once() -> None:
    partition = Partition("toy", [np.arange(50), np.arange(50, 100)])
    first = noisy(partition)[0]
    again = noisy(partition)[0]
    assert torch.equal(first.train.x, again.train.x)
    assert first.test is not None and again.test is not None
    assert torch.equal(first.test.x, again.test.x)
    assert not torch.equal(first.train.x, noisy(partition, seed=8)[0].train.x)
    # the same samples at two clients
    twice = noisy(Partition("toy", [np.arange(50)] * 2), fractions=(1, 0, 0))
    order = [split(50, (1, 0, 0), 7, pid)[0].argsort() for pid in range(2)]
    raw = [(twice[pid].train.x[order[pid]] - 0.5) / twice.noise_sd(pid) for pid in range(2)]
    assert not torch.allclose(*raw, atol=1e-3)
    # another split, the same noise on the same sample
    resplit = noisy(partition, fractions=(0.5, 0.5, 0))[0]
    assert resplit.val is not None and first.val is not None
    before = torch.cat([first.train.x, first.val.x, first.test.x])
    after = torch.cat([resplit.train.x, resplit.val.x])
    assert torch.equal(before.flatten(1).sort(0).values, after.flatten(1).sort(0).values)


def test_noise_is_for_images() -> None:
    x, y = torch.zeros(4, 3), torch.zeros(4).long()
    table = Dataset("table", x, y, Samples(x[:1], y[:1]), ("a",))
    message = r"partition\.noise=0\.1: noise .*images .*table .*shape \(3,\)"
    with pytest.raises(ConfigError, match=message):
        FederatedData(table, Partition("toy", [np.arange(4)]), [1, 0, 0], seed=0, noise=0.1)


def test_sizes_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = FederatedData(toy(), four_clients(), [0.5, 0.25, 0.25], seed=0)
    monkeypatch.delattr(FederatedData, "_gather")
    assert federation.part_sizes[:2] == [(10, 5, 5), (1, 0, 0)]
    # of 18 samples, floor(4.5 + .5) = 5 each are for validation and test
    assert federation.sizes == [10, 1, 0, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalize_per_channel(dtype: torch.dtype) -> None:
    here, there = multiprocessing.Pipe()  # as a spawned worker receives it
    here.send(transform(toy()))
    normalize = there.recv()
    x = torch.rand(5, 2, 1, 3, dtype=dtype)
    # a first use in evaluation must not make the constants unusable in training
    with torch.inference_mode():
        normalize(x)
    z = normalize(x.requires_grad_())
    assert z.dtype == dtype
    z.sum().backward()
    assert torch.allclose(z[:, 0], (x[:, 0] - 0.1) / 0.5)
    assert torch.allclose(z[:, 1], (x[:, 1] - 0.2) / 2)
    assert x.grad is not None and torch.allclose(x.grad[:, 0], torch.tensor(2.0, dtype=dtype))


def test_normalize_of_vectors() -> None:
    x = torch.rand(5, 3)
    expected = (x - torch.tensor([0, 0.5, 1])) / torch.tensor([1, 2, 4])
    assert torch.allclose(Normalize((0.0, 0.5, 1.0), (1.0, 2.0, 4.0))(x), expected)


def test_class_counts() -> None:
    partition = four_clients()
    counts = class_counts(toy(), partition)
    assert counts.shape == (4, 4) and counts.dtype == np.int64
    assert counts.sum(1).tolist() == [20, 1, 0, 18]
    for pid, indices in enumerate(partition.indices):
        for label in range(4):
            assert counts[pid, label] == sum(int(i) % 4 == label for i in indices)


def test_pixels_are_normalised_in_place_and_the_shared_array_stays() -> None:
    task = toy_task(1)
    task.transform = Normalize((0.2,), (0.5,))
    workspace = Workspace(task, device=torch.device("cpu"), seed=0)
    pixels = torch.arange(24, dtype=torch.uint8).reshape(2, 1, 3, 4)
    for x in (pixels, pixels.float() / 255):
        before = x.clone()
        prepared = workspace.prepared(Samples(x, torch.zeros(2))).x
        assert torch.equal(prepared, (pixels.float() / 255 - 0.2) / 0.5)
        assert torch.equal(x, before)

"""Clients' data as views on one shared dataset: a client is gathered when it is asked for."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedhet.data.dataset import Dataset
from fedhet.data.scheme import Partition, check_noise, check_split
from fedhet.errors import ConfigError
from fedhet.streams import generator
from fedhet.task import ClientData, Samples


def _parts(n: int, fractions: Sequence[float]) -> tuple[int, int, int]:
    """How many of n samples are (train, validation, test); train gets the first."""
    _, val, test = check_split(fractions)
    n_val = min(math.floor(n * val + 0.5), max(n - 1, 0))
    n_test = min(math.floor(n * test + 0.5), max(n - 1 - n_val, 0))
    return n - n_val - n_test, n_val, n_test


def split(
    n: int, fractions: Sequence[float], seed: int, pid: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shuffles 0 .. n-1 by the client's stream (seed, "split", pid) and cuts it into train,
    validation and test.

    Validation and test have floor(n f + 1/2) samples, except that train keeps one at least, taken
    from test first."""
    n_train, n_val, _ = _parts(n, fractions)
    order = generator(seed, "split", pid=pid).permutation(n)
    return order[:n_train], order[n_train : n_train + n_val], order[n_train + n_val :]


class Federation(Sequence[ClientData]):
    """The clients of a partition of `dataset`; client p's samples are copied out of `dataset` each
    time it is asked for.

    Args: fractions: (train, validation, test) of each client, see `split`. seed: the run's seed.
        noise: feature skew: Gaussian noise of variance noise * k / K on the pixels in [0, 1] of
        client k = 1 .. K, clipped to [0, 1]: FedDisk's noisy MNIST, after NIID-Bench
        (https://arxiv.org/abs/2102.02079), whose value is 0.1. It is the client's own, in all three
        parts, and the same whenever it is asked for; the global test set stays clean.

    An empty validation or test part is None; `train` is empty only for a client that has no sample
    at all.

    Raises:
        ConfigError: noise on samples that are no images.
    """

    def __init__(
        self,
        dataset: Dataset,
        partition: Partition,
        fractions: Sequence[float],
        seed: int,
        noise: float = 0.0,
    ) -> None:
        self._dataset, self._indices = dataset, partition.indices
        self._fractions, self._seed, self._noise = check_split(fractions), seed, check_noise(noise)
        if noise and dataset.x.ndim != 4:
            raise ConfigError(
                f"partition.noise={noise}: noise is for images (C, H, W); those of {dataset.name}"
                f" have shape {dataset.shape}"
            )

    def __len__(self) -> int:
        return len(self._indices)

    # one client at a time, no slices
    def __getitem__(self, pid: int) -> ClientData:  # type: ignore[override]
        pid = range(len(self))[operator.index(pid)]
        own = self._indices[pid]
        parts = split(len(own), self._fractions, self._seed, pid)
        if self._noise:
            noisy = self._noised(self._gather(own), pid)
            train, val, test = (Samples(noisy.x[part], noisy.y[part]) for part in parts)
        else:
            train, val, test = (self._gather(own[part]) for part in parts)
        return ClientData(train, val if len(val) else None, test if len(test) else None)

    def _gather(self, indices: np.ndarray) -> Samples:
        rows = torch.from_numpy(indices)
        return Samples(self._dataset.x.index_select(0, rows), self._dataset.y.index_select(0, rows))

    def _noised(self, samples: Samples, pid: int) -> Samples:
        """All of a client's samples, so that its noise does not depend on the split."""
        x = samples.x.float().div_(255) if samples.x.dtype == torch.uint8 else samples.x
        noise = generator(self._seed, "noise", pid=pid).standard_normal(x.shape, dtype=np.float32)
        return Samples(
            torch.from_numpy(noise).mul_(self.noise_sd(pid)).add_(x).clamp_(0, 1), samples.y
        )

    def noise_sd(self, pid: int) -> float:
        """The standard deviation of client `pid`'s noise."""
        return math.sqrt(self._noise * (pid + 1) / len(self))

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """Each client's number of training, validation and test samples, counted without gathering
        any."""
        return [_parts(len(indices), self._fractions) for indices in self._indices]

    @property
    def sizes(self) -> list[int]:
        """Training samples of each client."""
        return [train for train, _, _ in self.parts]


@dataclass(frozen=True)
class Normalize:
    """(x - mean) / std per channel, for floating x (B, C, ...) in [0, 1] on any device."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        mean, std = self._constants(x)
        return (x - mean).div_(std)

    def in_place(self, x: Tensor) -> Tensor:
        """The same on x itself: a second tensor of a client's images is memory that the system
        takes back and gives again each time."""
        mean, std = self._constants(x)
        return x.sub_(mean).div_(std)

    def _constants(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return _constant(self.mean, x.ndim, x.device, x.dtype), _constant(
            self.std, x.ndim, x.device, x.dtype
        )


@lru_cache
def _constant(
    values: tuple[float, ...], ndim: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    # it is kept: a first call in inference mode must not spoil it for training
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).view(-1, *(1,) * (ndim - 2))


def transform(dataset: Dataset) -> Callable[[Tensor], Tensor] | None:
    """What turns the dataset's pixels in [0, 1], or columns, into the model's input; it can be
    pickled. Tokens stay as they are."""
    return None if dataset.text else Normalize(tuple(dataset.mean), tuple(dataset.std))


def describe(dataset: Dataset, partition: Partition) -> np.ndarray:
    """How many samples of each class each client holds: (clients, classes) int64."""
    y = dataset.y.numpy()
    return np.stack(
        [np.bincount(y[indices], minlength=len(dataset.classes)) for indices in partition.indices]
    )

"""What a partition is, and what every scheme that makes one has in common."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np

from fedhet.data import partition_cache
from fedhet.errors import ConfigError

log = logging.getLogger("fedhet.data")

# part of the cache's key: raise it when `assign` gives other indices for the same settings
_ALGORITHM = 1


@dataclass(frozen=True)
class Partition:
    """Each client's samples.

    Args: name: the scheme's name. indices: per client, the ascending int64 indices of its samples;
        no sample has two owners. owners: per client, the name of the natural owner whose samples it
        holds; empty where clients are no owners. hash: 16 hex digits of the sha256 over each
        client's number of samples and indices, as little-endian int64.
    """

    name: str
    indices: list[np.ndarray] = field(compare=False, repr=False)
    owners: tuple[str, ...] = field(default=(), compare=False, repr=False)
    hash: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for indices in self.indices:
            digest.update(len(indices).to_bytes(8, "little") + indices.astype("<i8").tobytes())
        object.__setattr__(self, "hash", digest.hexdigest()[:16])


def labels_digest(labels: np.ndarray) -> str:
    """16 hex digits that tell whose labels (n,) a partition was made for."""
    return hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()[:16]


def check_split(fractions: Sequence[float]) -> tuple[float, float, float]:
    """`partition.split` as (train, validation, test); ConfigError unless they are >= 0, sum to 1
    and train is > 0."""
    values = (
        tuple(fractions)
        if isinstance(fractions, Sequence) and not isinstance(fractions, str)
        else ()
    )
    numbers = len(values) == 3 and all(
        isinstance(value, (int, float)) and value >= 0 for value in values
    )
    if not (numbers and values[0] > 0 and abs(sum(values) - 1) <= 1e-9):
        raise ConfigError(
            f"partition.split={fractions}: must be three numbers >= 0, [train, val, test], with sum"
            " 1 and train > 0"
        )
    return values[0], values[1], values[2]


def check_noise(noise: float) -> float:
    """`partition.noise`; ConfigError unless it is a finite number >= 0."""
    if type(noise) not in (int, float) or not 0 <= noise < math.inf:
        raise ConfigError(
            f"partition.noise={noise!r}: must be a number >= 0, the variance of the last client's"
            " noise"
        )
    return float(noise)


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC):
    """A way to say who holds which samples; its fields are the keys `partition.<field>`.

    Args:
        name: what the run's record calls it.
        split: each client's [train, validation, test] fractions (fedhet.data.federation.split).
        noise: the variance of the last client's noise (fedhet.data.federation.Federation).
    """

    name: str
    split: Sequence[float]
    noise: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", check_split(self.split))
        object.__setattr__(self, "noise", check_noise(self.noise))

    @abstractmethod
    def assign(
        self,
        labels: np.ndarray,
        seed: int,
        owners: np.ndarray | None = None,
        owner_names: Sequence[str] = (),
    ) -> Partition:
        """The clients' samples, of those with `labels` (n,) and, where the data name them, natural
        `owners` (n,).

        Raises:
            ConfigError: the settings are impossible for these data; the message has the numbers.
        """


@dataclass(frozen=True, kw_only=True)
class Drawn(Scheme):
    """A scheme that deals the samples out: a pure function of (labels, settings, seed).

    Args:
        clients: how many clients there are.
        min_size: the fewest samples that a client may have.
    """

    clients: int
    min_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._integer("clients", 1)
        self._integer("min_size", 0)

    def _integer(self, key: str, least: int) -> None:
        value = getattr(self, key)
        if type(value) is not int or value < least:
            raise ConfigError(f"partition.{key}={value!r}: must be an integer >= {least}")

    def _number(self, key: str) -> None:
        value = getattr(self, key)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ConfigError(f"partition.{key}={value!r}: must be a number > 0")

    def assign(
        self,
        labels: np.ndarray,
        seed: int,
        owners: np.ndarray | None = None,
        owner_names: Sequence[str] = (),
    ) -> Partition:
        """Found in the cache, where it was done before."""
        labels = np.ascontiguousarray(labels, dtype="<i8")
        n = len(labels)
        if self.clients > n:
            raise ConfigError(
                f"partition.clients={self.clients}: there are only {n} samples to share"
            )
        if (needed := self.clients * self.min_size) > n:
            raise ConfigError(
                f"partition.min_size={self.min_size}: {self.clients} clients would need {needed}"
                f" samples, there are {n}"
            )
        key = self._key(labels, seed)
        if (indices := partition_cache.load(key)) is None:
            indices = [np.sort(part) for part in self._draw(labels, seed)]
            self._check(indices, n)
            partition_cache.save(key, indices)
        return Partition(self.name, indices)

    @abstractmethod
    def _draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        """The indices of each client's samples."""

    def _settings(self) -> dict[str, Any]:
        return {
            key: value
            for key, value in asdict(self).items()
            if key not in ("name", "split", "noise")
        }

    def _key(self, labels: np.ndarray, seed: int) -> str:
        versions = [
            _ALGORITHM,
            version("flwr-datasets"),
            np.__version__,
        ]  # numpy may change its streams between versions
        named = json.dumps([type(self).__name__, self._settings(), seed, versions], sort_keys=True)
        return hashlib.sha256(named.encode() + b"\0" + labels.tobytes()).hexdigest()

    def _check(self, indices: list[np.ndarray], n: int) -> None:
        owners = np.bincount(np.concatenate(indices), minlength=n)
        if owners.max() > 1 or len(owners) > n:
            raise RuntimeError(
                f"partition {self.name}: sample {owners.argmax()} has {owners.max()} owners; each"
                " may have one at most"
            )
        if (smallest := min(map(len, indices))) < self.min_size:
            raise ConfigError(
                f"partition.min_size={self.min_size}: by {self._settings()} some client would get"
                f" {smallest} of {n} samples"
            )
        if left := n - int(owners.sum()):
            log.info("partition %s: %d of %d samples go to no client", self.name, left, n)

"""What a partition is, and what all schemes that make one have in common."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np

from fedhet.core import check
from fedhet.core.errors import ConfigError
from fedhet.data.array_cache import Arrays, cached_arrays

log = logging.getLogger("fedhet.data")

# Part of the cache's key: increase it when `draw` returns other indices for the same settings.
_ALGORITHM = 1


@dataclass(frozen=True)
class Partition:
    """Each client's samples.

    Args:
        name: the name of the scheme.
        indices: per client, the ascending int64 indices of its samples; no two clients share a
            sample.
        owners: per client, the name of the natural owner whose samples it has; empty where clients
            are not natural owners.
        pool_test: whether the samples are those of the training set, followed by those of the test
            set.

    Attributes:
        hash: 16 hex digits of the sha256 over each client's number of samples and indices, as
            little-endian int64, and over b"pool_test" where that is true.
    """

    name: str
    indices: list[np.ndarray] = field(compare=False, repr=False)
    owners: tuple[str, ...] = field(default=(), compare=False, repr=False)
    pool_test: bool = False
    hash: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for indices in self.indices:
            digest.update(len(indices).to_bytes(8, "little") + indices.astype("<i8").tobytes())
        if self.pool_test:
            digest.update(b"pool_test")
        object.__setattr__(self, "hash", digest.hexdigest()[:16])


def _plain(labels: np.ndarray) -> np.ndarray:
    """Labels as bytes are computed from: (n,) int64, or (n, K) float32 that are not classes."""
    return np.ascontiguousarray(labels, dtype="<f4" if labels.dtype.kind == "f" else "<i8")


def labels_digest(labels: np.ndarray) -> str:
    """16 hex digits that identify the labels for which a partition was made."""
    return hashlib.sha256(_plain(labels).tobytes()).hexdigest()[:16]


def check_split(fractions: Sequence[float]) -> tuple[float, float, float]:
    """`partition.split` as (train, validation, test).

    Raises:
        ConfigError: they are not three numbers >= 0 with sum 1, or train is 0.
    """
    if isinstance(fractions, Sequence) and not isinstance(fractions, str) and len(fractions) == 3:
        train, val, test = fractions
        numbers = all(isinstance(value, int | float) and value >= 0 for value in fractions)
        if numbers and train > 0 and abs(train + val + test - 1) <= 1e-9:
            return train, val, test
    raise ConfigError(
        f"partition.split={fractions}: must be three numbers >= 0, [train, val, test], with sum 1"
        " and train > 0"
    )


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC):
    """A way to assign samples to clients; its fields are the settings `partition.<field>`.

    Args:
        name: the scheme's name in the run's record.
        split: each client's [train, validation, test] fractions (fedhet.data.federation.split).
        noise: the variance of the last client's noise (fedhet.data.federation.FederatedData).
        pool_test: whether the clients share the test set too; the labels and owners that `assign`
            receives are then those of the pooled dataset (fedhet.data.dataset.Dataset.pooled).
    """

    by_class: ClassVar[bool] = False  # whether it needs samples that have one class each

    name: str
    split: Sequence[float]
    noise: float
    pool_test: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", check_split(self.split))
        object.__setattr__(self, "noise", check.number("partition.noise", self.noise, low=0))
        check.boolean("partition.pool_test", self.pool_test)

    def assign(
        self,
        labels: np.ndarray,
        seed: int,
        owners: np.ndarray | None = None,
        owner_names: Sequence[str] = (),
    ) -> Partition:
        """Assign samples to clients.

        Args:
            labels: the labels of all samples: (n,) int64, or (n, K) floating, which are not
                classes.
            seed: the seed of the run.
            owners: (n,), the numbers of the samples' natural owners, where the data name them.
            owner_names: the names of the owners.

        Raises:
            ConfigError: the settings are impossible for these data; the message has the numbers.
        """
        return self.drawn(labels, seed)

    @abstractmethod
    def drawn(self, labels: np.ndarray, seed: int) -> Partition:
        """Assign samples to clients by their labels alone; see `assign`."""


@dataclass(frozen=True, kw_only=True)
class DrawnScheme(Scheme):
    """A scheme that draws the assignment: a pure function of (labels, settings, seed).

    Args:
        clients: the number of clients.
        min_size: the smallest number of samples that a client may have.
    """

    clients: int
    min_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_clients()
        check.integer("partition.min_size", self.min_size, low=0)

    def _check_clients(self) -> None:
        check.integer("partition.clients", self.clients, low=1)

    def drawn(self, labels: np.ndarray, seed: int) -> Partition:
        """Draw the assignment, or load it from the cache if it was drawn before."""
        labels = _plain(labels)
        n = len(labels)
        if self.clients > n:
            raise ConfigError(
                f"partition.clients={self.clients}: more clients than samples allow; there are"
                f" only {n} samples to share"
            )
        if (needed := self.clients * self.min_size) > n:
            raise ConfigError(
                f"partition.clients={self.clients} with partition.min_size={self.min_size}: more"
                f" clients than samples allow; they would need {needed} samples, and there are {n}"
            )

        def made() -> Arrays:
            parts = [np.sort(part) for part in self.draw(labels, seed)]
            self._check_indices(parts, n)
            return {"indices": np.concatenate(parts), "ends": np.cumsum([*map(len, parts)])}

        # In a deployment every message is handled by a new process, and importing flwr-datasets
        # takes seconds. A scheme of one's own is not cached: its code may have changed.
        own = not type(self).__module__.startswith("fedhet.")
        key = {
            "scheme": type(self).__name__,
            "settings": self._settings(),
            "seed": seed,
            "labels": labels_digest(labels),
            # numpy may change its random streams between versions
            "versions": [_ALGORITHM, version("flwr-datasets"), np.__version__],
        }
        arrays = made() if own else cached_arrays("partition", key, made, verified=True)
        indices = np.split(arrays["indices"], arrays["ends"][:-1])
        return Partition(self.name, indices, pool_test=self.pool_test)

    @abstractmethod
    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        """The indices of each client's samples, in any order.

        Args:
            labels: (n,) int64, the labels of all samples.
            seed: the seed of the run, from which alone the draw may come.
        """

    def _settings(self) -> dict[str, Any]:
        """The settings that determine who has which samples."""
        settings = asdict(self)
        for key in ("name", "split", "noise", "pool_test"):
            del settings[key]
        return settings

    def _written(self, *without: str) -> str:
        """These settings as they are written on the command line, except for some."""
        settings = self._settings().items()
        return " ".join(f"partition.{key}={value}" for key, value in settings if key not in without)

    def _check_indices(self, indices: list[np.ndarray], n: int) -> None:
        holders = np.bincount(np.concatenate(indices), minlength=n)
        if holders.max() > 1 or len(holders) > n:
            raise RuntimeError(
                f"partition {self.name}: sample {holders.argmax()} is assigned to"
                f" {holders.max()} clients; at most one may have it"
            )
        smallest = min(map(len, indices))
        if smallest < self.min_size:
            raise ConfigError(
                f"partition.min_size={self.min_size}: a client would get only {smallest} of {n}"
                f" samples ({self._written()})"
            )
        if left := n - int(holders.sum()):
            log.info("partition %s: %d of %d samples are not assigned", self.name, left, n)

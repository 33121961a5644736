"""The schemes: who holds which samples, drawn by flwr-datasets' partitioners wherever it has one.

The samples are put in a seeded random order first, as flwr-datasets' `FederatedDataset` does,
because files often come sorted by class and a partitioner cuts what it is given."""

from __future__ import annotations

import logging
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedhet.check import one_of
from fedhet.data.scheme import Drawn, Partition
from fedhet.errors import ConfigError
from fedhet.streams import generator, integer

log = logging.getLogger("fedhet.data")


@dataclass(frozen=True, kw_only=True)
class Iid(Drawn):
    """Equal random parts (sizes differ by one at most), cut as flwr-datasets' IidPartitioner cuts
    them.

    The partitioner itself takes 0.5 ms per client and shares no indices; its blocks are exactly
    `np.array_split`."""

    def _draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        return np.array_split(_order(labels, seed), self.clients)


@dataclass(frozen=True, kw_only=True)
class _Flower(Drawn):
    """A scheme that is one of flwr-datasets' partitioners, which is imported when needed: that
    takes seconds."""

    @abstractmethod
    def _partitioner(self, n: int, seed: int) -> Any:
        """Made for n samples."""

    def _draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        from datasets import Dataset

        order = _order(labels, seed)
        partitioner = self._partitioner(len(labels), integer(seed, "partition"))
        partitioner.dataset = Dataset.from_dict({"label": labels[order], "index": order})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter(
                "always", UserWarning
            )  # flwr-datasets' own; the rest is between its dependencies
            try:
                partitioner.load_partition(0)  # makes it assign all samples
            except ValueError as error:
                raise ConfigError(
                    f"partition {self.name} of {len(labels)} samples by {self._settings()} is"
                    f" impossible: {error}"
                ) from error
        if caught:
            log.info(
                "partition %s: flwr-datasets warned %d times, last: %.200s",
                self.name,
                len(caught),
                caught[-1].message,
            )
        rows = np.asarray(
            partitioner.dataset["index"][:]
        )  # ShardPartitioner has sorted its dataset
        # All at once by a private attribute: load_partition makes a Hugging Face dataset per
        # client, 0.5 ms each.
        assigned = partitioner._partition_id_to_indices
        return [rows[np.asarray(assigned[pid], dtype=np.int64)] for pid in range(self.clients)]


@dataclass(frozen=True, kw_only=True)
class Dirichlet(_Flower):
    """Each class is divided in proportions drawn from Dirichlet(alpha),
    https://arxiv.org/abs/1905.12022 without balancing.

    Args:
        alpha: > 0; small: few clients hold a class, large: all hold equal shares.

    It is drawn anew until every client has min_size samples, after the first time 10 times at most
    (flwr-datasets' limit)."""

    alpha: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("alpha")

    def _partitioner(self, n: int, seed: int) -> Any:
        from flwr_datasets.partitioner import DirichletPartitioner

        return DirichletPartitioner(
            self.clients, "label", float(self.alpha), self.min_size, shuffle=False, seed=seed
        )


@dataclass(frozen=True, kw_only=True)
class Pathological(_Flower):
    """Every client holds samples of exactly `classes` classes, each class divided equally among its
    holders.

    Client p has class p mod C, so that with C clients or more no class is left out; its other
    classes are drawn at random (flwr-datasets' "first-deterministic")."""

    classes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._integer("classes", 1)

    def _draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        if self.classes > (present := len(np.unique(labels))):
            raise ConfigError(
                f"partition.classes={self.classes}: the data have only {present} classes"
            )
        return super()._draw(labels, seed)

    def _partitioner(self, n: int, seed: int) -> Any:
        from flwr_datasets.partitioner import PathologicalPartitioner

        return PathologicalPartitioner(
            self.clients, "label", self.classes, "first-deterministic", shuffle=False, seed=seed
        )


@dataclass(frozen=True, kw_only=True)
class Shards(_Flower):
    """McMahan et al. 2017: sorted by label, cut into clients * shards equal shards, each client
    given `shards` random ones.

    What is left after cutting, fewer samples than there are shards, or than a few shards hold, goes
    to no client."""

    shards: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._integer("shards", 1)

    def _draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        if (wanted := self.clients * self.shards) > len(labels):
            raise ConfigError(
                f"partition.shards={self.shards}: {self.clients} clients would need {wanted} shards"
                f" of {len(labels)} samples"
            )
        return super()._draw(labels, seed)

    def _partitioner(self, n: int, seed: int) -> Any:
        from flwr_datasets.partitioner import ShardPartitioner

        return ShardPartitioner(self.clients, "label", self.shards, shuffle=False, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Quantity(_Flower):
    """Equal label distributions, unequal sizes.

    Args: sizes: "dirichlet": each client has min_size samples, one at least, and the rest is shared
        out in proportions drawn from Dirichlet(alpha), the quantity skew of NIID-Bench
        (https://arxiv.org/abs/2102.02079). "linear", "square", "exponential": client k of 1, 2, ...
        has a share proportional to k, k^2 or e^k. alpha: > 0, of "dirichlet"; the smaller, the more
        unequal.
    """

    sizes: str
    alpha: float

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("partition.sizes", self.sizes, ("dirichlet", "linear", "square", "exponential"))
        self._number("alpha")

    def _partitioner(self, n: int, seed: int) -> Any:
        from flwr_datasets.partitioner import (
            ExponentialPartitioner,
            LinearPartitioner,
            SizePartitioner,
            SquarePartitioner,
        )

        if self.sizes == "dirichlet":
            return SizePartitioner(self._drawn_sizes(n, seed))
        return {
            "linear": LinearPartitioner,
            "square": SquarePartitioner,
            "exponential": ExponentialPartitioner,
        }[self.sizes](self.clients)

    def _drawn_sizes(self, n: int, seed: int) -> list[int]:
        least = max(self.min_size, 1)
        shares = np.random.default_rng(seed).dirichlet([float(self.alpha)] * self.clients)
        ends = np.floor(np.cumsum(shares) * (n - least * self.clients)).astype(int)
        ends[-1] = n - least * self.clients  # whatever the last digits of the sum
        return (least + np.diff(ends, prepend=0)).tolist()


@dataclass(frozen=True, kw_only=True)
class Natural(_Flower):
    """A client is a natural owner (a writer, a speaker, a source) with all its samples.

    Args:
        clients: that many owners, drawn at random; None: every owner.
        min_size: owners with fewer samples are left out.

    Clients are in the order of the owners' names in the dataset.
    """

    clients: int | None  # type: ignore[assignment]

    def _integer(self, key: str, least: int) -> None:
        if key != "clients" or self.clients is not None:
            super()._integer(key, least)

    def assign(
        self,
        labels: np.ndarray,
        seed: int,
        owners: np.ndarray | None = None,
        owner_names: Sequence[str] = (),
    ) -> Partition:
        """As `Drawn.assign`, by owner in place of label."""
        if owners is None:
            raise ConfigError(
                "partition=natural: these data do not say whose samples they are; femnist"
                " (writers), shakespeare (speakers) and chest_xray (sources) do, and your own data"
                " with a column of owners"
            )
        able = len(self._able(owners))
        wanted = able if self.clients is None else self.clients
        if not 1 <= wanted <= able:
            asked = "" if self.clients is None else f"partition.clients={self.clients} with "
            raise ConfigError(
                f"{asked}partition.min_size={self.min_size}: {able} of {len(owner_names)} owners"
                " have as many samples"
            )
        drawn = Drawn.assign(replace(self, clients=wanted), owners, seed)
        return replace(
            drawn, owners=tuple(owner_names[owners[indices[0]]] for indices in drawn.indices)
        )

    def _able(self, owners: np.ndarray) -> np.ndarray:
        return np.flatnonzero(np.bincount(owners) >= max(self.min_size, 1))

    def _draw(self, owners: np.ndarray, seed: int) -> list[np.ndarray]:
        chosen = generator(seed, "partition", "owners").choice(
            self._able(owners), self.clients, replace=False
        )
        rows = np.flatnonzero(np.isin(owners, chosen))
        return [rows[part] for part in super()._draw(owners[rows], seed)]

    def _partitioner(self, n: int, seed: int) -> Any:
        # in groups of one: NaturalIdPartitioner draws a progress bar
        from flwr_datasets.partitioner import GroupedNaturalIdPartitioner

        return GroupedNaturalIdPartitioner("label", group_size=1, sort_unique_ids=True)


def _order(labels: np.ndarray, seed: int) -> np.ndarray:
    return generator(seed, "partition", "order").permutation(len(labels))

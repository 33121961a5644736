"""The schemes that draw a partition, with flwr-datasets' partitioners wherever it has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fedhet.core.check import counted, one_of
from fedhet.core.errors import ConfigError
from fedhet.core.streams import generator
from fedhet.data.flower_scheme import FlowerScheme, RedrawnScheme, random_order
from fedhet.data.scheme import DrawnScheme, Partition

# What the draws of a scheme may cost before it gives up: a few seconds of one core.
_MOST_DRAWS = 50_000
_MOST_SHARES = 50_000_000  # of a client in a class
_MOST_CHOICES = 200_000  # of a class for a client


@dataclass(frozen=True, kw_only=True)
class Iid(DrawnScheme):
    """Equal random parts, whose sizes differ by one at most.

    The parts are exactly those of flwr-datasets' IidPartitioner. `np.array_split` replaces it
    because it takes 0.5 ms per client and does not give access to the indices.
    """

    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        return np.array_split(random_order(labels, seed), self.clients)


@dataclass(frozen=True, kw_only=True)
class Dirichlet(RedrawnScheme):
    """Each class is divided in proportions that are drawn from Dirichlet(alpha).

    This is https://arxiv.org/abs/1905.12022 without balancing. The draw is repeated until every
    client has min_size samples.

    Args:
        alpha: > 0; small: few clients hold a class, large: all hold equal shares.
    """

    by_class: ClassVar[bool] = True
    alpha: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("alpha")

    def _partitioner(self, n: int, seed: int) -> Any:
        from flwr_datasets.partitioner import DirichletPartitioner

        return DirichletPartitioner(
            self.clients, "label", float(self.alpha), self.min_size, shuffle=False, seed=seed
        )

    def _draw_sizes(self, class_sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        # as DirichletPartitioner does it, which returns samples and not sizes
        shares = rng.dirichlet(np.full(self.clients, float(self.alpha)), len(class_sizes))
        ends = (np.cumsum(shares, axis=1) * class_sizes[:, None]).astype(int)
        ends[:, -1] = class_sizes
        return np.diff(ends, axis=1, prepend=0).sum(0)

    def _draw_limit(self, classes: int) -> int:
        # at least flwr-datasets' eleven
        return min(_MOST_DRAWS, max(_MOST_SHARES // (self.clients * classes), 11))

    @property
    def _remedy(self) -> str:
        return "a smaller partition.min_size or a larger partition.alpha"


@dataclass(frozen=True, kw_only=True)
class Pathological(RedrawnScheme):
    """Every client has samples of exactly `classes` classes.

    Each class is divided equally among the clients that have it. Client p has class p mod C, so
    that with C clients or more no class is left out; its other classes are drawn at random
    (flwr-datasets' "first-deterministic"), and drawn again until every client has min_size samples
    and at least one of each of its classes.

    Args:
        classes: the number of classes of each client.
    """

    by_class: ClassVar[bool] = True
    classes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_integer("classes", 1)

    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        present = len(np.unique(labels))
        if self.classes > present:
            raise ConfigError(
                f"partition.classes={self.classes}: the data have only"
                f" {counted(present, 'class', 'classes')}"
            )
        if (needed := self.clients * self.classes) > len(labels):
            raise ConfigError(
                f"partition.classes={self.classes}: {self.clients} clients would need {needed}"
                f" samples, one of each of their classes, but there are {len(labels)}"
            )
        return super().draw(labels, seed)

    def _partitioner(self, n: int, seed: int) -> Any:
        from flwr_datasets.partitioner import PathologicalPartitioner

        return PathologicalPartitioner(
            self.clients, "label", self.classes, "first-deterministic", shuffle=False, seed=seed
        )

    def _draw_sizes(self, class_sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        # as PathologicalPartitioner does it
        present = len(class_sizes)
        has = np.zeros((self.clients, present), dtype=bool)
        for pid in range(self.clients):
            has[pid, pid % present] = True
            missing = self.classes - 1
            while missing:
                label = rng.choice(present, size=1)[0]
                missing -= not has[pid, label]
                has[pid, label] = True
        holders = has.sum(0)
        if np.any(holders > class_sizes):
            return np.array([-1])  # it refuses this draw: a client would have none of a class
        share, rest = np.divmod(class_sizes, np.maximum(holders, 1))
        rank = np.cumsum(has, axis=0) - 1  # among the holders of the class
        return np.where(has, share + (rank < rest), 0).sum(1)

    def _draw_limit(self, classes: int) -> int:
        if self.classes in (1, classes):
            return 1  # nothing is random
        # the choices until a client has its other classes: those that it already has are repeated
        choices = sum(classes / (classes - chosen) for chosen in range(1, self.classes))
        return max(int(_MOST_CHOICES / (self.clients * choices)), 1)

    @property
    def _remedy(self) -> str:
        return "a smaller partition.min_size"


@dataclass(frozen=True, kw_only=True)
class Shards(FlowerScheme):
    """The scheme of McMahan et al. 2017.

    The samples are sorted by label and cut into clients * shards equal shards, and each client is
    given `shards` random ones. The remainder of the cut (fewer samples than there are shards, or
    than a few shards contain) is not assigned.

    Args:
        shards: the number of shards of each client.
    """

    by_class: ClassVar[bool] = True
    shards: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_integer("shards", 1)

    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        if (wanted := self.clients * self.shards) > len(labels):
            raise ConfigError(
                f"partition.shards={self.shards}: {self.clients} clients would need {wanted} shards"
                f" of {len(labels)} samples"
            )
        return super().draw(labels, seed)

    def _partitioner(self, n: int, seed: int) -> Any:
        from flwr_datasets.partitioner import ShardPartitioner

        return ShardPartitioner(self.clients, "label", self.shards, shuffle=False, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Quantity(FlowerScheme):
    """Equal label distributions, unequal sizes.

    Args:
        sizes: "dirichlet": each client has min_size samples, at least one, and the others are
            shared out in proportions drawn from Dirichlet(alpha), the quantity skew of NIID-Bench
            (https://arxiv.org/abs/2102.02079). "linear", "square", "exponential": client k of
            1, 2, ... has a share proportional to k, k^2 or e^k.
        alpha: > 0, for "dirichlet"; the smaller, the more unequal.
    """

    sizes: str
    alpha: float

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("partition.sizes", self.sizes, ("dirichlet", "linear", "square", "exponential"))
        self._check_positive("alpha")

    def _partitioner(self, n: int, seed: int) -> Any:
        from flwr_datasets import partitioner

        if self.sizes == "dirichlet":
            return partitioner.SizePartitioner(self._draw_sizes(n, seed))
        return {
            "linear": partitioner.LinearPartitioner,
            "square": partitioner.SquarePartitioner,
            "exponential": partitioner.ExponentialPartitioner,
        }[self.sizes](self.clients)

    def _draw_sizes(self, n: int, seed: int) -> list[int]:
        least = max(self.min_size, 1)
        rest = n - least * self.clients
        shares = np.random.default_rng(seed).dirichlet([float(self.alpha)] * self.clients)
        ends = np.floor(np.cumsum(shares) * rest).astype(int)
        ends[-1] = rest  # the cumulative sum may end just below 1
        return (least + np.diff(ends, prepend=0)).tolist()


@dataclass(frozen=True, kw_only=True)
class Natural(FlowerScheme):
    """A client is a natural owner (a writer, a speaker, a source) with all its samples.

    Clients are in the order of the owners' names in the dataset.

    Args:
        clients: the number of owners, drawn at random; None: every owner.
        min_size: owners with fewer samples are left out.
    """

    clients: int | None  # type: ignore[assignment]

    def _check_integer(self, key: str, low: int) -> None:
        if key != "clients" or self.clients is not None:
            super()._check_integer(key, low)

    def assign(
        self,
        labels: np.ndarray,
        seed: int,
        owners: np.ndarray | None = None,
        owner_names: Sequence[str] = (),
    ) -> Partition:
        """As `DrawnScheme.assign`, with owners in the place of labels."""
        if owners is None:
            pooled = ""
            if self.pool_test:
                pooled = ", or not of those in the test set, which partition.pool_test=true shares"
            raise ConfigError(
                f"partition=natural: these data do not name the owners of their samples{pooled};"
                " femnist (writers), shakespeare (speakers) and chest_xray (sources) do, and so do"
                " your own data with a column of owners"
            )
        eligible = len(self._eligible(owners))
        wanted = eligible if self.clients is None else self.clients
        if not 1 <= wanted <= eligible:
            clients = "" if self.clients is None else f"partition.clients={self.clients} with "
            raise ConfigError(
                f"{clients}partition.min_size={self.min_size}: only {eligible} of"
                f" {len(owner_names)} owners have enough samples"
            )
        partition = DrawnScheme.assign(replace(self, clients=wanted), owners, seed)
        names = tuple(owner_names[owners[indices[0]]] for indices in partition.indices)
        return replace(partition, owners=names)

    def _eligible(self, owners: np.ndarray) -> np.ndarray:
        """The owners with at least `min_size` samples."""
        return np.flatnonzero(np.bincount(owners) >= max(self.min_size, 1))

    def draw(self, owners: np.ndarray, seed: int) -> list[np.ndarray]:
        draw = generator(seed, "partition", "owners")
        chosen = draw.choice(self._eligible(owners), self.clients, replace=False)
        rows = np.flatnonzero(np.isin(owners, chosen))
        return [rows[part] for part in super().draw(owners[rows], seed)]

    def _partitioner(self, n: int, seed: int) -> Any:
        # groups of one owner: NaturalIdPartitioner would show a progress bar
        from flwr_datasets.partitioner import GroupedNaturalIdPartitioner

        return GroupedNaturalIdPartitioner("label", group_size=1, sort_unique_ids=True)

"""Partitions and partition schemes: drawn as flwr-datasets 0.6.1 draws them, natural, or saved."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedhet.core import streams
from fedhet.core.check import Checked, counted, each, integer, setting, text
from fedhet.core.errors import ConfigError, DataError
from fedhet.data.files import cache_root, log, permitted
from fedhet.data.forms import read_object
from fedhet.data.storage import write_json

# Limits on the draws of a scheme before it gives up, which takes a few seconds of one core.
_MOST_DRAWS = 50_000
_MOST_SHARES = 50_000_000  # limits clients x classes x draws
_MOST_CHOICES = 200_000  # limits the random choices of a class for a client
# The form of a saved partition's name, and the entries that its file must have.
_NAME = re.compile(r"\w[\w.+-]*")
_REQUIRED = {
    "name": str,
    "hash": str,
    "labels": str,
    "samples": int,
    "settings": dict,
    "owners": [str],
    "indices": list,
}


@dataclass(frozen=True)
class Partition:
    """Each client's samples.

    Args:
        name: the name of the scheme.
        indices: per client, the ascending int64 indices of its samples; no two clients share a
            sample.
        owners: per client, the name of the natural owner that the client stands for; empty if
            clients are not natural owners.
        pool_test: whether indices count through the training set and then the test set.

    Attributes:
        hash: 16 hex digits of the sha256 over each client's number of samples and indices, as
            little-endian int64, followed by b"pool_test" if `pool_test` is true.
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
    """Return labels in a fixed dtype: (n,) int64 classes, or (n, K) float32 for other targets."""
    return np.ascontiguousarray(labels, dtype="<f4" if labels.dtype.kind == "f" else "<i8")


def labels_digest(labels: np.ndarray) -> str:
    """Return 16 hex digits that identify the labels for which a partition was made."""
    return hashlib.sha256(_plain(labels).tobytes()).hexdigest()[:16]


def check_split(fractions: Sequence[float]) -> tuple[float, float, float]:
    """Return `partition.split` as (train, validation, test).

    Raises:
        ConfigError: the fractions are not three numbers >= 0 with sum 1, or train is 0.
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
class Scheme(Checked, ABC):
    """A way to assign samples to clients. Its fields are the settings `partition.<field>`.

    Args:
        name: the scheme's name in the run's record.
        split: each client's [train, validation, test] fractions (fedhet.data.federation.split).
        noise: the variance of the noise of the last client (fedhet.data.federation.FederatedData).
        pool_test: whether the test set is divided among the clients, too. `assign` then receives
            the labels and owners of the pooled dataset (fedhet.data.dataset.Dataset.pooled).
    """

    GROUP: ClassVar[str] = "partition"
    by_class: ClassVar[bool] = False  # whether the scheme requires one class per sample

    name: str
    split: Sequence[float]
    noise: float = setting(low=0)
    pool_test: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "split", check_split(self.split))

    def assign(
        self,
        labels: np.ndarray,
        seed: int,
        owners: np.ndarray | None = None,
        owner_names: Sequence[str] = (),
    ) -> Partition:
        """Assign samples to clients.

        Args:
            labels: the labels of all samples: (n,) int64 classes, or (n, K) floating-point targets.
            seed: the seed of the run.
            owners: (n,), the numbers of the samples' natural owners; None if the data do not name
                them.
            owner_names: the names of the owners.

        Raises:
            ConfigError: the settings are impossible for these data; the message names the numbers.
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

    clients: int = setting(low=1)
    min_size: int = setting(low=0)

    def drawn(self, labels: np.ndarray, seed: int) -> Partition:
        """Draw the assignment."""
        labels = _plain(labels)
        n = len(labels)
        if (needed := self.clients * max(self.min_size, 1)) > n:
            raise ConfigError(
                f"partition.clients={self.clients} with partition.min_size={self.min_size}:"
                f" too many clients; they need {needed} samples, and the data have {n}"
            )
        indices = [np.sort(part) for part in self.draw(labels, seed)]
        holders = np.bincount(np.concatenate(indices), minlength=n)
        if holders.max() > 1 or len(holders) > n:
            raise RuntimeError(
                f"partition {self.name}: sample {holders.argmax()} is assigned to"
                f" {holders.max()} clients; at most one may have it"
            )
        if (smallest := min(map(len, indices))) < self.min_size:
            raise ConfigError(
                f"partition.min_size={self.min_size}: a client would get only {smallest} of {n}"
                f" samples; the settings are {self}"
            )
        return Partition(self.name, indices, pool_test=self.pool_test)

    @abstractmethod
    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        """Return the indices of each client's samples, in any order.

        Args:
            labels: (n,) int64, the labels of all samples.
            seed: the seed of the run, the only source of randomness.
        """


def random_order(labels: np.ndarray, seed: int) -> np.ndarray:
    """Return a random order (n,) of the samples, because files are often sorted by class."""
    return streams.generator(seed, "partition", "order").permutation(len(labels))


def _by_class(labels: np.ndarray, seed: int) -> np.ndarray:
    """Return the samples (n,) sorted by label; samples of one class are in `random_order`."""
    order = random_order(labels, seed)
    return order[np.argsort(labels[order], kind="stable")]


def _divided(labels: np.ndarray, seed: int, held: np.ndarray) -> list[np.ndarray]:
    """Return each client's samples; `held` (clients, classes) says how many it gets per class."""
    by_class = _by_class(labels, seed)
    left = np.unique(labels, return_counts=True)[1] - held.sum(0)
    sizes = np.vstack([held, left])  # the last row: samples that no client gets
    holders = np.repeat(np.tile(np.arange(len(sizes)), held.shape[1]), sizes.T.ravel())
    return np.split(by_class[np.argsort(holders, kind="stable")], np.cumsum(held.sum(1)))[:-1]


def _equal_shares(has: np.ndarray, class_sizes: np.ndarray) -> np.ndarray:
    """Return (clients, classes): each class is divided equally among the clients that have it."""
    share, rest = np.divmod(class_sizes, np.maximum(has.sum(0), 1))
    rank = np.cumsum(has, axis=0) - 1  # a client's rank among the holders of the class
    return np.where(has, share + (rank < rest), 0)


@dataclass(frozen=True, kw_only=True)
class Iid(DrawnScheme):
    """Random parts of equal size (up to one sample), as IidPartitioner makes them."""

    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        return np.array_split(random_order(labels, seed), self.clients)


@dataclass(frozen=True, kw_only=True)
class Listed(DrawnScheme):
    """Client p has the classes of list number p mod m, for m lists.

    Each class is divided randomly and equally among the clients that have it.

    Args:
        classes: lists of class numbers. The lists of all clients together must name every class of
            the data.
    """

    by_class: ClassVar[bool] = True
    classes: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        super().__post_init__()
        lists = each(partial(each, integer), "partition.classes", self.classes, low=0)
        if not lists or not all(one and len({*one}) == len(one) for one in lists):
            raise ConfigError(
                f"partition.classes={[list(one) for one in lists]}: must be lists of different"
                " classes, with at least one class in each, such as [[0,1],[2,3]]"
            )
        object.__setattr__(self, "classes", lists)

    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        own = [self.classes[pid % len(self.classes)] for pid in range(self.clients)]
        present, class_sizes = np.unique(labels, return_counts=True)
        if (given := {number for classes in own for number in classes}) != {*present.tolist()}:
            raise ConfigError(
                f"partition.classes: the clients' lists name the classes {sorted(given)}, but the"
                f" data have {present.tolist()}; they must be the same"
            )
        has = np.stack([np.isin(present, classes) for classes in own])
        return _divided(labels, seed, _equal_shares(has, class_sizes))


@dataclass(frozen=True, kw_only=True)
class RedrawnScheme(DrawnScheme):
    """A scheme that draws again until every client has `min_size` samples.

    It draws as flwr-datasets' partitioner does, but does not give up after a few draws. A draw
    determines only the numbers of samples, so it takes microseconds.
    """

    by_class: ClassVar[bool] = True

    @abstractmethod
    def _draw_held(self, class_sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        """Return the next draw: the numbers of samples (clients, classes). Advance `rng`.

        Return None if the partitioner would refuse this draw.

        Args:
            class_sizes: (classes,), the number of samples of each class.
            rng: the partitioner's random stream.
        """

    @abstractmethod
    def _draw_limit(self, classes: int) -> int:
        """Return the number of draws after which the scheme gives up (a few seconds at most)."""

    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        class_sizes = np.unique(labels, return_counts=True)[1]
        rng = np.random.default_rng(streams.integer(seed, "partition"))
        limit = self._draw_limit(len(class_sizes))
        smallest = -1  # stays -1 until the first draw that is not refused
        for draw in range(1, limit + 1):
            held = self._draw_held(class_sizes, rng)
            if held is None:
                continue
            smallest = max(smallest, int(held.sum(1).min()))
            if smallest >= self.min_size:
                if draw > 1:
                    log.info(
                        "partition %s: drawn %d times until every client had min_size=%d samples",
                        self.name,
                        draw,
                        self.min_size,
                    )
                return _divided(labels, seed, held)
        raise ConfigError(
            f"partition.clients={self.clients}: too many clients; none of {limit:,} draws gave each"
            f" client partition.min_size={self.min_size} of the {len(labels)} samples in"
            f" {counted(len(class_sizes), 'class', 'classes')}; the smallest client got"
            f" {max(smallest, 0)} at best. The settings are {self}"
        )


@dataclass(frozen=True, kw_only=True)
class Dirichlet(RedrawnScheme):
    """Each class is divided in proportions that are drawn from Dirichlet(alpha).

    This is the scheme of https://arxiv.org/abs/1905.12022 without balancing, as in
    DirichletPartitioner.

    Args:
        alpha: > 0. If it is small, few clients hold a class; if it is large, all clients hold
            nearly equal shares.
    """

    alpha: float = setting(open_low=0)

    def _draw_held(self, class_sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        shares = rng.dirichlet(np.full(self.clients, float(self.alpha)), len(class_sizes))
        ends = (np.cumsum(shares, axis=1) * class_sizes[:, None]).astype(int)
        ends[:, -1] = class_sizes
        return np.diff(ends, axis=1, prepend=0).T

    def _draw_limit(self, classes: int) -> int:
        # Make at least eleven draws, as flwr-datasets does.
        return min(_MOST_DRAWS, max(_MOST_SHARES // (self.clients * classes), 11))


@dataclass(frozen=True, kw_only=True)
class Pathological(RedrawnScheme):
    """Every client has samples of exactly `classes` classes.

    Each class is divided equally among the clients that have it. Client p has class p mod C. With
    at least C clients, no class is therefore left out. The other classes of a client are drawn at
    random (the "first-deterministic" of PathologicalPartitioner), and drawn again until every
    client has min_size samples and at least one sample of each of its classes.

    Args:
        classes: the number of classes of each client.
    """

    classes: int = setting(low=1)

    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        present = len(np.unique(labels))
        if self.classes > present:
            raise ConfigError(
                f"partition.classes={self.classes}: the data have only"
                f" {counted(present, 'class', 'classes')}"
            )
        return super().draw(labels, seed)

    def _draw_held(self, class_sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        present = len(class_sizes)
        has = np.zeros((self.clients, present), dtype=bool)
        for pid, own in enumerate(has):
            own[pid % present] = True
            while own.sum() < self.classes:
                own[rng.choice(present, size=1)[0]] = True
        return None if np.any(has.sum(0) > class_sizes) else _equal_shares(has, class_sizes)

    def _draw_limit(self, classes: int) -> int:
        if self.classes in (1, classes):
            return 1  # nothing is random
        # The expected number of choices of a client. If it draws a class that it has, it draws
        # again.
        choices = sum(classes / (classes - chosen) for chosen in range(1, self.classes))
        return max(int(_MOST_CHOICES / (self.clients * choices)), 1)


@dataclass(frozen=True, kw_only=True)
class Shards(DrawnScheme):
    """The scheme of McMahan et al. 2017, with the samples of ShardPartitioner.

    The samples are sorted by label and cut into equal shards. Each client gets `shards` random
    shards. A shard has n // (clients * shards) samples. Samples that are left over are not
    assigned.

    Args:
        shards: the number of shards of each client.
    """

    by_class: ClassVar[bool] = True
    shards: int = setting(low=1)

    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        n = len(labels)
        if (wanted := self.clients * self.shards) > n:
            raise ConfigError(
                f"partition.shards={self.shards}: {self.clients} clients need {wanted} shards, but"
                f" there are only {n} samples"
            )
        size = n // wanted
        cut = _by_class(labels, seed)[: n // size * size].reshape(-1, size)
        # There may be more shards than the clients need; the permutation leaves out random ones.
        drawn = streams.generator(seed, "partition").permutation(len(cut))[:wanted]
        return [*cut[drawn].reshape(self.clients, -1)]


@dataclass(frozen=True, kw_only=True)
class Quantity(DrawnScheme):
    """Equal label distributions, unequal sizes, with the samples of flwr-datasets.

    Args:
        sizes: "dirichlet": each client has min_size samples, at least one. The rest is shared in
            proportions drawn from Dirichlet(alpha), the quantity skew of NIID-Bench
            (https://arxiv.org/abs/2102.02079). "linear", "square", "exponential": client k = 1, 2,
            ... gets a share proportional to k, k^2 or e^k.
        alpha: > 0, for "dirichlet"; a smaller alpha makes sizes more unequal.
    """

    sizes: str = setting(allowed=("dirichlet", "linear", "square", "exponential"))
    alpha: float = setting(open_low=0)

    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        n = len(labels)
        if self.sizes == "dirichlet":
            sizes = self._drawn_sizes(n, streams.integer(seed, "partition"))
        else:
            share = {"linear": np.positive, "square": np.square, "exponential": np.exp}[self.sizes]
            shares = share(np.linspace(1, self.clients, self.clients))
            sizes = (shares / shares.sum() * n).astype(np.int64)
            sizes[-1] += n - sizes.sum()  # samples that rounding down has left over
            if sizes.min() < 1:
                raise ConfigError(f"{self}: a client would get none of the {n} samples")
        return np.split(random_order(labels, seed), np.cumsum(sizes)[:-1])

    def _drawn_sizes(self, n: int, seed: int) -> np.ndarray:
        least = max(self.min_size, 1)
        rest = n - least * self.clients
        shares = np.random.default_rng(seed).dirichlet([float(self.alpha)] * self.clients)
        ends = np.floor(np.cumsum(shares) * rest).astype(int)
        ends[-1] = rest  # the cumulative sum may end just below 1
        return least + np.diff(ends, prepend=0)


@dataclass(frozen=True, kw_only=True)
class Natural(DrawnScheme):
    """Each client is a natural owner (a writer, a speaker, a source) with all its samples.

    Clients are in the order of the owners' names in the dataset.

    Args:
        clients: the number of owners, who are drawn at random; None: every owner.
        min_size: owners with fewer samples are left out.
    """

    clients: int | None = setting(low=1)  # type: ignore[assignment]

    def assign(
        self,
        labels: np.ndarray,
        seed: int,
        owners: np.ndarray | None = None,
        owner_names: Sequence[str] = (),
    ) -> Partition:
        """Assign samples to clients by their owners instead of their labels."""
        if owners is None:
            raise ConfigError(
                "partition=natural: these data do not name the owners of their samples (with"
                " partition.pool_test=true, the test set needs owners, too). Use femnist (writers),"
                " shakespeare (speakers), chest_xray (sources), or your own data with a column of"
                " owners (dataset.owner)"
            )
        eligible = len(self._eligible(owners))
        wanted = eligible if self.clients is None else self.clients
        if not 1 <= wanted <= eligible:
            raise ConfigError(
                f"partition.clients={self.clients} with partition.min_size={self.min_size}: only"
                f" {eligible} of {len(owner_names)} owners have enough samples"
            )
        partition = replace(self, clients=wanted).drawn(owners, seed)
        names = tuple(owner_names[owners[indices[0]]] for indices in partition.indices)
        return replace(partition, owners=names)

    def _eligible(self, owners: np.ndarray) -> np.ndarray:
        """Return the owners with at least `min_size` samples, at least one."""
        return np.flatnonzero(np.bincount(owners) >= max(self.min_size, 1))

    def draw(self, owners: np.ndarray, seed: int) -> list[np.ndarray]:
        draw = streams.generator(seed, "partition", "owners")
        chosen = draw.choice(self._eligible(owners), self.clients, replace=False)
        parts = np.split(np.argsort(owners, kind="stable"), np.cumsum(np.bincount(owners))[:-1])
        return [parts[owner] for owner in np.sort(chosen)]


# ---- saved partitions: named ones, and the partition.json of a run


def saved_path(name: str) -> Path:
    """Return the file of the partition that is or will be saved as `name`.

    Raises:
        ConfigError: the name is not allowed.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name}: a name consists of letters, digits and _ . + - and begins with a"
            " letter, a digit or _"
        )
    return cache_root() / "partitions" / f"{name}.json"


def read_saved(name: str) -> tuple[Path, dict[str, Any]]:
    """Return the file that `partition.name` refers to, and its content.

    Args:
        name: a saved name, a run folder, or the path of a partition.json.

    Raises:
        ConfigError: there is no such partition.
        DataError: the file is damaged, or lacks a required entry.
    """
    given = Path(text("partition.name", name)).expanduser()
    own = [saved_path(name)] if _NAME.fullmatch(name) else []
    path = next((path for path in (*own, given / "partition.json", given) if path.is_file()), None)
    if path is None:
        saved = sorted(path.stem for path in (cache_root() / "partitions").glob("*.json"))
        raise ConfigError(
            f"partition.name={name}: must be a run folder, a partition.json, or a saved name;"
            f" saved names are: {', '.join(saved) or 'none'}"
        )
    if path not in own:
        path = permitted(path.absolute())
    return path, read_object(path, _REQUIRED, _REQUIRED)


def save(name: str, record: dict[str, Any]) -> Path:
    """Save the content of a partition.json as `name`; several processes may do so at a time.

    Raises:
        ConfigError: another partition is already saved under this name.
    """
    path = saved_path(name)
    existing = read_saved(name)[1] if path.exists() else record
    theirs, ours = (
        [one["hash"], *(one["settings"].get(key) for key in ("split", "noise"))]
        for one in (existing, record)
    )
    if theirs != ours:
        raise ConfigError(
            f"--name {name}: {path} is another partition; its hash, split and noise are {theirs},"
            f" those to save are {ours}; choose another name or remove the file"
        )
    write_json(path, record, indent=None)
    return path


@dataclass(frozen=True, kw_only=True)
class Saved(Scheme):
    """A saved partition of the same data.

    Args:
        name: a name given to `python -m fedhet data partition --name`, a run folder, or the path of
            a partition.json.
        split, noise: None: the saved value.
        pool_test: None, or the saved value; no other value, because the indices depend on it.
    """

    split: Sequence[float] | None  # type: ignore[assignment]
    noise: float | None  # type: ignore[assignment]
    pool_test: bool | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        path, record = read_saved(self.name)
        saved = {"pool_test": False, **record["settings"]}
        if self.pool_test not in (None, saved["pool_test"]):
            raise ConfigError(
                f"partition.pool_test={self.pool_test}: {path} was made with {saved['pool_test']},"
                " and a saved partition cannot change it"
            )
        for key in ("split", "noise", "pool_test"):
            if getattr(self, key) is None:
                object.__setattr__(self, key, saved.get(key))
        try:
            super().__post_init__()
        except ConfigError as error:
            raise ConfigError(f"partition.name={path}: {error}") from error

    def drawn(self, labels: np.ndarray, seed: int) -> Partition:
        """Return the saved partition; the seed is ignored.

        Raises:
            ConfigError: the partition was made for other data.
            DataError: the indices are damaged.
        """
        path, record = read_saved(self.name)
        digest = labels_digest(labels)
        if (record["samples"], record["labels"]) != (len(labels), digest):
            raise ConfigError(
                f"partition.name={self.name}: {path} was made for other data, with"
                f" {counted(record['samples'], 'sample')} and the labels' digest"
                f" {record['labels']}; these data have {len(labels)} samples and the digest"
                f" {digest}"
            )
        try:
            indices = [np.array(each, dtype=np.int64) for each in record["indices"]]
            owner_names = tuple(record["owners"])
            partition = Partition(record["name"], indices, owner_names, bool(self.pool_test))
            chosen = np.concatenate([np.empty(0, np.int64), *indices])
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"{path} is damaged: its indices are not lists of whole numbers ({error})"
            ) from error
        if partition.hash != record["hash"]:
            raise DataError(
                f"{path} is damaged: its indices have the hash {partition.hash}, not"
                f" {record['hash']}"
            )
        known = chosen.min(initial=0) >= 0 and chosen.max(initial=-1) < len(labels)
        if not known or len(np.unique(chosen)) < len(chosen):
            raise DataError(
                f"{path} is damaged: its indices repeat a sample, or are not all from 0 to"
                f" {len(labels) - 1}"
            )
        return partition

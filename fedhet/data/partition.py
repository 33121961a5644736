"""The schemes that draw a partition, as flwr-datasets does wherever it has one, and saved ones."""

from __future__ import annotations

import json
import logging
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedhet.core import check
from fedhet.core.check import counted
from fedhet.core.errors import ConfigError, DataError
from fedhet.core.streams import generator, integer
from fedhet.data.files import cache_root, permitted
from fedhet.data.scheme import DrawnScheme, Partition, Scheme, labels_digest

log = logging.getLogger("fedhet.data")

# What the draws of a scheme may cost before it gives up: a few seconds of one core.
_MOST_DRAWS = 50_000
_MOST_SHARES = 50_000_000  # of a client in a class
_MOST_CHOICES = 200_000  # of a class for a client
# Of a saved partition: its name, and what its file needs to have.
_NAME = re.compile(r"\w[\w.+-]*")
_REQUIRED = {
    "name": str,
    "hash": str,
    "labels": str,
    "samples": int,
    "settings": dict,
    "owners": list,
    "indices": list,
}


def random_order(labels: np.ndarray, seed: int) -> np.ndarray:
    """The order (n,) in which samples are partitioned, as flwr-datasets' `FederatedDataset` does.

    Files are often sorted by class, and a partitioner cuts its input where it is.
    """
    return generator(seed, "partition", "order").permutation(len(labels))


def _divided(labels: np.ndarray, seed: int, held: np.ndarray) -> list[np.ndarray]:
    """Each client's samples, where `held` (clients, classes) says how many it has of each class."""
    order = random_order(labels, seed)
    by_class = order[np.argsort(labels[order], kind="stable")]
    left = np.unique(labels, return_counts=True)[1] - held.sum(0)
    sizes = np.vstack([held, left])  # the last row is nobody's
    holders = np.repeat(np.tile(np.arange(len(sizes)), held.shape[1]), sizes.T.ravel())
    by_client = by_class[np.argsort(holders, kind="stable")]
    return np.split(by_client, np.cumsum(held.sum(1)))[:-1]


def _equal_shares(has: np.ndarray, class_sizes: np.ndarray) -> np.ndarray:
    """(clients, classes): each class divided equally among the clients that have it."""
    share, rest = np.divmod(class_sizes, np.maximum(has.sum(0), 1))
    rank = np.cumsum(has, axis=0) - 1  # among the holders of the class
    return np.where(has, share + (rank < rest), 0)


@dataclass(frozen=True, kw_only=True)
class Iid(DrawnScheme):
    """Equal random parts, whose sizes differ by one at most.

    The parts are exactly those of flwr-datasets' IidPartitioner. `np.array_split` replaces it
    because it takes 0.5 ms per client and does not give access to the indices.
    """

    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        return np.array_split(random_order(labels, seed), self.clients)


@dataclass(frozen=True, kw_only=True)
class Listed(DrawnScheme):
    """Client p has the classes of the list number p mod m, where there are m lists.

    Each class is divided at random, and equally, among the clients that have it.

    Args:
        classes: lists of the classes' numbers; together they have all classes of the data.
    """

    by_class: ClassVar[bool] = True
    classes: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        super().__post_init__()
        lists = self.classes
        if isinstance(lists, str) or not isinstance(lists, Sequence) or not lists:
            raise ConfigError(
                f"partition.classes={lists!r}: must be lists of classes, such as [[0,1],[2,3]]"
            )
        for each in lists:
            numbers = [] if isinstance(each, str) or not isinstance(each, Sequence) else [*each]
            fits = all(type(number) is int and number >= 0 for number in numbers)
            if not numbers or not fits or len(set(numbers)) < len(numbers):
                raise ConfigError(
                    f"partition.classes: {each!r} must be a list of different whole numbers >= 0,"
                    " as in [[0,1],[2,3]]"
                )
        object.__setattr__(self, "classes", tuple(tuple(each) for each in lists))

    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        own = [self.classes[pid % len(self.classes)] for pid in range(self.clients)]
        present, class_sizes = np.unique(labels, return_counts=True)
        missing, unlisted = {*chain(*own)} - {*present}, {*present} - {*chain(*own)}
        if missing or unlisted:
            problem = (
                f"there is no class {min(missing)}"
                if missing
                else f"no client has the class {min(unlisted)}"
            )
            raise ConfigError(
                f"partition.classes: {problem}; the classes of the data are {present.tolist()}"
            )
        has = np.stack([np.isin(present, classes) for classes in own])
        return _divided(labels, seed, _equal_shares(has, class_sizes))


@dataclass(frozen=True, kw_only=True)
class RedrawnScheme(DrawnScheme):
    """A scheme that is drawn again until every client has `min_size` samples.

    The draws are those of flwr-datasets' partitioner, in its own random stream, and so are the
    samples. It is not called, because it gives up after a few draws, or draws only once; a draw
    takes milliseconds there, and here, where only the numbers of samples are drawn, microseconds.
    """

    by_class: ClassVar[bool] = True
    remedy: ClassVar[str]  # what else than fewer clients makes small clients less likely

    @abstractmethod
    def _draw_held(self, class_sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        """The next draw, which advances `rng`: (clients, classes), the numbers of samples.

        None is a draw that the partitioner would refuse.

        Args:
            class_sizes: (classes,), the number of samples of each class.
            rng: the partitioner's stream.
        """

    @abstractmethod
    def _draw_limit(self, classes: int) -> int:
        """The number of draws after which the scheme gives up: some seconds' work at most."""

    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        class_sizes = np.unique(labels, return_counts=True)[1]
        rng = np.random.default_rng(integer(seed, "partition"))
        limit = self._draw_limit(len(class_sizes))
        smallest = -1
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
        draws = "the draw does not give" if limit == 1 else f"none of {limit:,} draws gives"
        classes = counted(len(class_sizes), "class", "classes")
        best = f"the smallest client got {smallest} at best"
        if smallest < 0:
            best = "a class always had more clients than samples"
        others = self._written("clients", "min_size")
        raise ConfigError(
            f"partition.clients={self.clients}: more clients than samples allow; {draws} each of"
            f" them partition.min_size={self.min_size} of the {len(labels)} samples in {classes}"
            f" ({others}), and {best}. Fewer partition.clients would help, or {self.remedy}"
        )


@dataclass(frozen=True, kw_only=True)
class Dirichlet(RedrawnScheme):
    """Each class is divided in proportions that are drawn from Dirichlet(alpha).

    This is https://arxiv.org/abs/1905.12022 without balancing, as DirichletPartitioner does it.

    Args:
        alpha: > 0; small: few clients hold a class, large: all hold equal shares.
    """

    remedy: ClassVar[str] = "a smaller partition.min_size or a larger partition.alpha"
    alpha: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("partition.alpha", self.alpha, open_low=0)

    def _draw_held(self, class_sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        shares = rng.dirichlet(np.full(self.clients, float(self.alpha)), len(class_sizes))
        ends = (np.cumsum(shares, axis=1) * class_sizes[:, None]).astype(int)
        ends[:, -1] = class_sizes
        return np.diff(ends, axis=1, prepend=0).T

    def _draw_limit(self, classes: int) -> int:
        # at least flwr-datasets' eleven
        return min(_MOST_DRAWS, max(_MOST_SHARES // (self.clients * classes), 11))


@dataclass(frozen=True, kw_only=True)
class Pathological(RedrawnScheme):
    """Every client has samples of exactly `classes` classes.

    Each class is divided equally among the clients that have it. Client p has class p mod C, so
    that with C clients or more no class is left out; its other classes are drawn at random
    (the "first-deterministic" of PathologicalPartitioner), and drawn again until every client has
    min_size samples and at least one of each of its classes.

    Args:
        classes: the number of classes of each client.
    """

    remedy: ClassVar[str] = "a smaller partition.min_size"
    classes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("partition.classes", self.classes, low=1)

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
        # the choices until a client has its other classes: those that it already has are repeated
        choices = sum(classes / (classes - chosen) for chosen in range(1, self.classes))
        return max(int(_MOST_CHOICES / (self.clients * choices)), 1)


@dataclass(frozen=True, kw_only=True)
class FlowerScheme(DrawnScheme):
    """A scheme that is one of flwr-datasets' partitioners.

    The partitioners are imported when they are needed, because that takes seconds.
    """

    @abstractmethod
    def _partitioner(self, n: int, seed: int) -> Any:
        """The partitioner for n samples."""

    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        from datasets import Dataset

        order = random_order(labels, seed)
        partitioner = self._partitioner(len(labels), integer(seed, "partition"))
        column = labels if labels.ndim == 1 else np.zeros(len(labels), dtype=np.int64)
        partitioner.dataset = Dataset.from_dict({"label": column[order], "index": order})
        try:
            partitioner.load_partition(0)  # makes it assign all samples
        except ValueError as error:
            raise ConfigError(
                f"partition {self.name} of {len(labels)} samples is impossible"
                f" ({self._written()}): {error}"
            ) from error
        # ShardPartitioner has sorted its dataset, so `order` no longer applies.
        rows = np.asarray(partitioner.dataset["index"][:])
        # The private attribute has all clients at once: load_partition builds a Hugging Face
        # dataset per client, which takes 0.5 ms each.
        assigned = partitioner._partition_id_to_indices
        return [rows[np.asarray(assigned[pid], dtype=np.int64)] for pid in range(self.clients)]


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
        check.integer("partition.shards", self.shards, low=1)

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
        check.one_of(
            "partition.sizes", self.sizes, ("dirichlet", "linear", "square", "exponential")
        )
        check.number("partition.alpha", self.alpha, open_low=0)

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

    def _check_clients(self) -> None:
        check.optional(check.integer, "partition.clients", self.clients, low=1)

    def assign(
        self,
        labels: np.ndarray,
        seed: int,
        owners: np.ndarray | None = None,
        owner_names: Sequence[str] = (),
    ) -> Partition:
        """As other schemes do, with owners in the place of labels."""
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
        partition = replace(self, clients=wanted).drawn(owners, seed)
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


# ---- saved partitions: those that a run wrote to its partition.json, and those with a name


def saved_path(name: str) -> Path:
    """The file of the partition that is or will be saved as `name`.

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
    """The file that `partition.name` refers to, and its content.

    Args:
        name: a saved name, a run folder, or the path of a partition.json.

    Raises:
        ConfigError: there is no such partition.
        DataError: the file is damaged, or lacks something that a partition needs.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"partition.name={name!r}: give a saved name, a run folder, or the path of a"
            " partition.json"
        )
    given = Path(name).expanduser()
    own = [saved_path(name)] if _NAME.fullmatch(name) else []
    path = next((path for path in (*own, given / "partition.json", given) if path.is_file()), None)
    if path is None:
        saved = sorted(path.stem for path in (cache_root() / "partitions").glob("*.json"))
        raise ConfigError(
            f"partition.name={name}: neither a run folder, nor a partition.json, nor a saved name;"
            f" saved names are: {', '.join(saved) or 'none'}"
        )
    if path not in own:
        path = permitted(path.absolute())
    try:
        record = json.loads(path.read_text())
        wrong = [key for key, kind in _REQUIRED.items() if not isinstance(record.get(key), kind)]
    except (ValueError, AttributeError) as error:  # not JSON, or not a mapping
        raise DataError(f"{path} is damaged: expected a partition.json ({error})") from error
    if wrong:
        raise DataError(
            f"{path} is not a partition that can be used again: {', '.join(wrong)} missing or of"
            " the wrong type"
        )
    return path, record


def save(name: str, record: dict[str, Any]) -> Path:
    """Save the content of a partition.json as `name`; concurrent processes may do so.

    Raises:
        ConfigError: another partition has that name.
    """
    from fedhet.record.files import write_json

    path = saved_path(name)
    if path.exists():
        existing = _identity(read_saved(name)[1])
        wanted = _identity(record)
        if existing != wanted:
            raise ConfigError(
                f"--name {name}: {path} is another partition, {existing}, not {wanted}; choose"
                " another name or remove the file"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record, indent=None)
    return path


def _identity(record: dict[str, Any]) -> str:
    settings = [f"{key} {record['settings'].get(key)}" for key in ("split", "noise")]
    return ", ".join([record["hash"], *settings])


@dataclass(frozen=True, kw_only=True)
class Saved(Scheme):
    """A saved partition of the same data.

    Args:
        name: the name given to `python -m fedhet.data partition --name`, a run folder, or the path
            of a partition.json.
        split, noise: None: as saved.
        pool_test: None, or as saved: it determines which samples the indices mean.
    """

    split: Sequence[float] | None  # type: ignore[assignment]
    noise: float | None  # type: ignore[assignment]
    pool_test: bool | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        path, record = read_saved(self.name)
        for key in ("split", "noise"):
            if getattr(self, key) is None:
                if key not in record["settings"]:
                    raise DataError(f"{path}: its settings have no {key}; give partition.{key}")
                object.__setattr__(self, key, record["settings"][key])
        pooled = record["settings"].get("pool_test", False)
        if self.pool_test not in (None, pooled):
            raise ConfigError(
                f"partition.pool_test={self.pool_test}: {path} was made with {pooled}, and a saved"
                " partition keeps the samples that it shares out"
            )
        object.__setattr__(self, "pool_test", pooled)
        super().__post_init__()

    def drawn(self, labels: np.ndarray, seed: int) -> Partition:
        """The saved partition, whatever the seed.

        Raises:
            ConfigError: it was made for other data.
            DataError: its indices are not those that were saved.
        """
        path, record = read_saved(self.name)
        digest = labels_digest(labels)
        if (record["samples"], record["labels"]) != (len(labels), digest):
            raise ConfigError(
                f"partition.name={self.name}: {path} is of other data,"
                f" {counted(record['samples'], 'sample')} whose labels have the digest"
                f" {record['labels']}; these are {len(labels)} with {digest}"
            )
        try:
            indices = [np.array(each, dtype=np.int64) for each in record["indices"]]
            owner_names = tuple(record["owners"])
            partition = Partition(record["name"], indices, owner_names, bool(self.pool_test))
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"{path} is damaged: its indices are not lists of whole numbers ({error})"
            ) from error
        if partition.hash != record["hash"]:
            raise DataError(
                f"{path} is damaged: its indices have the hash {partition.hash}, not"
                f" {record['hash']}"
            )
        return partition

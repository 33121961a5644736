"""Schemes that are flwr-datasets' partitioners.

The samples are first put in a seeded random order, as flwr-datasets' `FederatedDataset` does,
because files are often sorted by class and a partitioner cuts its input where it is.
"""

from __future__ import annotations

import logging
import warnings
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedhet.core.check import counted
from fedhet.core.errors import ConfigError
from fedhet.core.streams import generator, integer
from fedhet.data.scheme import DrawnScheme

log = logging.getLogger("fedhet.data")


def random_order(labels: np.ndarray, seed: int) -> np.ndarray:
    """The order (n,) in which the samples are partitioned."""
    return generator(seed, "partition", "order").permutation(len(labels))


@dataclass(frozen=True, kw_only=True)
class FlowerScheme(DrawnScheme):
    """A scheme that is one of flwr-datasets' partitioners.

    The partitioners are imported when they are needed, because that takes seconds.
    """

    @abstractmethod
    def _partitioner(self, n: int, seed: int) -> Any:
        """The partitioner for n samples."""

    def _advance(self, partitioner: Any, labels: np.ndarray) -> None:
        """Advance the partitioner's random stream to the draw that it should make."""

    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        from datasets import Dataset

        order = random_order(labels, seed)
        partitioner = self._partitioner(len(labels), integer(seed, "partition"))
        self._advance(partitioner, labels)
        column = labels if labels.ndim == 1 else np.zeros(len(labels), dtype=np.int64)
        partitioner.dataset = Dataset.from_dict({"label": column[order], "index": order})
        with warnings.catch_warnings(record=True) as caught:
            # flwr-datasets' own warnings are UserWarnings; others concern its dependencies
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)
            try:
                partitioner.load_partition(0)  # makes it assign all samples
            except ValueError as error:
                raise ConfigError(
                    f"partition {self.name} of {len(labels)} samples is impossible"
                    f" ({self._written()}): {error}"
                ) from error
        if caught:
            log.info(
                "partition %s: flwr-datasets warned %s, last: %.200s",
                self.name,
                counted(len(caught), "time"),
                caught[-1].message,
            )
        # ShardPartitioner has sorted its dataset, so `order` no longer applies.
        rows = np.asarray(partitioner.dataset["index"][:])
        # The private attribute has all clients at once: load_partition builds a Hugging Face
        # dataset per client, which takes 0.5 ms each.
        assigned = partitioner._partition_id_to_indices
        return [rows[np.asarray(assigned[pid], dtype=np.int64)] for pid in range(self.clients)]


@dataclass(frozen=True, kw_only=True)
class RedrawnScheme(FlowerScheme):
    """A scheme that is drawn again until every client has `min_size` samples.

    flwr-datasets gives up after a few draws, or draws only once. Here the clients' sizes alone are
    drawn in advance from the partitioner's own stream, which takes microseconds; the partitioner
    then makes the first draw that is large enough. It is the one at which the partitioner would
    arrive if it drew on.
    """

    @abstractmethod
    def _draw_sizes(self, class_sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The clients' sizes of the next draw, which advances `rng`.

        They are (clients,), or [-1] for a draw that the partitioner would refuse.

        Args:
            class_sizes: (classes,), the number of samples of each class.
            rng: the partitioner's stream.
        """

    @abstractmethod
    def _draw_limit(self, classes: int) -> int:
        """The number of draws after which the scheme gives up: some seconds' work at most."""

    @property
    @abstractmethod
    def _remedy(self) -> str:
        """What else than fewer clients makes small clients less likely."""

    def _advance(self, partitioner: Any, labels: np.ndarray) -> None:
        class_sizes = np.unique(labels, return_counts=True)[1]
        rng: np.random.Generator = partitioner._rng
        first = rng.bit_generator.state
        limit = self._draw_limit(len(class_sizes))
        smallest = -1
        for draw in range(1, limit + 1):
            before = rng.bit_generator.state
            sizes = self._draw_sizes(class_sizes, rng)
            if sizes.min() >= self.min_size:
                rng.bit_generator.state = before
                if draw > 1:
                    log.info(
                        "partition %s: drawn %d times until every client had min_size=%d samples",
                        self.name,
                        draw,
                        self.min_size,
                    )
                return
            smallest = max(smallest, int(sizes.min()))
        if smallest < 0:
            rng.bit_generator.state = first
            return  # the partitioner says why it refuses
        draws = "the draw does not give" if limit == 1 else f"none of {limit:,} draws gives"
        classes = counted(len(class_sizes), "class", "classes")
        others = self._written("clients", "min_size")
        raise ConfigError(
            f"partition.clients={self.clients}: more clients than samples allow; {draws} each of"
            f" them partition.min_size={self.min_size} of the {len(labels)} samples in {classes}"
            f" ({others}), and the smallest client got {smallest} at best. Fewer partition.clients"
            f" would help, or {self._remedy}"
        )

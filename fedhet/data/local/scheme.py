"""The partition that `dataset=local` has: each site is a client, and keeps what it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedhet.core import check
from fedhet.core.errors import ConfigError
from fedhet.data.scheme import Partition, Scheme


@dataclass(frozen=True, kw_only=True)
class Sites(Scheme):
    """Each site is a client.

    Args:
        clients: None, or the number of declared sites.
    """

    noise: float = 0.0
    clients: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check.optional(check.integer, "partition.clients", self.clients, low=1)

    def check_clients(self, sites: Sequence[str]) -> None:
        """Refuse another number of clients than that of the sites.

        Raises:
            ConfigError: with both numbers.
        """
        if self.clients not in (None, len(sites)):
            raise ConfigError(
                f"partition.clients={self.clients}: dataset.sites declares {len(sites)}, and each"
                " is a client; leave partition.clients out"
            )

    def assign(
        self,
        labels: np.ndarray,
        seed: int,
        owners: np.ndarray | None = None,
        owner_names: Sequence[str] = (),
    ) -> Partition:
        """Refuse: there is nothing to share out.

        Raises:
            ConfigError: always; a run with dataset=local does not ask.
        """
        raise ConfigError(
            "partition=sites: each site is a client with its own data, which needs dataset=local"
        )

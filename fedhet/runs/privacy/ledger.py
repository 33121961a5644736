"""What a machine has released in all runs, where its owner sets FEDHET_MAX_EPSILON.

A run's own count is in the folder of the run that each message names. The server chooses
that name, so the owner's count is elsewhere, and is never removed. The server chooses the numbers
of the clients too, and so which part of a data set each of them is: a machine counts all of its
clients together, but for a site with data of its own, whose name its operator has chosen.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from fedhet.core.errors import ConfigError
from fedhet.core.limits import demanded
from fedhet.core.noise import MAX_EPSILON, most_delta
from fedhet.data.storage import write_json
from fedhet.runs.stores import own_folder

log = logging.getLogger("fedhet")

History = tuple[tuple[float, int], ...]  # (noise multiplier, number of releases) pairs


def composed(history: History, delta: float) -> float:
    """Return the epsilon of all of these releases together, by opacus' accountant.

    It composes Rényi divergences (Mironov 2017), and is an upper bound of the exact value.

    Args:
        history: the releases; each multiplier is the noise's standard deviation over the
            sensitivity, > 0.
        delta: in (0, 1).
    """
    if not any(releases for _, releases in history):
        return 0.0
    from opacus.accountants import RDPAccountant  # here: the import takes seconds

    accountant = RDPAccountant()
    accountant.history = [(multiplier, 1.0, releases) for multiplier, releases in history]
    with warnings.catch_warnings():
        # The best order may lie beyond those that it tries: still a bound, only less tight.
        warnings.filterwarnings("ignore", "Optimal order", UserWarning)
        return float(accountant.get_epsilon(delta))


@contextmanager
def locked(name: str) -> Iterator[Path]:
    """Give the block the path of a ledger, and no other process at the same time.

    Args:
        name: of whom: a site with data of its own, or the machine.

    Raises:
        ValueError: the folder belongs to another user, or others may write to it.
    """
    path = own_folder("fedhet-privacy") / f"{sha256(name.encode()).hexdigest()[:16]}.json"
    with FileLock(path.with_suffix(".lock")):
        yield path


def spend(path: Path, name: str, multiplier: float, releases: int) -> None:
    """Write releases into a ledger; it does nothing where the owner has set no limit.

    Args:
        path: the ledger, which `locked` has given.
        name: as for `locked`.
        multiplier: the noise multiplier of the releases, > 0.
        releases: how many.

    Raises:
        ValueError: they would exceed what the owner allows, or the ledger cannot be read. Nothing
            may then be sent.
    """
    most = demanded(MAX_EPSILON)
    if most is None or not releases:
        return
    counts = _read(path)
    before = composed(tuple(counts.items()), most_delta())
    counts[multiplier] = counts.get(multiplier, 0) + releases
    after = composed(tuple(counts.items()), most_delta())
    if not after <= most:
        raise ConfigError(
            f"{MAX_EPSILON}={most:g}: in all runs together, {name} has spent epsilon {before:.4g},"
            f" and this reply would make it {after:.4g}; nothing was sent"
        )
    write_json(path, {"name": name, "releases": [list(pair) for pair in counts.items()]})


def _read(path: Path) -> dict[float, int]:
    """The numbers of releases by their noise multipliers."""
    if not path.exists():
        return {}
    try:
        return {float(z): int(n) for z, n in json.loads(path.read_text("utf-8"))["releases"]}
    except (ValueError, KeyError, TypeError) as error:
        log.error("%s cannot be read", path)
        raise ConfigError(f"the ledger of {MAX_EPSILON} is damaged; nothing was sent") from error

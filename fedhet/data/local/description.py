"""A site's description of its data when it joins, and the statistics that the sites agree on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedhet.core.counts import counts_few, withheld
from fedhet.core.errors import DataError, Rejected
from fedhet.core.task import PARTS, Samples
from fedhet.core.trees import LARGEST
from fedhet.data.array_cache import Arrays
from fedhet.data.dataset import label_counts
from fedhet.data.files import log
from fedhet.data.forms import has_form
from fedhet.data.local.declaration import STATISTICS, Declaration
from fedhet.data.moments import Moments, Own, joined, moments

MOST_SAMPLES = 10**12


@dataclass(frozen=True)
class SiteDescription:
    """A site's description of its data. It is sent to the server as a dictionary of plain values.

    Attributes:
        site: the name of the site.
        digest: the digest of the declaration that the site's data match.
        sizes: the numbers of training, validation and test samples.
        counts: the number of samples of each class or label in all parts together; an entry is None
            if it is withheld. None: the site reports no counts.
        moments: count, mean and squares (`fedhet.data.moments.Moments`) of the training part, for
            "x", the inputs, and "y", the numbers to predict, if their statistics are "auto". Mean
            and squares of a column are None if they would reveal a count of few samples.
    """

    site: str
    digest: str
    sizes: list[int]
    counts: list[int | None] | None
    moments: dict[str, dict[str, Any]]

    @classmethod
    def of(
        cls,
        declared: Declaration,
        site: str,
        parts: Mapping[str, Samples],
        *,
        min_count: int | None,
        least: int,
    ) -> SiteDescription:
        """Return the description of a site with the given parts.

        Args:
            declared: the declaration that the site's data match.
            site: the name of the site.
            parts: the samples of the site: part -> samples.
            min_count: the smallest count of a class that the site reports; None: it reports none.
            least: moments may not reveal groups of fewer samples than this.
        """
        counts = None
        if min_count is not None and declared.target != "number":
            y = torch.cat([part.y for part in parts.values()]).numpy()
            exact = label_counts(y, declared.target, len(declared.outputs))
            hidden = withheld(exact.tolist(), min_count)
            counts = [None if h else n for h, n in zip(hidden, exact.tolist(), strict=True)]
        sizes = [len(parts[part]) if part in parts else 0 for part in PARTS]
        train = {"x": parts["train"].x, "y": parts["train"].y}
        if (dataset := declared.dataset()).by_client:
            train["x"] = Own.of(dataset, train["x"])(train["x"])
        reported = {name: _reported(train[name].numpy(), least) for name in declared.measured}
        return cls(site, declared.digest, sizes, counts, reported)

    @classmethod
    def read(cls, declared: Declaration, value: Any) -> SiteDescription:
        """Check a description from another process, and return it.

        Raises:
            Rejected: the description is malformed, or does not match the declaration; the message
                says why.
            DataError: the site has more samples than the declaration allows.
        """
        names = ("site", "digest", "sizes", "counts", "moments")
        if not isinstance(value, dict) or set(value) != set(names):
            raise Rejected("unreadable", f"its description must consist of {', '.join(names)}")
        site = value["site"]
        if not isinstance(site, str) or site not in declared.sites:
            raise Rejected("wrong content", f"its site {str(site)[:100]!r} is not declared")
        if value["digest"] != declared.digest:
            raise Rejected(
                "wrong content",
                f"site {site!r} has data for another declaration: its digest is"
                f" {str(value['digest'])[:16]!r}, and this run's is {declared.digest!r}",
            )
        sizes, counts, found = value["sizes"], value["counts"], value["moments"]
        if not has_form(sizes, [_whole]) or len(sizes) != len(PARTS) or not sizes[0]:
            raise Rejected("wrong content", f"site {site!r}: {str(sizes)[:50]} are not valid sizes")
        check_sizes(declared, site, sizes)
        form = [lambda n: n is None or (_whole(n) and n <= sum(sizes))]
        classes = 0 if declared.target == "number" else len(declared.outputs)
        valid = classes and has_form(counts, form) and len(counts) == classes
        if counts is not None and not valid:
            raise Rejected("wrong content", f"site {site!r}: its label counts are invalid")
        each = {"x": math.prod(declared.shape_of_sample[1:]), "y": 1}
        if (
            not isinstance(found, dict)
            or sorted(found) != declared.measured
            or not all(
                _are_moments(found[name], sizes[0] * each[name], declared.columns_of[name])
                for name in found
            )
        ):
            raise Rejected(
                "wrong content",
                f"site {site!r}: the moments of its training samples must have one mean and one sum"
                " of squares for each column or channel, computed from values of at most"
                f" {LARGEST:g}",
            )
        return cls(**value)


def _reported(samples: np.ndarray, least: int) -> dict[str, Any]:
    found, reveals_few = moments([samples]), counts_few(samples, least)
    counts = np.atleast_1d(found.count)
    hidden = [few or not count for few, count in zip(reveals_few, counts, strict=True)]
    mean, squares = (
        [None if hide else value for value, hide in zip(values.tolist(), hidden, strict=True)]
        for values in (found.mean, found.squares)
    )
    count = samples.size // samples.shape[1]  # the number of values per column, including NaN
    return {"count": count, "mean": mean, "squares": squares}


def check_sizes(declared: Declaration, site: str, sizes: Iterable[int]) -> None:
    """Refuse a site if one of its parts has more samples than `dataset.max_samples`.

    Raises:
        DataError: a part is too large; the message names the site and both numbers.
    """
    if declared.max_samples is not None and (most := max(sizes)) > declared.max_samples:
        raise DataError(
            f"site {site!r} has {most} samples in one of its parts, more than"
            f" dataset.max_samples={declared.max_samples}"
        )


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_SAMPLES


def _are_moments(one: Any, count: int, columns: int) -> bool:
    if not isinstance(one, dict) or set(one) != {"count", "mean", "squares"}:
        return False
    means, squares = one["mean"], one["squares"]
    lists = isinstance(means, list) and isinstance(squares, list)
    return (
        lists
        and len(means) == len(squares) == columns
        and type(one["count"]) is int
        and one["count"] == count
        and all(
            _number(mean) and _number(square, count * LARGEST**2) and square >= 0
            for mean, square in zip(means, squares, strict=True)
            if (mean, square) != (None, None)
        )
    )


def _number(value: Any, most: float = LARGEST) -> bool:
    return type(value) is float and abs(value) <= most


@dataclass(frozen=True)
class Agreement:
    """What the server and the sites agree on before the first round.

    Attributes:
        descriptions: the descriptions of the sites, in the order of the sites; None for a site that
            has not joined.
        statistics: setting ("mean", "std", "target_mean", "target_std") -> the numbers that replace
            its value "auto".
    """

    descriptions: tuple[SiteDescription | None, ...]
    statistics: dict[str, list[float]]

    @classmethod
    def of(cls, declared: Declaration, descriptions: Sequence[SiteDescription | None]) -> Agreement:
        """Join the sites' measurements, in the order of the sites.

        Raises:
            DataError: there is no training sample.
        """
        statistics: dict[str, list[float]] = {}
        for name, keys in (("x", STATISTICS[:2]), ("y", STATISTICS[2:])):
            wanted = [key for key in keys if key in declared.auto]
            if not wanted:
                continue
            parts = [one.moments[name] for one in descriptions if one is not None]
            columns = [_agreed(parts, column) for column in range(declared.columns_of[name])]
            if hidden := [column for column, found in enumerate(columns) if found is None]:
                log.warning(
                    "%s: no site reports %s of the columns or channels %s, so the run uses 0 for a"
                    " mean and 1 for a std. Either the statistics would reveal how many samples"
                    " have a rare value (privacy.min_count), or the column has no values",
                    *(declared.name, " and ".join(wanted), hidden),
                )
            arrays = {
                "mean": [0.0 if one is None else float(one["mean"]) for one in columns],
                "std": [1.0 if one is None else float(one["std"]) for one in columns],
            }
            statistics |= {key: arrays[key.removeprefix("target_")] for key in wanted}
        return cls(tuple(descriptions), statistics)

    @property
    def sizes(self) -> list[list[int]]:
        """Each site's numbers of training, validation and test samples; 0 if it has not joined."""
        return [[0] * len(PARTS) if one is None else one.sizes for one in self.descriptions]


def _agreed(parts: Sequence[Mapping[str, Any]], column: int) -> Arrays | None:
    """Return mean and std of a column over the sites that report it; None if no site does.

    Raises:
        DataError: there is no training sample.
    """
    reported = [
        Moments(part["count"], np.array(part["mean"][column]), np.array(part["squares"][column]))
        for part in parts
        if part["mean"][column] is not None
    ]
    return joined(reported).arrays if reported or not parts else None


def read_statistics(declared: Declaration, value: Any) -> dict[str, list[float]]:
    """Check the agreed statistics that a site receives, and return them.

    Raises:
        Rejected: the statistics that are "auto" are incomplete or not numbers of at most LARGEST,
            or a std is not above 0.
    """
    valid = isinstance(value, dict) and set(value) == set(declared.auto)
    for key in declared.auto if valid else ():
        count = declared.columns_of["x" if key in STATISTICS[:2] else "y"]
        given = value[key]
        valid = (
            valid and isinstance(given, list) and len(given) == count and all(map(_number, given))
        )
        valid = valid and (not key.endswith("std") or min(given) > 0)
    if not valid:
        raise Rejected(
            "wrong content",
            "the server sent no valid statistics: expected finite numbers for each of"
            f" {declared.auto}, and std > 0",
        )
    return dict(value)

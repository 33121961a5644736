"""How often a design of a comparison errs, measured by drawing whole comparisons from a pool.

The pool (experiment=design) has FedAvg at ten rates with forty seeds in each setting. A comparison
is drawn as the leaderboard makes it: two methods are tuned, each on seeds of its own, and then
compared on other seeds. Both are FedAvg. So each difference that is called one is a false alarm;
and where every score of the second is raised by a gap, each one that is not called one is missed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedhet.core.check import counted
from fedhet.core.errors import ConfigError
from fedhet.report import statistics
from fedhet.report.results import NOT_RUN, Results
from papers.tables import RESULTS, markdown
from papers.tables import replace as replace_kept

POOL = RESULTS / "design.csv"
COLUMNS = ["setting", "client.lr", "seed", "validation", "test", "validation_5", "test_5", "code"]
LAST = 5  # evaluations, of which the pool has the mean beside the last one
GRID = (0.01, 0.03, 0.1, 0.3, 1, 3)  # the rates of six trials; ten have the whole pool's
DRAWS = 400
GAPS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1)  # of accuracy
COMPARISONS = 25  # of one table, for which Holm's correction is made
FALSE_ALARMS, POWER = 0.05, 0.8  # the most, and the least, that a design may have


@dataclass(frozen=True)
class Design:
    """How two methods are compared in a setting, or over all.

    Attributes:
        trials: the number of rates that are tried.
        tuning_seeds: the seeds with which each is tried.
        seeds: those of the comparison, on which no rate was tried.
        mean: whether the mean of the last LAST evaluations counts, and not the last one.
        margin: whether a difference must be larger than the setting's margin (see `margins`).
    """

    trials: int
    tuning_seeds: int
    seeds: int
    mean: bool = False
    margin: bool = False

    def __str__(self) -> str:
        score = f"mean of {LAST}" if self.mean else "last round"
        above = ", above the margin" if self.margin else ""
        return f"{self.trials} trials on {self.tuning_seeds}, {self.seeds} seeds, {score}{above}"


# That of the leaderboard's runs of version 0.1, its parts, and that of the next runs.
EARLIER = Design(6, 1, 3)
TODAY = Design(6, 8, 12, margin=True)
DESIGNS = (
    EARLIER,
    Design(6, 1, 10),
    Design(6, 5, 10),
    Design(6, 5, 10, mean=True),
    Design(6, 5, 10, mean=True, margin=True),
    Design(10, 5, 10),
    replace(TODAY, margin=False),
    TODAY,
)


class Pool(NamedTuple):
    """The scores of a setting, (rates, seeds) each; NaN on validation for a run that diverged."""

    rates: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def keep(read: Results, path: Path) -> None:
    """Write the pool's runs to a csv file, in the place of the earlier ones of their settings.

    Where there is no global test set, the clients' mean score on their own test data counts.
    """
    from fedhet.experiment.code import Code

    rows = []
    for cell in read.source.cells:
        if cell.status == NOT_RUN:
            continue
        ended = cell.counts and cell.summary["status"] == "ok"
        last = read.steps(cell)[-1] if ended else {}
        test = "acc_clients_mean" if last.get("acc_global") is None else "acc_global"
        scores = {"validation": "acc_val_weighted", "test": test}
        rows.append({**cell.axes, "code": Code.text(cell.code)})
        for name, key in scores.items():
            found = [step[key] for step in read.steps(cell) if step.get(key) is not None]
            missing = np.nan if name == "validation" else 0.0
            rows[-1] |= {
                name: found[-1] if ended else missing,
                f"{name}_{LAST}": float(np.mean(found[-LAST:])) if ended else missing,
            }
    replace_kept(path, pd.DataFrame(rows)[COLUMNS].round(5), ["setting"])


def pools(cells: pd.DataFrame, design: Design) -> dict[str, Pool]:
    """Setting -> its scores, of the rates that the design tries."""
    suffix = f"_{LAST}" if design.mean else ""
    found = {}
    for setting, own in cells.groupby("setting", sort=False):
        tried = own if design.trials > len(GRID) else own[own["client.lr"].isin(GRID)]
        validation, test = (
            tried.pivot(index="client.lr", columns="seed", values=name + suffix)
            for name in ("validation", "test")
        )
        rates = validation.index.to_numpy(float)
        found[str(setting)] = Pool(rates, validation.to_numpy(), test.to_numpy())
    return found


def choices(pool: Pool, design: Design, seeds: np.ndarray) -> np.ndarray:
    """The row (draws,) that tuning on these seeds (draws, tuning seeds) chooses.

    It is that with the best mean on validation; one of which a trial has diverged cannot win.
    """
    means = pool.validation[:, seeds[:, : design.tuning_seeds]].mean(-1)
    return np.where(np.isnan(means), -np.inf, means).argmax(0)


def costs(pool: Pool, chosen: np.ndarray) -> np.ndarray:
    """What each choice loses against the best rate, by the means over all seeds of the pool."""
    means = pool.test.mean(1)
    return means.max() - means[chosen]


def drawn_seeds(count: int, draws: int = DRAWS) -> np.ndarray:
    """(draws, count) orders of the seeds: the first ones tune, the last ones compare."""
    return np.random.default_rng(0).permuted(np.tile(np.arange(count), (draws, 1)), axis=1)


def margins(cells: pd.DataFrame, design: Design) -> dict[str, float]:
    """Setting -> the difference that tuning alone makes between two equal methods, at most.

    It is the 95 % quantile of the difference between the expected scores of two choices; `all` is
    that of the mean over the settings.
    """
    differences = {}
    for setting, pool in pools(cells, design).items():
        order = drawn_seeds(pool.test.shape[1])
        own = (choices(pool, design, part) for part in _apart(order, design))
        ours, theirs = (pool.test.mean(1)[chosen] for chosen in own)
        differences[setting] = ours - theirs
    differences["all"] = np.mean([*differences.values()], axis=0)
    return {name: float(np.quantile(np.abs(d), 0.95)) for name, d in differences.items()}


def margin_over(settings: Collection[str]) -> float:
    """The margin of today's design for the mean over these settings, from the kept pool.

    Raises:
        ConfigError: the pool lacks one of them.
    """
    cells = pd.read_csv(POOL)
    if missing := sorted({*settings} - {*cells["setting"]}):
        raise ConfigError(f"{POOL.name} has no runs of {', '.join(missing)}; experiment=design")
    return margins(cells[cells["setting"].isin(settings)], TODAY)["all"]


def _apart(order: np.ndarray, design: Design) -> tuple[np.ndarray, np.ndarray]:
    """The seeds on which each of the two methods is tuned."""
    return order[:, : design.tuning_seeds], order[:, design.tuning_seeds : 2 * design.tuning_seeds]


def differences(pool: Pool, design: Design, order: np.ndarray, *, paired: bool) -> np.ndarray:
    """(draws, seeds): the second method's score minus the first's, seed by seed.

    Args:
        pool: the scores of a setting.
        design: how they are compared.
        order: (draws, n) of the pool's seeds.
        paired: whether both have the same seeds, so that they are equal where they are tuned
            alike; otherwise the second has other ones, as if no part of its noise were shared.
    """
    ours, theirs = (choices(pool, design, part) for part in _apart(order, design))
    seeds = order[:, -design.seeds :]
    others = seeds if paired else order[:, -2 * design.seeds : -design.seeds]
    return pool.test[theirs[:, None], others] - pool.test[ours[:, None], seeds]


def p_beyond(differences: np.ndarray, margin: float) -> float:
    """The p-value, not corrected, of a mean difference that is larger than the margin.

    Differences within the margin, and those of too few seeds for COMPARISONS tests, have the
    p-value 1: nothing is shown of them.
    """
    if not statistics.enough(len(differences), COMPARISONS):
        return 1.0
    return statistics.wilcoxon(statistics.beyond(differences, margin))


def called(found: np.ndarray, gap: float, margin: float) -> float:
    """The share of the draws in which a difference is shown to be larger than the margin.

    The level is the one that Holm's correction leaves the smallest of COMPARISONS p-values.

    Args:
        found: (draws, seeds) differences.
        gap: what is added to each.
        margin: a difference that does not count as one.
    """
    p = np.array([p_beyond(row + gap, margin) for row in found])
    return float((p * COMPARISONS < statistics.LEVEL).mean())


class Rates(NamedTuple):
    """How often a design errs.

    Attributes:
        false_alarms: the share of the draws in which two equal methods are called different.
        smallest_gap: the first of GAPS by which a better method is called so in a share of POWER of
            the draws; None if it is at none.
    """

    false_alarms: float
    smallest_gap: float | None


def rates(cells: pd.DataFrame, design: Design) -> dict[str, Rates]:
    """Setting -> how often the design errs there; `all` is over all settings.

    Over all settings a pair is a seed with its mean over the settings, which share their seeds.
    False alarms are those of the worse of two cases: both methods have the same seeds, and so are
    equal where they are tuned alike, or the second has other ones. Gaps are to be found in the
    second case, where differences vary more.
    """
    margin = margins(cells, design)
    every: dict[bool, dict[str, np.ndarray]] = {}
    for paired in (True, False):
        own = {
            name: differences(pool, design, drawn_seeds(pool.test.shape[1]), paired=paired)
            for name, pool in pools(cells, design).items()
        }
        every[paired] = own | {"all": np.mean([*own.values()], axis=0)}
    found = {}
    for name in every[True]:
        least = margin[name] if design.margin else 0.0
        alarms = max(called(every[paired][name], 0.0, least) for paired in every)
        often = (gap for gap in GAPS if called(every[False][name], gap, least) >= POWER)
        found[name] = Rates(alarms, next(often, None))
    return found


# ---- the tables of docs/tuning.md
def noise(cells: pd.DataFrame) -> str:
    """By setting, in points: what the choice of a rate costs, and how much a score varies."""
    rows = []
    for setting, own in cells.groupby("setting", sort=False):
        row = {"setting": str(setting)}
        for trials, seeds in ((6, 1), (6, 3), (6, 5), (6, 8), (10, 1), (10, 5)):
            (pool,) = pools(own, design := Design(trials, seeds, 0)).values()
            lost = costs(pool, choices(pool, design, drawn_seeds(pool.test.shape[1])))
            head = f"{trials} trials, {counted(seeds, 'seed')}"
            row[head] = f"{points(lost.mean())} ({points(lost.max())})"
        for title, mean in {"spread, last round": False, f"spread, mean of {LAST}": True}.items():
            (pool,) = pools(own, Design(10, 5, 0, mean)).values()
            row[title] = points(pool.test[pool.test.mean(1).argmax()].std(ddof=1))
        row["margin"] = points(margins(own, TODAY)[str(setting)])
        rows.append(row)
    return markdown(rows)


def errors(cells: pd.DataFrame) -> str:
    """By design: false alarms, and the smallest gap that is found often enough."""
    rows = []
    for design in DESIGNS:
        found = rates(cells, design)
        over_all = found.pop("all")
        alarms = [one.false_alarms for one in found.values()]
        gaps = [one.smallest_gap for one in found.values()]
        known = [gap for gap in gaps if gap is not None]
        lacking = f"; none in {len(gaps) - len(known)}" if len(known) < len(gaps) else ""
        in_one = f"{points(min(known))} to {points(max(known))}{lacking}" if known else "none"
        smallest = over_all.smallest_gap
        rows.append(
            {
                "design": str(design),
                "false alarms, in a setting at most": f"{max(alarms):.1%}",
                "over all": f"{over_all.false_alarms:.1%}",
                "gap found, in a setting": in_one,
                "gap found, over all": "none" if smallest is None else points(smallest),
            }
        )
    return markdown(rows)


def points(share: float) -> str:
    """A share in percentage points."""
    return f"{100 * share:.1f}"

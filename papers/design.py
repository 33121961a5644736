"""How often a design of a comparison errs, measured by drawing whole comparisons from a pool.

The pool (experiment=design) has FedAvg at many rates with forty seeds in each setting: those of the
grid that is tried on the setting's leaderboard, and others between them. A comparison is drawn as
the leaderboard makes it: two methods are tuned, each on seeds of its own, and then compared on
other seeds. Both are FedAvg. So each difference that is called one is a false alarm; and where
every score of the second is raised by a gap, each one that is not called one is missed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedhet.core.check import counted
from fedhet.core.errors import ConfigError
from fedhet.runs.config import catalogue
from fedhet.study.report import statistics
from fedhet.study.report.results import NOT_RUN, Results
from papers.tables import RESULTS, markdown
from papers.tables import replace as replace_kept

EXPERIMENTS = ("design", "design_hospitals")
POOL = RESULTS / "design.csv"  # of both
COLUMNS = ["setting", "client.lr", "seed", "validation", "test", "code"]
BOARDS = ("hospitals", "leaderboard")  # the last one's grid is that of settings of no board
DRAWS = 400
GAPS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1)  # of accuracy
COMPARISONS = 25  # of one table, for which Holm's correction is made
POWER = 0.8  # the least that a design may have


@dataclass(frozen=True)
class Design:
    """How two methods are compared in a setting, or over all.

    Attributes:
        tuning_seeds: the seeds with which each rate is tried.
        seeds: those of the comparison, on which no rate was tried.
        margin: whether a difference must be larger than the setting's margin (see `margins`).
    """

    tuning_seeds: int
    seeds: int
    margin: bool = False

    def __str__(self) -> str:
        above = ", above the margin" if self.margin else ""
        return f"tuned on {self.tuning_seeds}, {self.seeds} seeds{above}"


TODAY = Design(8, 12, margin=True)  # that of the digits' boards
DESIGNS = (
    Design(1, 3),  # that of the runs of version 0.1
    Design(1, 10),
    Design(5, 10),
    Design(5, 10, margin=True),
    replace(TODAY, margin=False),
    TODAY,
)


class Pool(NamedTuple):
    """The scores of a setting, (rates, seeds) each; NaN on validation for a run that diverged.

    `tried` says of each rate whether it is in the grid of the setting's board.
    """

    tried: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def keep(read: Results, path: Path) -> None:
    """Write the pool's runs to a csv file, in the place of those of the same settings and rates.

    Where there is no global test set, the clients' mean score on their own test data counts.
    """
    from fedhet.study.code import Code

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
            rows[-1][name] = found[-1] if ended else np.nan if name == "validation" else 0.0
    replace_kept(path, pd.DataFrame(rows)[COLUMNS].round(5), COLUMNS[:2])


@cache
def grid(setting: str) -> tuple[float, ...]:
    """The rates that are tried on the board of a setting."""
    for name in BOARDS:
        board = catalogue.content("experiment", name)
        if setting in board["axes"]["setting"]:
            break
    return tuple(board["tune"]["space"]["client.lr"])


def pools(cells: pd.DataFrame) -> dict[str, Pool]:
    """Setting -> its scores."""
    found = {}
    for setting, own in cells.groupby("setting", sort=False):
        validation, test = (
            own.pivot(index="client.lr", columns="seed", values=name)
            for name in ("validation", "test")
        )
        tried = validation.index.isin(grid(str(setting)))
        found[str(setting)] = Pool(tried, validation.to_numpy(), test.to_numpy())
    return found


def choices(pool: Pool, design: Design, seeds: np.ndarray, *, shifted: bool = False) -> np.ndarray:
    """The row (draws,) that tuning on these seeds (draws, tuning seeds) chooses.

    It is that with the best mean on validation; one of which a trial has diverged cannot win.

    Args:
        pool: the scores of a setting.
        design: how many of the seeds tune.
        seeds: in the order in which they are drawn.
        shifted: whether the grid is not that of the board, but the pool's other rates.
    """
    means = pool.validation[:, seeds[:, : design.tuning_seeds]].mean(-1)
    wins = (pool.tried != shifted)[:, None] & ~np.isnan(means)
    return np.where(wins, means, -np.inf).argmax(0)


def costs(pool: Pool, chosen: np.ndarray) -> np.ndarray:
    """What each choice loses against the pool's best rate, by the means over all seeds."""
    means = pool.test.mean(1)
    return means.max() - means[chosen]


def drawn_seeds(count: int, draws: int = DRAWS) -> np.ndarray:
    """(draws, count) orders of the seeds: the first ones tune, the last ones compare."""
    return np.random.default_rng(0).permuted(np.tile(np.arange(count), (draws, 1)), axis=1)


def margins(cells: pd.DataFrame, design: Design) -> dict[str, float]:
    """Setting -> the difference that tuning alone makes between two equal methods, at most.

    It is the 95 % quantile of the difference between the expected scores of two choices, where both
    have the same grid or the second a shifted one, whichever is more; `all` is that of the mean
    over the settings.
    """
    quantiles = []
    for shifted in (False, True):
        moved = {}
        for setting, pool in pools(cells).items():
            first, second = _apart(drawn_seeds(pool.test.shape[1]), design)
            means = pool.test.mean(1)
            theirs = means[choices(pool, design, second, shifted=shifted)]
            moved[setting] = theirs - means[choices(pool, design, first)]
        moved["all"] = np.mean([*moved.values()], axis=0)
        quantiles.append({name: np.quantile(np.abs(d), 0.95) for name, d in moved.items()})
    return {name: float(max(own[name] for own in quantiles)) for name in quantiles[0]}


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


def differences(
    pool: Pool, design: Design, order: np.ndarray, *, paired: bool, shifted: bool = False
) -> np.ndarray:
    """(draws, seeds): the second method's score minus the first's, seed by seed.

    Args:
        pool: the scores of a setting.
        design: how they are compared.
        order: (draws, n) of the pool's seeds.
        paired: whether both have the same seeds, so that they are equal where they are tuned
            alike; otherwise the second has other ones, as if no part of its noise were shared.
        shifted: whether the second is tuned on the pool's other rates.
    """
    first, second = _apart(order, design)
    ours, theirs = choices(pool, design, first), choices(pool, design, second, shifted=shifted)
    seeds = order[:, -design.seeds :]
    others = seeds if paired else order[:, -2 * design.seeds : -design.seeds]
    return pool.test[theirs[:, None], others] - pool.test[ours[:, None], seeds]


def called(found: np.ndarray, gap: float, margin: float) -> float:
    """The share of the draws in which a difference is shown to be larger than the margin.

    The level is the one that Holm's correction leaves the smallest of COMPARISONS p-values, for
    which few seeds are not enough.

    Args:
        found: (draws, seeds) differences.
        gap: what is added to each.
        margin: a difference that does not count as one.
    """
    if not statistics.enough(found.shape[1], COMPARISONS):
        return 0.0
    p = np.array([statistics.wilcoxon(statistics.beyond(row + gap, margin)) for row in found])
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
    False alarms are those of the worst of three cases: the second method has other seeds; both have
    the same, and so are equal where they are tuned alike; or, with the same seeds, the second is
    tuned on a shifted grid. Gaps are to be found in the first case, where differences vary most.
    """
    margin = margins(cells, design)
    cases: list[dict[str, np.ndarray]] = []
    for paired, shifted in ((False, False), (True, False), (True, True)):
        own = {}
        for name, pool in pools(cells).items():
            order = drawn_seeds(pool.test.shape[1])
            own[name] = differences(pool, design, order, paired=paired, shifted=shifted)
        cases.append(own | {"all": np.mean([*own.values()], axis=0)})
    found = {}
    for name in cases[0]:
        least = margin[name] if design.margin else 0.0
        alarms = max(called(case[name], 0.0, least) for case in cases)
        often = (gap for gap in GAPS if called(cases[0][name], gap, least) >= POWER)
        found[name] = Rates(alarms, next(often, None))
    return found


# ---- the tables of docs/tuning.md
def noise(cells: pd.DataFrame) -> str:
    """By setting, in points: what the choice of a rate costs, and how much a score varies."""
    rows = []
    for setting, own in cells.groupby("setting", sort=False):
        row = {"setting": str(setting)}
        (pool,) = pools(own).values()
        for seeds in (1, 3, 5, 8):
            lost = costs(pool, choices(pool, Design(seeds, 0), drawn_seeds(pool.test.shape[1])))
            row[f"tuned on {counted(seeds, 'seed')}"] = (
                f"{points(lost.mean())} ({points(lost.max())})"
            )
        row["spread"] = points(pool.test[pool.test.mean(1).argmax()].std(ddof=1))
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

"""The error rates of designs of a comparison, from whole comparisons that are drawn from a pool.

The pool (experiment=design) has runs of FedAvg with forty seeds in each setting. Its learning rates
are the grid of the setting's leaderboard, and rates between its values. A comparison is drawn as on
the leaderboard: two methods are tuned on different seeds, and then compared on further seeds. Both
methods are FedAvg, so every difference that the test shows is a false alarm. If a gap is added to
all scores of the second method, every difference that the test does not show is missed.
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
POOL = RESULTS / "design.csv"  # of both experiments
COLUMNS = ["setting", "client.lr", "seed", "validation", "test", "code"]
BOARDS = ("hospitals", "leaderboard")  # settings of no board use the grid of the last one
DRAWS = 400
GAPS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1)  # of accuracy
COMPARISONS = 25  # in a table, for Holm's correction
POWER = 0.8  # a gap counts as found from this share of draws on


@dataclass(frozen=True)
class Design:
    """The design of a comparison of two methods, in a setting or over all settings.

    Attributes:
        tuning_seeds: number of seeds with which each rate is tried.
        seeds: number of seeds of the comparison; no rate is tried on them.
        margin: whether a difference must be larger than the setting's margin (see `margins`).
    """

    tuning_seeds: int
    seeds: int
    margin: bool = False

    def __str__(self) -> str:
        above = ", above the margin" if self.margin else ""
        return f"tuned on {self.tuning_seeds}, {self.seeds} seeds{above}"


TODAY = Design(8, 12, margin=True)  # the design of the digits' boards
DESIGNS = (
    Design(1, 3),  # the design of the runs of version 0.1
    Design(1, 10),
    Design(5, 10),
    Design(5, 10, margin=True),
    replace(TODAY, margin=False),
    TODAY,
)


class Pool(NamedTuple):
    """The scores of a setting, each of shape (rates, seeds).

    `validation` is NaN for a diverged run. `tried` marks the rates in the grid of the setting's
    board.
    """

    tried: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def keep(read: Results, path: Path) -> None:
    """Write the pool's runs to a csv file; they replace rows with the same setting and rate.

    Without a global test set, the clients' mean score on their own test data counts.
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
    """Return the learning rates that are tried on the board of a setting."""
    for name in BOARDS:
        board = catalogue.content("experiment", name)
        if setting in board["axes"]["setting"]:
            break
    return tuple(board["tune"]["space"]["client.lr"])


def pools(cells: pd.DataFrame) -> dict[str, Pool]:
    """Return setting -> its scores."""
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
    """Return the row of the pool (draws,) that tuning on these seeds chooses.

    It has the best mean on validation. A rate cannot win if one of its trials has diverged.

    Args:
        pool: the scores of a setting.
        design: gives the number of seeds for the tuning.
        seeds: (draws, at least that number), in the order in which they are drawn.
        shifted: whether to tune on the pool's other rates instead of the board's grid.
    """
    means = pool.validation[:, seeds[:, : design.tuning_seeds]].mean(-1)
    wins = (pool.tried != shifted)[:, None] & ~np.isnan(means)
    return np.where(wins, means, -np.inf).argmax(0)


def costs(pool: Pool, chosen: np.ndarray) -> np.ndarray:
    """Return how much score each choice loses against the best rate, by means over all seeds."""
    means = pool.test.mean(1)
    return means.max() - means[chosen]


def drawn_seeds(count: int, draws: int = DRAWS) -> np.ndarray:
    """Return (draws, count) random orders of the seeds: the first tune, the last compare."""
    return np.random.default_rng(0).permuted(np.tile(np.arange(count), (draws, 1)), axis=1)


def margins(cells: pd.DataFrame, design: Design) -> dict[str, float]:
    """Return setting -> the difference that tuning alone makes between two equal methods.

    It is the 95 % quantile of the difference between the expected scores of two choices. Both have
    the same grid, or the second has a shifted one; the larger quantile counts. `all` is the margin
    for the mean over the settings.
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
    """Return the margin of today's design for the mean over these settings, from the kept pool.

    Raises:
        ConfigError: the pool lacks one of the settings.
    """
    cells = pd.read_csv(POOL)
    if missing := sorted({*settings} - {*cells["setting"]}):
        raise ConfigError(
            f"{POOL.name} has no runs of {', '.join(missing)}; run experiment=design for them"
        )
    return margins(cells[cells["setting"].isin(settings)], TODAY)["all"]


def _apart(order: np.ndarray, design: Design) -> tuple[np.ndarray, np.ndarray]:
    """Return the tuning seeds of the first and of the second method."""
    return order[:, : design.tuning_seeds], order[:, design.tuning_seeds : 2 * design.tuning_seeds]


def differences(
    pool: Pool, design: Design, order: np.ndarray, *, paired: bool, shifted: bool = False
) -> np.ndarray:
    """Return (draws, seeds): the second method's score minus the first's, seed by seed.

    Args:
        pool: the scores of a setting.
        design: the design of the comparison.
        order: (draws, n) orders of the pool's seeds.
        paired: whether both methods have the same seeds; their scores are then equal if tuning
            chooses the same rate. Else the second has other seeds, so no noise is shared.
        shifted: whether the second is tuned on the pool's other rates.
    """
    first, second = _apart(order, design)
    ours, theirs = choices(pool, design, first), choices(pool, design, second, shifted=shifted)
    seeds = order[:, -design.seeds :]
    others = seeds if paired else order[:, -2 * design.seeds : -design.seeds]
    return pool.test[theirs[:, None], others] - pool.test[ours[:, None], seeds]


def called(found: np.ndarray, gap: float, margin: float) -> float:
    """Return the share of draws in which the test shows a difference larger than the margin.

    The level is the level of Holm's correction for the smallest of COMPARISONS p-values. The share
    is 0 if there are too few seeds for it.

    Args:
        found: (draws, seeds) differences.
        gap: added to each difference.
        margin: the difference must be larger than this.
    """
    if not statistics.enough(found.shape[1], COMPARISONS):
        return 0.0
    p = np.array([statistics.wilcoxon(statistics.beyond(row + gap, margin)) for row in found])
    return float((p * COMPARISONS < statistics.LEVEL).mean())


class Rates(NamedTuple):
    """The error rates of a design.

    Attributes:
        false_alarms: the share of draws in which the test shows a difference of equal methods.
        smallest_gap: the smallest of GAPS that the test shows in at least a share POWER of the
            draws; None if it shows none of them so often.
    """

    false_alarms: float
    smallest_gap: float | None


def rates(cells: pd.DataFrame, design: Design) -> dict[str, Rates]:
    """Return setting -> the error rates of the design; `all` is over all settings.

    Over all settings, a pair is a seed with its mean over the settings; these share their seeds.
    False alarms are the worst of three cases: (1) the second method has other seeds; (2) both have
    the same seeds, so they are equal if tuning chooses the same rate; (3) both have the same seeds,
    and the second is tuned on a shifted grid. Gaps are searched in the first case, in which
    differences vary most.
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
    """Make the table by setting: cost of the choice of a rate, spread and margin, in points."""
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
    """Make the table by design: false alarms, and the smallest gap that is found often enough."""
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
    """Format a share in percentage points."""
    return f"{100 * share:.1f}"

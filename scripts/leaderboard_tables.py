"""The tables of docs/leaderboard.md, each from the cells of one dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from pages import head

from fedhet.report import statistics
from fedhet.report.scores import against_best

HOST = "FedAvg"
REAL, IF_NORMAL = "▼", "▽"  # worse than the best of the setting
CHANCE = 0.2  # a score below it, of ten classes, is hardly better than a guess


def ranked(runs: pd.DataFrame, settings: Sequence[str], score: str) -> Iterator[str]:
    """The scores by method and setting, the methods by their mean ranks; what these show.

    Args:
        runs: the runs of one dataset.
        settings: its settings, in the order of the columns.
        score: the column that is compared.
    """
    ranks = mean_ranks(runs, score)
    if lacking := [str(m) for m in dict.fromkeys(runs["method"]) if m not in ranks.index]:
        yield f"{joined(lacking)} lack runs, and are left out.\n"
    yield from _scores(runs, settings, ranks, score)
    ranking = statistics.rank(_blocks(runs, score))
    if ranking is not None:
        best = str(ranks.index[0])
        told = [str(m) for m in ranks.index if ranking.nemenyi.loc[best, m] < statistics.LEVEL]
        told = told if ranking.p < statistics.LEVEL else []  # Friedman's test comes first
        yield (
            f"Over the settings, {best} has the best mean rank. By Nemenyi's test, over"
            f" {ranking.blocks} pairs of a setting and a seed, and so of these settings only,"
            f" it differs from {joined(told) if told else 'no other method'}; the critical"
            f" distance of mean ranks is {ranking.critical:.1f}.\n"
        )


def overall(runs: pd.DataFrame, score: str) -> Iterator[str]:
    """All methods over all settings: which are better or worse than the host.

    A setting is one pair of the tests, with the means over its seeds.

    Args:
        runs: the runs of all datasets.
        score: the column that is compared.
    """
    means = runs.pivot_table(score, "setting", "method").dropna(axis=1)
    gains = means.drop(columns=HOST).sub(means[HOST], axis=0)
    p = pd.Series(
        statistics.holm(np.array([statistics.wilcoxon(gains[m].to_numpy()) for m in gains])),
        index=gains.columns,
    )
    ranks = means.rank(axis=1, ascending=False).mean().sort_values()
    yield head(["method", "mean rank", f"against {HOST}", "settings in which it is better", "p"])
    for method, rank in ranks.items():
        told = "– | – | –"
        if method != HOST:
            gain, wins = gains[method].mean(), int((gains[method] > 0).sum())
            told = f"{100 * gain:+.1f} | {wins} of {len(gains)} | {p[method]:.3f}"
        yield f"| {method} | {rank:.1f} | {told} |"
    yield ""
    if not statistics.enough(len(gains), len(p)):
        needed = statistics.pairs_needed(len(p))
        yield (
            f"Over {len(gains)} settings, the test cannot show a difference for {len(p)} methods"
            f" (that takes {needed} settings).\n"
        )
        return
    real = p[p < statistics.LEVEL].index
    better = [str(m) for m in ranks.index if m in real and gains[m].mean() > 0]
    worse = [str(m) for m in ranks.index if m in real and gains[m].mean() < 0]
    yield (
        f"Over these {len(gains)} settings, {joined(better) or 'no method'}"
        f" {'are' if len(better) > 1 else 'is'} shown to be better than {HOST}, and"
        f" {joined(worse) or 'none'} to be worse.\n"
    )


def mean_ranks(runs: pd.DataFrame, score: str) -> pd.Series:
    """The mean rank of each method over settings and seeds, the best one first."""
    return _blocks(runs, score).rank(axis=1, ascending=False).mean().sort_values()


def _blocks(runs: pd.DataFrame, score: str) -> pd.DataFrame:
    return runs.pivot_table(score, ["setting", "seed"], "method").dropna(axis=1)


def _scores(
    runs: pd.DataFrame, settings: Sequence[str], ranks: pd.Series, score: str
) -> Iterator[str]:
    groups = runs.groupby(["method", "setting"])[score]
    means, stds = groups.mean().unstack(), groups.std().unstack()
    blocks = {
        name: runs[runs["setting"] == name].pivot(index="seed", columns="method", values=score)
        for name in settings
    }
    bests = {name: str(blocks[name].dropna().mean().idxmax()) for name in settings}
    verdicts = {name: against_best(blocks[name], bests[name]) for name in settings}
    marks = {statistics.REAL: f" {REAL}", statistics.IF_NORMAL: f" {IF_NORMAL}"}
    yield head(["method", "mean rank", *(name.partition(", ")[2] for name in settings)])
    for method, rank in ranks.items():
        entries = []
        for name in settings:
            text = f"{means.loc[method, name]:.3f} ± {stds.loc[method, name]:.3f}"
            mark = marks.get(verdicts[name].get(str(method), ""), "")
            entries.append(f"**{text}**" if method == bests[name] else f"{text}{mark}")
        yield f"| {method} | {rank:.1f} | {' | '.join(entries)} |"
    yield ""
    yield _told(blocks, verdicts)


def _told(blocks: Mapping[str, pd.DataFrame], verdicts: Mapping[str, Mapping[str, str]]) -> str:
    """What the bold entries and the marks of a table of scores mean, and what they do not."""
    methods = max(len(table.columns) for table in blocks.values())
    couples = methods * (methods - 1) // 2
    seeds = min(statistics.fewest_pairs(table) for table in blocks.values())
    found = {verdict for told in verdicts.values() for verdict in told.values()}
    text = "Bold is the best mean of a setting. "
    if statistics.enough(seeds, couples):
        text += f"{REAL} is worse than it by Wilcoxon's test, with Holm's correction. "
    else:
        text += (
            f"With {seeds} seeds, no rank test within a setting can show a difference between"
            f" {methods} methods (that takes {statistics.pairs_needed(couples)} seeds), so that the"
            " best mean of a setting may be so by chance. "
        )
    if statistics.IF_NORMAL in found:
        text += (
            f"{IF_NORMAL} is worse than the best by the paired t-test with Holm's correction, which"
            " holds if differences between seeds are normal, and that so few seeds cannot show. "
        )
    elif statistics.REAL not in found:
        text += "Nor does the paired t-test, with Holm's correction, tell any from the best. "
    return f"{text.strip()}\n"


def global_costs(runs: pd.DataFrame, trials: pd.DataFrame) -> Iterator[str]:
    """What a table of accuracies does not tell: worst clients, variance, tuning and costs."""
    costs = _relative(runs, ["megabytes", "seconds"])
    heads = [
        "clients' mean",
        "personal models",
        "worst tenth of the clients",
        "spread over seeds",
        "rounds to .8",
        "rounds to .9",
    ]
    heads += ["median trial against the best", "trials below 20 %", "bytes", "time"]
    yield head(["method", *heads])
    for method in mean_ranks(runs, "accuracy").index:
        own = runs[runs["method"] == method]
        tried = trials[trials["method"] == method]
        failed = (tried["validation"].fillna(0.0) < CHANCE).mean()
        entries = [
            f"{own['clients_mean'].mean():.3f}",
            f"{own['personal'].mean():.3f}" if own["personal"].notna().any() else "–",
            f"{own['worst_decile'].mean():.3f}",
            f"{own.groupby('setting')['accuracy'].std().mean():.3f}",
            *(_rounds(own[f"rounds_to_{target}"]) for target in ("0.8", "0.9")),
            f"-{_lost(tried):.3f}",
            f"{failed:.0%}",
            *costs[str(method)],
        ]
        yield f"| {method} | {' | '.join(entries)} |"
    yield ""


def personal_costs(runs: pd.DataFrame, trials: pd.DataFrame) -> Iterator[str]:
    """As `global_costs`, for the models that clients would use themselves."""
    costs = _relative(runs, ["megabytes", "seconds", "evaluation"])
    heads = ["clients' mean", "global model", "worst tenth of the clients", "spread over seeds"]
    heads += ["median trial against the best", "bytes", "time", "evaluation"]
    yield head(["method", *heads])
    for method in mean_ranks(runs, "score").index:
        own = runs[runs["method"] == method]
        entries = [
            f"{own['score'].mean():.3f}",
            f"{own['global'].mean():.3f}" if own["global"].notna().any() else "–",
            f"{own['worst_decile'].mean():.3f}",
            f"{own.groupby('setting')['score'].std().mean():.3f}",
            f"-{_lost(trials[trials['method'] == method]):.3f}",
            *costs[str(method)],
        ]
        yield f"| {method} | {' | '.join(entries)} |"
    yield ""


def _relative(runs: pd.DataFrame, names: list[str]) -> dict[str, list[str]]:
    """Method -> its costs as multiples of FedAvg's, the mean over the settings."""
    means = runs.groupby(["method", "setting"])[names].mean()
    host = means.loc[HOST]
    return {
        str(method): [f"{value:.1f}" for value in (means.loc[method] / host).mean()]
        for method in means.index.unique("method")
    }


def _lost(trials: pd.DataFrame) -> float:
    """How much validation accuracy the median trial loses against the best, over the settings."""
    best = trials.groupby("setting")["validation"].max()
    median = trials.fillna({"validation": 0.0}).groupby("setting")["validation"].median()
    return float((best - median).mean())


def _rounds(values: pd.Series) -> str:
    """The median number of rounds, and how many runs reached the target if not all did."""
    reached = values.dropna()
    if reached.empty:
        return "never"
    part = "" if len(reached) == len(values) else f" ({len(reached)} of {len(values)})"
    return f"{reached.median():.0f}{part}"


def joined(names: Sequence[str]) -> str:
    """The names as a sentence lists them."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

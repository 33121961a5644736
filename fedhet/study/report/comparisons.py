"""Tests each method against the reference in one family of tests, and writes the summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from statistics import mean
from typing import Any

import pandas as pd

from fedhet.core.check import counted
from fedhet.study.report.compared import FEWEST_TUNING_SEEDS, SCORES, Study
from fedhet.study.report.document import (
    Columns,
    Table,
    TableEntry,
    joined,
    mean_std,
    number,
    p_value,
    plain,
)
from fedhet.study.report.results import NOT_RUN
from fedhet.study.report.statistics import (
    NOT_SHOWN,
    NOT_TESTED,
    PRINTED,
    SHOWN,
    compare,
    mean_ranks,
    pairs_needed,
    seeds_needed,
)

MOST_SEEDS = 1000  # larger numbers of seeds are not printed
WORDS = ("better", "worse", NOT_SHOWN, NOT_TESTED)
SAME_STEPS = 0.05  # local steps count as equal up to this relative difference
RULE = (
    "A difference is shown if Wilcoxon's signed-rank test over the seeds has p < .05 after Holm's"
    " correction over all comparisons of this table, which are one family. A comparison is not"
    " tested if it has fewer seeds than this family needs. It is not tested either if the two"
    " methods have different tuned values that were chosen on fewer than"
    f" {FEWEST_TUNING_SEEDS} seeds. If a tested difference is not shown, the methods may be equal,"
    " or the difference is too small for these seeds."
)
ASSUMPTIONS = [
    RULE,
    "A pair is a seed, with the mean over the settings that were run, because settings of one seed"
    " share data and initial weights. The tests therefore hold for these settings, their data and"
    " their test data only.",
    "Wilcoxon's test assumes independent pairs with symmetrically distributed differences; zeros"
    " are split. With n pairs the smallest possible two-sided p-value is 2/2ⁿ.",
    "The 95 % interval belongs to a single comparison, without the correction. It can therefore"
    " leave out 0 although nothing is shown. It is a bootstrap interval (BCa, 2000 resamples),"
    " which is a little too narrow for ten seeds, and more so for fewer.",
    "Seeds needed: if nothing is shown, this is the number of seeds with which 80 % of all"
    " experiments would show a difference of the size seen. It uses the normal approximation to the"
    " power of Wilcoxon's test, at the level .05 divided by the number of comparisons. The size"
    " seen is itself uncertain, and so is this number.",
    "Mean rank: the mean over all seeds in all settings; 1 is best. Scores that are equal in the"
    " three printed digits share their ranks.",
]


def against_reference(study: Study) -> pd.DataFrame:
    """Compare each method with the reference over all settings; sort by difference, best first.

    The columns are the ones of `statistics.compare`, and `needed`: the number of seeds that a
    difference of this size needs, or NaN.
    """
    frame = compare(study.gains(), study.reference, untested=study.tuned_on_few)
    frame["needed"] = [
        seeds_needed(effect, len(frame)) if abs(effect) > 0 else math.nan
        for effect in frame["effect"]
    ]
    return frame.sort_values("difference", ascending=False, kind="stable", ignore_index=True)


def comparison_table(study: Study, found: pd.DataFrame) -> Table:
    """Make the table with a row per method: rate, costs, score, rank, difference and test."""
    blocks = study.blocks(study.metric)
    means = study.means(study.metric).mean()
    ranks = mean_ranks(blocks.dropna(axis=1, how="all").dropna())
    rows = found.assign(method=found["a"], shown=found["verdict"] == SHOWN).to_dict("records")
    place = sum(row["difference"] > 0 for row in rows)
    compared = [row["method"] for row in rows]
    own = {"method": study.reference, "difference": 0.0, "verdict": "reference"}
    rest = [{"method": m} for m in study.methods if m not in (*compared, study.reference)]
    columns: Columns = [
        (study.compare, "method"),
        ("learning rate", lambda r: plain(study.rates.get(r["method"]))),
        ("local steps", lambda r: number(study.steps.get(r["method"]), ".2f")),
        ("bytes", lambda r: number(study.sent.get(r["method"]), ".2f")),
        (f"mean {study.title}", lambda r: number(means.get(r["method"]))),
        ("mean rank", lambda r: number(ranks.get(r["method"]), ".2f")),
        (f"difference from {study.reference}", lambda r: number(r.get("difference"), "+.3f")),
        ("95 % interval", lambda r: plain(_interval(r))),
        ("by setting", lambda r: plain(_ends(study, r["method"]))),
        ("p", lambda r: p_value(r.get("p", math.nan))),
        ("result", lambda r: TableEntry(_result(r), best=r.get("shown", False))),
        ("seeds", lambda r: plain(r.get("pairs"))),
        ("seeds needed", lambda r: plain(_needed(r))),
    ]
    caption = (
        f"{study.title.capitalize()} ({SCORES[study.metric]}) as the mean over"
        f" {counted(len(study.conditions), 'setting')} and seeds, and each method's difference from"
        f" {study.reference}. Local steps and bytes count all rounds; they are multiples of what"
        f" {study.reference} takes. p is the p-value of Wilcoxon's test after Holm's correction"
        " over these comparisons; the correction can make several p-values equal."
    )
    records = [*rows[:place], own, *rows[place:], *rest]
    data = pd.DataFrame(records)
    further = {
        "learning_rate": study.rates,
        "mean_rank": ranks,
        "local_steps": study.steps,
        "bytes": study.sent,
    }
    for name, values in further.items():
        data[name] = data["method"].map(values)
    return Table.of("comparison", "Comparison", caption, records, columns, data)


def _interval(row: Mapping[str, Any]) -> str | None:
    low, high = row.get("low", math.nan), row.get("high", math.nan)
    return None if math.isnan(low) else f"{low:+.3f} to {high:+.3f}"


def _needed(row: Mapping[str, Any]) -> str | None:
    needed = row.get("needed", math.nan)
    if math.isnan(needed) or row["verdict"] == SHOWN:
        return None
    return f"{needed:.0f}" if needed <= MOST_SEEDS else f"more than {MOST_SEEDS}"


def _result(row: Mapping[str, Any]) -> str:
    verdict = str(row.get("verdict", "not compared"))
    return verdict if verdict != SHOWN else "better" if row["difference"] > 0 else "worse"


def _by_setting(study: Study, method: str) -> dict[str, float]:
    """Return setting -> the method's mean difference from the reference."""
    every = ((name, own[own["a"] == method]) for name, own in study.differences.items())
    return {name: float(row["difference"].iloc[0]) for name, row in every if len(row)}


def _ends(study: Study, method: str) -> str | None:
    """Format the smallest and the largest difference by setting; None for a single setting."""
    own = _by_setting(study, method).values()
    return f"{min(own):+.3f} to {max(own):+.3f}" if len(own) > 1 else None


def pairs_table(study: Study) -> Table:
    """Make the table of each method's difference from the reference by setting, without tests."""
    frames = [own.assign(setting=name) for name, own in study.differences.items()]
    data = pd.concat(frames, ignore_index=True).drop(columns=["p"])
    columns: Columns = [
        ("setting", "setting"),
        (study.compare, "a"),
        (f"difference from {study.reference}", lambda r: number(r["difference"], "+.3f")),
        ("95 % interval", lambda r: plain(_interval(r))),
        ("effect size", lambda r: number(r["effect"], ".2f")),
        (
            "wins–losses–ties",
            lambda r: TableEntry(f"{r['wins']}–{r['losses']}–{r['ties']}", r["wins"] - r["losses"]),
        ),
    ]
    caption = (
        "Means over the seeds that both methods have. They are not tested; the picture shows them"
        " as small marks. The effect size is the mean difference divided by the standard deviation"
        " of the differences."
    )
    return Table.of("pairs", "Differences by setting", caption, data, columns)


# ---- the summary
def sentences(study: Study, found: pd.DataFrame) -> list[str]:
    """Return the sentences of the summary."""
    return [_score(study), *_verdicts(study, found), *_gaps(study)]


def _score(study: Study) -> str:
    methods, conditions = len(study.methods), len(study.conditions)
    what = (
        counted(methods, "method")
        if study.compare == "method"
        else f"{counted(methods, 'value')} of {study.compare}"
    )
    where = "one setting" if conditions == 1 else f"{conditions} settings"
    seeds = counted(study.scores["seed"].nunique(), "seed")
    mean = "" if conditions == 1 else ", averaged over the settings"
    return f"{what} in {where} with {seeds}, by {study.title} ({SCORES[study.metric]}){mean}."


def _verdicts(study: Study, found: pd.DataFrame) -> Iterator[str]:
    """Say which methods are better, worse, not shown to differ, or not tested."""
    if len(study.methods) < 2:
        yield (
            f"{study.methods[0]} has {mean_std(study.scores[study.metric]).text};"
            " there is nothing to compare it with."
        )
        return
    if found.empty:
        yield f"No method has a seed in common with {study.reference}: nothing is compared."
        return
    by = {word: [row for row in found.to_dict("records") if _result(row) == word] for word in WORDS}
    for word in WORDS[:2]:
        if listed := [
            f"{row['a']} by {abs(row['difference']):.3f} ({_size(study, row)})"
            for row in sorted(by[word], key=lambda r: -abs(r["difference"]))
        ]:
            yield f"Shown to be {word} than {study.reference}: {joined(listed)}."
    if listed := [
        f"{row['a']} ({row['difference']:+.3f}, p {row['p']:.3f}{_hidden(_along(study, row))})"
        for row in sorted(by[NOT_SHOWN], key=lambda r: r["p"])
    ]:
        yield f"Not shown to differ from {study.reference}: {joined(listed)}."
    few = [row for row in by[NOT_TESTED] if row["a"] in study.tuned_on_few]
    if listed := [f"{row['a']} ({row['difference']:+.3f})" for row in few]:
        yield (
            f"Not tested, because their tuned values differ from {study.reference}'s values and"
            f" were chosen on fewer than {FEWEST_TUNING_SEEDS} seeds (tune.seeds):"
            f" {joined(listed)}."
        )
    if listed := [f"{r['a']} ({r['difference']:+.3f})" for r in by[NOT_TESTED] if r not in few]:
        needed, family = pairs_needed(len(found)), counted(len(found), "comparison")
        yield (
            f"Not tested, because a table of {family} needs {needed} seeds"
            f" (seed=range(0,{needed})): {joined(listed)}."
        )
    if listed := [
        f"{method} takes {ratio:.1f} times"
        for method, ratio in study.steps.items()
        if abs(ratio - 1) > SAME_STEPS
    ]:
        yield f"Local steps differ: {joined(listed)} as many as {study.reference}."


def _size(study: Study, row: Mapping[str, Any]) -> str:
    """Format the interval of a difference, and its range over the settings."""
    sign = 1 if row["difference"] > 0 else -1
    low, high = sorted((sign * row["low"], sign * row["high"]))
    own = _along(study, row)
    text = f"95 % interval {low:z.3f} to {high:z.3f}"
    if len(own) > 1:
        text += f"; by setting {min(own.values()):z.3f} to {max(own.values()):z.3f}"
    return text + _hidden(own)


def _along(study: Study, row: Mapping[str, Any]) -> dict[str, float]:
    """Return the differences by setting, with the sign that makes their mean positive."""
    own = _by_setting(study, str(row["a"]))
    return {name: math.copysign(1, row["difference"]) * value for name, value in own.items()}


def _hidden(own: Mapping[str, float]) -> str:
    if len(own) > 1 and (hidden := hidden_by_mean(own, lambda value: f"{value:z.3f}")):
        return f"; {hidden}"
    return ""


def hidden_by_mean(own: Mapping[str, float], form: Callable[[float], str]) -> str | None:
    """Name the settings with the opposite sign, or the setting that most of the mean comes from.

    Args:
        own: setting -> its difference, with the sign that makes the mean positive; at least two.
        form: formats a difference.

    Returns:
        None if all signs agree, and no setting makes up more than half of the mean difference.
    """
    if opposite := [name for name, value in own.items() if round(value, PRINTED) < 0]:
        return f"the other way around with {joined(opposite)}"
    most = max(own, key=own.__getitem__)
    rest = mean(value for name, value in own.items() if name != most)
    return f"without {most} it is {form(rest)}" if rest < mean(own.values()) / 2 else None


def _gaps(study: Study) -> Iterator[str]:
    """Name diverged runs, missing runs, and tuned values at the edge of their grid."""
    counts = study.scores[study.scores["diverged"]].groupby("method", sort=False).size()
    runs = study.scores.groupby("method").size()
    if listed := [
        f"{method} in {count} of {runs[method]} runs" for method, count in counts.items()
    ]:
        yield f"Training diverged, or the loss was infinite at the end: {joined(listed)}."
    cells = study.results.source.cells  # runs that did not start may not have been requested
    missing = [cell.trial for cell in cells if not cell.counts and cell.status != NOT_RUN]
    words = ("run", "runs"), ("trial of the tuning", "trials of the tuning")
    for trial, (word, plural) in enumerate(words):
        if count := missing.count(bool(trial)):
            are = "is" if count == 1 else "are"
            missed = counted(count, word, plural)
            yield f"{missed} without a result {are} listed below, with the reason."
    edges = [
        str(entry.get("axes", {}).get(study.compare))
        for entry in study.results.source.experiment.get("tuned") or []
        if entry.get("at_the_edge")
    ]
    if edges:
        yield (
            "These methods have a tuned value at the edge of its grid, and a better value may lie"
            f" beyond: {joined(list(dict.fromkeys(edges)))}."
        )

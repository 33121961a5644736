"""The tables of scores."""

from __future__ import annotations

import pandas as pd

from fedhet.report.document import (
    NOT_SHOWN_WORSE,
    WORSE_IF_NORMAL,
    Columns,
    Table,
    TableEntry,
    mean_std,
)
from fedhet.report.statistics import IF_NORMAL, NOT_SHOWN, compare
from fedhet.report.study import SCORES, Study, paired

MARKS = {NOT_SHOWN: NOT_SHOWN_WORSE, IF_NORMAL: WORSE_IF_NORMAL}
LEGEND = (
    "Mean ± standard deviation over seeds; the best mean is bold. Only seeds that all methods of"
    " a setting have decide which that is, and without such seeds none is bold. n: the seeds of a"
    f" method that has not all. {NOT_SHOWN_WORSE}: no test shows"
    f" that it is worse than the best. {WORSE_IF_NORMAL}: worse by the paired t-test only, which"
    " assumes normal differences; there are too few seeds for Wilcoxon's test. No mark: worse by"
    " Wilcoxon's test. Holm's correction is over all pairs of methods of a setting."
)
DIVERGENCE = (
    "A run has diverged if its loss is no longer finite, or if it failed with weights that are not"
    " finite. (The loss is infinite by definition too where a model excludes the class of a sample,"
    " as FedPCL's does.) That is a result: its last score counts in means and tests as it was"
    " measured, and where there is none, it counts as 0, or as the lowest score of its setting if"
    " that is negative. Such runs are counted in brackets. A run that is missing for another reason"
    " counts nowhere, and a pair of runs of which one is missing is left out."
)


def score_tables(study: Study) -> list[Table]:
    """The deciding score by method and condition, and all scores."""
    return [deciding(study), every_score(study)]


def deciding(study: Study) -> Table:
    """A row per method and a column per condition."""
    entries = {name: condition_entries(study, study.metric, name) for name in study.conditions}
    columns: Columns = [(study.compare, "method")]
    columns += [(name, lambda r, own=own: own.get(r["method"])) for name, own in entries.items()]
    groups = study.counted.groupby(["method", "setting"], sort=False)
    data = groups[study.metric].agg(["mean", "std", "count"])
    data["diverged"] = groups["diverged"].sum()
    title = f"{study.title.capitalize()}: {SCORES[study.metric]}"
    records = [{"method": method} for method in study.methods]
    return Table.of("scores", title, LEGEND, records, columns, data.reset_index())


def every_score(study: Study) -> Table:
    """A row per condition and method and a column per score."""
    counted = study.counted
    names = [name for name in SCORES if counted[name].notna().any()]
    entries = {
        (name, condition): condition_entries(study, name, condition)
        for condition in study.conditions
        for name in names
    }
    runs = counted.groupby(["setting", "method"])["diverged"].agg(["size", "sum"])
    diverged = runs.reindex(pd.MultiIndex.from_product([study.conditions, study.methods]))
    records = [
        {"setting": condition, "method": method, "runs": int(size), "diverged": int(lost)}
        for (condition, method), size, lost in diverged.fillna(0).itertuples()
    ]
    columns: Columns = [("setting", "setting"), (study.compare, "method")]
    columns += [
        (SCORES[name], lambda r, name=name: entries[name, r["setting"]].get(r["method"]))
        for name in names
    ]
    caption = (
        "All scores are on test data: of the global model on the global test set, “clients' mean”"
        " and “worst 10 %” on the clients' own test data (of the model that a client would use"
        " first), “best by validation” at the round that the clients' validation data choose. "
    )
    columns += [("runs", "runs"), ("diverged", "diverged")]
    data = counted[["setting", "method", "seed", "diverged", *names]]
    return Table.of("all_scores", "All scores", caption + LEGEND, records, columns, data)


def condition_entries(study: Study, score: str, condition: str) -> dict[str, TableEntry]:
    """The entries of one condition by method, with the best one and the others marked."""
    blocks = study.blocks(score, condition).dropna(axis=1, how="all")
    if blocks.empty:
        return {}
    diverged = study.counted.query("setting == @condition").groupby("method")["diverged"].sum()
    means = paired(blocks).mean()
    best = None if means.isna().all() else str(means.idxmax())
    verdicts = against_best(blocks, best) if best else {}
    entries = {}
    for method in blocks:
        entry = mean_std(blocks[method])
        if blocks[method].count() < len(blocks):
            entry.text += f" (n={blocks[method].count()})"
        if diverged[method]:
            entry.text += f" ({diverged[method]} diverged)"
        entry.best = best is not None and means[method] == means[best]
        entry.mark = "" if entry.best else MARKS.get(verdicts.get(str(method), ""), "")
        entries[str(method)] = entry
    return entries


def against_best(blocks: pd.DataFrame, best: str) -> dict[str, str]:
    """The verdict on the difference of each other method from the best."""
    pairs = compare(blocks, effects=False)
    verdicts = {}
    for row in pairs.itertuples():
        if best in (row.a, row.b):
            # Of incomplete pairs, the better one by the mean can be another than that of all runs.
            worse = row.b if row.a == best else row.a
            verdicts[str(worse)] = str(row.verdict) if row.a == best else NOT_SHOWN
    return verdicts

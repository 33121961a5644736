"""The tables of a report without tests: scores, costs, and how the runs were made."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from contextlib import suppress
from typing import Any

import pandas as pd

from fedhet.core.errors import clean
from fedhet.data.forms import plain_text
from fedhet.runs.record.schema import FEWEST_OF_A_GRID
from fedhet.runs.record.scores import DETAILS, detailed
from fedhet.study.code import short
from fedhet.study.report.compared import SCORES, Study, paired
from fedhet.study.report.document import (
    NOTHING,
    Columns,
    Section,
    Table,
    TableEntry,
    joined,
    mean_std,
    number,
    plain,
    size,
)
from fedhet.study.report.results import DIVERGED, FAILED, FINISHED, Values

LEGEND = (
    "Mean ± standard deviation over seeds. The best mean over the seeds that all methods of a"
    " setting have is bold; this is not a test. If a method lacks seeds, n is the number that it"
    " has."
)
DIVERGENCE = (
    "A run has diverged if its loss is no longer finite, or if it failed with weights that are not"
    " finite. (The loss is also infinite by definition if a model, such as FedPCL's, excludes the"
    " class of a sample.) Divergence is a result: the last measured score of the run counts in"
    " means and tests. Without a measured score, the run counts as 0, or as the lowest score of its"
    " setting if this score is negative. Tables give the number of diverged runs in brackets. A run"
    " that is missing for another reason counts nowhere, and a pair with a missing run is left out."
)


def deciding(study: Study) -> Table:
    """Make the table of the deciding score: a row per method and a column per condition."""
    entries = {name: condition_entries(study, study.metric, name) for name in study.conditions}
    columns: Columns = [
        (study.compare, "method"),
        *((name, lambda r, own=own: own.get(r["method"])) for name, own in entries.items()),
    ]
    groups = study.counted.groupby(["method", "setting"], sort=False)
    data = groups[study.metric].agg(["mean", "std", "count"])
    data["diverged"] = groups["diverged"].sum()
    title = f"{study.title.capitalize()}: {SCORES[study.metric]}"
    records = [{"method": method} for method in study.methods]
    return Table.of("scores", title, LEGEND, records, columns, data.reset_index())


def every_score(study: Study) -> Table:
    """Make the table of all scores: a row per condition and method, a column per score."""
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
    columns: Columns = [
        *_place(study),
        *(
            (SCORES[name], lambda r, name=name: entries[name, r["setting"]].get(r["method"]))
            for name in names
        ),
        ("runs", "runs"),
        ("diverged", "diverged"),
    ]
    caption = (
        "All scores are on test data. The global model is scored on the global test set."
        " “clients' mean” and “worst 10 %” are on the clients' own test data, with the clients' own"
        " models if the method has them. “best by validation” is the score at the round that the"
        " clients' validation data choose. "
    )
    data = counted[["setting", "method", "seed", "diverged", *names]]
    return Table.of("all_scores", "All scores", caption + LEGEND, records, columns, data)


def detail_tables(study: Study) -> list[Table]:
    """Make the tables of eval.scores=all, pooled and by client; none if no run recorded them."""
    frame = pd.DataFrame(
        [
            {**dict(zip(("method", "setting", "seed"), study.place(cell), strict=True)), **found}
            | {"models": place, "confusion": str(found.get("confusion"))}
            for cell in study.cells
            for place, found in detailed(cell.summary).items()
        ]
    )
    names = [name for name in DETAILS if name in frame]
    if not names:
        return []
    where = [*PLACE, "models"]
    records = [
        {**dict(zip(where, place, strict=True)), **{name: own[name] for name in names}}
        for place, own in frame.groupby(where, sort=False)
    ]
    scores: Columns = [(DETAILS[name], lambda r, name=name: mean_std(r[name])) for name in names]
    columns = [*_place(study), ("models and samples", "models"), *scores]
    together = Table.of(
        "details",
        "Beyond the accuracy",
        "Scores at the last evaluation, as mean ± standard deviation over seeds. Scores on the"
        " clients' test data are computed over the samples of all clients together. With two"
        " classes, the second one is positive. The calibration error is the expected error over 15"
        " bins of the confidence. The CSV file has the confusion matrices, with a row for each"
        " target.",
        records,
        columns,
        frame,
    )
    return [together, *_by_client(study, names)]


def _by_client(study: Study, names: list[str]) -> list[Table]:
    last = study.results.last_clients.drop(columns=PLACE, errors="ignore")
    last = last[(last["split"] == "test") & last["metric"].isin(names)]
    if last.empty:
        return []
    runs = study.scores[[*PLACE, "folder"]].merge(last, on="folder")
    where = [*PLACE, "model", "client"]
    means = runs.pivot_table("value", where, "metric", sort=False).reset_index()
    shown: Columns = [
        (DETAILS[name], lambda r, name=name: number(r[name], ".3f"))
        for name in names
        if name in means
    ]
    columns: Columns = [*_place(study), ("models", "model"), ("client", "client"), *shown]
    caption = "The same on each client's own test data, as the mean over seeds."
    return [Table.of("sites", "By client", caption, means, columns, folded=True)]


def condition_entries(study: Study, score: str, condition: str) -> dict[str, TableEntry]:
    """Return method -> its entry in one condition, with the best mean marked."""
    blocks = study.blocks(score, condition).dropna(axis=1, how="all")
    if blocks.empty:
        return {}
    diverged = study.counted.query("setting == @condition").groupby("method")["diverged"].sum()
    means = paired(blocks).mean()
    best = None if means.isna().all() else str(means.idxmax())
    entries = {}
    for method in blocks:
        entry = mean_std(blocks[method])
        if blocks[method].count() < len(blocks):
            entry.text += f" (n={blocks[method].count()})"
        if diverged[method]:
            entry.text += f" ({diverged[method]} diverged)"
        entry.best = best is not None and means[method] == means[best]
        entries[str(method)] = entry
    return entries


# ---- costs: the cost of a threshold, seconds, bytes and memory
THRESHOLD = re.compile(r"thresholds\.(.+)\.(rounds|bytes|seconds)")
COSTS = ("rounds", "bytes", "seconds")
NEVER = TableEntry("never reached")
NOT_RECORDED = "not recorded"
CAPTIONS = {
    "seconds": (
        "Seconds of a run by phase and kind of work, as the mean over seeds, measured on the"
        " machines named below. They leave out the start of the run, so their sum is less than the"
        " seconds of the whole run."
    ),
    "bytes": (
        "Bytes that all clients together send (up) and receive (down) in a run, by phase and kind,"
        " as the mean over seeds. They count payloads, without evaluations and without the overhead"
        " of the transport. The kind “model” is the weights. Other kinds begin with the name of the"
        " method or plug-in that sends them; its help explains them (for instance python -m fedhet"
        " --help method=scaffold)."
    ),
}
SHARED = (
    " Some runs shared a process, and their seconds are shares of its time. Such seconds cannot be"
    " used to compare methods; with engine.fused=off every run has its own process."
)
RUN_COSTS = ["seconds.total", "up", "down", "memory.peak", "memory.gpu_peak", "client_state.bytes"]
PLACE = ["setting", "method"]


def cost_tables(study: Study) -> list[Table]:
    """Make all tables of costs that the runs recorded."""
    made = [thresholds(study), run_costs(study), phases(study, "seconds"), phases(study, "bytes")]
    return [table for table in made if table]


def run_frame(study: Study) -> pd.DataFrame:
    """Return `results.runs` for `study.cells`, with the report's columns `method` and `setting`.

    The index is the same as in `study.scores`.
    """
    runs = study.results.runs.drop(columns=PLACE, errors="ignore")
    places = study.scores[["method", "setting", "folder"]]
    return places.merge(runs, on="folder", how="left", validate="one_to_one")


def thresholds(study: Study) -> Table | None:
    """Make the table of rounds, bytes and seconds to each threshold; None without thresholds."""
    runs = run_frame(study)
    names = list(dict.fromkeys(m[1] for c in runs.columns if (m := THRESHOLD.fullmatch(str(c)))))
    if not names:
        return None
    records = [
        {
            **dict(zip(PLACE, place, strict=True)),
            "threshold": name.replace(".", " ", 1),
            **{cost: own[f"thresholds.{name}.{cost}"].astype(float) for cost in COSTS},
            "reached": int(own[f"thresholds.{name}.rounds"].notna().sum()),
            "runs": len(own),
        }
        for place, own in runs.groupby(PLACE, sort=False)
        for name in names
    ]
    in_seconds: Columns = [
        ("seconds", lambda r: mean_std(r["seconds"], ".2f") if r["reached"] else NEVER)
    ]
    caption = (
        "Cost up to the first evaluation on test data that reaches the threshold, as mean"
        " ± standard deviation over the runs that reach it. The last column is the number of these"
        " runs. If some runs of a method do not reach the threshold, its costs are too low. Rounds"
        " of preparation count, evaluations do not."
    )
    return Table.of(
        "thresholds",
        "Cost of reaching a threshold",
        caption,
        records,
        [
            *_place(study),
            ("threshold", "threshold"),
            ("rounds", lambda r: mean_std(r["rounds"], ".1f") if r["reached"] else NEVER),
            ("sent", lambda r: _bytes(r["bytes"].mean(), NOTHING) if r["reached"] else NEVER),
            *(in_seconds if study.comparable_seconds else []),
            (
                "reached by",
                lambda r: TableEntry(f"{r['reached']} of {r['runs']}", r["reached"] / r["runs"]),
            ),
        ],
        pd.DataFrame([{**r, **{cost: r[cost].mean() for cost in COSTS}} for r in records]),
    )


def _place(study: Study) -> Columns:
    """Return the columns for the setting and the method of a row."""
    return [("setting", "setting"), (study.compare, "method")]


def _bytes(count: float | None, absent: str = NOT_RECORDED) -> TableEntry:
    return TableEntry(absent) if count is None or pd.isna(count) else TableEntry(size(count), count)


def phases(study: Study, name: str) -> Table | None:
    """Make the table of seconds or bytes (`name`) by phase and kind; None if none are recorded."""
    rounds = study.results.rounds
    columns = [str(column) for column in rounds if str(column).startswith(f"{name}.")]
    if not columns or "phase" not in rounds:
        return None
    sums = rounds.groupby(["folder", "phase"], sort=False)[columns].sum().reset_index()
    runs = study.scores[[*PLACE, "folder"]].merge(sums, on="folder", validate="one_to_many")
    means = runs.groupby([*PLACE, "phase"], sort=False)[columns].mean()
    caption = CAPTIONS[name]
    if name == "seconds":
        means.insert(0, "sum", means.sum(axis=1))
        caption += "" if study.comparable_seconds else SHARED
    kinds: Columns = [
        (
            kind.removeprefix(f"{name}."),
            lambda r, kind=kind: (
                number(r[kind], "z.2f") if name == "seconds" else _bytes(r[kind] or None, NOTHING)
            ),
        )
        for kind in map(str, means)
    ]
    title = f"{name.capitalize()} by phase"
    shown = [*_place(study), ("phase", "phase"), *kinds]
    return Table.of(name, title, caption, means.reset_index(), shown, folded=True)


def run_costs(study: Study) -> Table:
    """Make the table of a run's seconds, bytes, peak memory, and bytes that clients store."""
    runs = run_frame(study)
    for way in ("up", "down"):
        runs[way] = runs.filter(like=f"bytes.{way}.").sum(axis=1, min_count=1)
    runs = runs.reindex(columns=[*PLACE, *RUN_COSTS])
    groups = runs.astype(dict.fromkeys(RUN_COSTS, float)).groupby(PLACE, sort=False)
    caption = (
        "Costs of a whole run, as the mean over seeds; the two tables below divide seconds and"
        " bytes by phase. Seconds are shown if no runs shared a process. They count from the start"
        " of a run to its end, with evaluations; compare them only between runs of equal load."
        " Bytes leave out evaluations. The peak is the peak memory of the whole process since its"
        " start. Runs in one process therefore share its peak, and worker processes are not"
        " included. Folders of earlier versions have no peak. The last column is the data that"
        " all clients together keep between rounds."
    )
    total: Columns = [("seconds", lambda r: number(r["seconds.total"], ".2f"))]
    columns: Columns = [
        *_place(study),
        *(total if study.comparable_seconds else []),
        ("sent by clients", lambda r: _bytes(r["up"])),
        ("received", lambda r: _bytes(r["down"])),
        ("peak of the process", lambda r: _bytes(r["memory.peak"])),
        ("peak on the GPU", lambda r: _bytes(r["memory.gpu_peak"])),
        ("stored by clients", lambda r: _bytes(r["client_state.bytes"])),
    ]
    return Table.of(
        "costs", "Seconds, bytes and memory", caption, groups.mean().reset_index(), columns
    )


# ---- how the runs were made: configuration, versions, machines, seeds, and what is missing
LONGEST_CONFIG = 40_000
NO_COMMAND = (
    "No experiment.json names a command. To repeat a run, use the overrides in its overrides.yaml."
)


def making_section(study: Study) -> Section:
    """Make the section on how the runs were made."""
    given = study.results.source.experiment.get("command")
    seeds = sorted(set(study.scores["seed"]))
    section = Section(
        "How it was made",
        [*([] if given else [NO_COMMAND]), f"Seeds: {', '.join(map(str, seeds))}."],
        [runs_table(study), environment_table(study)],
        listings=[("The command that repeats it", command(given))] if given else [],
    )
    cell = study.cells[0]
    with suppress(OSError, ValueError):
        text = plain_text(cell.folder / "config.yaml")
        # The other runs differ from this one by the overrides in the table.
        section.listings.append((f"config.yaml of {cell.name}", text[:LONGEST_CONFIG]))
    return section


def command(overrides: Any) -> str:
    """Return the command line with its arguments quoted for a shell.

    Overrides `axes.*` are left out: they only choose the part of the experiment that ran last.
    """
    lines = [str(line) for line in (overrides if isinstance(overrides, list) else [overrides])]
    kept = [shlex.quote(line) for line in lines if not line.startswith("axes.")]
    return " ".join(["python -m fedhet", *kept])


def runs_table(study: Study) -> Table:
    """Make the table of all runs with their overrides and status."""
    records = [
        {
            "folder": cell.name,
            study.compare: str(cell.axes.get(study.compare, NOTHING)),
            "setting": study.condition_of(cell.axes),
            "seed": str(cell.axes.get("seed", cell.summary.get("seed", NOTHING))),
            "status": cell.status,
            "overrides": " ".join(f"{key}={value}" for key, value in cell.overrides.items()),
        }
        for cell in study.results.cells
    ]
    columns = [(name, name) for name in records[0]]
    caption = "Every run, with the overrides that repeat it."
    return Table.of("runs", "Runs", caption, records, columns, folded=True)


def environment_table(study: Study) -> Table:
    """Make the table of versions and machines of all runs; different values have several rows."""
    found: dict[str, Counter[str]] = {}
    for cell in study.cells:
        code = {f"code: {name}": value for name, value in cell.code.items()}
        for name, value in {**study.results.environment(cell), **code}.items():
            if name != "resumed":
                found.setdefault(name, Counter())[_text(value)] += 1
    records = [
        {"name": name, "value": value, "runs": count}
        for name, counts in found.items()
        for value, count in counts.most_common()
    ]
    caption = (
        "Versions and machines as the runs recorded them; the last column is the number of runs"
        " with this value."
    )
    columns = [("", "name"), ("value", "value"), ("runs", "runs")]
    data = pd.DataFrame(records, columns=["name", "value", "runs"])
    return Table.of("environment", "Versions and hardware", caption, records, columns, data)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def mixed_code(study: Study) -> list[str]:
    """Return a warning if different versions of the code made the runs and trials.

    Commits do not count, because two commits may have the same code.
    """
    trials = [cell for cell in study.results.source.cells if cell.trial and cell.counts]
    counts: Counter[str] = Counter()
    for cell in [*study.cells, *trials]:
        code = {name: str(cell.code[name]) for name in ("version", "digest") if cell.code.get(name)}
        named = " ".join(f"{name} {short(value)}" for name, value in code.items())
        counts[named or _text(study.results.environment(cell).get("fedhet"))] += 1
    if len(counts) < 2:
        return []
    listed = "; ".join(f"{clean(name)} in {count}" for name, count in counts.items())
    made = "runs and trials" if trials else "runs"
    return [f"The {made} were made by different versions of the code: {listed}."]


def idle(study: Study) -> list[str]:
    """Return a sentence for each component that changed nothing in some rounds (`idle`)."""
    rounds, found = study.results.rounds, []
    methods = rounds["folder"].map(study.scores.set_index("folder")["method"])
    for column in [str(name) for name in rounds if str(name).endswith(".idle")]:
        by_method = rounds[column].notna().groupby(methods, sort=False)
        listed = [f"{own.sum()} of {len(own)} rounds of {m}" for m, own in by_method if own.any()]
        component = column.removesuffix(".idle")
        found.append(f"{component} changed nothing in {joined(listed)}; the log of a run says why.")
    return found


def missing_table(study: Study) -> Table | None:
    """Make the table of the runs and trials without a result."""
    frame = study.results.missing
    if frame.empty:
        return None
    # All entries are texts, because numbers on axes are not measurements.
    columns: Columns = [
        (name, lambda r, name=name: plain(None if pd.isna(r[name]) else str(r[name])))
        for name in map(str, frame.columns)
    ]
    caption = "Runs without a result, which count in no table or test."
    return Table.of("missing", "What is missing", caption, frame, columns)


def methods_table(study: Study) -> Table | None:
    """Make the table of settings in which the methods differ; None if they do not differ."""
    own: dict[str, dict[str, Any]] = {}
    for cell in study.cells:
        method = study.place(cell)[0]
        before = own.get(method, cell.overrides).items()
        own[method] = {k: v for k, v in before if cell.overrides.get(k) == v}
    shared = set.intersection(*(set(lines.items()) for lines in own.values()))
    records = [
        {
            study.compare: method,
            "settings": " ".join(f"{k}={v}" for k, v in lines.items() if (k, v) not in shared),
        }
        for method, lines in own.items()
    ]
    if not any(record["settings"] for record in records):
        return None
    columns = [(name, name) for name in (study.compare, "settings")]
    caption = "Settings that a method has in all of its runs, and that not all methods share."
    return Table.of("methods", "Settings by method", caption, records, columns)


def tuning_table(study: Study) -> Table | None:
    """Make the table of tuned values by method and condition; None if nothing was tuned."""
    experiment = study.results.source.experiment
    tuned = experiment.get("tuned") or []
    if not tuned:
        return None
    trials = [cell for cell in study.results.source.cells if cell.trial]
    records = []
    for entry in tuned:
        axes = entry.get("axes", {})
        ends = [cell.status for cell in trials if axes.items() <= cell.axes.items()]
        lost = sum(status in (FAILED, DIVERGED) for status in ends)
        records += [
            {
                "method": str(axes.get(study.compare)),
                "setting": study.condition_of(axes),
                "parameter": name,
                "value": value,
                "at the edge": _edge(experiment, entry, name),
                "validation": entry.get("validation"),
                "trials": len(ends),
                "failed or diverged": lost,
                "not run": len(ends) - lost - ends.count(FINISHED),
            }
            for name, value in (
                entry.get("chosen") or {NOTHING: "none: no trial has a score"}
            ).items()
        ]
    columns: Columns = [
        (study.compare, "method"),
        ("setting", "setting"),
        ("parameter", "parameter"),
        ("chosen", "value"),
        ("at the edge of its grid", "at the edge"),
        ("validation score", lambda r: number(r["validation"])),
        *((name, name) for name in ("trials", "failed or diverged", "not run")),
    ]
    caption = (
        "The score on the clients' validation data, never on test data, chose these values. No"
        " reported run has a seed of the trials. If a value lies at the edge of its grid, a better"
        " value may lie beyond. For intervals, and for grids of one or two values, this is not"
        " known; names have no edge. Interrupted trials, and trials with damaged records, count as"
        " not run. Values with 0 trials come from earlier trials, and are kept in the experiment's"
        " file (tune.chosen)."
    )
    return Table.of("tuned", "Tuned values", caption, records, columns)


def _edge(experiment: Values, entry: Values, name: str) -> str:
    """Say whether the chosen value lies at the edge of its grid: yes, no, not known or a dash."""
    if name in (entry.get("at_the_edge") or []):
        return "yes"
    tune = experiment.get("tune") or {}
    values = (tune.get("space") or {}).get(name)
    for label in (entry.get("axes") or {}).values():
        values = (tune.get("own") or {}).get(str(label), {}).get(name, values)
    if not isinstance(values, list) or len(values) < FEWEST_OF_A_GRID:
        return "not known"
    return "no" if all(type(value) in (int, float) for value in values) else NOTHING

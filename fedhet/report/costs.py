"""The tables of costs: what it takes to reach a threshold, seconds, bytes and memory."""

from __future__ import annotations

import re

import pandas as pd

from fedhet.report.document import NOTHING, Columns, Table, TableEntry, mean_std, number, size
from fedhet.report.study import Study

THRESHOLD = re.compile(r"thresholds\.(.+)\.(rounds|bytes|seconds)")
COSTS = ("rounds", "bytes", "seconds")
NEVER = TableEntry("never reached")
NOT_RECORDED = "not recorded"
MEMORY = ["memory.peak", "memory.gpu_peak", "client_state.bytes"]
PLACE = ["setting", "method"]


def cost_tables(study: Study) -> list[Table]:
    """All tables of costs that the runs have something for."""
    made = [thresholds(study), seconds(study), sent(study), memory(study)]
    return [table for table in made if table is not None]


def run_frame(study: Study) -> pd.DataFrame:
    """`results.runs` of the runs that count, with `method` and `setting` as the report names them.

    The index is that of `study.scores`.
    """
    runs = study.results.runs.drop(columns=PLACE, errors="ignore")
    places = study.scores[["method", "setting", "folder"]]
    return places.merge(runs, on="folder", how="left", validate="one_to_one")


def thresholds(study: Study) -> Table | None:
    """Rounds, bytes and seconds to each threshold; None where the runs have none."""
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
    caption = (
        "What it took until the first evaluation on test data that reaches the threshold, as mean"
        " ± standard deviation over the runs that reach it; the last column says how many do. Costs"
        " of methods whose runs do not all reach it are too low. Rounds before the training count,"
        " evaluations cost nothing."
    )
    return Table.of(
        "thresholds",
        "Cost of reaching a threshold",
        caption,
        records,
        [
            ("setting", "setting"),
            (study.compare, "method"),
            ("threshold", "threshold"),
            ("rounds", lambda r: mean_std(r["rounds"], ".1f") if r["reached"] else NEVER),
            ("sent", lambda r: _bytes(r["bytes"].mean(), NOTHING) if r["reached"] else NEVER),
            ("seconds", lambda r: mean_std(r["seconds"], ".2f") if r["reached"] else NEVER),
            (
                "reached by",
                lambda r: TableEntry(f"{r['reached']} of {r['runs']}", r["reached"] / r["runs"]),
            ),
        ],
        pd.DataFrame([{**r, **{cost: r[cost].mean() for cost in COSTS}} for r in records]),
    )


def _bytes(count: float, absent: str = NOT_RECORDED) -> TableEntry:
    return TableEntry(absent) if pd.isna(count) else TableEntry(size(count), count)


def seconds(study: Study) -> Table | None:
    """Seconds of a run by phase and kind of work."""
    means = _by_phase(study, "seconds.")
    if means is None:
        return None
    kinds = list(means.columns)
    means["sum"] = means.sum(axis=1)
    data = means.reset_index()
    caption = (
        "Seconds of a run by phase and kind of work, as the mean over seeds, measured on the"
        " machines named below; compare them only between runs of equal load. The start of a run is"
        " not in them."
    )
    columns: Columns = [("setting", "setting"), (study.compare, "method"), ("phase", "phase")]
    columns += [
        (kind.removeprefix("seconds."), lambda r, kind=kind: number(r[kind], ".2f"))
        for kind in ("sum", *kinds)
    ]
    return Table.of("seconds", "Seconds by phase", caption, data, columns, folded=True)


def sent(study: Study) -> Table | None:
    """Bytes of a run by phase, direction and kind."""
    means = _by_phase(study, "bytes.")
    if means is None:
        return None
    records = [
        dict(zip((*PLACE, "phase"), place[:3], strict=True))
        | dict(zip(("way", "kind"), place[3].split(".", 2)[1:], strict=True))
        | {"bytes": mean}
        for place, mean in means.stack().items()
        if mean > 0
    ]
    caption = (
        "What all clients together send (up) and receive (down) in a run, by phase and kind, as the"
        " mean over seeds: payloads, without evaluations and the overhead of the transport."
    )
    columns: Columns = [("setting", "setting"), (study.compare, "method"), ("phase", "phase")]
    columns += [
        ("direction", "way"),
        ("kind", "kind"),
        ("bytes", lambda r: _bytes(r["bytes"])),
    ]
    return Table.of("bytes", "Bytes by phase", caption, records, columns, folded=True)


def _by_phase(study: Study, prefix: str) -> pd.DataFrame | None:
    """The mean over runs of the sums over each phase's steps, of the columns with this prefix."""
    rounds = study.results.rounds
    columns = [column for column in rounds if str(column).startswith(prefix)]
    if not columns or "phase" not in rounds:
        return None
    sums = rounds.groupby(["folder", "phase"], sort=False)[columns].sum().reset_index()
    places = study.scores[["method", "setting", "folder"]]
    runs = places.merge(sums, on="folder", validate="one_to_many")
    return runs.groupby([*PLACE, "phase"], sort=False)[columns].mean()


def memory(study: Study) -> Table:
    """The peak memory of a run's process, and what clients store."""
    runs = run_frame(study).reindex(columns=[*PLACE, *MEMORY])
    groups = runs.astype(dict.fromkeys(MEMORY, float)).groupby(PLACE, sort=False)
    caption = (
        "Memory, as the mean over seeds. The peak is that of the whole process from its start: of"
        " runs that share a process it is the peak of all of them so far, and worker processes are"
        " not in it. Folders of earlier versions have none. The last column is what all clients"
        " together keep between rounds."
    )
    columns = [
        ("setting", "setting"),
        (study.compare, "method"),
        ("peak of the process", lambda r: _bytes(r["memory.peak"])),
        ("peak on the GPU", lambda r: _bytes(r["memory.gpu_peak"])),
        ("stored by clients", lambda r: _bytes(r["client_state.bytes"])),
    ]
    return Table.of("memory", "Memory", caption, groups.mean().reset_index(), columns, folded=True)

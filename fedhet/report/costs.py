"""The tables of costs: what it takes to reach a target, seconds, bytes and memory."""

from __future__ import annotations

import re

import pandas as pd

from fedhet.report.document import Table, TableEntry, mean_std, number, size
from fedhet.report.study import Study

TARGET = re.compile(r"targets\.(.+)\.(rounds|bytes|seconds)")
NOT_RECORDED = "not recorded"


def cost_tables(study: Study) -> list[Table]:
    """All tables of costs that the runs have something for."""
    made = [targets(study), seconds(study), sent(study), memory(study)]
    return [table for table in made if table is not None]


def run_frame(study: Study) -> pd.DataFrame:
    """`results.runs` of the runs that count, with `method` and `setting` as the report names them.

    The index is that of `study.scores`.
    """
    runs = study.results.runs.drop(columns=["method", "setting"], errors="ignore")
    places = study.scores[["method", "setting", "folder"]]
    return places.merge(runs, on="folder", how="left", validate="one_to_one")


def targets(study: Study) -> Table | None:
    """Rounds, bytes and seconds to each target; None where the runs have no targets."""
    runs = run_frame(study)
    names = list(dict.fromkeys(m[1] for c in runs.columns if (m := TARGET.fullmatch(str(c)))))
    if not names:
        return None
    rows, data = [], []
    for (setting, method), own in runs.groupby(["setting", "method"], sort=False):
        for name in names:
            column = {cost: f"targets.{name}.{cost}" for cost in ("rounds", "bytes", "seconds")}
            reached = int(own[column["rounds"]].notna().sum())
            wanted = name.replace(".", " ", 1)
            row = [TableEntry(setting), TableEntry(method), TableEntry(wanted)]
            if reached:
                row += [mean_std(own[column["rounds"]], ".1f"), _bytes(own[column["bytes"]])]
                row.append(mean_std(own[column["seconds"]], ".2f"))
            else:
                row += [TableEntry("never reached")] * 3
            rows.append([*row, TableEntry(f"{reached} of {len(own)}", reached / len(own))])
            record = {"setting": setting, "method": method, "target": wanted}
            record |= {cost: own[column[cost]].astype(float).mean() for cost in column}
            data.append({**record, "reached": reached, "runs": len(own)})
    heads = ["setting", study.compare, "target", "rounds", "sent", "seconds", "reached by"]
    caption = (
        "What it took until the first evaluation on test data that reaches the target, as mean ±"
        " standard deviation over the runs that reach it; the last column says how many do. Costs"
        " of methods whose runs do not all reach it are too low. Rounds before the training count,"
        " evaluations cost nothing."
    )
    return Table("targets", "Cost of a target", caption, heads, rows, pd.DataFrame(data))


def _bytes(values: pd.Series) -> TableEntry:
    known = values.dropna()
    return (
        TableEntry(size(float(known.mean())), float(known.mean()))
        if len(known)
        else TableEntry("–")
    )


def seconds(study: Study) -> Table | None:
    """Seconds of a run by phase and kind of work."""
    steps = _steps(study, "seconds.")
    if steps is None:
        return None
    kinds = [column for column in steps if column.startswith("seconds.")]
    rows, data = [], []
    for (setting, method, phase), own in steps.groupby(["setting", "method", "phase"], sort=False):
        means = own[kinds].mean()
        total = float(means.sum())
        entries = [number(total, ".2f"), *(number(float(means[kind]), ".2f") for kind in kinds)]
        rows.append([TableEntry(setting), TableEntry(method), TableEntry(phase), *entries])
        data.append({"setting": setting, "method": method, "phase": phase, **means, "sum": total})
    heads = ["setting", study.compare, "phase", "sum", *(k.partition(".")[2] for k in kinds)]
    caption = (
        "Seconds of a run by phase and kind of work, as the mean over seeds, measured on the"
        " machines named below; compare them only between runs of equal load. The start of a run is"
        " not in them."
    )
    frame = pd.DataFrame(data)
    return Table("seconds", "Seconds by phase", caption, heads, rows, frame, folded=True)


def sent(study: Study) -> Table | None:
    """Bytes of a run by phase, direction and kind."""
    steps = _steps(study, "bytes.")
    if steps is None:
        return None
    rows, data = [], []
    for (setting, method, phase), own in steps.groupby(["setting", "method", "phase"], sort=False):
        for column in own:
            if not column.startswith("bytes.") or not own[column].any():
                continue
            _, way, kind = column.split(".", 2)
            mean = float(own[column].mean())
            where = [TableEntry(text) for text in (setting, method, phase, way, kind)]
            rows.append([*where, TableEntry(size(mean), mean)])
            record = {"setting": setting, "method": method, "phase": phase, "way": way}
            data.append({**record, "kind": kind, "bytes": mean})
    heads = ["setting", study.compare, "phase", "direction", "kind", "bytes"]
    caption = (
        "What all clients together send (up) and receive (down) in a run, by phase and kind, as the"
        " mean over seeds: payloads, without evaluations and the overhead of the transport."
    )
    frame = pd.DataFrame(data)
    return Table("bytes", "Bytes by phase", caption, heads, rows, frame, folded=True)


def _steps(study: Study, prefix: str) -> pd.DataFrame | None:
    """The sums of each run's steps by phase, of the columns with this prefix."""
    rounds = study.results.rounds
    columns = [column for column in rounds if str(column).startswith(prefix)]
    if not columns or "phase" not in rounds:
        return None
    sums = rounds.groupby(["folder", "phase"], sort=False)[columns].sum().reset_index()
    places = study.scores[["method", "setting", "folder"]]
    return places.merge(sums, on="folder", validate="one_to_many")


def memory(study: Study) -> Table:
    """The peak memory of a run's process, and what clients store."""
    runs = run_frame(study)
    rows, data = [], []
    for (setting, method), own in runs.groupby(["setting", "method"], sort=False):
        record: dict[str, object] = {"setting": setting, "method": method}
        row = [TableEntry(str(setting)), TableEntry(str(method))]
        for column in ("memory.peak", "memory.gpu_peak", "client_state.bytes"):
            known = own[column].dropna() if column in own else pd.Series(dtype=float)
            mean = float(known.astype(float).mean()) if len(known) else None
            row.append(TableEntry(NOT_RECORDED) if mean is None else TableEntry(size(mean), mean))
            record[column] = mean
        rows.append(row)
        data.append(record)
    heads = [
        "setting",
        study.compare,
        "peak of the process",
        "peak on the GPU",
        "stored by clients",
    ]
    caption = (
        "Memory, as the mean over seeds. The peak is that of the whole process from its start: of"
        " runs that share a process it is the peak of all of them so far, and worker processes are"
        " not in it. Folders of earlier versions have none. The last column is what all clients"
        " together keep between rounds."
    )
    frame = pd.DataFrame(data)
    return Table("memory", "Memory", caption, heads, rows, frame, folded=True)

"""The runs of a folder as tidy frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedhet.config.aliases import unfolded
from fedhet.core.errors import ConfigError, DataError
from fedhet.core.targets import TARGETS, Classes
from fedhet.record import schema
from fedhet.record.summary import method_name
from fedhet.report import parts
from fedhet.report.folders import DIVERGED, OF_THE_LABEL, FoundRun, FoundRuns, Values, scalar

LOSS = "loss"
# What runs of classes have in any case; the columns where no run has a result yet.
OF_A_RUN = ["accuracy.last", "accuracy.best_val", "acc_clients_mean", LOSS, "validation"]
OF_A_RUN += ["seconds.total", "seconds.train", "bytes.up.model", "bytes.down.model"]
OF_A_STEP = ["acc_global", "loss_global", "acc_clients_mean", "acc_val_weighted"]
OF_A_STEP += ["seconds.train", "bytes.up.model", "bytes.down.model"]


def results(folder: Path | str | Sequence[Path | str]) -> Results:
    """Read the runs of an experiment, of a sweep, or of any folder with runs in it.

    Args:
        folder: a folder, or several of the same experiment.

    Raises:
        ConfigError: a folder has no runs, or they are of different experiments.
        DataError: an experiment.json is damaged.
    """
    return Results(parts.read(folder))


class Results:
    """Runs as tidy pandas frames, which are read when they are first used.

    All frames have the columns `folder` and those of `keys`.

    Attributes:
        source: the runs and experiment.json, as they were read.
        axes: what differs between the runs, axis -> its values in their order. Those of an
            experiment are its own; in other folders, the overrides that differ, with the method and
            its plug-ins as one axis "method".
        problems: files that are damaged and were read as far as possible, one sentence each.
    """

    def __init__(self, source: FoundRuns) -> None:
        self.source = source
        self.problems: list[str] = []
        self.axes: dict[str, list[Any]] = (
            {axis: list(values) for axis, values in source.experiment["axes"].items()}
            if source.experiment
            else differing(source.cells)
        )
        self.cells = [cell for cell in source.cells if not cell.trial]
        for cell in source.cells:
            cell.axes = {axis: scalar(value) for axis, value in cell.axes.items()}
            if cell.counts and has_diverged(cell, self._last_evaluation(cell)):
                cell.status = DIVERGED

    @property
    def keys(self) -> list[str]:
        """The columns that tell runs apart: the axes, and the seed."""
        return list(dict.fromkeys([*self.axes, "seed"]))

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row per run with its status, axes, overrides, and the scalars of its summary.json.

        An entry of an entry is the column `seconds.train`. Of a name that several have, the axis
        counts, then the override.
        """
        return self._frame(self.cells)

    @cached_property
    def trials(self) -> pd.DataFrame:
        """As `runs`, for the trials of an experiment's tuning; `tuned.*` are the values tried."""
        return self._frame([cell for cell in self.source.cells if cell.trial])

    @cached_property
    def missing(self) -> pd.DataFrame:
        """The runs without a result, each with its status and its reason."""
        rows = [
            {"folder": cell.name, **cell.axes, "status": cell.status, "reason": cell.reason}
            for cell in self.source.cells
            if not cell.counts
        ]
        return pd.DataFrame(rows, columns=["folder", *self.axes, "status", "reason"])

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """The lines of every run's rounds.jsonl; nested values are columns `seconds.train`."""
        rows = [
            {**self._key(cell), **dict(_flat(step))}
            for cell in self.cells
            if cell.summary
            for step in self.steps(cell)
        ]
        columns = ["folder", *self.keys, "phase", "step", "round"]
        return pd.DataFrame(rows) if rows else _with(OF_A_STEP, pd.DataFrame(columns=columns))

    @cached_property
    def clients(self) -> pd.DataFrame:
        """The clients' scores at every evaluation, in long format, as in clients/*.parquet."""
        return self._clients(last=False)

    @cached_property
    def last_clients(self) -> pd.DataFrame:
        """As `clients`, at the last evaluation of each run only."""
        return self._clients(last=True)

    def steps(self, cell: FoundRun) -> list[Values]:
        """The lines of a run's rounds.jsonl, up to the first that is damaged."""
        steps: list[Values] = []
        try:
            for step in schema.read_steps(cell.folder / "rounds.jsonl"):
                steps.append(step)
        except DataError as error:
            self._note(cell, error)
        return steps

    def partition(self, cell: FoundRun) -> Values:
        """A run's partition.json; empty if it is missing or damaged."""
        return self._read(cell, "partition.json", {"counts": schema.is_table})

    def environment(self, cell: FoundRun) -> Values:
        """A run's environment.json; empty if it is missing or damaged."""
        return self._read(cell, "environment.json", {})

    def _read(self, cell: FoundRun, name: str, form: Values) -> Values:
        try:
            return schema.read_object(cell.folder / name, form)
        except OSError:
            self._note(cell, f"{cell.folder}/{name} is missing")
        except DataError as error:
            self._note(cell, error)
        return {}

    def _note(self, cell: FoundRun, problem: object) -> None:
        told = str(problem).replace(str(cell.folder), cell.name)
        if told not in self.problems:
            self.problems.append(told)

    def _last_evaluation(self, cell: FoundRun) -> Values:
        """The last line of rounds.jsonl with an evaluation, if the summary leaves a doubt."""
        if cell.summary.get(LOSS) is not None or cell.status == DIVERGED:
            return {}
        evaluated = [
            s
            for s in self.steps(cell)
            if any(v is not None for v in _losses(s))
            or any(s.get(key) is not None for key in _score_keys(cell))
        ]
        return evaluated[-1] if evaluated else {}

    def _key(self, cell: FoundRun) -> Values:
        return {"folder": cell.name, "seed": cell.summary.get("seed"), **cell.axes}

    def _frame(self, cells: Sequence[FoundRun]) -> pd.DataFrame:
        rows = [
            {
                "folder": cell.name,
                **cell.axes,
                **{
                    name: value
                    for name, value in {**dict(flattened(cell.summary)), **cell.overrides}.items()
                    if name not in cell.axes
                },
                **{f"tuned.{name}": value for name, value in cell.tuned.items()},
                "status": cell.status,
                "reason": cell.reason,
            }
            for cell in cells
        ]
        columns = ["folder", *self.keys, "status", "reason"]
        frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=columns)
        return frame if any(cell.counts for cell in cells) else _with(OF_A_RUN, frame)

    def _clients(self, last: bool) -> pd.DataFrame:
        import pyarrow as pa
        import pyarrow.parquet as pq

        parts = []
        for cell in self.cells:
            if not cell.summary:
                continue
            files = sorted((cell.folder / "clients").glob("*.parquet"))
            for path in files[-1:] if last else files:
                try:
                    part = pq.ParquetFile(path).read().to_pandas()[schema.COLUMNS]
                except (OSError, pa.ArrowException, KeyError):
                    self._note(cell, f"{path} is damaged")
                    continue
                for name, value in reversed(self._key(cell).items()):
                    part.insert(0, name, value)
                parts.append(part)
        columns = ["folder", *self.keys, *schema.COLUMNS]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def _with(names: Sequence[str], frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with these columns, which are empty if it has not had them."""
    return frame.assign(**{name: float("nan") for name in names if name not in frame})


def has_diverged(cell: FoundRun, last: Values) -> bool:
    """Whether the run's model is no longer finite.

    Its loss at the last evaluation is null, which is how NaN and infinity are written, where a
    score was measured; or it has failed with weights that are not finite.

    Args:
        cell: a run with a result.
        last: the line of its last evaluation, or {} if its summary has a loss.
    """
    if cell.status == DIVERGED:
        return True
    if not last:
        return False
    keys = _score_keys(cell)
    scored = [last.get(key) is not None for key in keys]
    return any(
        was and loss is None for was, loss in zip(scored, _losses(last), strict=True)
    ) or not any(scored)


def _score_keys(cell: FoundRun) -> list[str]:
    target = TARGETS.get(cell.summary.get("target", Classes.name), Classes)
    return [target.key("global"), target.clients_key()] if target.keys else ["", ""]


def _losses(step: Values) -> list[Any]:
    return [
        step.get("loss_global"),
        step.get("loss_clients_mean", step.get("loss_clients_weighted")),
    ]


def flattened(summary: Values) -> Iterator[tuple[str, Any]]:
    """The scalars of summary.json by their dotted names; lists in a form that a column can hold."""
    for name, value in summary.items():
        if name == "thresholds":
            for reached in value:
                score, threshold = next(iter(reached.items()))
                for cost in ("rounds", "bytes", "seconds"):
                    yield f"thresholds.{score}.{threshold:g}.{cost}", reached.get(cost)
        elif name == "phases":
            for phase in value:
                yield f"phases.{phase['name']}", phase["rounds"]
        elif name == "failures":
            yield name, len(value)
        elif name in ("plugins", "models"):
            yield name, ",".join(value)
        else:
            yield from _flat({name: value})


def _flat(nested: Values, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in nested.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def chosen(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuse a value of the experiment's `report` that is none of those allowed."""
    if value not in allowed:
        raise ConfigError(f"report.{name}={value!r}: it must be one of {', '.join(allowed)}")


# ---- what differs between runs that no experiment names
def differing(cells: Sequence[FoundRun]) -> dict[str, list[Any]]:
    """The axes of runs that no experiment names, which are also entered into the cells."""
    readable = [cell for cell in cells if cell.summary]
    names = dict.fromkeys(
        key for cell in readable for key in cell.overrides if key not in (*OF_THE_LABEL, "seed")
    )
    for cell in readable:
        cell.axes = {"method": method_name(cell.summary)}
        cell.axes["dataset"] = cell.summary.get("dataset") or "a Task"
        cell.axes |= {
            name: cell.overrides[name] if name in cell.overrides else _configured(cell, name)
            for name in names
        }
        cell.axes["seed"] = cell.summary["seed"]
    every = {
        axis: list(dict.fromkeys(cell.axes[axis] for cell in readable))
        for axis in (readable[0].axes if readable else ())
    }
    kept = {
        axis: values
        for axis, values in every.items()
        if len(values) > 1 or axis in ("method", "seed")
    }
    for cell in readable:
        cell.axes = {axis: cell.axes[axis] for axis in kept}
    if "seed" in kept:
        kept["seed"] = sorted(kept["seed"])
    return kept


def _configured(cell: FoundRun, name: str) -> Any:
    """The value that a setting had without an override, from the run's config.yaml."""
    try:
        node = yaml.safe_load(unfolded((cell.folder / "config.yaml").read_text(encoding="utf-8")))
        for part in name.split("."):
            node = node[part]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return "default"
    if isinstance(node, dict):
        return node.get("name", "default")
    return scalar(node)

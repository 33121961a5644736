"""Writes the run folder: the settings of a run, its steps, and its end.

Everything is written as soon as it is known, so the folder of a killed run lacks only the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedhet.core.errors import RunFailed, WriteError, log, reason_of
from fedhet.core.messages import Upload
from fedhet.core.server.callbacks import Callback, Row
from fedhet.core.server.loop import Loop, recorded_numbers
from fedhet.core.server.strategy import FedStrategy
from fedhet.core.timing import now
from fedhet.data.storage import (
    LastingJson,
    append_line,
    as_json,
    save_tensors,
    sync,
    unwritable,
    write_json,
    write_text,
    written,
)
from fedhet.runs.record import prometheus
from fedhet.runs.record.card import write_card
from fedhet.runs.record.schema import COLUMNS, FORMAT, RUNNING, read_or_empty
from fedhet.runs.record.summary import summarise, versions

FIRST_FAILURES = 20  # summary.json names only these if the disk has no space for more
STOPPED = "stopped by the user"


class Recorder(Callback):
    """Writes the run folder.

    Attributes:
        folder: its path.
        rows: the lines of rounds.jsonl so far.
        failures: the clients that have failed so far, with the round.
        summary: the content of summary.json.
        draws: whether to draw the run's figures at its end.
    """

    draws = True

    def __init__(
        self,
        folder: Path,
        about: dict[str, Any],
        *,
        config: str,
        overrides: Sequence[str],
        partition: dict[str, Any],
        environment: dict[str, Any],
        resumes: bool = False,
        past: Mapping[str, Any] | None = None,
    ) -> None:
        """Write what is known before the run starts.

        Args:
            folder: an existing folder, from `lock.claim`.
            about: the entries of summary.json that are known before the run.
            config: the content of config.yaml, the composed configuration.
            overrides: the content of overrides.yaml, the overrides that give the configuration.
            partition: the content of partition.json.
            environment: the content of environment.json, without the versions.
            resumes: whether this is a resumed run.
            past: `rows` and `seconds` from the checkpoint of a resumed run, or None.

        Raises:
            RunFailed: a file cannot be written; summary.json says so, if there is space for it.
        """
        self.folder = folder
        self.rows: list[Row] = past["rows"] if past else []
        self.failures: list[dict[str, Any]] = [
            {"round": row["round"], **failure} for row in self.rows for failure in row["failures"]
        ]
        self._complete = False
        self._start = now() - (past["seconds"] if past else 0.0)
        self._partition = partition
        self.summary: dict[str, Any] = {
            "format": FORMAT,
            "status": "interrupted",
            "reason": RUNNING,
            **about,
        }
        self._summary_file = LastingJson(folder / "summary.json")
        try:
            self._summary_file.write(self.summary)
            write_text(folder / "config.yaml", config)
            lines = "".join(f"- {json.dumps(override)}\n" for override in overrides)
            write_text(folder / "overrides.yaml", lines or "[]\n")
            # One number per sample.
            write_json(folder / "partition.json", partition, indent=None)
            where = {**versions(), **environment}
            before = read_or_empty(folder / "environment.json") if resumes else {}
            if before:  # one entry for each time that the run was resumed
                resumed = [*before.get("resumed", []), {"round": len(self.rows), **where}]
                where = {**before, "resumed": resumed}
            write_json(folder / "environment.json", where)
            if not self.rows:
                write_text(folder / "rounds.jsonl", "")
        except WriteError as error:
            recorded = self._record_end(status="failed", reason=str(error)) is None
            if not recorded and not resumes:
                (folder / "summary.json").unlink()  # it is empty, or says that the run continues
            raise RunFailed(str(error), str(folder) if recorded else None) from error

    @property
    def seconds(self) -> float:
        """The seconds that the run has taken so far, without the time in which it was stopped."""
        return now() - self._start

    def begun(self, loop: Loop) -> None:
        loop.failures = self.failures
        self.summary |= loop.notes
        self._summary_file.write(self.summary)

    def evaluated(self, loop: Loop, row: Row, updates: Sequence[Upload]) -> None:
        """Record an evaluation of the clients, and the global model if it is the best so far."""
        self.write_clients(row["round"], updates)
        if loop.best == loop.round and "global" in loop.method.views:
            save_tensors(self.folder / "best_val.safetensors", loop.method.weights["model"])

    def step_ended(self, loop: Loop, row: Row) -> None:
        """Record one executed step.

        Numbers that the method and the plug-ins record are added to the line of rounds.jsonl. Their
        tensors are saved to a file in arrays/.
        """
        row |= recorded_numbers(loop.current)
        for component, recorded in loop.current.recorded.items():
            if arrays := {name: t for name, t in recorded.items() if isinstance(t, Tensor)}:
                phase = component if row["phase"] == "train" else row["phase"]
                save_tensors(self.folder / "arrays" / f"{phase}-{row['step']}.safetensors", arrays)
        append_line(self.folder / "rounds.jsonl", as_json(row))
        self.rows.append(row)
        prometheus.update(self.summary, self.rows, self.failures, "running")

    def write_clients(self, round: int, updates: Sequence[Upload]) -> None:
        """Record one evaluation of the clients, as a Parquet file in long format.

        It has the metrics with names of the form `split.model.metric`.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [
            (round, update.pid, *name.split("."), value)
            for update in sorted(updates, key=lambda update: update.pid)
            for name, value in {**update.metrics, **_cells(update)}.items()
            if name.count(".") == 2
        ]
        kinds = map(pa.type_for_alias, COLUMNS.values())
        columns = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
        arrays = [pa.array(each, kind) for each, kind in zip(columns, kinds, strict=True)]
        with written(self.folder / "clients" / f"round-{round:06d}.parquet") as part:
            pq.write_table(pa.Table.from_arrays(arrays, [*COLUMNS]), part)

    def ended(self, loop: Loop, status: str, error: BaseException | None) -> None:
        """Record the end of the run.

        Raises:
            RunFailed: the run succeeded, but a file cannot be written.
        """
        try:
            self.summary |= loop.notes
            reason = None if error is None else reason_of(error)
            self.finish(loop.method, status, STOPPED if status == "interrupted" else reason)
        except (KeyboardInterrupt, SystemExit):
            if not self._complete:
                self.finish(loop.method, "interrupted", STOPPED)
            raise

    def finish(self, strategy: FedStrategy, status: str, reason: str | None = None) -> None:
        """Record the end of the run: the weights, the summary, the figures and the model card.

        Args:
            strategy: the run's strategy, in its final state.
            status: ok, failed or interrupted.
            reason: why the run did not succeed, or None.

        Raises:
            RunFailed: the run succeeded, but a file cannot be written.
        """
        well = status == "ok"
        problem = self._save_weights(strategy, lasting=well)
        if problem and well:
            status, reason = "failed", problem
        elif problem and problem != reason:
            reason = f"{reason}; {problem}"
        end = summarise(
            self.rows,
            strategy,
            status=status,
            reason=reason,
            seconds=self.seconds,
            failures=self.failures,
        )
        problem = self._record_end(**end) or problem
        if self.rows and self.draws and not problem:
            self._draw()
        prometheus.update(self.summary, self.rows, self.failures, self.summary["status"])
        if well and not problem:
            write_card(self.folder, self.summary, self._partition)
        log.info("run folder: %s", self.folder)
        if problem and well:
            raise RunFailed(problem, str(self.folder))

    def _save_weights(self, strategy: FedStrategy, *, lasting: bool) -> str | None:
        """Save the final weights; return the reason if that is not possible.

        If `lasting`, flush them and the other models to the disk (fsync), so that they are safe
        before summary.json says that the run has ended.
        """
        try:
            for slot, tree in strategy.weights.items():
                save_tensors(self.folder / f"{slot}.safetensors", tree)
            if lasting:
                personal = (self.folder / "personal").rglob("*")
                models = self.folder.glob("*.safetensors")
                for path in (*models, *personal, self.folder / "rounds.jsonl", self.folder):
                    sync(path)
        except WriteError as error:
            return str(error)
        except OSError as error:
            return str(unwritable(path, error))
        return None

    def _record_end(self, **entries: Any) -> str | None:
        """Write summary.json for the last time; return the reason if that is not possible."""
        self.summary |= entries
        self._complete = True
        try:
            try:
                self._summary_file.write_last(self.summary)
            except WriteError:  # there may be space for a summary without thousands of failures
                first = self.summary.get("failures", [])[:FIRST_FAILURES]
                self._summary_file.write_last({**self.summary, "failures": first})
        except WriteError as error:
            return str(error)
        return None

    def _draw(self) -> None:
        try:
            from fedhet.runs.record import figures

            figures.draw(self.folder, self.summary, self.rows, self._partition)
        except (ModuleNotFoundError, OSError, ValueError, RuntimeError) as error:
            # A successful run must not fail because of a figure.
            log.warning("no figures: %s", error)


def _cells(update: Upload) -> dict[str, float]:
    """Return a client's confusion matrices as `confusion[target,prediction]`, without zeros."""
    return {
        f"{where}.confusion[{i},{j}]": float(tally["confusion"][i, j])
        for where, tally in update.extras.items()
        if isinstance(tally, dict) and "confusion" in tally
        for i, j in tally["confusion"].nonzero().tolist()
    }

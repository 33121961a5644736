"""The run folder: what a run was, what it did, and how it ended.

Everything is written as soon as it is known, so a run that is killed leaves all of it but its end.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor

from fedhet.errors import ConfigError
from fedhet.record.summary import Row, summarise
from fedhet.trees import Tree

if TYPE_CHECKING:
    from fedhet.plugin import Report
    from fedhet.strategy import FedStrategy

log = logging.getLogger("fedhet")
FORMAT = 1
RUNNING = "the run has not ended: it is still running, or it was killed"
# The packages whose versions environment.json records.
RECORDED_PACKAGES = (
    "fedhet",
    "torch",
    "torchvision",
    "flwr",
    "numpy",
    "scikit-learn",
    "hydra-core",
    "ray",
)


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write a JSON file atomically: it is complete or does not exist."""
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(_plain(value), indent=indent, allow_nan=False) + "\n")
    part.replace(path)


def _plain(value: Any) -> Any:
    """Replace NaN and infinity, the scores of a diverged model, by null: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def claim(folder: Path, explicit: bool) -> Path:
    """Create the run folder.

    Args:
        folder: its path.
        explicit: whether the user named it. If not, and it already holds a run, the next free name
            `<folder>-2`, `<folder>-3`, ... is taken.

    Raises:
        ConfigError: the user named a folder that already holds a run.
    """
    base = folder.resolve()
    folder = base
    count = 1
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # Atomic: of two runs that start in the same second, only one succeeds.
            (folder / "summary.json").open("x").close()
            return folder
        except FileExistsError:
            if explicit:
                raise ConfigError(
                    f"hydra.run.dir={folder}: that folder already holds a run; name another"
                ) from None
            count += 1
            folder = base.with_name(f"{base.name}-{count}")


class Recorder:
    """Writes the run folder.

    Attributes:
        folder: its path.
        rows: the lines of rounds.jsonl so far.
        failures: the clients that have failed so far, with the round.
        summary: the content of summary.json.
        ended: whether the end of the run is recorded.
    """

    def __init__(
        self,
        folder: Path,
        about: dict[str, Any],
        *,
        config: str,
        overrides: Sequence[str],
        partition: dict[str, Any],
        environment: dict[str, Any],
    ) -> None:
        """Write what is known before the run starts.

        Args:
            folder: an existing folder, from `claim`.
            about: the entries of summary.json that are known before the run.
            config: config.yaml, the composed configuration.
            overrides: overrides.yaml, the overrides that lead to it.
            partition: partition.json.
            environment: environment.json, without the versions.
        """
        self.folder = folder
        self.rows: list[Row] = []
        self.failures: list[dict[str, Any]] = []
        self.ended = False
        self._start = time.perf_counter()
        self._partition = partition
        state = {"format": FORMAT, "status": "interrupted", "reason": RUNNING}
        self.summary: dict[str, Any] = {**state, **about}
        (folder / "config.yaml").write_text(config)
        lines = "".join(f"- {json.dumps(override)}\n" for override in overrides)
        (folder / "overrides.yaml").write_text(lines or "[]\n")
        write_json(folder / "partition.json", partition, indent=None)  # one number per sample
        write_json(folder / "environment.json", {**versions(), **environment})
        (folder / "rounds.jsonl").write_text("")
        self._write_summary()

    def step(self, row: Row, reports: dict[str, Report]) -> None:
        """Record one executed step.

        Args:
            row: its line of rounds.jsonl.
            reports: what the method and the plug-ins report, by name. Numbers are added to the
                line, tensors go into a file in arrays/.
        """
        for piece, report in reports.items():
            arrays = {}
            for name, value in report.items():
                if isinstance(value, Tensor):
                    arrays[name] = value
                else:
                    row[f"{piece}.{name}"] = value
            if arrays:
                folder = self.folder / "arrays"
                folder.mkdir(exist_ok=True)
                phase = piece if row["phase"] == "train" else row["phase"]
                _save(folder / f"{phase}-{row['step']}.safetensors", arrays)
        self.rows.append(row)
        with (self.folder / "rounds.jsonl").open("a") as lines:
            lines.write(json.dumps(_plain(row), allow_nan=False) + "\n")

    def clients(self, round: int, metrics: dict[int, dict[str, float]]) -> None:
        """Record one evaluation of the clients, as a Parquet file in long format.

        Its columns are round, client, split, model, metric and value.

        Args:
            round: the round of the evaluation.
            metrics: client -> `split.model.metric` -> value.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [
            (pid, *name.split("."), value)
            for pid, values in sorted(metrics.items())
            for name, value in values.items()
            if name.count(".") == 2
        ]
        columns = list(zip(*rows, strict=True)) or [()] * 5
        types = {
            "client": pa.int32(),
            "split": pa.string(),
            "model": pa.string(),
            "metric": pa.string(),
            "value": pa.float64(),
        }
        arrays = {"round": pa.array([round] * len(rows), pa.int32())}
        for column, (name, kind) in zip(columns, types.items(), strict=True):
            arrays[name] = pa.array(column, kind)
        folder = self.folder / "clients"
        folder.mkdir(exist_ok=True)
        part = folder / f".round-{round:06d}.part"
        pq.write_table(pa.table(arrays), part)
        part.replace(folder / f"round-{round:06d}.parquet")

    def note(self, **entries: Any) -> None:
        """Add entries to summary.json."""
        self.summary |= entries
        self._write_summary()

    def keep_best(self, strategy: FedStrategy) -> None:
        """Save the current global model, the best so far by validation, in best_val.safetensors."""
        if "global" in strategy.views:
            _save(self.folder / "best_val.safetensors", strategy.weights["model"])

    @contextmanager
    def ending(self, strategy: FedStrategy) -> Iterator[None]:
        """Record the end of the run inside the block if it fails or is interrupted."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            if not self.ended:
                self.finish("interrupted", reason="stopped by the user", strategy=strategy)
            raise
        except Exception as error:
            if not self.ended:
                self.finish("failed", reason=str(error) or type(error).__name__, strategy=strategy)
            raise

    def finish(self, status: str, *, strategy: FedStrategy, reason: str | None = None) -> None:
        """Record the end of the run: the weights, the summary and the figures.

        Args:
            status: ok, failed or interrupted.
            strategy: the run's strategy, in its final state.
            reason: why the run did not end well, or None.
        """
        for slot, tree in strategy.weights.items():
            _save(self.folder / f"{slot}.safetensors", tree)
        self.summary |= summarise(
            self.rows,
            strategy,
            status=status,
            reason=reason,
            seconds=time.perf_counter() - self._start,
            failures=self.failures,
        )
        self._write_summary()
        self.ended = True
        if self.rows:
            self._draw()
        log.info("run folder: %s", self.folder)

    def _draw(self) -> None:
        try:
            from fedhet.record import figures
        except ModuleNotFoundError as error:
            log.warning("no figures: %s", error)
            return
        try:
            figures.draw(self.folder, self.summary, self.rows, self._partition)
        except (OSError, ValueError, RuntimeError) as error:
            # A figure must not fail a run that has ended well.
            log.warning("no figures: %s", error)

    def _write_summary(self) -> None:
        write_json(self.folder / "summary.json", self.summary)


def versions() -> dict[str, Any]:
    """Return the versions of Python and of the packages that affect results, and the machine."""
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }
    for package in RECORDED_PACKAGES:
        try:
            environment[package] = version(package)
        except PackageNotFoundError:
            environment[package] = None
    if torch.cuda.is_initialized():  # in a run on the CPU, the name would open the GPU
        environment["gpu"] = torch.cuda.get_device_name()
    return environment


def _save(path: Path, tree: Tree) -> None:
    """Write a safetensors file atomically, with the mode that every new file has here.

    safetensors itself gives its files the mode 0600, whatever the umask.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tree.items()}
    part = path.with_name(f".{path.name}.part")
    part.touch()
    mode = part.stat().st_mode
    safetensors.torch.save_file(tensors, part)
    part.chmod(mode)
    part.replace(path)

"""The run folder: what a run was, what it did, and what it ended with. Nothing is kept back until
the end."""

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

from fedhet import trees
from fedhet.errors import ConfigError
from fedhet.maths.feddisk import comm_cost, effective_rounds

if TYPE_CHECKING:
    from fedhet.plugin import Report
    from fedhet.strategy import FedStrategy

log = logging.getLogger("fedhet")
FORMAT = 1
RUNNING = "the run has not ended: it is still running, or was killed"


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Whole or not at all."""
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(_plain(value), indent=indent, allow_nan=False) + "\n")
    part.replace(path)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: what a diverged model measures is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def claim(folder: Path, explicit: bool) -> Path:
    """Create the run folder. One that already holds a run is refused if it was named, else the next
    free name is taken."""
    base, count = folder.resolve(), 1
    folder = base
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / "summary.json").open(
                "x"
            ).close()  # atomic: two runs of one second cannot both have it
            return folder
        except FileExistsError:
            if explicit:
                raise ConfigError(
                    f"hydra.run.dir={folder}: that folder already holds a run; name another"
                ) from None
            count += 1
            folder = base.with_name(f"{base.name}-{count}")


class Recorder:
    """Writes the folder that it is given; `about` is the part of summary.json that is known before
    the run."""

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
        self.folder, self._began = folder, time.perf_counter()
        self.failures: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.ended = False
        self._partition = partition
        self.summary: dict[str, Any] = {
            "format": FORMAT,
            "status": "interrupted",
            "reason": RUNNING,
            **about,
        }
        (folder / "config.yaml").write_text(config)
        (folder / "overrides.yaml").write_text(
            "".join(f"- {json.dumps(o)}\n" for o in overrides) or "[]\n"
        )
        write_json(folder / "partition.json", partition, indent=None)  # a number per sample
        write_json(folder / "environment.json", {**versions(), **environment})
        (folder / "rounds.jsonl").write_text("")
        self._write()

    def step(self, row: dict[str, Any], reports: dict[str, Report]) -> None:
        """One executed step: a line of rounds.jsonl, and the pieces' arrays."""
        for piece, report in reports.items():
            arrays = {name: value for name, value in report.items() if isinstance(value, Tensor)}
            row |= {
                f"{piece}.{name}": value
                for name, value in report.items()
                if not isinstance(value, Tensor)
            }
            if arrays:
                (self.folder / "arrays").mkdir(exist_ok=True)
                label = (
                    f"{piece}-{row['step']}"
                    if row["phase"] == "train"
                    else f"{row['phase']}-{row['step']}"
                )
                path = self.folder / "arrays" / f"{label}.safetensors"
                safetensors.torch.save_file(
                    {k: t.contiguous().cpu() for k, t in arrays.items()}, path
                )
        self.rows.append(row)
        with (self.folder / "rounds.jsonl").open("a") as lines:
            lines.write(json.dumps(_plain(row), allow_nan=False) + "\n")

    def clients(self, round: int, metrics: dict[int, dict[str, float]]) -> None:
        """One Parquet part per evaluation, long format: round, client, split, model, metric,
        value."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [
            (pid, *name.split("."), value)
            for pid, found in sorted(metrics.items())
            for name, value in found.items()
            if name.count(".") == 2
        ]
        columns = list(zip(*rows, strict=True)) or [()] * 5
        kinds = {
            "client": pa.int32(),
            "split": pa.string(),
            "model": pa.string(),
            "metric": pa.string(),
            "value": pa.float64(),
        }
        named = {
            name: pa.array(column, kind)
            for (name, kind), column in zip(kinds.items(), columns, strict=True)
        }
        table = pa.table({"round": pa.array([round] * len(rows), pa.int32()), **named})
        home = self.folder / "clients"
        home.mkdir(exist_ok=True)
        part = home / f".round-{round:06d}.part"
        pq.write_table(table, part)
        part.replace(home / f"round-{round:06d}.parquet")

    def keep_best(self, strategy: FedStrategy) -> None:
        """The global model as it now stands, the best so far by validation, in
        best_val.safetensors."""
        if "global" in strategy.evaluates:
            part = self.folder / ".best_val.part"
            _save(part, strategy.weights["model"])
            part.replace(self.folder / "best_val.safetensors")

    @contextmanager
    def ending(self, strategy: FedStrategy) -> Iterator[None]:
        """However the run inside ends, summary.json says how."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            self.finish("interrupted", reason="stopped by the user", strategy=strategy)
            raise
        except Exception as error:
            self.finish("failed", reason=str(error) or type(error).__name__, strategy=strategy)
            raise

    def finish(self, status: str, *, strategy: FedStrategy, reason: str | None = None) -> None:
        """The end: the weights, and the summary."""
        for slot, tree in strategy.weights.items():
            _save(self.folder / f"{slot}.safetensors", tree)
        losses = [row["loss_global"] for row in self.rows if row["loss_global"] is not None]
        spent: dict[str, float] = {}
        sizes: dict[str, dict[str, int]] = {"up": {}, "down": {}}
        for row in self.rows:
            for name, value in row["seconds"].items():
                spent[name] = spent.get(name, 0.0) + value
            for way, kinds in row["bytes"].items():
                for kind, n in kinds.items():
                    sizes[way][kind] = sizes[way].get(kind, 0) + n
        executed = [row["phase"] for row in self.rows]
        self.summary |= {
            "status": status,
            "reason": reason,
            "phases": [
                {"name": entry.name, "rounds": executed.count(entry.name)}
                for entry in strategy.timetable
            ],
            "models": list(strategy.views),
            "accuracy": self._accuracy("acc_global", "acc_val_weighted"),
            **{
                view: self._accuracy(f"acc_{view}_mean", f"acc_{view}_val_weighted")
                for view in strategy.views
                if view != "global"
            },
            "validation": max(
                (row["acc_val_weighted"] for row in self.rows if "acc_val_weighted" in row),
                default=None,
            ),
            "loss": losses[-1] if losses else None,
            "seconds": {
                "total": time.perf_counter() - self._began,
                **{name: spent.get(name, 0.0) for name in ("train", "evaluate", "aggregate")},
            },
            "communication": self._communication(strategy),
            "bytes": sizes,
            "client_state": strategy.client_state,
            "failures": self.failures,
            "weights_sha256": trees.sha256(strategy.weights),
        }
        self._write()
        self.ended = True
        self._draw()
        log.info("run folder: %s", self.folder)

    def _accuracy(self, test: str, val: str) -> dict[str, float | None]:
        """At the last evaluation, at the one that validation chooses, and the best on the test
        data, which no honest choice can know."""
        found: list[tuple[float, float | None]] = [
            (row[test], row.get(val)) for row in self.rows if row.get(test) is not None
        ]
        validated = [(val, acc) for acc, val in found if val is not None]
        return {
            "last": found[-1][0] if found else None,
            "best_val": max(validated, key=lambda pair: pair[0])[1] if validated else None,
            "best_test": max(acc for acc, _ in found) if found else None,
        }

    def _communication(self, strategy: FedStrategy) -> dict[str, int | None]:
        """Effective rounds until this run's own best accuracy, and what they cost one client in
        numbers sent and received (FedDisk, eq. 18 and 19). A step before the training is a round
        where clients sent something up. Null where no accuracy is defined."""
        train = [row for row in self.rows if row["phase"] == "train"]
        scored = [
            (row["step"], row["acc_global"]) for row in train if row["acc_global"] is not None
        ]
        if not scored:
            return {"effective_rounds": None, "cost": None}
        step = scored[
            (effective_rounds(torch.tensor([acc for _, acc in scored])) or len(scored)) - 1
        ][0]
        before = [
            row["phase"]
            for row in self.rows
            if row["phase"] != "train" and any(row["bytes"]["up"].values())
        ]
        others = [
            entry
            for entry in strategy.timetable
            if entry.name != "train" and entry.phase.slot and entry.phase.uploads
        ]
        cost = comm_cost(_numbers(strategy.sent("model")), step)
        for entry in others:
            cost += comm_cost(_numbers(strategy.sent(entry.phase.slot)), before.count(entry.name))
        return {"effective_rounds": len(before) + step, "cost": cost}

    def _draw(self) -> None:
        try:
            from fedhet.record import figures
        except ModuleNotFoundError as error:
            log.warning("no figures: %s", error)
            return
        try:
            figures.draw(self.folder, self.summary["method"], self.rows, self._partition)
        except (OSError, ValueError, RuntimeError) as error:
            log.warning(
                "no figures: %s", error
            )  # a picture must not fail a run that has ended well

    def _write(self) -> None:
        write_json(self.folder / "summary.json", self.summary)


def _save(path: Path, tree: trees.Tree) -> None:
    safetensors.torch.save_file({k: t.detach().cpu().contiguous() for k, t in tree.items()}, path)


def _numbers(tree: trees.Tree) -> int:
    return sum(t.numel() for t in tree.values() if t.is_floating_point())


def versions() -> dict[str, Any]:
    """Python, the packages that decide the numbers, and the machine's kind."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }
    for package in (
        "fedhet",
        "torch",
        "torchvision",
        "flwr",
        "numpy",
        "scikit-learn",
        "hydra-core",
        "ray",
    ):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found

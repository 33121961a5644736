"""Run folders as runs leave them, without training: their scores are given."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ENVIRONMENT = {"python": "3.11.7", "cpus": 2, "fedhet": "0.1.0", "torch": "2.11", "engine": "local"}
Axes = dict[str, Any]


def make_run(
    folder: Path,
    curve: Sequence[float | None],
    *,
    method: str = "fedavg",
    plugins: Sequence[str] = (),
    seed: int = 0,
    overrides: Sequence[str] = (),
    status: str = "ok",
    reason: str | None = None,
    loss: float | None = 0.5,
    clients: int = 5,
    targets: Mapping[float, int | None] | None = None,
    validation: float | None = None,
    bytes_of_a_round: int = 1000,
    steps: float = 10.0,  # of a client in a round
) -> Path:
    """A run folder of format 1 whose global model has the scores of `curve`, one per round."""
    folder.mkdir(parents=True)
    last = curve[-1] if curve else None
    summary: dict[str, Any] = {
        "format": 1,
        "status": status,
        "reason": reason,
        "method": method,
        "plugins": list(plugins),
        "server_opt": "none",
        "merge": "mean",
        "dataset": "digits",
        "model": "mlp",
        "partition": {"name": "dirichlet", "clients": clients, "hash": f"hash{seed}"},
        "seed": seed,
        "rounds": len(curve),
        "run_dir": str(folder),
        "phases": [{"name": "train", "rounds": len(curve)}],
        "models": ["global"],
        "target": "class",
        "score": "accuracy",
        "accuracy": {"last": last, "best_val": last, "best_test": last},
        "acc_clients_mean": last,
        "acc_clients_worst_decile": None if last is None else last / 2,
        "acc_last_k": {"mean": last, "evaluations": len(curve)},
        "targets": [
            {
                "accuracy": wanted,
                "rounds": rounds,
                "bytes": rounds and rounds * bytes_of_a_round,
                "seconds": rounds and rounds / 10,
            }
            for wanted, rounds in (targets or {}).items()
        ],
        "validation": validation if validation is not None else last,
        "loss": loss,
        "seconds": {"total": 1.0, "train": 0.6, "evaluate": 0.1, "aggregate": 0.1},
        "bytes": {"up": {"model": 400}, "down": {"model": 600}},
        "client_state": {"clients": 0, "bytes": 0, "largest": 0},
        "steps": round(steps * clients * len(curve)),
        "failures": [],
    }
    write(folder / "summary.json", summary)
    lines = [
        {
            "phase": "train",
            "step": step,
            "round": step,
            "cohort": list(range(clients)),
            "accepted": clients,
            "metrics": {"steps": steps},
            "acc_global": score,
            "loss_global": loss if step == len(curve) else 1.0,
            "acc_clients_mean": score,
            "acc_val_weighted": validation if validation is not None else score,
            "loss_clients_mean": loss and loss + 0.5 if step == len(curve) else 1.5,
            "seconds": {"train": 0.06, "evaluate": 0.5, "aggregate": 0.04},
            "bytes": {
                "up": {"model": bytes_of_a_round * 4 // 10},
                "down": {"model": bytes_of_a_round * 6 // 10},
            },
        }
        for step, score in enumerate(curve, 1)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "rounds.jsonl").write_text(text)
    given = [f"method={method}", *overrides, f"seed={seed}"]
    (folder / "overrides.yaml").write_text("".join(f"- {json.dumps(o)}\n" for o in given))
    (folder / "config.yaml").write_text(f"seed: {seed}\npartition:\n  alpha: 0.3\n")
    write(folder / "environment.json", ENVIRONMENT)
    counts = [[(p + label + seed) % 7 for label in range(4)] for p in range(clients)]
    write(folder / "partition.json", {"name": "dirichlet", "clients": clients, "counts": counts})
    if last is not None:
        (folder / "clients").mkdir()
        values = [min(1.0, last * (0.8 + 0.4 * p / clients)) for p in range(clients)]
        columns = {
            "round": [len(curve)] * clients,
            "client": list(range(clients)),
            "split": ["test"] * clients,
            "model": ["global"] * clients,
            "metric": ["accuracy"] * clients,
            "value": values,
        }
        name = f"round-{len(curve):06d}.parquet"
        pq.write_table(pa.table(columns), folder / "clients" / name)
    return folder


def make_experiment(
    folder: Path,
    axes: Mapping[str, Sequence[Any]],
    score: Callable[[Axes], float | None],
    *,
    rounds: int = 4,
    steps: Callable[[Axes], float] = lambda axes: 10.0,
    name: str = "made",
    **entries: Any,
) -> Path:
    """An experiment whose cell at some axes ends with `score(axes)`; there is no run at None."""
    cells = []
    for number, values in enumerate(product(*axes.values())):
        place = dict(zip(axes, values, strict=True))
        cell = f"cells/cell-{number:03d}"
        end = score(place)
        if end is not None:
            curve = [end * (1 - 0.5 ** (step + 1)) for step in range(rounds - 1)] + [end]
            make_run(folder / cell, curve, seed=place.get("seed", 0), steps=steps(place))
            about = {
                "format": 1,
                "status": "finished",
                "reason": None,
                "code": {"version": "0.1.0"},
            }
            write(folder / cell / "cell.json", about)
        overrides = [f"{axis}={value}" for axis, value in place.items()]
        cells.append({"folder": cell, "kind": "run", "axes": place, "overrides": overrides})
        cells[-1]["tuned"] = {}
    content = {
        "format": 1,
        "experiment": name,
        "title": "A made experiment",
        "command": [f"experiment={name}", "seed=0,1"],
        "axes": {axis: list(values) for axis, values in axes.items()},
        "tune": None,
        "report": {"compare": next(iter(axes)), "metric": "last", "reference": None},
        "tuned": [],
        "cells": cells,
        "code": {"version": "0.1.0"},
    }
    folder.mkdir(exist_ok=True)
    write(folder / "experiment.json", {**content, **entries})
    return folder


def change(path: Path, **entries: Any) -> None:
    """Change entries of a JSON file."""
    write(path, {**json.loads(path.read_text()), **entries})


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))

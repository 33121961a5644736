"""Reads and checks the JSON files that runs and experiments record.

A summary.json, cell.json, experiment.json, partition.json or rounds.jsonl may come from anyone, so
each is compared with its form; fedhet/data/forms.py says what a form is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedhet.core.errors import ConfigError, DataError
from fedhet.data.forms import cause, fault, has_form, plain_file, plain_text, read_object

FORMAT = 3  # the format that is written, since fedhet 0.3
READABLE = (1, 2, 3)
COLUMNS = {  # of clients/*.parquet, with their types
    **dict.fromkeys(("round", "client"), "int32"),
    **dict.fromkeys(("split", "model", "metric"), "string"),
    "value": "float64",
}
BLOCK = 2**22  # bytes to read from the end of a rounds.jsonl; 100,000 clients in a step take 1 MB
LARGEST_COUNT = 10**9  # of samples, of numbers in a sample, or of tokens
CELL_FILE = "cell.json"  # of each run of an experiment, and of each failed run of a sweep
RUNNING = "the run has not ended: it is still running, or it was killed"
FEWEST_OF_A_GRID = 3  # values that trials try; with fewer, none lies inside of the grid
OWN = "own"  # stands in place of numbers if each client has its own numbers
NUMBERS: dict[Any, Any] = {str: float}


def read_partition(path: Path, needed: Iterable[str] = ()) -> dict[str, Any]:
    """Read the partition.json of a run; it has no `shape` if the data were given as objects.

    Raises:
        FileNotFoundError: there is no such file.
        NotADirectoryError: its folder is no folder.
        DataError: it is damaged, or cannot be read.
    """
    content = read_object(path, PARTITION, needed)
    if problem := next(_misfits(content), None):
        raise DataError(f"{path} is damaged: {problem}")
    return content


def _misfits(partition: Mapping[str, Any]) -> Iterator[str]:
    """Yield the entries of a partition.json that are missing, or contradict other entries."""
    empty = {key for key, value in partition.items() if value is None}
    if wrong := empty & PARTITION.keys() - {"hash", "normalised", "target_scale", "padding"}:
        yield f"{min(wrong)} is None"
    if "shape" not in partition:
        return
    if absent := DESCRIBING - partition.keys():
        yield f"{min(absent)} is missing"
    inputs, outputs = partition["shape"][0], len(partition["numbers"] or partition["classes"])
    if not outputs:
        yield "classes is [], and so is numbers"
    normalised, own = partition["normalised"] or {}, partition.get("own") or {}
    if normalised.get("mean") == OWN:
        yield from (f"own.{pid} has no mean" for pid, each in own.items() if "mean" not in each)
        normalised = {}
    elif not normalised and partition.get("missing") == "median":
        yield "normalised is None, with missing=median"
    scales = {f"own.{pid}": each for pid, each in own.items()} | {"normalised": normalised}
    lengths = [(key, each, inputs) for key, each in scales.items()]
    lengths.append(("target_scale", partition["target_scale"] or {}, outputs))
    for key, scale, size in lengths:
        for name, values in scale.items():
            if len(values) != size:
                yield f"{key}.{name} has {len(values)} numbers, not {size}"
    if (partition.get("padding") or -1) >= partition["vocabulary"]:
        yield f"padding is {partition['padding']}, with vocabulary={partition['vocabulary']}"
    if {len(row) for row in partition.get("counts") or []} - {0, len(partition["classes"])}:
        yield f"counts has not one column for each of the {len(partition['classes'])} classes"


def read_or_empty(path: Path) -> dict[str, Any]:
    """Return `read_object(path)`, or {} if the file is missing or damaged, as by a killed run."""
    try:
        return read_object(path)
    except (FileNotFoundError, DataError):
        return {}


def resumable(folder: Path) -> dict[str, Any]:
    """Return the summary of a run to resume; empty if it has none.

    Raises:
        ConfigError: the run has the format of an earlier version, which had other settings.
    """
    summary = read_or_empty(folder / "summary.json")
    if summary.get("format", FORMAT) != FORMAT:
        raise ConfigError(
            f"resume={folder}: another version of fedhet has written this run (format"
            f" {summary['format']}); only runs of format {FORMAT} can be resumed"
        )
    return summary


def read_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Read rounds.jsonl line by line.

    Raises:
        DataError: it cannot be read, or the next line is damaged.
    """
    count = 0
    try:
        for line in plain_text(path).splitlines():
            step = json.loads(line)
            scores = [name for name in dict(step) if name.startswith(("acc_", "loss_"))]
            if problem := fault(step, STEP | dict.fromkeys(scores, float)):
                raise ValueError(problem)
            yield step
            count += 1
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged after {count} lines: {cause(error)}") from error


def last_step(path: Path) -> dict[str, Any]:
    """Return the last complete line of a rounds.jsonl that a run still writes; {} if none."""
    try:
        with plain_file(path, math.inf).open("rb") as file:
            # Read from the end: a display calls this often, and the file may be large.
            file.seek(max(0, path.stat().st_size - BLOCK))
            *lines, _ = file.read().split(b"\n")  # the last line may be incomplete
        return dict(json.loads(lines[-1]))
    except (OSError, ValueError, IndexError):
        return {}


def read_config(folder: Path) -> Any:
    """Return the settings of a run.

    Raises:
        ConfigError: the folder is no run folder.
        DataError: config.yaml is damaged.
    """
    from omegaconf import OmegaConf
    from yaml import YAMLError

    file = folder / "config.yaml"
    try:
        config = OmegaConf.create(read_yaml(plain_text(file)) or {})  # {}: the file is empty
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} is not the folder of a run: {file.name} is missing") from error
    except (YAMLError, OSError, ValueError) as error:
        raise DataError(f"{file} is damaged: {error}") from error
    if "method" not in config:
        raise DataError(f"{file} is damaged: it names no method")
    return config


def read_yaml(text: str) -> Any:
    """Return the content of YAML from a run folder, by the parser in C if there is one.

    A few lines of aliases can expand to more than any memory holds. fedhet writes none.

    Raises:
        yaml.YAMLError: the text is no YAML, or has aliases.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if "*" in text and any(
        isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, loader)
    ):
        raise yaml.YAMLError("it has aliases, which fedhet does not write")
    return loader(text).get_single_data()


def leaves(node: Mapping[str, Any], dot: str = ".", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for the values of nested objects, with names such as `seconds.train`."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from leaves(value, dot, f"{prefix}{key}{dot}")
        else:
            yield f"{prefix}{key}", value


# ---- the forms
def _is_scalar(value: Any) -> bool:
    return not isinstance(value, list | dict)


def is_table(value: Any) -> bool:
    """Whether the value is a list of equally long lists of numbers."""
    return has_form(value, [[float]]) and len({len(row) for row in value}) < 2


def is_name(value: Any) -> bool:
    """Whether the value can be a file's name and cannot lead to another folder."""
    return isinstance(value, str) and re.fullmatch(r"\w[\w-]*", value) is not None


def _is_count(value: Any) -> bool:
    """Whether the value is a number of samples, columns or tokens that is not too large."""
    return has_form(value, int) and 0 <= value <= LARGEST_COUNT


def _is_shape(value: Any) -> bool:
    return (
        has_form(value, [_is_count])
        and 1 <= len(value) <= 3
        and 1 <= math.prod(value) <= LARGEST_COUNT
    )


def _is_statistics(value: Any) -> bool:
    """Whether the value has lists of finite numbers: `mean` and `std` (> 0), `median`, or all."""
    return (
        isinstance(value, dict)
        and value.keys() <= {"mean", "std", "median"}
        and ("mean" in value) == ("std" in value)
        and all(
            has_form(each, [float]) and all(map(math.isfinite, each)) for each in value.values()
        )
        and min(value.get("std") or [1]) > 0
    )


def _is_scale(value: Any) -> bool:
    return _is_statistics(value) and "mean" in value


def _is_phases(value: Any) -> bool:
    phase = {"name": str, "rounds": int}
    return has_form(value, [phase]) and all(phase.keys() <= each.keys() for each in value)


def _is_thresholds(value: Any) -> bool:
    """Whether each entry has a threshold first, followed by the cost of reaching it (or null)."""
    return has_form(value, [NUMBERS]) and all(
        next(iter(each.values()), None) is not None for each in value
    )


_TUNED = {"axes": dict, "chosen": dict, "validation": float, "at_the_edge": [str]}
EXPERIMENT = {
    "axes": {str: list},
    "cells": list,
    "tuned": [_TUNED],
    "tune": {"space": dict, "own": {str: dict}},
    "report": {
        **dict.fromkeys(("compare", "metric"), str),
        "reference": _is_scalar,
        "notes": [str],
    },
    **{key: [str] for key in ("fixed", "command")},
    **dict.fromkeys(("experiment", "title", "digest"), str),
}
CELL = {"folder": str, "kind": str, "axes": dict, "tuned": dict, "overrides": [str]}
STEP: dict[str, Any] = {"phase": str, **dict.fromkeys(("step", "round"), float)}
STEP |= {"seconds": NUMBERS, "bytes": {str: NUMBERS}}
STATE = {"status": str, "reason": str, "code": {str: _is_scalar}}
PARTITION = {
    **dict.fromkeys(("name", "hash", "labels", "target", "missing", "declaration"), str),
    **dict.fromkeys(("clients", "samples", "vocabulary", "padding"), _is_count),
    "seed": int,
    **{key: [str] for key in ("classes", "numbers", "columns")},
    "shape": _is_shape,
    "normalised": lambda value: value == {"mean": OWN, "std": OWN} or _is_scale(value),
    "target_scale": _is_scale,
    "own": lambda value: isinstance(value, dict) and all(map(_is_statistics, value.values())),
    "settings": dict,
    "owners": [str],
    "indices": list,
    "train_sizes": [_is_count],
    "counts": lambda value: has_form(value, [[_is_count]]) and is_table(value),
}
# Keys that a partition.json with a `shape` must have.
DESCRIBING = {"target", "classes", "numbers", "normalised", "target_scale", "vocabulary"}
_DETAILS = {"confusion": is_table, str: float}
SUMMARY = {
    **dict.fromkeys(("status", "reason", "method", "server_opt", "merge"), str),
    **dict.fromkeys(("dataset", "model", "target", "score"), str),
    "plugins": [str],
    "models": lambda value: has_form(value, [str]) and all(map(is_name, value)),
    "personal_models": {"kept": {str: {str: int}}, "not_kept": {str: str}},
    "delivered": {"client": int, "round": int},
    **dict.fromkeys(("seed", "rounds"), int),
    **dict.fromkeys(("loss", "validation"), float),
    **dict.fromkeys(("seconds", "memory", "client_state", "personal", "finetuned"), NUMBERS),
    "bytes": {str: NUMBERS},
    "partition": {"name": str, "clients": int, "hash": str},
    "details": {"test_set": _DETAILS, "clients": {str: _DETAILS}},
    "failures": list,
    "thresholds": _is_thresholds,
    "phases": _is_phases,
}

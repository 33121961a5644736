"""Functions that the papers' pages share: Markdown tables, and updates of kept results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedhet.core.errors import ConfigError
from fedhet.runs.config.lines import key_of
from fedhet.study import definition
from fedhet.study.report.results import Results

HOME = Path(__file__).resolve().parent
RESULTS = HOME / "results"
# Columns of times.csv: seconds of all runs and trials of a scale, one after another.
TIMES = {"reproduction": object, "scale": object, "runs": int, "trials": int, "seconds": int}


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the rows as a Markdown table; columns without any text are left out."""
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    lines = [heads, ["---"] * len(heads)]
    lines += [[row[head] or "–" for head in heads] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def kept(path: Path, columns: Mapping[str, Any]) -> pd.DataFrame:
    """Read a csv file that must have these columns (name -> type); no rows if there is no file.

    Raises:
        ConfigError: the file has other columns.
    """
    if not path.exists():
        return pd.DataFrame(columns=list(columns))
    # Only scores may be missing (runs without a result); an empty text is a text.
    scores = [name for name, kind in columns.items() if pd.api.types.is_float_dtype(kind)]
    found = pd.read_csv(path, keep_default_na=False, na_values={name: [""] for name in scores})
    if [*found] != [*columns]:
        raise ConfigError(
            f"{path}: its columns are {','.join(found)}; they must be {','.join(columns)}"
        )
    return found.astype(dict(columns))


def replace(path: Path, found: pd.DataFrame, key: Sequence[str]) -> None:
    """Write rows to a csv file; they replace earlier rows with the same values of `key`."""
    earlier = kept(path, found.dtypes.to_dict())
    again = pd.MultiIndex.from_frame(found[[*key]])
    stays = ~pd.MultiIndex.from_frame(earlier[[*key]]).isin(again)
    rows = pd.concat([earlier[stays], found]) if stays.any() else found
    rows.sort_values([*key], kind="stable").to_csv(path, index=False)


def note_time(path: Path, *values: str | int) -> None:
    """Write a row of TIMES to a csv file; it replaces the row of the same name and scale.

    Raises:
        ConfigError: the file has other columns.
    """
    replace(path, pd.DataFrame([values], columns=[*TIMES]), ["reproduction", "scale"])


def check_experiment(read: Results) -> None:
    """Refuse runs with other settings than the experiment's file.

    Raises:
        ConfigError: the runs have other settings.
    """
    record = read.source.experiment
    name = record["experiment"]
    experiment = definition.read([f"experiment={name}"])
    assert experiment is not None
    others = [
        line
        for line in record["fixed"]
        if line not in experiment.fixed and key_of(line) not in definition.WITHOUT_EFFECT
    ]
    of_file = {
        "digest": experiment.digest,
        "axes": experiment.labels,
        "tune": experiment.tuning.record() if experiment.tuning else None,
    }
    as_read = json.loads(json.dumps(of_file))
    others += [f"another {key}" for key, value in as_read.items() if record[key] != value]
    if others:
        raise ConfigError(
            f"{read.source.folders[0]}: its runs differ from the file of experiment={name}:"
            f" {', '.join(others)}"
        )

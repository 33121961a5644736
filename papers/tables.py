"""What the papers' pages share: Markdown tables, and kept results, of which some are replaced."""

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
# How long each scale of each reproduction takes: its runs and trials, one after another.
TIMES = {"reproduction": object, "scale": object, "runs": int, "trials": int, "seconds": int}


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """The rows as a table, without the columns in which none of them has a text."""
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    lines = [heads, ["---"] * len(heads)]
    lines += [[row[head] or "–" for head in heads] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def kept(path: Path, columns: Mapping[str, Any]) -> pd.DataFrame:
    """The rows of a csv file with these columns, whose types are given; none if there is no file.

    Raises:
        ConfigError: the file holds something else.
    """
    if not path.exists():
        return pd.DataFrame(columns=list(columns))
    # A run without a result has no scores, and a text is never missing.
    scores = [name for name, kind in columns.items() if pd.api.types.is_float_dtype(kind)]
    empty = {name: [""] for name in scores}
    found = pd.read_csv(path, keep_default_na=False, na_values=empty)
    if [*found] != [*columns]:
        raise ConfigError(
            f"{path}: its columns are {','.join(found)}; expected is {','.join(columns)}"
        )
    return found.astype(dict(columns))


def replace(path: Path, found: pd.DataFrame, key: Sequence[str]) -> None:
    """Write rows to a csv file, in the place of the earlier ones with one of their keys."""
    earlier = kept(path, found.dtypes.to_dict())
    again = pd.MultiIndex.from_frame(found[[*key]])
    stays = ~pd.MultiIndex.from_frame(earlier[[*key]]).isin(again)
    rows = pd.concat([earlier[stays], found]) if stays.any() else found
    rows.sort_values([*key], kind="stable").to_csv(path, index=False)


def note_time(path: Path, *values: str | int) -> None:
    """Write a row of TIMES to a csv file, in the place of the one of the same name and scale.

    Raises:
        ConfigError: the file holds something else.
    """
    replace(path, pd.DataFrame([values], columns=[*TIMES]), ["reproduction", "scale"])


def check_experiment(read: Results) -> None:
    """Refuse runs that are not those of an experiment's file.

    Raises:
        ConfigError: they have other settings.
    """
    record = read.source.experiment
    name = record["experiment"]
    experiment = definition.read([f"experiment={name}"])
    assert experiment is not None
    others = [line for line in record["fixed"] if line not in experiment.fixed]
    others = [line for line in others if key_of(line) not in definition.WITHOUT_EFFECT]
    of_file: dict[str, Any] = {
        "digest": experiment.digest,
        "axes": experiment.labels,
        "tune": experiment.tuning.record() if experiment.tuning else None,
    }
    of_file = json.loads(json.dumps(of_file))
    others += [f"another {key}" for key, value in of_file.items() if record[key] != value]
    if others:
        raise ConfigError(
            f"{read.source.folders[0]}: its runs are not those of experiment={name}:"
            f" {', '.join(others)}"
        )

"""The cells of an experiment: its runs, and the trials that choose their settings."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from omegaconf import DictConfig

from fedhet.core.errors import ConfigError
from fedhet.runs.config import catalogue, composition
from fedhet.runs.config.experiment_file import SEED
from fedhet.runs.config.lines import by_key, key_of
from fedhet.study.axes import Label, Setting, Value, written
from fedhet.study.definition import WITHOUT_EFFECT, Experiment
from fedhet.study.tuning import Point, points

LONGEST_NAME = 80
Axes = dict[str, Label]  # axis -> the label of its value
Combination = tuple[tuple[str, Value], ...]  # a value of each axis


@dataclass(frozen=True)
class Cell:
    """One run or trial of an experiment. Cells with the same folder are equal.

    Attributes:
        kind: "run", or "trial" for a run that only serves the choice of settings.
        axes: axis -> the label of its value.
        tuned: tuned setting -> its value: the chosen one for a run, the tried one for a trial.
        overrides: the overrides of the run.
        folder: its folder, relative to the folder of the experiment. The name depends on the
            experiment's settings, the overrides, and the labels of the axes' values, because two
            labels may have the same overrides.
    """

    kind: str = field(compare=False)
    axes: Axes = field(compare=False)
    tuned: Point = field(compare=False)
    overrides: tuple[str, ...] = field(compare=False)
    folder: str

    def on(self, axes: Collection[str]) -> Setting:
        """Return its labels on these axes."""
        return tuple((axis, label) for axis, label in self.axes.items() if axis in axes)

    @property
    def label(self) -> str:
        """A name for people, made of its labels and tuned values."""
        values = [
            f"{axis.rpartition('.')[2]}={label}" if axis != "method" else str(label)
            for axis, label in {**self.axes, **self.tuned}.items()
        ]
        return " ".join(["trial", *values] if self.kind == "trial" else values)

    def record(self) -> dict[str, object]:
        """Return its entry in experiment.json."""
        return {
            "folder": self.folder,
            "kind": self.kind,
            "axes": self.axes,
            "tuned": self.tuned,
            "overrides": self.overrides,
        }


def settings_of(experiment: Experiment) -> list[Combination]:
    """Return all combinations of the values of all axes except the seed."""
    axes = {axis: values for axis, values in experiment.axes.items() if axis != SEED}
    return [tuple(zip(axes, values, strict=True)) for values in product(*axes.values())]


def trials(experiment: Experiment) -> list[Cell]:
    """Return the trials in order: for each combination of the axes, each point with each seed.

    There are none if the experiment's file has the choices of earlier trials.
    """
    tuning = experiment.tuning
    if tuning is None or tuning.chosen is not None:
        return []
    return [
        _cell(experiment, "trial", combination, Value(seed, (f"{SEED}={seed}",)), point)
        for combination in settings_of(experiment)
        for point in points(tuning.space_of(labels(combination)), tuning.budget)
        for seed in tuning.seeds
    ]


def runs(
    experiment: Experiment,
    chosen: Mapping[Setting, Point | None] | None = None,
) -> list[Cell]:
    """Return the runs in the order of the axes.

    Args:
        experiment: the experiment.
        chosen: labels on the axes `tune.per` -> the tuned values that the trials have chosen. None:
            use the choices in the experiment's file.
    """
    if chosen is None and experiment.tuning:
        chosen = experiment.tuning.chosen
    every = []
    for values in product(*experiment.axes.values()):
        combination = tuple(zip(experiment.axes, values, strict=True))
        place = tuple((axis, value.label) for axis, value in combination if axis in experiment.per)
        point = (chosen or {}).get(place) or {}
        every.append(_cell(experiment, "run", combination, None, point))
    return every


def wanted(experiment: Experiment, every: Sequence[Cell]) -> list[Cell]:
    """Return the runs of the requested part, and the trials on which their settings depend."""
    places = {run.on(experiment.per) for run in runs(experiment) if experiment.wants(run.axes)}
    return [
        cell
        for cell in every
        if (
            cell.on(experiment.per) in places
            if cell.kind == "trial"
            else experiment.wants(cell.axes)
        )
    ]


def labels(combination: Combination) -> list[Label]:
    """Return the labels of the values."""
    return [value.label for _, value in combination]


def check(
    cells: Sequence[Cell], bases: composition.Bases | None = None
) -> dict[frozenset[str], DictConfig]:
    """Check names, values and whether the components fit together, before the first run starts.

    Every combination of choices of groups is checked. Every other override is checked once only,
    because the range of a setting does not depend on other settings.

    Args:
        cells: the cells.
        bases: composes their settings; None: a new one.

    Returns:
        `data_lines` of a cell -> the composed settings of one cell that reads these data.

    Raises:
        ConfigError: a setting is wrong; the message names the run.
    """
    from fedhet.runs.config.instantiation import instantiate
    from fedhet.runs.job import try_settings

    folders: dict[str, Cell] = {}
    for cell in cells:
        other = folders.setdefault(cell.folder, cell)
        if other is not cell:
            raise ConfigError(f"{other.label} and {cell.label} are the same run; leave one out")
    groups = catalogue.groups()
    bases = bases or composition.of_sweep()
    seen: set[object] = set()
    data: dict[frozenset[str], DictConfig] = {}
    for cell in cells:
        choices = frozenset(line for line in cell.overrides if key_of(line) in groups)
        about_data = data_lines(cell)
        if about_data in data and not {choices, *cell.overrides} - seen:
            continue
        seen |= {choices, *cell.overrides}
        try:
            settings = composition.compose(cell.overrides, bases=bases)
            instantiate(settings.cfg.partition)
            try_settings(settings)
        except ConfigError as error:
            raise ConfigError(f"{error} (in the experiment's run {cell.label})") from error
        data.setdefault(about_data, settings.cfg)
    return data


def data_lines(cell: Cell) -> frozenset[str]:
    """Return the overrides that decide which data a cell reads."""
    return frozenset(line for line in cell.overrides if _top(line) in ("dataset", "data_dir"))


def _cell(
    experiment: Experiment, kind: str, combination: Combination, seed: Value | None, point: Point
) -> Cell:
    axes = dict(combination) | ({SEED: seed} if seed else {})
    lines = [
        *(line for value in axes.values() for line in value.overrides),
        *(f"{key}={written(value)}" for key, value in point.items()),
    ]
    cell_overrides = tuple(by_key([*experiment.fixed, *lines]).values())
    effective = [line for line in experiment.fixed if _top(line) not in WITHOUT_EFFECT]
    own = by_key([*effective, "figures=false", *lines])
    text = json.dumps([experiment.digest, list(own.values())])
    words = [
        str(value.label) if len(value.overrides) != 1 or axis == "method" else _short(value)
        for axis, value in axes.items()
    ]
    words += [f"{key.rpartition('.')[2]}={value}" for key, value in point.items()]
    words = ["trial", *words] if kind == "trial" else words
    name = re.sub(r"[^a-zA-Z0-9_.,=+-]+", "_", "-".join(words))[:LONGEST_NAME]
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Cell(
        kind,
        {axis: value.label for axis, value in axes.items()},
        point,
        cell_overrides,
        f"cells/{name}-{digest}",
    )


def _top(line: str) -> str:
    """Return the first part of the key of an override."""
    return key_of(line).partition(".")[0]


def _short(value: Value) -> str:
    """Return the override of a value without the group of its setting: alpha=0.1."""
    key, _, text = value.overrides[0].partition("=")
    return f"{key.rpartition('.')[2]}={text}"


def covering(experiment: Experiment) -> list[Cell]:
    """Return the cells to check before the start: the trials, and runs with one of their points."""
    tried = trials(experiment)
    chosen = {cell.on(experiment.per): cell.tuned for cell in tried}
    return wanted(experiment, [*tried, *runs(experiment, chosen or None)])

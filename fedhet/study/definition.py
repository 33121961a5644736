"""The definition of an experiment, from its file in conf/experiment and the command line.

axes:                                    the runs are all combinations of the axes' values
  method:                                label: the overrides of this label
    FedAvg: method=fedavg
    SCAFFOLD + FedNorm: method=scaffold plugin=[fednorm]
  partition.alpha: [0.05, 0.3]           or a list of values of a setting or group
  seed: range(0,3)                       or a sweep in Hydra's grammar
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations, product
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from fedhet.core.check import each, one_of, text
from fedhet.core.errors import ConfigError
from fedhet.runs.config import catalogue, components, composition, overrides
from fedhet.runs.config.composition import EXPERIMENT_KEYS
from fedhet.runs.config.experiment_file import PART, SEED, declared_by, is_own, mapping
from fedhet.runs.config.lines import key_of
from fedhet.study.axes import Label, Value, labels_of, lines_of, read_axes, single_settings
from fedhet.study.tuning import Tuning, read_tuning


def refuse_conflicts(
    axes: Mapping[str, Sequence[Value]], given: Mapping[str, Override], tuning: Tuning | None
) -> None:
    """Refuse a setting that a label sets and also the command line, another label or the tuning.

    Labels may override the file and its scale. The choice of a group does not count as setting the
    group's settings: `client=adam` and `client.lr=0.1` are allowed together.

    Args:
        axes: axis -> its values.
        given: key -> the override of the command line; keys may be names of axes.
        tuning: the settings that are tuned, or None.

    Raises:
        ConfigError: a setting is set twice; the message names it and both places.
    """
    for axis, values in axes.items():
        for value in values:
            for key in sorted(_keys(value).intersection(given).difference(axes)):
                raise ConfigError(
                    f"{given[key].input_line!r}: {_name(axis, value)} sets {key} as well, so the"
                    " command line would have no effect on these runs; change the experiment's"
                    f" file, or choose other values of {axis}"
                )
    for (axis, values), (other_axis, others) in combinations(axes.items(), 2):
        for value, other in product(values, others):
            for key in sorted(_keys(value) & _keys(other)):
                raise ConfigError(
                    f"{_name(axis, value)} and {_name(other_axis, other)} both set {key}; a run can"
                    " have only one value of it"
                )
    if tuning is not None:
        _refuse_tuned(axes, tuning)


def _refuse_tuned(axes: Mapping[str, Sequence[Value]], tuning: Tuning) -> None:
    # The seed is left out, because nothing is tuned for a seed.
    others = {axis: values for axis, values in axes.items() if axis != SEED}
    for values in product(*others.values()):
        space = tuning.space_of([value.label for value in values])
        for axis, value in zip(others, values, strict=True):
            for key in sorted(_keys(value).intersection(space)):
                where = "space" if key in tuning.space else "own"
                raise ConfigError(
                    f"tune.{where}: {key} is tuned, but {_name(axis, value)} sets it as well;"
                    " remove one of the two"
                )


def _keys(value: Value) -> set[str]:
    return set(map(key_of, value.overrides))


def _name(axis: str, value: Value) -> str:
    return f"axes.{axis}.{value.label}"


# ---- the experiment
# The scores that a report can compare, by their names in fedhet/study/report.
METRICS = (
    "last",
    "best_val",
    "last_k",
    "clients",
    "worst",
    "personal",
    "personal_best_val",
    "finetuned",
)
# These settings change no result, so the name of a run folder does not depend on them.
WITHOUT_EFFECT = ("tracker", "figures")
OTHER_CODE = ("stop", "keep", "rerun")
PRESETS = {"figures": "false", "engine.fused": "auto"}  # the report has figures of all runs


@dataclass(frozen=True)
class Experiment:
    """Several runs that belong together.

    Attributes:
        name: the choice of the group `experiment`.
        title: the first comment of its file.
        command: the command line: --config-dir=<folder> for each folder of the user's own
            components, and the overrides.
        fixed: the overrides of every run; the first is `experiment=<name>`.
        axes: axis -> its values.
        tuning: the tuning before the runs, or None.
        report: the settings of the report: `compare`, `metric`, `reference`.
        part: axis -> the labels of the requested runs; runs with other labels are not launched.
        on_other_code: what to do with finished runs of other code: stop, keep or rerun.
        digest: 16 hex digits of the settings that the file gives to every run.
    """

    name: str
    title: str
    command: tuple[str, ...]
    fixed: tuple[str, ...]
    axes: dict[str, tuple[Value, ...]]
    tuning: Tuning | None
    report: dict[str, Any]
    part: dict[str, tuple[str, ...]]
    on_other_code: str
    digest: str

    @property
    def labels(self) -> dict[str, list[Label]]:
        """Return a dict: axis -> the labels of its values."""
        return {axis: [value.label for value in values] for axis, values in self.axes.items()}

    @property
    def per(self) -> tuple[str, ...]:
        """The axes with choices of their own (see `Tuning`); none without tuning."""
        return self.tuning.per if self.tuning else ()

    def wants(self, axes: Mapping[str, Label]) -> bool:
        """Whether the run or trial with these labels belongs to the requested part."""
        return all(
            str(label) in self.part[axis] for axis, label in axes.items() if axis in self.part
        )


def read(lines: Sequence[str]) -> Experiment | None:
    """Return the experiment that the overrides choose, or None if they lead to a single run.

    Args:
        lines: the overrides of the command line. An override of an axis replaces its values. A
            sweep over another setting adds an axis.

    Raises:
        ConfigError: the experiment's file, or an override, is wrong.
    """
    declared = declared_by(lines)
    labels = labels_of(declared["axes"])
    apart = (*EXPERIMENT_KEYS, *(declared["axes"] or ()))
    single = list(single_settings(lines, but=apart))
    given = {line.key_or_group: line for line in overrides.parse(single, labels)}
    own = {key: line for key, line in given.items() if is_own(key)}
    if not declared["axes"]:
        return None
    scaled = {line.key_or_group: line for line in _of_scale(declared, labels)}
    rest = {**scaled, **{key: value for key, value in given.items() if key not in own}}
    experiment = rest.pop("experiment")
    settings = {key: value for key, value in rest.items() if not value.is_hydra_override()}
    axes = read_axes(declared["axes"], settings)
    fixed = [override.input_line for key, override in settings.items() if key not in axes]
    seed = settings[SEED].value() if SEED in settings else declared[SEED]
    tuning = read_tuning(declared["tune"], axes, settings, read_axes(declared["axes"], {}), seed)
    refuse_conflicts(axes, {key: given[key] for key in settings if key in given}, tuning)
    fixed += [f"{key}={value}" for key, value in PRESETS.items() if key not in settings]
    name = str(experiment.value())
    flags = [f"--config-dir={folder}" for folder in components.search_path()]
    return Experiment(
        name=name,
        title=catalogue.title("experiment", name),
        command=(*flags, *lines),
        fixed=(f"experiment={name}", *(str(line) for line in fixed)),
        axes=axes,
        tuning=tuning,
        report=_report(declared["report"], axes),
        part=dict(_part(key, line, axes) for key, line in own.items() if key.startswith(PART)),
        on_other_code=one_of("on_other_code", declared["on_other_code"], OTHER_CODE),
        digest=_digest(name),
    )


def _digest(name: str) -> str:
    """Return the digest of the settings of the experiment's file, including all defaults."""
    settings: Any = OmegaConf.to_container(composition.raw([f"experiment={name}"]))
    default: Any = OmegaConf.to_container(composition.raw([]))
    settings |= {key: default[key] for key in WITHOUT_EFFECT}
    content = {key: value for key, value in settings.items() if key not in EXPERIMENT_KEYS}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _of_scale(declared: Mapping[str, Any], labels: Mapping[str, Collection[str]]) -> list[Override]:
    """Return the overrides of the chosen scale."""
    scale, scales = declared["scale"], mapping("scales", declared["scales"])
    if scale is None:
        return []
    if not scales:
        raise ConfigError(f"scale={scale}: this experiment has no scales")
    lines = scales[one_of("scale", scale, map(str, scales))]
    return overrides.parse(lines_of(f"scales.{scale}", lines), labels)


def _part(
    key: str, override: Override, axes: Mapping[str, Sequence[Value]]
) -> tuple[str, tuple[str, ...]]:
    """Return the axis of an override `axes.<axis>=...`, and the labels that its patterns match.

    Raises:
        ConfigError: there is no such axis, or a pattern matches no label.
    """
    axis = one_of("axes", key.removeprefix(PART), axes)
    value = override.value()
    labels = [str(value.label) for value in axes[axis]]
    wanted: list[str] = []
    for pattern in map(str, value if isinstance(value, list) else [value]):
        exact = [pattern] if pattern in labels else []  # a label may have brackets
        fitting = exact or [label for label in labels if fnmatchcase(label, pattern)]
        wanted += fitting or [one_of(key, pattern, labels)]
    return axis, tuple(dict.fromkeys(wanted))


def _report(declared: Mapping[str, Any], axes: Mapping[str, Sequence[Value]]) -> dict[str, Any]:
    compare = declared["compare"]
    # If the seed is the only axis, the report has one method: the method of all runs.
    choices = [axis for axis in axes if axis != SEED] or ["method"]
    if compare is None:
        compare = "method" if "method" in choices else choices[0]
    one_of("report.compare", compare, choices)
    one_of("report.metric", declared["metric"], METRICS)
    reference = declared["reference"]
    if reference is not None:
        labels = [str(value.label) for value in axes.get(compare, ())]
        reference = one_of("report.reference", str(reference), labels)
    notes = each(text, "report.notes", declared["notes"])
    return {**declared, "compare": compare, "reference": reference, "notes": list(notes)}

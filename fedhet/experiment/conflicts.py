"""Settings that two sides of an experiment would set, one of them without effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product

from hydra.core.override_parser.types import Override

from fedhet.config.lines import key_of
from fedhet.core.errors import ConfigError
from fedhet.experiment.axes import SEED, Value
from fedhet.experiment.tuning import Tuning


def refuse_conflicts(
    axes: Mapping[str, Sequence[Value]], given: Mapping[str, Override], tuning: Tuning | None
) -> None:
    """Refuse a setting that a label has, and the command line, another label or the tuning too.

    That a label overrides the file, and its scale, is what labels are for. A choice of a group is
    not one of the settings that it has: `client=adam` and `client.lr=0.1` go together.

    Args:
        axes: axis -> its values.
        given: key -> the override of the command line; the names of axes may be among them.
        tuning: what is tuned, or None.

    Raises:
        ConfigError: naming the setting, and where it is set.
    """
    for axis, values in axes.items():
        for value in values:
            for key in sorted(_keys(value).intersection(given).difference(axes)):
                raise ConfigError(
                    f"{given[key].input_line!r}: {_name(axis, value)} sets {key} as well, so that"
                    " it would have no effect there; change the file, or choose other values of"
                    f" {axis}"
                )
    for (axis, values), (other_axis, others) in combinations(axes.items(), 2):
        for value, other in product(values, others):
            for key in sorted(_keys(value) & _keys(other)):
                raise ConfigError(
                    f"{_name(axis, value)} and {_name(other_axis, other)} both set {key}; a run has"
                    " one value of it"
                )
    if tuning is not None:
        _refuse_tuned(axes, tuning)


def _refuse_tuned(axes: Mapping[str, Sequence[Value]], tuning: Tuning) -> None:
    others = {axis: values for axis, values in axes.items() if axis != SEED}  # not tuned for
    for values in product(*others.values()):
        space = tuning.space_of([value.label for value in values])
        for axis, value in zip(others, values, strict=True):
            for key in sorted(_keys(value).intersection(space)):
                where = "space" if key in tuning.space else "own"
                raise ConfigError(
                    f"tune.{where}: {key} is tuned, and {_name(axis, value)} sets it as well; leave"
                    " one of them out"
                )


def _keys(value: Value) -> set[str]:
    return set(map(key_of, value.overrides))


def _name(axis: str, value: Value) -> str:
    return f"axes.{axis}.{value.label}"

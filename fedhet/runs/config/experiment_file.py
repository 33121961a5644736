"""Reads what an experiment's file declares about the experiment, and refuses it for single runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from fedhet.core.errors import ConfigError
from fedhet.runs.config import catalogue, composition, overrides
from fedhet.runs.config.composition import EXPERIMENT_KEYS
from fedhet.runs.config.lines import by_key, key_of

SEED = "seed"


def mapping(name: str, value: object) -> dict[str, Any]:
    """Return an entry of the file as a dictionary; empty if the entry is null.

    Raises:
        ConfigError: the entry is no mapping.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value}: names with values are expected")
    return {str(key): inner for key, inner in value.items()}


PART = "axes."  # axes.<axis>=[<patterns of labels>] on the command line


def refuse(lines: Sequence[str]) -> None:
    """Refuse an experiment with axes where only a single run is possible.

    Raises:
        ConfigError: the overrides choose such an experiment.
    """
    if declared_by(lines)["axes"]:
        chosen = by_key(lines)["experiment"]
        raise ConfigError(
            f"{chosen} has axes, so it is several runs: start it by `python -m fedhet {chosen}`"
        )


def declared_by(lines: Sequence[str]) -> dict[str, Any]:
    """Return what the chosen experiment's file declares about the experiment, with the overrides.

    `axes` is None or empty if the overrides choose no experiment with several runs.

    Raises:
        ConfigError: the overrides choose several experiments and one of them has axes, or they
            set something of an experiment without choosing one that has axes.
    """
    relevant = [line for line in lines if key_of(line) == "experiment" or is_own(key_of(line))]
    chosen = {line.key_or_group: line for line in overrides.parse(relevant)}
    _refuse_sweep_of_experiments(chosen.get("experiment"))
    declared = _declared(chosen)
    own = [line.input_line for key, line in chosen.items() if is_own(key)]
    if own and not declared["axes"]:
        line = chosen["experiment"].input_line if "experiment" in chosen else None
        raise ConfigError(
            f"{own[0]!r} needs an experiment that has axes;"
            + (f" {line} has none" if line else " choose one by experiment=<name>")
        )
    return declared


def is_own(key: str) -> bool:
    """Whether a setting belongs to the experiment itself, and not to its runs."""
    return key.partition(".")[0] in EXPERIMENT_KEYS


def _refuse_sweep_of_experiments(override: Override | None) -> None:
    """Refuse a sweep over experiments with axes: a sweep makes one run of each experiment."""
    if override is None or not override.is_sweep_override():
        return
    for line in overrides.each_value(override):
        (choice,) = overrides.parse([line])
        if _declared({"experiment": choice})["axes"]:
            raise ConfigError(
                f"{override.input_line!r}: {line} has axes, so it is several runs; start each"
                " experiment by its own command"
            )


def _declared(given: Mapping[str, Override]) -> dict[str, Any]:
    """Return what the file declares about the experiment, with the overrides in `given`."""
    if "experiment" not in given or given["experiment"].is_sweep_override():
        return dict.fromkeys(EXPERIMENT_KEYS)
    name = given["experiment"].value()
    content = {} if name is None else catalogue.content("experiment", str(name))
    mapping("axes", content.get("axes"))  # Hydra's message would not name the key
    own = [line for key, line in given.items() if is_own(key) and not key.startswith(PART)]
    kept = [given["experiment"], *own]
    cfg = composition.raw([str(override.input_line) for override in kept])
    return {
        key: OmegaConf.to_container(cfg[key]) if OmegaConf.is_config(cfg[key]) else cfg[key]
        for key in (*EXPERIMENT_KEYS, SEED)
    }

"""Configurations for tests that are not about Hydra, which takes a tenth of a second for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict

from fedhet import __main__ as main
from fedhet.runs.config import Config, catalogue, compose, composition, validation
from fedhet.runs.config.instantiation import check_targets
from fedhet.runs.config.validation import validate


def check_overrides(lines: Sequence[str], *, sweep: bool = False) -> list[tuple[str, ...]]:
    """Check a run, or all runs of a sweep, as the command line does; return their overrides."""
    if sweep:
        return composition.sweep_runs(lines, composition.of_sweep())
    compose(lines)
    return [tuple(lines)]


@cache
def _by_hydra(*choices: str) -> Config:
    return compose(choices)


def composed(*overrides: str) -> Config:
    """Return what `config.compose` makes of the overrides, without the run folder.

    Hydra is called only once for each method with its groups' choices, and for each plug-in; in its
    result plug-ins are added and settings are changed. tests/config/test_compose.py compares the
    two.
    """
    parsed = OverridesParser.create().parse_overrides([*overrides])
    groups = catalogue.groups()
    plugins: list[str] = []
    choices: list[str] = []
    for override in parsed:
        if override.key_or_group == "plugin":
            plugins += override.value()
        elif override.key_or_group in groups:
            choices.append(override.input_line)
    base = _by_hydra(*choices)
    cfg = base.cfg.copy()
    OmegaConf.set_readonly(cfg, False)
    with open_dict(cfg.plugin):
        for name in plugins:
            # This replaces the settings that a method may have for its own plug-in.
            own = _by_hydra("method=fedavg", f"plugin=[{name}]")
            cfg.plugin[name] = own.cfg.plugin[name]
    for override in parsed:
        if override.key_or_group not in groups:
            OmegaConf.update(cfg, override.key_or_group, override.value())
    validation.resolve(cfg)
    check_targets(cfg)
    validate(cfg)
    OmegaConf.set_readonly(cfg, True)
    return replace(base, cfg=cfg, run_dir="", overrides=overrides)


def data_main(argv: list[str]) -> int:
    """Run `python -m fedhet data <argv>` in this process."""
    return main.main(["data", *argv])

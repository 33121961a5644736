"""Configurations for tests that are not about Hydra, which takes a tenth of a second for each."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from fedhet.config.config import Config, compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict

from fedhet import config
from fedhet.config import catalogue
from fedhet.config.targets import check_targets


@cache
def _by_hydra(*choices: str) -> Config:
    return compose(choices)


def composed(*overrides: str) -> Config:
    """What `config.compose` makes of `overrides`, its run folder aside. Hydra is asked once for
    each method with its groups' choices, and for each plug-in; plug-ins are added and settings are
    set in what it found. test_compose.py holds that to the original."""
    parsed, groups = OverridesParser.create().parse_overrides([*overrides]), catalogue.groups()
    found = _by_hydra(
        *(o.input_line for o in parsed if o.key_or_group in groups and o.key_or_group != "plugin")
    )
    cfg = found.cfg.copy()
    OmegaConf.set_readonly(cfg, False)
    with open_dict(cfg.plugin):
        for name in (name for o in parsed if o.key_or_group == "plugin" for name in o.value()):
            cfg.plugin[name] = _by_hydra("method=fedavg", f"plugin=[{name}]").cfg.plugin[
                name
            ]  # over a method's own settings of it
    for override in parsed:
        if override.key_or_group not in groups:
            OmegaConf.update(cfg, override.key_or_group, override.value())
    check_targets(cfg)
    config.validate(cfg)
    OmegaConf.set_readonly(cfg, True)
    return replace(found, cfg=cfg, run_dir="", overrides=overrides)

"""Sends the settings of a run to another process, as values that need no composition.

The process that begins a run composes the configuration and sends the result. The reader repeats
the checks of types, ranges and classes, because it does not trust the sender.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from fedhet.core.errors import ConfigError
from fedhet.data.forms import fault
from fedhet.runs.config import validation
from fedhet.runs.config.composition import Config, as_config_error
from fedhet.runs.config.instantiation import check_targets, walk

LONGEST = 1_000_000  # characters


def written(config: Config) -> str:
    """Return the settings as text, without the overrides and folders of this process."""
    return json.dumps({"cfg": OmegaConf.to_container(config.cfg), "choices": config.choices})


def read(text: str) -> Config:
    """Return the settings from a text of `written`.

    Raises:
        ConfigError: the text is damaged, a class is unknown, or a value is not allowed.
    """
    if len(text) > LONGEST:
        raise ConfigError(
            f"the run's settings have {len(text)} characters; at most {LONGEST} are allowed"
        )
    try:
        content = json.loads(text)
        problem = fault(content, {"cfg": dict, "choices": {str: str}}, ("cfg", "choices"))
        for key, _, value in walk(content):
            if isinstance(value, str) and "${" in value:
                problem = f"{key}={value} is an interpolation, and only plain values are allowed"
    except (ValueError, RecursionError) as error:
        problem = str(error)
    if problem:
        raise ConfigError(f"the run's settings cannot be read: {problem}")
    with as_config_error():
        cfg = OmegaConf.create(content["cfg"])
        validation.check_structure(cfg)
        check_targets(cfg)
        OmegaConf.set_readonly(cfg, True)
        config = Config(cfg, content["choices"], "", False, ())
        _ = config.run  # checks the values
    return config


def save(config: Config, file: Path) -> None:
    """Write the settings and the run folder for `load` in another process of this machine."""
    folder = {"run_dir": config.run_dir, "run_dir_given": True, "resumes": config.resumes}
    content = {"settings": written(config), "overrides": config.overrides, **folder}
    file.write_text(json.dumps(content), encoding="utf-8")


def load(file: Path) -> Config:
    """Return the configuration that `save` has written."""
    content = json.loads(file.read_text(encoding="utf-8"))
    overrides = tuple(content.pop("overrides"))
    return replace(read(content.pop("settings")), overrides=overrides, **content)

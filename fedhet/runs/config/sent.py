"""The settings of a run as another process gets them: values, of which nothing is composed there.

The process that begins a run composes its configuration, and sends what comes out. The reader
checks types, ranges and classes as where it was composed, and trusts nothing else of it.
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
    """The settings as text, without the overrides and folders of this process."""
    return json.dumps({"cfg": OmegaConf.to_container(config.cfg), "choices": config.choices})


def read(text: str) -> Config:
    """The settings that `written` has made text of.

    Raises:
        ConfigError: they are damaged, a class is unknown, or a value is not allowed.
    """
    if len(text) > LONGEST:
        raise ConfigError(
            f"the run's settings have {len(text)} characters; at most {LONGEST} are read"
        )
    try:
        content = json.loads(text)
        problem = fault(content, {"cfg": dict, "choices": {str: str}}, ("cfg", "choices"))
        for key, _, value in walk(content):
            if isinstance(value, str) and "${" in value:
                problem = f"{key}={value} would be resolved here, and is no value"
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
    """Write the settings and the run folder for a process of this machine, which `load`s them."""
    about = {"run_dir": config.run_dir, "run_dir_given": True, "resumes": config.resumes}
    content = {"settings": written(config), "overrides": config.overrides, **about}
    file.write_text(json.dumps(content), encoding="utf-8")


def load(file: Path) -> Config:
    """The settings that `save` has written."""
    content = json.loads(file.read_text(encoding="utf-8"))
    overrides = tuple(content.pop("overrides"))
    return replace(read(content.pop("settings")), overrides=overrides, **content)

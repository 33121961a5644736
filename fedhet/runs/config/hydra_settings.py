"""Hydra's own settings, `hydra.*`: which of them fedhet reads; files may set none of them.

Hydra composes the configurations, and fedhet starts the runs. For this, fedhet reads the places of
the run folders and the settings of its launcher. If the command line has any other of these
settings, Hydra itself starts the runs (fedhet/study/by_hydra.py), and calls what the settings name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce
from operator import getitem
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedhet.core.errors import ConfigError
from fedhet.runs.config import catalogue
from fedhet.runs.config.lines import key_of

RUN_DIR = "hydra.run.dir"
_READ = re.compile(
    r"hydra\.(run\.dir|sweep\.(dir|subdir)|launcher\.(?!.*_target_)[\w.]+)|hydra/launcher"
)
_NO_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
# The defaults of all settings by which Hydra calls, writes or reads something.
_UNCHANGED: dict[str, Any] = {
    "callbacks": {},
    "env": {},
    "hydra_logging": _NO_LOGGING,
    "job.chdir": False,
    "job.env_copy": [],
    "job.env_set": {},
    "job.name": "fedhet",
    "job_logging": _NO_LOGGING,
    "launcher": {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"},
    "mode": None,
    "output_subdir": None,
    "sweeper": {
        "_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "max_batch_size": None,
        "params": None,
    },
    "verbose": False,
}
_FOLDERS = ("run.dir", "sweep.dir", "sweep.subdir")  # config.yaml sets them


def is_hydras(key: str) -> bool:
    """Whether the key belongs to one of Hydra's own settings."""
    return key.startswith(("hydra.", "hydra/"))


def is_read(key: str) -> bool:
    """Whether fedhet reads this setting of Hydra's."""
    return _READ.fullmatch(key) is not None


def check(hydra: DictConfig, lines: Sequence[str]) -> None:
    """Refuse overrides of Hydra's settings that no run reads, and all such settings in files.

    Args:
        hydra: Hydra's settings, with their interpolations.
        lines: the overrides.

    Raises:
        ConfigError: naming the key.
    """
    given = [line for line in lines if is_hydras(key_of(line))]
    for line in given:
        if not is_read(key_of(line)):
            raise ConfigError(
                f"{line} is not allowed here: a run reads only {RUN_DIR} of Hydra's own settings;"
                " the others may stand on a command line (docs/experiments.md)"
            )
    overrides = {"hydra": given, "task": [line for line in lines if line not in given]}
    content: Any = OmegaConf.to_container(hydra)
    default = catalogue.content("config")["hydra"]
    expected = _UNCHANGED | {key: _at(default, key) for key in _FOLDERS} | {"overrides": overrides}
    own = [f"{key_of(line).replace('/', '.')}." for line in given]
    for key, value in expected.items():
        found = _at(content, key)
        if found != value and not any(name.startswith(f"hydra.{key}.") for name in own):
            raise ConfigError(
                f"hydra.{key}={found} is not allowed: files cannot change Hydra's own settings"
            )


def _at(content: Any, key: str) -> Any:
    return reduce(getitem, key.split("."), content)

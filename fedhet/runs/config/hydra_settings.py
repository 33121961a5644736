"""Hydra's own settings, `hydra.*`: what fedhet reads of them, and that no file sets any.

fedhet has Hydra compose configurations and starts the runs itself, for which it reads where the run
folders lie and how its launcher works. With any other of these settings on the command line Hydra
itself drives the runs (fedhet/study/by_hydra.py), and calls what they name.
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
# What they are as long as nobody changes them; Hydra calls, writes or reads nothing by the others.
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
_FOLDERS = ("run.dir", "sweep.dir", "sweep.subdir")  # config.yaml has them


def is_hydras(key: str) -> bool:
    """Whether a key is that of a setting of Hydra's own."""
    return key.startswith(("hydra.", "hydra/"))


def is_read(key: str) -> bool:
    """Whether fedhet reads this setting of Hydra's."""
    return _READ.fullmatch(key) is not None


def check(hydra: DictConfig, lines: Sequence[str]) -> None:
    """Refuse what overrides set in vain, and what files set at all.

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
                f"{line} is not allowed: of Hydra's own settings a run reads {RUN_DIR} alone; a"
                " command line may have the others (docs/experiments.md)"
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
                f"hydra.{key}={found} is not allowed: files set nothing of Hydra's own settings"
            )


def _at(content: Any, key: str) -> Any:
    return reduce(getitem, key.split("."), content)

"""Hydra's own settings, `hydra.*`: which of them are read.

fedhet has Hydra compose configurations and starts the runs itself. So it reads where the run
folders lie and how a launcher works; the others would have no effect, and are refused. What is read
are texts and numbers: nothing that these settings name is called.
"""

from __future__ import annotations

import re
from functools import reduce
from operator import getitem
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedhet.core.errors import ConfigError
from fedhet.runs.config.instantiation import walk
from fedhet.runs.config.interpolations import SETTING, only
from fedhet.runs.config.lines import key_of

_READ = re.compile(r"hydra\.(run\.dir|sweep\.(dir|subdir)|launcher\.[\w.]+)|hydra/launcher")
_SECTIONS = ("run", "sweep", "launcher")
# What choices of hydra/launcher that are not ours say; the launchers of these names are ours, too.
_LAUNCHERS = (
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
)
_NO_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
# What the other sections say as long as no file changes them.
_UNCHANGED: dict[str, Any] = {
    "callbacks": {},
    "env": {},
    "hydra_logging": _NO_LOGGING,
    "job.chdir": False,
    "job.env_copy": [],
    "job.env_set": {},
    "job_logging": _NO_LOGGING,
    "output_subdir": None,
    "sweeper": {
        "_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "max_batch_size": None,
        "params": None,
    },
    "verbose": False,
}
# Each of the resolvers returns a text or a number.
_READABLE = (
    SETTING,
    re.compile(r"\$\{hydra(\.\w+)+\}"),
    re.compile(r"\$\{(now|python_version|hydra|oc\.env|fedhet\.\w+):"),
)


def check(hydra: DictConfig) -> None:
    """Refuse what has no effect, and interpolations that are more than a text.

    Args:
        hydra: Hydra's settings, with their interpolations.

    Raises:
        ConfigError: naming the key.
    """
    content: Any = OmegaConf.to_container(hydra)
    idle = [line for line in content["overrides"]["hydra"] if not _READ.fullmatch(key_of(line))]
    for key, value in _UNCHANGED.items():
        if (found := reduce(getitem, key.split("."), content)) != value:
            idle.append(f"hydra.{key}={found}")
    if idle:
        raise ConfigError(
            f"{idle[0]} is not allowed, because it has no effect: of Hydra's own settings fedhet"
            " reads hydra.run.dir, hydra.sweep.dir, hydra.sweep.subdir, hydra/launcher and"
            " hydra.launcher.*"
        )
    for path, name, value in walk({key: content[key] for key in _SECTIONS}, "hydra"):
        if name == "_target_" and (path != "hydra.launcher._target_" or value not in _LAUNCHERS):
            raise ConfigError(
                f"{path}={value} is not trusted: fedhet calls nothing that Hydra's settings name;"
                " hydra/launcher has the launchers"
            )
        text = isinstance(value, str) and path != "hydra.launcher"  # which is a group of settings
        if isinstance(value, str) and not (text and only(value, _READABLE)):
            raise ConfigError(
                f"{path}={value} is not allowed: Hydra's settings refer to hydra.*, to other"
                " settings by their full names, and to now, oc.env and python_version"
            )

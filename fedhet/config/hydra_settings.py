"""Hydra's own settings, `hydra.*`: a run sets its folders and what starts it, and nothing else.

Hydra calls the launcher and the sweeper, the callbacks, and whatever Python's logging is told to
call. So all but the folders and the settings of launcher and sweeper is as conf/config.yaml has it.
"""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedhet.config.interpolations import SETTING, only
from fedhet.config.targets import walk
from fedhet.core.errors import ConfigError

FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
_CORE, _SUBMITIT = "hydra._internal.core_plugins", "hydra_plugins.hydra_submitit_launcher"
# The two places of a `_target_`, and what each may name.
CALLED = {
    "hydra.launcher._target_": (
        "hydra_plugins.fedhet.ProcessesLauncher",
        "hydra_plugins.fedhet.RayLauncher",
        f"{_CORE}.basic_launcher.BasicLauncher",
        f"{_SUBMITIT}.submitit_launcher.SlurmLauncher",
        f"{_SUBMITIT}.submitit_launcher.LocalLauncher",
    ),
    "hydra.sweeper._target_": (
        "hydra_plugins.fedhet.sweeper.ProductSweeper",
        "hydra_plugins.fedhet.sweeper.ExperimentSweeper",
        f"{_CORE}.basic_sweeper.BasicSweeper",
    ),
}
_OPEN = ("hydra.launcher", "hydra.sweeper")
# What Hydra sets itself, and `named_by_what_varies`.
_WRITTEN = re.compile(r"hydra\.(mode|runtime|overrides|job\.(num|id|override_dirname|config))\b.*")
# Each of these is a text, or another setting that is checked here.
_READABLE = (
    re.compile(r"\$\{hydra(\.\w+)+\}"),
    re.compile(r"\$\{(now|python_version|hydra|oc\.env|fedhet\.\w+):"),
)


def check(hydra: DictConfig, given: DictConfig) -> None:
    """Refuse what would call other code, or read and write where a run has no business.

    Args:
        hydra: Hydra's settings of a run, with their interpolations.
        given: the same where no file and no override changes them.

    Raises:
        ConfigError: naming the key.
    """
    fixed = {path: value for path, _, value in walk(OmegaConf.to_container(given), "hydra")}
    content: Any = OmegaConf.to_container(hydra)
    for path, name, value in walk(content, "hydra"):
        folder = path in FOLDERS
        if not folder and not path.startswith(_OPEN):
            if fixed.get(path, fixed) == value or isinstance(value, dict | list):
                continue
            if not _WRITTEN.fullmatch(path):
                raise ConfigError(  # without its value, which Hydra may have read from a variable
                    f"{path} is not allowed: of Hydra's own settings, a run has"
                    f" {', '.join(FOLDERS)}, hydra/launcher and hydra.launcher.*"
                )
        elif name == "_target_" and value not in CALLED.get(path, ()):
            allowed = ", ".join(CALLED.get(path, ())) or "none here"
            raise ConfigError(f"{path}={value} is not trusted; allowed: {allowed}")
        elif isinstance(value, str) and (
            path in _OPEN or not only(value, (*_READABLE, *[SETTING] * folder))
        ):
            raise ConfigError(
                f"{path}={value} is not allowed: it may refer to hydra.*, now, oc.env and"
                f" python_version{', and to settings by their full names' if folder else ''}"
            )

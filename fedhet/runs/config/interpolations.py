"""Interpolations `${...}` in overrides and settings: which may be read where.

A resolver such as `${oc.env:NAME}` reads the machine on which it is resolved, and what it reads
would be in the messages and the record of the run. So no setting of a run calls one.
"""

from __future__ import annotations

import re
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from fedhet.core.errors import ConfigError
from fedhet.runs.config.instantiation import walk

# `${` that begins anything but `${a.b}`: another setting by its full name. That is the only form
# that no machine's own state and no resolver is part of; `hydra` has folders and variables.
_OTHER = re.compile(r"\$\{(?!(?!hydra\b)[A-Za-z_]\w*(\.\w+)*\})")


def resolve(cfg: DictConfig) -> None:
    """Replace references to settings by their values; refuse what files have that reads a machine.

    Raises:
        ConfigError: naming the key.
    """
    _refuse(
        _OTHER,
        cfg,
        "resolvers such as oc.env read a machine, and what they read would be in messages and"
        " records; write the value itself. A setting may refer to others by their full names, such"
        " as ${client.lr}",
    )
    OmegaConf.resolve(cfg)
    # Such a text would be resolved when it is read.
    _refuse(re.compile(r"\$\{"), cfg, "a setting cannot contain '${' as text")


def _refuse(texts: re.Pattern[str], cfg: DictConfig, reason: str) -> None:
    for key, _, value in walk(OmegaConf.to_container(cfg)):
        if isinstance(value, str) and texts.search(value):
            raise ConfigError(f"{key}={value} is refused: {reason}")


def literal(value: Any) -> str:
    """Return the value as Hydra's overrides write it, whatever characters a text has."""
    if isinstance(value, str):
        return QuotedString(value, Quote.single).with_quotes()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(literal, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{literal(inner)}' for key, inner in value.items())}}}"
    return repr(value)

"""Interpolations `${...}` in overrides and settings: which may be read where.

A resolver such as `${oc.env:NAME}` reads the machine on which it is resolved, and what it reads
would be in the messages and the record of the run. So no setting of a run calls one. The folders of
Hydra's own settings may, but for those of a run that comes from another machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from fedhet.core.errors import ConfigError
from fedhet.runs.config.hydra_settings import RUN_DIR
from fedhet.runs.config.instantiation import walk
from fedhet.runs.config.lines import key_of

# `${a.b}`: another setting by its full name. It is the only form that no machine's own state and
# no resolver is part of; `hydra` has the machine's folders and variables.
SETTING = re.compile(r"\$\{(?!hydra\b)[A-Za-z_]\w*(\.\w+)*\}")
_NOW = re.compile(r"\$\{now:[^${}]*\}")


def check_lines(lines: Sequence[str], *, sent: bool) -> None:
    """Refuse overrides which would read a machine, or with which a sent run would change Hydra.

    Args:
        lines: the overrides.
        sent: whether they come from another machine.

    Raises:
        ConfigError: naming the override.
    """
    for line in lines:
        key = key_of(line).strip()
        hydras = re.match(r"hydra\b", key)
        if hydras and sent and key != RUN_DIR:
            raise ConfigError(
                f"{line!r}: a run from another machine sets {RUN_DIR} and nothing else of Hydra"
            )
        if not only(line, (SETTING, _NOW) if hydras else (SETTING,)) and (sent or not hydras):
            raise ConfigError(f"{line!r} {_HINT}")


def resolve(cfg: DictConfig) -> None:
    """Replace references to settings by their values; refuse what files have that reads a machine.

    Raises:
        ConfigError: naming the key.
    """
    _check_texts(cfg, (SETTING,), _HINT)
    OmegaConf.resolve(cfg)
    # Such a text would be resolved when it is read.
    _check_texts(cfg, (), "is refused: a setting cannot contain '${' as text")


_HINT = (
    "is refused: resolvers such as oc.env read a machine, and what they read would be in messages"
    " and records; write the value itself. A setting may refer to others by their full names, such"
    " as ${client.lr}"
)


def _check_texts(cfg: DictConfig, forms: Sequence[re.Pattern[str]], reason: str) -> None:
    for key, _, value in walk(OmegaConf.to_container(cfg)):
        if isinstance(value, str) and not only(value, forms):
            raise ConfigError(f"{key}={value} {reason}")


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


def only(text: str, forms: Sequence[re.Pattern[str]]) -> bool:
    """Return whether each `${` in the text, nested or escaped ones too, begins one of the forms."""
    places = (place.start() for place in re.finditer(r"\$\{", text))
    return all(any(form.match(text, place) for form in forms) for place in places)

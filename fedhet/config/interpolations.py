"""Interpolations `${...}` in overrides and settings: which may be read where.

A resolver such as `${oc.env:NAME}` reads the machine on which it is resolved, and what it reads
would be in the messages and the record of the run. So no setting of a run calls one. Hydra's own
settings may, but for those of a run that comes from another machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from fedhet.config.lines import key_of
from fedhet.core.errors import ConfigError

RUN_DIR = "hydra.run.dir"
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
        if hydras and not sent:  # hydra_settings.py has checks of them
            continue
        if hydras and key != RUN_DIR:
            raise ConfigError(
                f"{line!r}: a run from another machine sets {RUN_DIR} and nothing else of Hydra"
            )
        readable = (SETTING, _NOW) if hydras else (SETTING,)
        if not only(line, readable):
            raise ConfigError(f"{line!r} {_HINT}")


_HINT = (
    "is refused: resolvers such as oc.env read a machine, and what they read would be in messages"
    " and records; write the value itself. A setting may refer to others by their full names, such"
    " as ${client.lr}"
)


def check_composed(cfg: DictConfig) -> None:
    """Refuse resolvers in the settings, which files may have too.

    Raises:
        ConfigError: naming the key.
    """
    for key, value in _strings(OmegaConf.to_container(cfg)):
        if not only(value, (SETTING,)):
            raise ConfigError(f"{key}={value} {_HINT}")


def check_resolved(cfg: DictConfig) -> None:
    """Refuse text that an interpolation has turned into another one: reading it would resolve it.

    Raises:
        ConfigError: naming the key.
    """
    for key, value in _strings(OmegaConf.to_container(cfg)):
        if "${" in value:
            raise ConfigError(f"{key}={value}: a setting cannot contain '${{' as text")


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


def _strings(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for every text in nested mappings and lists."""
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, dict | list):
        for name, inner in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _strings(inner, f"{path}.{name}" if path else str(name))

"""Interpolations `${...}` in overrides and settings: which may be read where.

A resolver such as `${oc.env:NAME}` reads the machine on which it is resolved. So a run that comes
from another machine brings none (`check_sent`), and a run that is sent brings what they returned
on the machine that wrote them (`portable`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.types import Override, Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from fedhet.config import overrides
from fedhet.errors import ConfigError

RUN_DIR = "hydra.run.dir"
# `${a.b}`: another setting by its full name. It is the only form that no machine's own state and
# no resolver is part of; `hydra` has the machine's folders and variables.
SETTING = re.compile(r"\$\{(?!hydra\b)[A-Za-z_]\w*(\.\w+)*\}")
_NOW = re.compile(r"\$\{now:[^${}]*\}")


def check_sent(lines: Sequence[str]) -> None:
    """Refuse overrides from another machine that would read this one, or change Hydra itself.

    Raises:
        ConfigError: naming the override.
    """
    for line in lines:
        key = line.lstrip("+~").partition("=")[0].strip()
        # A search path has an error of its own (overrides.parse).
        if re.match(r"hydra\b(?!\.searchpath)", key) and key != RUN_DIR:
            raise ConfigError(
                f"{line!r}: a run from another machine sets {RUN_DIR} and nothing else of Hydra"
            )
        readable = (SETTING, _NOW) if key == RUN_DIR else (SETTING,)
        if not only(line, readable):
            raise ConfigError(f"{line!r} {_HINT}")


_HINT = (
    "is not resolved here: of a run from another machine, a server or node reads only references"
    " to settings by their full names, such as ${client.lr}. Resolvers such as oc.env read the"
    " machine; `python -m fedhet engine=flwr` resolves them before it sends the run"
)


def check_composed(cfg: DictConfig) -> None:
    """Refuse resolvers in the files of this machine too: what they read would be recorded.

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


def portable(lines: Sequence[str], raw: DictConfig, resolved: DictConfig) -> list[str]:
    """Return the overrides for another machine, with what the resolvers of this one returned.

    Args:
        lines: the overrides of the run.
        raw: the settings to which they lead, before interpolations were resolved.
        resolved: the same settings afterwards.
    """
    parsed = overrides.parse(lines)
    kept = [override for override in parsed if only(str(override.input_line), (SETTING,))]
    read = [
        key for key, value in _strings(OmegaConf.to_container(raw)) if not only(value, (SETTING,))
    ]
    keys = [key for override in parsed if override not in kept for key in _keys(override)]
    keys += [re.sub(r"(\.\d+)+$", "", key) for key in read]  # a list is sent as a whole
    return [str(override.input_line) for override in kept] + [
        f"{key}={literal(_as_plain(OmegaConf.select(resolved, key)))}"
        for key in dict.fromkeys(keys)
    ]


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


def _as_plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _keys(override: Override) -> Iterator[str]:
    return overrides.leaf_keys(override.value(), override.key_or_group)


def _strings(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for every text in nested mappings and lists."""
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, dict | list):
        for name, inner in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _strings(inner, f"{path}.{name}" if path else str(name))

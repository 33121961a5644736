"""Composes configurations that differ in values alone without reading their files again.

Hydra takes a tenth of a second for each configuration. Most runs of a sweep make the same choices,
so what these lead to is composed once, and each run's values are set in a copy, as Hydra sets them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from fedhet.config import catalogue

_FOLDERS = ("hydra.run.", "hydra.sweep.")  # of Hydra's settings, those that composing ignores


class Bases:
    """Composes like `load`, from what it has composed before.

    It is for one sweep: files that change meanwhile are not read again.

    Args:
        load: composes the configuration that overrides lead to, with Hydra's settings.
    """

    def __init__(self, load: Callable[[list[str]], DictConfig]) -> None:
        self._load = load
        self._parser = OverridesParser.create()
        self._groups = frozenset(catalogue.groups())
        self._bases: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, lines: Sequence[str]) -> DictConfig:
        """Compose the configuration of these overrides."""
        try:
            return self._from_base(lines)
        except (HydraException, OmegaConfBaseException, ValueError):
            return self._load(list(lines))  # which says it better

    def _from_base(self, lines: Sequence[str]) -> DictConfig:
        parsed = self._parser.parse_overrides(list(lines))
        values = [override for override in parsed if self._is_value(override)]
        chosen = [override for override in parsed if override not in values]
        key = tuple(str(override.input_line) for override in chosen)
        if key not in self._bases:
            self._bases[key] = self._load(list(key))
        cfg = deepcopy(self._bases[key])
        ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
        hydras = sum(override.is_hydra_override() for override in chosen)
        given = cfg.hydra.overrides
        first = list(given.hydra)[: len(given.hydra) - hydras]  # the sweep's own
        given.hydra = [*first, *(each.input_line for each in parsed if each.is_hydra_override())]
        tasks = [override for override in parsed if not override.is_hydra_override()]
        given.task = [override.input_line for override in tasks]
        how = cfg.hydra.job.config.override_dirname
        cfg.hydra.job.override_dirname = get_overrides_dirname(
            overrides=tasks,
            kv_sep=how.kv_sep,
            item_sep=how.item_sep,
            exclude_keys=how.exclude_keys,
        )
        return cfg

    def _is_value(self, override: Override) -> bool:
        """Whether it sets values that have no part in which files are read."""
        key = override.key_or_group
        if override.is_delete() or override.package is not None or "/" in key:
            return False
        if override.is_hydra_override():
            return key.startswith(_FOLDERS)
        return key.partition(".")[0] not in self._groups or "." in key

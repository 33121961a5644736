"""Composes configurations that differ in values alone without reading their files again.

Hydra takes a tenth of a second for each configuration. Most runs of a sweep make the same choices,
so what these lead to is composed once, and each run's values are set in a copy, as Hydra sets them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedhet.runs.config import catalogue

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
        key = tuple(str(override.input_line) for override in parsed if override not in values)
        if key not in self._bases:
            self._bases[key] = self._load(list(key))
        cfg = deepcopy(self._bases[key])
        for override in values:
            OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
        for name, hydras in (("hydra", True), ("task", False)):
            cfg.hydra.overrides[name] = [
                override.input_line for override in parsed if override.is_hydra_override() == hydras
            ]
        return cfg

    def _is_value(self, override: Override) -> bool:
        """Whether it sets values that have no part in which files are read."""
        key = override.key_or_group
        if override.type != OverrideType.CHANGE or override.package is not None or "/" in key:
            return False
        if override.is_hydra_override():
            return key.startswith(_FOLDERS)
        return key.partition(".")[0] not in self._groups or "." in key

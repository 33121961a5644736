"""A check, before the first of several runs starts, that the data of all runs exist."""

from __future__ import annotations

from collections.abc import Iterable

from omegaconf import DictConfig, OmegaConf

from fedhet.data.files import SITE_HINT, find_path
from fedhet.runs.config.instantiation import instantiate


def find_data(configs: Iterable[DictConfig]) -> None:
    """Load each dataset once, as the runs will do. Decoded data are cached for the runs.

    Args:
        configs: the composed settings of runs.

    Raises:
        ConfigError: a setting of a dataset is wrong.
        DataError: data are missing or damaged.
    """
    different = {
        (OmegaConf.to_yaml(cfg.dataset, resolve=True), str(cfg.data_dir)): cfg for cfg in configs
    }
    for cfg in different.values():
        loaded = instantiate(cfg.dataset, data_dir=cfg.data_dir)
        for file in (getattr(loaded, "files", None) or {}).values():  # sites' files: dataset=local
            find_path(cfg.data_dir, file, SITE_HINT)

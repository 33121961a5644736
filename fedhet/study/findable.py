"""Whether the data of several runs are there, before the first of them starts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedhet.data.files import SITE_HINT, find_path
from fedhet.runs.config.instantiation import instantiate

Source = dict[str, Any]  # the settings of a dataset, and data_dir


def source(cfg: DictConfig) -> Source:
    """What determines the dataset of a run, in a form that other processes can read."""
    settings = OmegaConf.to_container(cfg.dataset, resolve=True)
    return {"dataset": settings, "data_dir": str(cfg.data_dir)}


def find_data(sources: Iterable[Source]) -> None:
    """Load each dataset once, as the runs will; what is decoded here is cached for them.

    Raises:
        ConfigError: a setting of a dataset is wrong.
        DataError: data are missing or damaged.
    """
    different = {json.dumps(each, sort_keys=True, default=str): each for each in sources}
    for content in different.values():
        cfg = OmegaConf.create(content)
        loaded = instantiate(cfg.dataset, data_dir=cfg.data_dir)
        for file in (getattr(loaded, "files", None) or {}).values():  # dataset=local: the sites'
            find_path(cfg.data_dir, file, SITE_HINT)

"""Loads the user's own data by their yaml."""

from __future__ import annotations

from pathlib import Path

import yaml

from fedhet.data import tables
from fedhet.data.dataset import Dataset

CONF = Path(__file__).parents[2] / "conf" / "dataset"


def load(name: str, folder: Path, **keys: object) -> Dataset:
    """The dataset of conf/dataset/<name>.yaml in `folder` with these settings."""
    conf = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    loader = getattr(tables, conf.pop("_target_").split(".")[-1])
    return loader(**{**conf, "data_dir": str(folder), **keys})

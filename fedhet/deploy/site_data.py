"""Compares the data of a site or the server with a run's declaration, for `deploy check`."""

from __future__ import annotations

from collections.abc import Sequence

from fedhet.core.errors import ConfigError
from fedhet.data.files import confined
from fedhet.data.local.description import SiteDescription
from fedhet.deploy.folders import SiteFolder
from fedhet.flower.sites import OwnData, SiteClient
from fedhet.runs import config
from fedhet.runs.local_data import declaration, is_local, test_set
from fedhet.runs.run_data import RunData
from fedhet.runs.stores import MemoryStore


def compared(place: SiteFolder, overrides: Sequence[str]) -> str:
    """Read the data as a run with these overrides does, and describe them in a line.

    Raises:
        ConfigError: a setting is wrong, or the run does not fit this site.
        DataError: the data are missing, or not as the run declares them.
    """
    settings = config.compose(overrides)
    if own := OwnData.of(place.node_config):
        described = SiteClient(settings, own, MemoryStore()).description
        return f"{place.data} is as declared; the server would learn: {_report(described)}"
    if is_local(settings.cfg):
        raise ConfigError(
            f"dataset=local runs on each site's own data, but {place.folder / 'site.toml'} has"
            ' data = "": write their absolute path'
        )
    with confined():
        return _shared(settings)


def at_server(overrides: Sequence[str]) -> str:
    """Read the data that the server itself needs for a run, and describe them in a line.

    Raises:
        ConfigError: a setting is wrong.
        DataError: the data are missing, or not as the run declares them.
    """
    settings = config.compose(overrides)
    if not is_local(settings.cfg):
        return _shared(settings)
    declared, _ = declaration(settings.cfg)
    if (test := test_set(declared)) is None:
        return "the run needs no data at the server"
    return f"the global test set is as declared: {len(test)} samples"


def _shared(settings: config.Config) -> str:
    """Describe a data set that every machine has a copy of."""
    record = RunData.of(settings.cfg).partition_record()
    return f"{record['samples']} samples, labels {record['labels']}, partition {record['hash']}"


def _report(described: SiteDescription) -> str:
    """Describe what the server learns about the site's data before the first round."""
    train, val, test = described.sizes
    lines = [f"{train} training, {val} validation, {test} test samples"]
    if described.counts is None:
        lines.append("no counts of classes")
    else:
        counts = ["not sent" if count is None else str(count) for count in described.counts]
        lines.append(f"counts of classes: {', '.join(counts)}")
    contents = {"x": "the inputs", "y": "the numbers to predict"}
    lines += [f"mean and squares of {contents[name]}" for name in described.moments]
    return "; ".join(lines)

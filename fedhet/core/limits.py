"""Limits that a machine and its node set for runs; imports neither torch nor Flower."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedhet.core.check import Checked, setting
from fedhet.core.errors import SUBMITTED, ConfigError

FLOOR = "FEDHET_MIN_COUNT"
MIN_COUNT = 5  # the default of a node with data of its own
MIN_TEST = 20  # its default, too; with MIN_COUNT, an accuracy then has at least five values
MAX_MODEL = 1000  # MB: 250 million weights
MAX_ARRAY = 1000  # MB


@dataclass(frozen=True)
class Limits(Checked):
    """Limits that the operator of a node sets, and that no run can change. Default: no limits.

    Attributes:
        evaluate: whether scores leave the node.
        min_count: the smallest `privacy.min_count` of its clients; a run can only raise it.
        min_test: a part of the data with fewer samples sends no scores, and a larger part sends
            rounded scores (see `Target.releasable`); 0: parts of any size send exact scores.
        max_model: the largest model that the node builds, in MB of parameters and buffers; 0: any.
        max_array: the largest array that any other setting of a run can demand, in MB; 0: any.
    """

    evaluate: bool = setting(True, name="node config: evaluate")
    min_count: int = setting(0, name="node config: min-count", low=0)
    min_test: int = setting(0, name="node config: min-test", low=0)
    max_model: int = setting(0, name="node config: max-model", low=0)
    max_array: int = setting(0, name="node config: max-array", low=0)

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Limits:
        """Return the limits that the node config states. For all others, the defaults apply.

        By default, every node limits the sizes of models and arrays. A node with data of its own
        ("site" in its config) also limits statistics and scores. Other nodes have no default limits
        for runs that this machine submitted to itself.

        Raises:
            ConfigError: a value is not allowed.
        """
        own = cls(max_model=MAX_MODEL, max_array=MAX_ARRAY)
        if SUBMITTED in os.environ:  # the runs of engine=flwr are this machine's own
            own = cls()
        if "site" in node_config:  # the node has data of its own
            own = cls(True, MIN_COUNT, MIN_TEST, MAX_MODEL, MAX_ARRAY)
        given = {name: node_config.get(name.replace("_", "-"), n) for name, n in vars(own).items()}
        return cls(**given)

    def check_array(self, setting: str, *shape: int, width: int = 4) -> None:
        """Refuse an array that is too large for the node, before it is allocated.

        Args:
            setting: the setting that makes the array so large, for the message.
            shape: the shape of the array.
            width: the bytes of an entry.

        Raises:
            ConfigError: the array is larger than `max_array`.
        """
        size = math.prod(shape) * width / 1e6
        if self.max_array and size > self.max_array:
            raise ConfigError(
                f"{setting} asks for an array of {size:.0f} MB; this node allows at most"
                f" max-array={self.max_array} MB, as its site.toml or node config says"
            )


UNLIMITED = Limits()


def least_count(configured: int, limits: Limits = UNLIMITED) -> int:
    """Return the smallest number of samples for which this machine's clients send a statistic.

    It is the largest of three numbers: the run's `privacy.min_count`, the node's `min-count`, and
    the environment variable FEDHET_MIN_COUNT, which the machine's owner can set. So a run can raise
    the number, but not lower it.

    Args:
        configured: the run's `privacy.min_count`.
        limits: the limits of this node.

    Raises:
        ConfigError: the variable is no whole number >= 0.
    """
    return max(configured, limits.min_count, demanded(FLOOR, whole=True) or 0)


def demanded(variable: str, *, whole: bool = False) -> Any:
    """Return the number that the machine's owner set in an environment variable, or None.

    Args:
        variable: the name of the variable.
        whole: whether its value must be a whole number >= 0; otherwise any number > 0.

    Raises:
        ConfigError: the variable has another value.
    """
    if (text := os.environ.get(variable)) is None:
        return None
    try:
        value: float = int(text) if whole else float(text)
    except ValueError:
        value = -1
    if not (0 if whole else math.ulp(0)) <= value < math.inf:
        # A server gets this text, so it must not contain the value.
        allowed = "whole number >= 0" if whole else "number > 0"
        raise ConfigError(f"{variable} in the environment must be a {allowed}")
    return value

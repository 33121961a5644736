"""What a machine and its node allow a run; imports neither torch nor Flower."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedhet.core.check import Checked, setting
from fedhet.core.errors import SUBMITTED, ConfigError

FLOOR = "FEDHET_MIN_COUNT"
MIN_COUNT = 5  # of a node with data of its own that says nothing else
MIN_TEST = 20  # with MIN_COUNT, an accuracy of so many samples has five values at least
MAX_MODEL = 1000  # MB: 250 million weights
MAX_ARRAY = 1000  # MB


@dataclass(frozen=True)
class Limits(Checked):
    """What a node's own operator allows a run, whatever that says; by default anything.

    Attributes:
        evaluate: whether scores leave it.
        min_count: the least `privacy.min_count`.
        min_test: the least number of samples of which scores leave it, which are coarse then (see
            `Target.releasable`); 0: scores of any number of samples, as they are.
        max_model: the largest model that it builds, in MB of parameters and buffers; 0: any.
        max_array: the largest array that another setting of the run sizes, in MB; 0: any.
    """

    evaluate: bool = setting(True, name="node config: evaluate")
    min_count: int = setting(0, name="node config: min-count", low=0)
    min_test: int = setting(0, name="node config: min-test", low=0)
    max_model: int = setting(0, name="node config: max-model", low=0)
    max_array: int = setting(0, name="node config: max-array", low=0)

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Limits:
        """The limits that the node config states, or the defaults of such a node.

        Raises:
            ConfigError: a value is not allowed.
        """
        own = cls(max_model=MAX_MODEL, max_array=MAX_ARRAY)
        if SUBMITTED in os.environ:  # the runs of engine=flwr are this machine's own
            own = cls()
        if "site" in node_config:  # it has data of its own
            own = cls(True, MIN_COUNT, MIN_TEST, MAX_MODEL, MAX_ARRAY)
        given = {name: node_config.get(name.replace("_", "-"), n) for name, n in vars(own).items()}
        return cls(**given)

    def check_array(self, setting: str, *shape: int, width: int = 4) -> None:
        """Refuse an array that is too large for the node, before its memory is taken.

        Args:
            setting: what makes it so large, for the message.
            shape: its shape.
            width: the bytes of an entry.

        Raises:
            ConfigError: it is larger than `max_array`.
        """
        size = math.prod(shape) * width / 1e6
        if self.max_array and size > self.max_array:
            raise ConfigError(
                f"{setting} asks for an array of {size:.0f} MB; this node makes none above"
                f" max-array={self.max_array} MB, as its site.toml or node config says"
            )


UNLIMITED = Limits()


def least_count(configured: int, limits: Limits = UNLIMITED) -> int:
    """Return the smallest number of samples of which this machine's clients send a statistic.

    It is the largest of `privacy.min_count`, the `min-count` of this node, and what the machine's
    owner has set in the environment variable FEDHET_MIN_COUNT: a run can raise the number, but not
    lower it.

    Args:
        configured: the run's `privacy.min_count`.
        limits: those of this node.

    Raises:
        ConfigError: the variable is no whole number >= 0.
    """
    return max(configured, limits.min_count, demanded(FLOOR, whole=True) or 0)


def demanded(variable: str, *, whole: bool = False) -> Any:
    """The number that the machine's owner has set in an environment variable; None for none.

    Args:
        variable: its name.
        whole: whether it is a whole number >= 0; else it is any number > 0.

    Raises:
        ConfigError: it is something else.
    """
    if (text := os.environ.get(variable)) is None:
        return None
    try:
        value: float = int(text) if whole else float(text)
    except ValueError:
        value = -1
    if not (0 if whole else math.ulp(0)) <= value < math.inf:
        # A server gets this text, and so it is without the value.
        what = "whole number >= 0" if whole else "number > 0"
        raise ConfigError(f"{variable} in the environment must be a {what}")
    return value

"""Where a run took place: the versions and the machine in environment.json."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

KIB = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss, in bytes
RECORDED_PACKAGES = (
    "fedhet",
    "torch",
    "torchvision",
    "flwr",
    "numpy",
    "scikit-learn",
    "hydra-core",
    "ray",
)


def versions() -> dict[str, Any]:
    """Return the versions of Python and of the packages that affect results, and the machine."""
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }
    for package in RECORDED_PACKAGES:
        try:
            environment[package] = version(package)
        except PackageNotFoundError:
            environment[package] = None
    if torch.cuda.is_initialized():  # in a run on the CPU, the name would open the GPU
        environment["gpu"] = torch.cuda.get_device_name()
    return environment


def peak_memory() -> dict[str, int]:
    """Return the most bytes that this process, and its GPU, have had in use at once.

    It is counted from the start of the process, so that a run which shares its process with earlier
    ones has their peak, too. Workers are processes of their own, and are not in it.
    """
    peak = {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB}
    if torch.cuda.is_initialized():
        peak["gpu_peak"] = torch.cuda.max_memory_allocated()
    return peak

"""Where a run took place: the versions and the machine in environment.json."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

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

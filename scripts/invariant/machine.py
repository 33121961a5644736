"""Describes what else decides the bits of a result, apart from the code."""

from __future__ import annotations

import platform
import re
from importlib.metadata import version
from pathlib import Path

INFO = Path("/proc/cpuinfo")
LIBRARIES = ("torch", "numpy", "scikit-learn")


def kind() -> str:
    """Return the kind of processor and the versions of the computing libraries, in one line.

    Two machines of the same kind compute the same bits; machines of different kinds may not. The
    processor is its vendor, family and model with the instructions that torch uses.
    """
    from torch.backends import cpu

    info = INFO.read_text() if INFO.exists() else ""
    found = [re.search(rf"^{key}\s*: (.*)$", info, re.M) for key in ("vendor_id", "cpu family")]
    found.append(re.search(r"^model\s*: (.*)$", info, re.M))
    about = " ".join(match[1] for match in found if match) or platform.processor()
    versions = [f"{name} {version(name)}" for name in LIBRARIES]
    return ", ".join([f"{about or platform.machine()} {cpu.get_cpu_capability()}", *versions])

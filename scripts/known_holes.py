"""Says which lower bounds of the dependencies admit a release with a known hole.

`make check` runs this. The table is kept by hand, because the data of pip-audit need the network;
`pip-audit .` knows more where there is one.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
# Package -> the first release without the hole, and the hole.
MENDED = {
    "datasets": ("4.0.0", "earlier releases can run code that comes with a data set"),
    "filelock": ("3.20.3", "CVE-2026-22701"),
    "jinja2": ("3.1.6", "CVE-2025-27516"),
    "pyarrow": ("14.0.1", "CVE-2023-47248"),
    "ray": ("2.52.0", "CVE-2025-62593"),
    "scikit-learn": ("1.5.0", "CVE-2024-5206"),
    "torch": ("2.6.0", "CVE-2025-32434"),
}


def requirements(root: Path) -> list[Requirement]:
    """Each dependency of fedhet and of its extras."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(line) for lines in (project["dependencies"], *extras) for line in lines]


def holes(root: Path) -> Iterator[str]:
    """A line for each dependency that admits a release with a known hole."""
    for needed in requirements(root):
        first, hole = MENDED.get(needed.name, ("0", ""))
        bounds = [part.version for part in needed.specifier if part.operator in (">=", "==")]
        if Version(first) > max(map(Version, bounds), default=Version("0")):
            yield f"pyproject.toml: {needed} admits releases before {first} ({hole})"


if __name__ == "__main__":
    sys.exit("\n".join(holes(ROOT)) or None)

"""Wheels that carry nothing but metadata, for a folder that stands in for a package index."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

WHEEL = "Wheel-Version: 1.0\nGenerator: fedhet-tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def stub_wheels(folder: Path, requirements: Iterable[str]) -> dict[str, str]:
    """Write a wheel for each requirement and for all that it needs on any platform.

    Its metadata is that of the package that is installed here. A package that is missing here, such
    as one for another system, gets a name and the lowest version that is asked for. An installer
    finds the folder as the only index: UV_FIND_LINKS=<folder>, UV_NO_INDEX=1, UV_OFFLINE=1 and an
    empty UV_CACHE_DIR.

    Returns:
        The version of each package (where two are asked for, the later one).
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [Requirement(line) for line in requirements]
    seen: set[str] = set()
    versions: dict[str, str] = {}
    while wanted:
        requirement = wanted.pop()
        text = f"{requirement.name}{sorted(requirement.extras)}{requirement.specifier}"
        if text in seen:
            continue
        seen.add(text)
        name = canonicalize_name(requirement.name)
        version, metadata = _metadata(name, requirement)
        file = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(folder / f"{file}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{file}.dist-info/METADATA", metadata)
            wheel.writestr(f"{file}.dist-info/WHEEL", WHEEL)
            wheel.writestr(f"{file}.dist-info/RECORD", "")
        versions[name] = version
        lines = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
        needed = [Requirement(line.removeprefix("Requires-Dist: ")) for line in lines]
        wanted += [one for one in needed if _is_needed(one, requirement.extras)]
    return versions


def _metadata(name: str, requirement: Requirement) -> tuple[str, str]:
    """(version, METADATA) of the installed package if it satisfies the requirement."""
    try:
        found = distribution(name)
        if requirement.specifier.contains(found.version, prereleases=True):
            return found.version, found.read_text("METADATA") or ""
    except PackageNotFoundError:
        pass
    asked = [one.version for one in requirement.specifier if one.operator in (">=", "==", "~=")]
    version = asked[0].replace(".*", ".0") if asked else "1.0"
    return version, f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def _is_needed(requirement: Requirement, extras: set[str]) -> bool:
    """Whether an optional requirement is asked for; the others are always needed."""
    marker = str(requirement.marker or "")
    return "extra ==" not in marker or any(f'extra == "{extra}"' in marker for extra in extras)

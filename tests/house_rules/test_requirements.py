"""The lower bounds of the dependencies."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import pytest
import yaml
from house_rules.source import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

# Package -> the first release without the hole, and the hole. It is kept by hand, because the data
# of pip-audit need the network; `pip-audit .` knows more where there is one.
MENDED = {
    "datasets": ("4.0.0", "earlier releases can run code that comes with a data set"),
    "filelock": ("3.20.3", "CVE-2026-22701"),
    "jinja2": ("3.1.6", "CVE-2025-27516"),
    "pyarrow": ("14.0.1", "CVE-2023-47248"),
    "ray": ("2.52.0", "CVE-2025-62593"),
    "scikit-learn": ("1.5.0", "CVE-2024-5206"),
    "torch": ("2.6.0", "CVE-2025-32434"),
}


def requirements() -> list[str]:
    """The dependencies of fedhet and of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    return [line for lines in (project["dependencies"], *extras) for line in lines]


def holes(lines: list[str]) -> Iterator[str]:
    """A line for each dependency that admits a release with a known hole."""
    for needed in map(Requirement, lines):
        first, hole = MENDED.get(needed.name, ("0", ""))
        bounds = [part.version for part in needed.specifier if part.operator in (">=", "==")]
        if Version(first) > max(map(Version, bounds), default=Version("0")):
            yield f"{needed} admits releases before {first} ({hole})"


def test_no_lower_bound_admits_a_release_with_a_known_hole() -> None:
    assert not list(holes(requirements()))


@pytest.mark.parametrize("bound", ["", ">=3.1.5", "<4", ">=3.1,<3.2"])
def test_one_that_does_is_named(bound: str) -> None:
    (line,) = holes([f"jinja2{bound}", "torch>=2.6"])
    assert line.startswith("jinja2") and "3.1.6" in line and "CVE" in line


def test_every_file_that_states_the_version_states_the_same() -> None:
    ours, papers = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))
        for folder in (".", "papers")
    )
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    (for_uv,) = ours["tool"]["uv"]["dependency-metadata"]
    version = ours["project"]["version"]
    assert {for_uv["version"], papers["project"]["version"], citation["version"]} == {version}
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    day = f"{citation['date-released']:%B {citation['date-released'].day}, %Y}"
    assert f"\n## {version}, {day}\n" in changelog
    assert citation["keywords"] == ours["project"]["keywords"]


def test_the_extras_that_errors_name_have_the_packages() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = extras["optional-dependencies"]
    calls = re.compile(r'installed\(f?"[^"]+", ((?:"\w+", )+)extra="(\w+)"\)')
    found = [
        call
        for path in (ROOT / "fedhet").rglob("*.py")
        for call in calls.findall(path.read_text("utf-8"))
    ]
    trackers = [(f'"{name}"', name) for name in ("mlflow", "tensorboard", "wandb")]
    assert {extra for _, extra in found} == {"hf", "onnx", "privacy", "text", "timm"}
    for packages, extra in found + trackers:
        has = {Requirement(line).name.removesuffix("-skinny") for line in extras[extra]}
        assert {*re.findall(r"\w+", packages)} <= has, extra


def test_every_dependency_has_a_lower_bound_which_test_lowest_installs() -> None:
    """Its recipe in the Makefile reads them with sed."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"s/( \S+)/\S+/p' pyproject.toml", makefile)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for line in text.partition("dependencies = [\n")[2].partition("]")[0].splitlines():
        assert re.match(pattern, line), line

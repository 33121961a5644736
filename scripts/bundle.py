"""Write the app as other SuperLinks get it: the files of the bundle, with its own pyproject.toml.

    python scripts/bundle.py build/fedhet

A SuperLink has uv install an app's dependencies before each run. In this repository
tool.uv.dependency-metadata keeps uv from it, so that `flwr run .` starts at once; elsewhere nothing
is installed yet. uv also locks optional dependencies, which a run under Flower can do without.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

import tomli_w
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def write(folder: Path) -> None:
    """Write the app's files into the folder, which `flwr build` and `flwr app publish` take."""
    with tempfile.TemporaryDirectory() as temporary:
        flwr = Path(sys.executable).parent / "flwr"
        subprocess.run([flwr, "build", "--app", ROOT], cwd=temporary, check=True)
        (archive,) = Path(temporary).glob("*.fab")
        zipfile.ZipFile(archive).extractall(folder)
    path = folder / "pyproject.toml"
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    project = content["project"]
    del project["optional-dependencies"]
    # Only engine=ray and hydra/launcher=ray import Ray. Flower simulates with one of its own, which
    # must not be hidden by another one.
    every = project["dependencies"]
    project["dependencies"] = [line for line in every if Requirement(line).name != "ray"]
    content["tool"] = {name: content["tool"][name] for name in ("hatch", "flwr")}
    path.write_text(tomli_w.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))

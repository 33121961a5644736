"""Write the app for other SuperLinks: the files of the bundle, with another pyproject.toml.

    python scripts/bundle.py build/fedhet

Before each run, a SuperLink lets uv install the app's dependencies. In this repository,
tool.uv.dependency-metadata prevents that, so that `flwr run .` starts at once. On other machines
the dependencies are not installed yet, so the bundle leaves this setting out. It also leaves
optional dependencies out: uv would lock them, and a run under Flower does not need them.
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
    """Write the app's files into the folder, for `flwr build` and `flwr app publish`."""
    with tempfile.TemporaryDirectory() as temporary:
        flwr = Path(sys.executable).parent / "flwr"
        subprocess.run([flwr, "build", "--app", ROOT], cwd=temporary, check=True)
        (archive,) = Path(temporary).glob("*.fab")
        zipfile.ZipFile(archive).extractall(folder)
    path = folder / "pyproject.toml"
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    project = content["project"]
    del project["optional-dependencies"]
    # Only engine=ray and hydra/launcher=ray import Ray. Flower's simulation brings its own Ray, and
    # another Ray must not hide it.
    every = project["dependencies"]
    project["dependencies"] = [line for line in every if Requirement(line).name != "ray"]
    content["tool"] = {name: content["tool"][name] for name in ("hatch", "flwr")}
    path.write_text(tomli_w.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))

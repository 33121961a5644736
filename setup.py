"""The one step of the build that pyproject.toml cannot express: conf/ becomes `fedhet/conf`.

In the repository conf/ lies beside the package, where users edit it and `flwr run` bundles it. A
wheel needs it inside the package. If pyproject.toml declared it as a package (`package-dir`),
setuptools would warn about every folder below it, so the build of a wheel copies it instead. An
editable install uses it in place.
"""

import shutil
import warnings
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPyWithConf(build_py):
    """Copies conf/ beside the modules of a wheel."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("conf", Path(self.build_lib, "fedhet", "conf"), dirs_exist_ok=True)


# Flower's app format asks for `license = {file = ...}`, of which setuptools warns.
warnings.filterwarnings("ignore", ".*`project.license` as a TOML table is deprecated", Warning)
setup(cmdclass={"build_py": BuildPyWithConf})

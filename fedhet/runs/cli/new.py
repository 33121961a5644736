"""Write a component of your own: its class, yaml file and test, in a package outside of fedhet.

The files hold a working example with tests that pass. Replace it step by step.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from fedhet.core.errors import ConfigError
from fedhet.runs.config import catalogue, components
from fedhet.runs.templates import filled

TEMPLATES = Path(__file__).with_name("templates.yaml")
KINDS = ("method", "plugin", "model", "dataset", "partition")
# How the command line selects a component.
CHOICES = dict.fromkeys(KINDS, "{kind}={name}") | {"plugin": "'plugin=[{name}]'"}


def main(argv: Sequence[str]) -> int:
    """Write the files and print the next steps; existing files stay unchanged.

    Args:
        argv: the arguments after `new`.

    Raises:
        ConfigError: the name is taken or not allowed, or the project names no package for
            components.
    """
    parser = argparse.ArgumentParser(prog="python -m fedhet new", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument(
        "name",
        help="name of the class in letters, digits and _, such as FedExp; in lower case, fedexp, it"
        " is the name on the command line",
    )
    parser.add_argument(
        "--package",
        type=Path,
        metavar="DIR",
        help="folder of the project to which the files are added; it is created if it does not"
        " exist; default: fedhet-NAME",
    )
    args = parser.parse_args(argv)
    name = args.name.lower()
    project: Path = args.package or Path(f"fedhet-{name.replace('_', '-')}")
    for path in create(args.kind, args.name, project):
        print(f"written: {path}")
    choice = CHOICES[args.kind].format(kind=args.kind, name=name)
    print(
        f"\nnext:\n  pip install -e {project} pytest\n  python -m fedhet {choice}\n"
        f"  python -m pytest {project}"
    )
    return 0


def create(kind: str, name: str, project: Path) -> list[Path]:
    """Write the files of a component and return their paths.

    Args:
        kind: one of KINDS.
        name: the name of the choice, with the capitals of the class.
        project: the folder of its project.

    Raises:
        ConfigError: as `main` does.
    """
    _check_name(kind, name)
    package = _package_of(project) or _new_package(project)
    words = {
        "name": name.lower(),
        "cls": "".join(part[:1].upper() + part[1:] for part in name.split("_")),
        "package": package,
        "project": project.resolve().name,
    }
    folder, name = project / package, words["name"]
    texts = {
        folder / f"{name}.py": filled(TEMPLATES, f"{kind}.py", words),
        folder / "conf" / kind / f"{name}.yaml": filled(TEMPLATES, f"{kind}.yaml", words),
        project / "tests" / f"test_{name}.py": filled(TEMPLATES, f"{kind}.test", words),
    }
    if existing := [str(path) for path in texts if path.exists()]:
        raise ConfigError(f"{', '.join(existing)}: already there; choose another name")
    if not (project / "pyproject.toml").exists():
        texts[project / "pyproject.toml"] = filled(TEMPLATES, "pyproject.toml", words)
        texts[folder / "__init__.py"] = f'"""Components for fedhet: {words["project"]}."""\n'
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(texts)


def _check_name(kind: str, name: str) -> None:
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]{0,29}", name):
        raise ConfigError(
            f"{name!r} cannot be the name of a {kind}: use at most 30 letters, digits and _, and"
            " begin with a letter"
        )
    if name.lower() in catalogue.choices(kind):
        raise ConfigError(f"{kind}={name.lower()} exists already; choose another name")


def _package_of(project: Path) -> str | None:
    """Return the package that the entry point of an existing project names; None: no project.

    Raises:
        ConfigError: the project names no package, or several.
    """
    file = project / "pyproject.toml"
    if not file.exists():
        return None
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {error}") from error
    points = content.get("project", {}).get("entry-points", {}).get(components.ENTRY_POINTS, {})
    packages = [value.removesuffix(".conf") for value in points.values() if isinstance(value, str)]
    found = [package for package in packages if (project / package).is_dir()]
    if len(found) != 1:
        raise ConfigError(
            f"{file} names {'several packages' if found else 'no package'} for components; write"
            f' [project.entry-points."{components.ENTRY_POINTS}"] with one line such as'
            ' my_package = "my_package.conf"; the package must be in the folder of this file'
        )
    return found[0]


def _new_package(project: Path) -> str:
    """Return the name of the package of a new project."""
    package = project.resolve().name.replace("-", "_")
    if not package.isidentifier() or package == "fedhet":
        raise ConfigError(
            f"--package {project}: the folder's name, with _ for -, would be the name of the"
            f" package, and {package!r} is not allowed as one; name another folder"
        )
    if project.is_dir() and any(project.iterdir()):
        raise ConfigError(f"{project} is not empty and has no pyproject.toml; name another folder")
    return package

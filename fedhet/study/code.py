"""The version of the code that runs an experiment, so that results of two are not mixed unseen."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]
# Their versions change the bytes of a run.
_PACKAGES = ("torch", "numpy", "scikit-learn")


@dataclass(frozen=True)
class Code:
    """A version of the code.

    Attributes:
        version: the version of the package fedhet.
        commit: the commit of the repository that tracks its files; None if no repository does, for
            example if the package is installed inside of somebody else's repository.
        digest: the digest of the files (function `digest`).
    """

    version: str
    commit: str | None
    digest: str

    @classmethod
    def current(cls) -> Code:
        """Return the version of the files as they are now."""
        return cls(_version("fedhet"), _commit(), digest())

    def record(self) -> dict[str, Any]:
        """Return the entries of a record."""
        return {"version": self.version, "commit": self.commit, "digest": self.digest}

    def is_that_of(self, record: Mapping[str, Any]) -> bool:
        """Whether a record names this version and digest; its commit may differ."""
        return (self.version, self.digest) == (record.get("version"), record.get("digest"))

    @staticmethod
    def text(record: Mapping[str, Any]) -> str:
        """Format the entries of a record for users."""
        commit = record.get("commit")
        at = f" at commit {commit[:7]}" if isinstance(commit, str) else ""
        return f"fedhet {record.get('version')}{at}, code {short(record.get('digest'))}"


def digest() -> str:
    """Compute the digest of the code on the disk. It needs no git, because every run does it twice.

    Returns:
        16 hex digits of: fedhet's source files; conf/ and the folders of the user's own components,
        without experiments; the source files of all packages with classes that a configuration may
        name; the versions of torch, NumPy and scikit-learn.
    """
    state = hashlib.sha256()
    for name, path in _files():
        with suppress(FileNotFoundError):  # the file was removed after the listing
            content = path.read_bytes()
            state.update(f"{name}\0{len(content)}\0".encode() + content)
    state.update(" ".join(map(_version, _PACKAGES)).encode())
    return state.hexdigest()[:16]


def joined(record: Mapping[str, Any], found: str) -> dict[str, Any]:
    """Return the record of a run that began with one code and found another digest later.

    A process imports modules when it needs them, so the run may have used parts of both. The new
    digest names both, and equals the digest of no code.
    """
    began = str(record.get("digest"))
    if found == began or short(found) in began.split("+"):
        return dict(record)
    return {**record, "commit": None, "digest": f"{short(began)}+{short(found)}"}


def short(digest: object) -> str:
    """Shorten a digest, or each part of a joined digest, for users."""
    return "+".join(part[:8] for part in str(digest).split("+"))


def _files() -> Iterator[tuple[str, Path]]:
    """Yield each file with a name: its package or folder, and its path inside of it.

    The name does not depend on the place of the package on the disk.
    """
    from fedhet.runs.config import catalogue, components  # here, because a report needs neither

    yield from _below("fedhet", _PACKAGE, "*.py")
    for number, folder in enumerate(catalogue.folders()):
        for name, path in _below(f"conf {number}", folder, "*.yaml"):
            if path.relative_to(folder).parts[0] != "experiment":
                yield name, path
    for package in sorted({*components.trusted_packages()}):
        for place in components.locations(package):
            yield from [(package, place)] if place.is_file() else _below(package, place, "*.py")


def _below(name: str, folder: Path, pattern: str) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob(pattern)):
        yield f"{name}/{path.relative_to(folder).as_posix()}", path


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _commit() -> str | None:
    known = _git("ls-files", "--error-unmatch", "__init__.py")
    return _git("rev-parse", "HEAD") if known else None


def _git(*arguments: str) -> str | None:
    """Return what git prints in the package's folder; None if git fails."""
    command = ["git", "-C", str(_PACKAGE), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

"""Where clients' states are kept: in memory, in files, or in Flower's contexts."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

import safetensors.torch
import torch
from flwr.common import Array, ArrayRecord, RecordDict

from fedhet.core.client.state import Store
from fedhet.core.errors import LostState
from fedhet.core.trees import Tree, nbytes
from fedhet.data.storage import written
from fedhet.runs.guard import TemporaryFolder

MEMORY_BYTES = 2**29  # limit for the states that one process keeps in memory
STATE_DAYS = 7  # after so many days without use, the states of a run are removed
HASH_BYTES = 32  # of SHA-256
MARK = ".fedhet"  # marks the folders that may be removed


class MemoryStore:
    """States in this process.

    Beyond `limit` bytes, the least recently used states move to files, which are deleted when the
    process ends.
    """

    def __init__(self, limit: int = MEMORY_BYTES) -> None:
        self._limit = limit
        self._bytes = 0
        # by client: the states by version, and the older versions to keep
        self._states: OrderedDict[int, tuple[dict[int, Tree], Collection[int]]] = OrderedDict()
        self._spilled: tuple[TemporaryFolder, DiskStore] | None = None

    def load(self, pid: int, version: int) -> Tree | None:
        if pid in self._states:
            self._states.move_to_end(pid)
            versions, _ = self._states[pid]
            if version in versions:
                return versions[version]
        return self._spilled[1].load(pid, version) if self._spilled else None

    def save(self, pid: int, version: int, state: Tree, keep: Collection[int]) -> None:
        before, _ = self._states.pop(pid, ({}, ()))
        versions = {v: t for v, t in before.items() if v in keep}
        # Clones: a stored state must not change with the model from which it was read.
        versions[version] = {name: t.clone() for name, t in state.items()}
        self._states[pid] = versions, keep
        self._bytes += _size(versions) - _size(before)
        while self._bytes > self._limit and len(self._states) > 1:
            self._spill()

    def _spill(self) -> None:
        """Move the least recently used client's states to files."""
        if self._spilled is None:
            folder = TemporaryFolder("fedhet-state-")
            self._spilled = folder, DiskStore(Path(folder.name))
        pid, (versions, keep) = next(iter(self._states.items()))
        for version in sorted(versions):
            self._spilled[1].save(pid, version, versions[version], keep)
        # Only now: if the disk is full, only the client of the current message fails.
        self._bytes -= _size(versions)
        del self._states[pid]


def _size(versions: dict[int, Tree]) -> int:
    return sum(map(nbytes, versions.values()))


class DiskStore:
    """States as files: the SHA-256 of the rest, and then the content of a safetensors file.

    This store is for clients that share a node, or whose process ends after each message.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, pid: int, version: int) -> Tree | None:
        path = self._folder / str(pid) / f"{version}.safetensors"
        if not path.exists():
            return None
        content = path.read_bytes()
        stated, data = content[:HASH_BYTES], content[HASH_BYTES:]
        if hashlib.sha256(data).digest() != stated:
            raise LostState(
                f"client {pid}: its state of round {version} is damaged on this machine: the file"
                " does not have the content whose hash it begins with"
            )
        return safetensors.torch.load(data)

    def save(self, pid: int, version: int, state: Tree, keep: Collection[int]) -> None:
        home = self._folder / str(pid)
        # Clones: two pieces may keep one tensor, which safetensors refuses.
        whole = torch.contiguous_format
        clones = {name: t.cpu().clone(memory_format=whole) for name, t in state.items()}
        content = safetensors.torch.save(clones)
        with written(home / f"{version}.safetensors") as part:
            part.write_bytes(hashlib.sha256(content).digest() + content)
        for path in home.glob("*.safetensors"):
            if int(path.stem) not in {version, *keep}:
                path.unlink(missing_ok=True)


class ContextStore:
    """States in Flower's `context.state`.

    Ray carries this record to whichever worker serves the client, so there must be one client per
    node.
    """

    def __init__(self, record: RecordDict) -> None:
        self._record = record

    def load(self, pid: int, version: int) -> Tree | None:
        arrays = self._record.array_records.get(f"fedhet.{pid}.{version}")
        if arrays is None:
            return None
        return {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}

    def save(self, pid: int, version: int, state: Tree, keep: Collection[int]) -> None:
        prefix = f"fedhet.{pid}."
        kept = {f"{prefix}{older}" for older in keep}
        for key in list(self._record.array_records):
            if key.startswith(prefix) and key not in kept:
                del self._record[key]
        self._record[f"{prefix}{version}"] = ArrayRecord(
            {name: Array(t.cpu().numpy()) for name, t in state.items()}
        )


def store_at_site(run_id: str) -> Store:
    """The store of a run's client processes at a site. It outlives Flower's run, and its id."""
    return DiskStore(state_folder(run_id))


def state_folder(run_id: str) -> Path:
    """Return the folder in which the client processes of a run keep their states.

    It is below $FEDHET_STATE_DIR, or below the user's own folder in the temporary directory.

    Raises:
        ValueError: the folder belongs to another user, or others may write to it. In a shared
            temporary directory, another user could have created it first.

    When a run starts on the machine, the folders of runs that have not been used for STATE_DAYS
    days are removed. Only folders that carry our mark are removed, whatever else is beside them.
    """
    root = own_folder("fedhet-state")
    home = root / run_id
    if not home.exists():
        for mark in root.glob(f"*/{MARK}"):
            if time.time() - mark.stat().st_mtime > STATE_DAYS * 86400:
                shutil.rmtree(mark.parent, ignore_errors=True)
        home.mkdir(exist_ok=True)
    (home / MARK).touch()
    return home


def own_folder(name: str) -> Path:
    """A folder of this name where the client processes of this site keep what is theirs.

    Raises:
        ValueError: as `state_folder` does.
    """
    default = Path(tempfile.gettempdir()) / f"fedhet-{os.getuid()}"
    root = Path(os.environ.get("FEDHET_STATE_DIR") or default) / name
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.parent == default:
        _check_own(root.parent, closed=0o022)  # others may look, but not put anything there
    _check_own(root, closed=0o077)
    return root


def _check_own(folder: Path, closed: int) -> None:
    """Refuse a folder of another user, a link, and one whose mode has a bit of `closed`."""
    status = folder.lstat()
    own = status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode)
    if not own or status.st_mode & closed:
        raise ValueError(
            f"{folder} must be a folder of this user (uid {os.getuid()}) that is closed to others;"
            f" it has uid {status.st_uid} and mode {stat.S_IMODE(status.st_mode):04o}: remove it,"
            " or set FEDHET_STATE_DIR to a folder of your own"
        )

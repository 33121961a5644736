"""Stores clients' states in memory, in files, or in Flower's contexts."""

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
STATE_DAYS = 7  # the states of a run are removed after this many days without use
HASH_BYTES = 32  # the length of a SHA-256
MARK = ".fedhet"  # the file that marks folders which may be removed


class MemoryStore:
    """Stores states in the memory of this process.

    If they need more than `limit` bytes, the least recently used states move to files. The files
    are deleted when the process ends.
    """

    def __init__(self, limit: int = MEMORY_BYTES) -> None:
        self._limit = limit
        self._bytes = 0
        # client -> (version -> state, older versions to keep)
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
        # Store clones: a stored state must not change with the model from which it was read.
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
        # Remove the states only after they are saved: if the disk is full, only one client fails.
        self._bytes -= _size(versions)
        del self._states[pid]


def _size(versions: dict[int, Tree]) -> int:
    return sum(map(nbytes, versions.values()))


class DiskStore:
    """Stores each state in a file: the SHA-256 of a safetensors file, and then its content.

    It is for clients that share a node, and for processes that end after each message.
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
                f"client {pid}: its state of round {version} is damaged on this machine: the hash"
                " at the beginning of the file does not fit its content"
            )
        return safetensors.torch.load(data)

    def save(self, pid: int, version: int, state: Tree, keep: Collection[int]) -> None:
        home = self._folder / str(pid)
        # Save clones: two components may keep the same tensor, and safetensors refuses that.
        whole = torch.contiguous_format
        clones = {name: t.cpu().clone(memory_format=whole) for name, t in state.items()}
        content = safetensors.torch.save(clones)
        with written(home / f"{version}.safetensors") as part:
            part.write_bytes(hashlib.sha256(content).digest() + content)
        for path in home.glob("*.safetensors"):
            if int(path.stem) not in {version, *keep}:
                path.unlink(missing_ok=True)


class ContextStore:
    """Stores states in Flower's `context.state`.

    Ray carries this record to the worker that serves the client, so each node must have only one
    client.
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
    """Return the store for a run's client processes at a site; it outlives Flower's run."""
    return DiskStore(state_folder(run_id))


def state_folder(run_id: str) -> Path:
    """Return the folder in which the client processes of a run keep their states.

    It is in $FEDHET_STATE_DIR, or in the user's own folder in the temporary directory. When a new
    run starts on the machine, this function removes the folders of runs that were not used for
    STATE_DAYS days. It removes only folders that have our mark.

    Raises:
        ValueError: the folder belongs to another user, or others may write to it. In a shared
            temporary directory, another user could have created it first.
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
    """Create and return a private folder of this name for the client processes of this site.

    Raises:
        ValueError: as in `state_folder`.
    """
    default = Path(tempfile.gettempdir()) / f"fedhet-{os.getuid()}"
    root = Path(os.environ.get("FEDHET_STATE_DIR") or default) / name
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.parent == default:
        _check_own(root.parent, closed=0o022)  # others may read it, but not write to it
    _check_own(root, closed=0o077)
    return root


def _check_own(folder: Path, closed: int) -> None:
    """Refuse a link, a folder of another user, and a folder whose mode has a bit of `closed`."""
    status = folder.lstat()
    own = status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode)
    if not own or status.st_mode & closed:
        raise ValueError(
            f"{folder} must be a folder of this user (uid {os.getuid()}) that is closed to others;"
            f" it has uid {status.st_uid} and mode {stat.S_IMODE(status.st_mode):04o}: remove it,"
            " or set FEDHET_STATE_DIR to a folder of your own"
        )

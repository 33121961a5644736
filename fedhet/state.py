"""What a client remembers from one participation to the next.

A client's state is one flat tree of "<piece>.<name>/<tensor>". A store keeps it by client and by
version: the version is the round in which the server accepted it, and the server names it in every
message. So an update that was left out does not advance the state, and a state that was lost is
noticed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

import safetensors.torch
import torch
from flwr.common import Array, ArrayRecord, RecordDict

from fedhet.trees import Tree, nbytes

MEMORY_BYTES = 2**29  # of states in one process


class Store(Protocol):
    """Where states lie. `save` keeps `version` and `keep`, and may forget every other version of
    the client."""

    def load(self, pid: int, version: int) -> Tree | None: ...
    def save(self, pid: int, version: int, state: Tree, keep: int) -> None: ...


class ClientState:
    """One client's state during one message: read, change, and commit only when the work has
    succeeded."""

    def __init__(
        self, store: Store, pid: int, version: int, device: torch.device | None = None
    ) -> None:
        self.pid, self.version, self.device = pid, version, device
        self._store = store
        self._state: Tree | None = None
        self._changed = False

    def _load(self) -> Tree:
        if self._state is None:
            self._state = {}
            if self.version:
                found = self._store.load(self.pid, self.version)
                if found is None:
                    raise ValueError(
                        f"client {self.pid}: its state of round {self.version} is gone from this"
                        " machine; it must be reached where it ran before, with its state folder"
                    )
                self._state = {name: t.to(self.device) for name, t in found.items()}
        return self._state

    def get(self, key: str) -> Tree | None:
        """The tree kept under "<piece>.<name>", or None where there is none yet."""
        found = {
            name.removeprefix(f"{key}/"): t
            for name, t in self._load().items()
            if name.startswith(f"{key}/")
        }
        return found or None

    def put(self, key: str, tree: Tree) -> None:
        state = {name: t for name, t in self._load().items() if not name.startswith(f"{key}/")}
        self._state = state | {f"{key}/{name}": t.detach() for name, t in tree.items()}
        self._changed = True

    @property
    def nbytes(self) -> int:
        return nbytes(self._load())

    def commit(self, version: int) -> bool:
        """Write the state as `version`; false where nothing has changed."""
        if self._changed:
            self._store.save(self.pid, version, self._load(), keep=self.version)
        return self._changed


class MemoryStore:
    """States in this process; beyond `limit` bytes, those that were used longest ago go to files,
    which end with the process."""

    def __init__(self, limit: int = MEMORY_BYTES) -> None:
        self._limit, self._bytes = limit, 0
        # versions, and which of them is `keep`
        self._states: OrderedDict[int, tuple[dict[int, Tree], int]] = OrderedDict()
        self._spilled: tuple[tempfile.TemporaryDirectory[str], DiskStore] | None = None

    def load(self, pid: int, version: int) -> Tree | None:
        if pid in self._states:
            self._states.move_to_end(pid)
            if (found := self._states[pid][0].get(version)) is not None:
                return found
        return self._spilled[1].load(pid, version) if self._spilled else None

    def save(self, pid: int, version: int, state: Tree, keep: int) -> None:
        held, _ = self._states.pop(pid, ({}, 0))
        # Clones: what a client keeps must not change with the model that it was read from.
        versions = {v: t for v, t in held.items() if v == keep} | {
            version: {k: t.clone() for k, t in state.items()}
        }
        self._states[pid] = versions, keep
        self._bytes += _size(versions) - _size(held)
        while self._bytes > self._limit and len(self._states) > 1:
            self._spill()

    def _spill(self) -> None:
        if self._spilled is None:
            folder = tempfile.TemporaryDirectory(prefix="fedhet-state-")
            self._spilled = folder, DiskStore(Path(folder.name))
        pid, (versions, keep) = next(iter(self._states.items()))
        for version in sorted(versions):
            self._spilled[1].save(pid, version, versions[version], keep)
        # only now: where the disk is full, it is this message's client that fails
        self._bytes -= _size(versions)
        del self._states[pid]


def _size(versions: dict[int, Tree]) -> int:
    return sum(map(nbytes, versions.values()))


class DiskStore:
    """States as safetensors files, for clients that share a node or whose process ends after each
    message."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, pid: int, version: int) -> Tree | None:
        path = self._folder / str(pid) / f"{version}.safetensors"
        return safetensors.torch.load(path.read_bytes()) if path.exists() else None

    def save(self, pid: int, version: int, state: Tree, keep: int) -> None:
        home = self._folder / str(pid)
        home.mkdir(parents=True, exist_ok=True)
        part = home / f"{version}.{os.getpid()}.part"
        part.write_bytes(
            safetensors.torch.save({k: t.cpu().contiguous() for k, t in state.items()})
        )
        part.replace(home / f"{version}.safetensors")
        for old in home.glob("*.safetensors"):
            if int(old.stem) not in (version, keep):
                old.unlink(missing_ok=True)


class ContextStore:
    """States in Flower's `context.state`, which Ray carries to whichever worker serves the client;
    one client per node."""

    def __init__(self, record: RecordDict) -> None:
        self._record = record

    def load(self, pid: int, version: int) -> Tree | None:
        record = self._record.array_records.get(f"fedhet.{pid}.{version}")
        if record is None:
            return None
        return {name: torch.from_numpy(array.numpy()) for name, array in record.items()}

    def save(self, pid: int, version: int, state: Tree, keep: int) -> None:
        for key in [
            k
            for k in self._record.array_records
            if k.startswith(f"fedhet.{pid}.") and not k.endswith(f".{keep}")
        ]:
            del self._record[key]
        self._record[f"fedhet.{pid}.{version}"] = ArrayRecord(
            {k: Array(t.cpu().numpy()) for k, t in state.items()}
        )


STATE_DAYS = 7
MARK = ".fedhet"


def state_folder(run_id: int | str) -> Path:
    """Where client processes of a Flower run keep state: below $FEDHET_STATE_DIR, or the user's own
    folder below the temporary one.

    Runs that nothing has touched for STATE_DAYS days are removed when another run starts on the
    machine: only folders that carry our mark, in a folder of our own, whatever else lies beside
    them."""
    root = (
        Path(
            os.environ.get("FEDHET_STATE_DIR")
            or Path(tempfile.gettempdir()) / f"fedhet-{os.getuid()}"
        )
        / "fedhet-state"
    )
    home = root / str(run_id)
    if not home.exists():
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for mark in root.glob(f"*/{MARK}"):
            if time.time() - mark.stat().st_mtime > STATE_DAYS * 86400:
                shutil.rmtree(mark.parent, ignore_errors=True)
        home.mkdir(exist_ok=True)
    (home / MARK).touch()
    return home

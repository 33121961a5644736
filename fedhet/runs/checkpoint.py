"""Writes and reads checkpoints, from which a killed run continues: `python -m fedhet resume=RUN`.

core/memory.py turns what objects remember into JSON and tensors. runs/record/start.py prepares the
run folder of a resumed run. No random generator is saved: every draw is a function of the seed, the
phase and the step. Files in the run folder, each written completely or not at all:

    checkpoints/000012/manifest.json        describes the checkpoint; SHA-256 of all it needs
    checkpoints/000012/values.json          what the run's objects remember after round 12
    checkpoints/000012/tensors.safetensors  the tensors of these objects
    checkpoints/000012/best_val.safetensors the best model so far, if there is one
    checkpoints/states/3/9.safetensors      client 3's state of round 9, shared by the checkpoints

The manifest also has the lines of rounds.jsonl, with NaN and infinities instead of null. A
checkpoint is written under a hidden name, flushed to the disk (fsync), and renamed. The last two
checkpoints are kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch

from fedhet.core import trees
from fedhet.core.client.state import Store
from fedhet.core.errors import RunFailed, log
from fedhet.core.memory import MemoryPacker, put_back, unpacked
from fedhet.core.server.callbacks import Callback, Row
from fedhet.core.server.loop import Loop
from fedhet.core.server.phases import RunState, TimetableEntry
from fedhet.data.forms import plain_file
from fedhet.data.storage import save_tensors, sync, write_text, written_folder
from fedhet.runs.record.run_folder import Recorder
from fedhet.runs.record.schema import FORMAT
from fedhet.runs.stores import HASH_BYTES, DiskStore

KEPT = 2
MANIFEST, VALUES, TENSORS = "manifest.json", "values.json", "tensors.safetensors"
BEST = "best_val.safetensors"
ROUNDS = "rounds.jsonl"
RUN = "run"  # the name of the run among what callbacks remember
STATES = "states"
Needs = dict[int, list[int]]  # client -> the versions of its state


def all_needs(parts: Iterable[Mapping[int, Iterable[int]]]) -> Needs:
    """Return the union of several needs."""
    needs: dict[int, set[int]] = {}
    for part in parts:
        for pid, versions in part.items():
            needs.setdefault(pid, set()).update(versions)
    return {pid: sorted(versions) for pid, versions in sorted(needs.items())}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is complete and undamaged.

    Attributes:
        folder: its folder.
        round: its last round.
        about: what else `Checkpoints` has recorded about the run.
        states: client -> version -> the hash of the state; None if the state is at the client's
            site.
    """

    folder: Path
    round: int
    about: dict[str, Any]
    states: dict[int, dict[int, str | None]]


class CheckpointFolder:
    """The checkpoints of a run.

    Args:
        run: the run folder.
        config: the digest of the configuration; checkpoints with another digest are refused.
    """

    def __init__(self, run: Path, config: str) -> None:
        self.home = run / "checkpoints"
        self._best = run / BEST
        self._config = config
        self._kept: dict[int, Checkpoint] = {}  # by round

    @property
    def needs(self) -> Needs:
        """The versions of the clients' states that the kept checkpoints need, by client."""
        return all_needs(checkpoint.states for checkpoint in self._kept.values())

    # ---- writing
    def write(
        self,
        round: int,
        about: dict[str, Any],
        nodes: Mapping[str, Any],
        tensors: trees.Tree,
        needs: Needs,
        store: Store | None,
        room: int,
    ) -> None:
        """Write a checkpoint, and remove all except the last two.

        Args:
            round: the last round.
            about: what to record about the run.
            nodes: what the run's objects remember.
            tensors: the tensors in `nodes`.
            needs: the clients' states that belong to the checkpoint.
            store: holds these states; None if they are at the clients' sites.
            room: the bytes that must stay free on the disk for the run's own files.

        Raises:
            WriteError: the checkpoint cannot be written, or would leave less than `room` bytes
                free; earlier checkpoints stay unchanged.
            ValueError: a state is missing.
        """
        folder = self.home / f"{round:06d}"
        try:
            with written_folder(folder) as part:
                states = {
                    pid: {version: self._stored(pid, version, store) for version in versions}
                    for pid, versions in needs.items()
                }
                save_tensors(part / TENSORS, tensors)
                write_text(part / VALUES, json.dumps(nodes, allow_nan=False))
                if self._best.exists():
                    shutil.copyfile(self._best, part / BEST)
                manifest = {
                    "format": FORMAT,
                    "round": round,
                    "about": about,
                    "states": states,
                    "config": self._config,
                    "files": {path.name: sha256(path) for path in sorted(part.iterdir())},
                }
                text = json.dumps(manifest)
                digest = hashlib.sha256(text.encode()).hexdigest()
                write_text(part / MANIFEST, f"{digest}\n{text}\n")
                if (self.home / STATES).exists():  # not if clients keep no state
                    sync(self.home / STATES)
                if (left := shutil.disk_usage(part).free) < room:
                    raise OSError(
                        f"it leaves {left} bytes free; the run's own files may need {room}"
                    )
            self._kept[round] = Checkpoint(folder, round, about, states)
        finally:
            self.prune()

    def _stored(self, pid: int, version: int, store: Store | None) -> str | None:
        """Store a client's state, unless it is stored already, and return its hash."""
        if store is None:
            return None
        path = self._state_path(pid, version)
        if not path.exists():
            state = store.load(pid, version)
            if state is None:
                raise ValueError(f"the state of client {pid} of round {version} is missing")
            older = [int(file.stem) for file in path.parent.glob("*.safetensors")]
            DiskStore(self.home / STATES).save(pid, version, state, older)
            sync(path)
            sync(path.parent)
        with path.open("rb") as file:
            return file.read(HASH_BYTES).hex()

    def _state_path(self, pid: int, version: int) -> Path:
        return self.home / STATES / str(pid) / f"{version}.safetensors"

    def prune(self) -> None:
        """Remove all checkpoints except the last ones, and states that no kept checkpoint needs."""
        for round in sorted(self._kept)[:-KEPT]:
            del self._kept[round]
        names = {f"{round:06d}" for round in self._kept} | {STATES}
        for path in self.home.glob("*"):
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)
        paths = {
            self._state_path(pid, version)
            for pid, versions in self.needs.items()
            for version in versions
        }
        for path in (self.home / STATES).glob("*/*"):
            if path not in paths:
                with suppress(OSError):
                    path.unlink()

    # ---- reading
    def find(self) -> Checkpoint | None:
        """Return the last undamaged checkpoint; log why others are not used."""
        for path in sorted(self.home.glob("[0-9]*")):
            try:
                checkpoint = self._read(path)
                self._kept[checkpoint.round] = checkpoint
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("the checkpoint %s is not used: %s", path, error)
        return self._kept[max(self._kept)] if self._kept else None

    def _read(self, folder: Path) -> Checkpoint:
        """Read a manifest, and check all files and states that it names.

        Raises:
            ValueError: the checkpoint is damaged, or belongs to other settings.
        """
        manifest_file = plain_file(folder / MANIFEST, math.inf)
        stated, _, text = manifest_file.read_text(encoding="utf-8").partition("\n")
        if hashlib.sha256(text.rstrip("\n").encode()).hexdigest() != stated:
            raise ValueError(f"{MANIFEST} is damaged")
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}; this fedhet reads {FORMAT}")
        if manifest["config"] != self._config:
            raise ValueError("it belongs to a run with other settings")
        for name, expected in manifest["files"].items():
            if sha256(folder / name) != expected:
                raise ValueError(f"{name} is damaged")
        states = {
            int(pid): {int(version): stated for version, stated in versions.items()}
            for pid, versions in manifest["states"].items()
        }
        for pid, versions in states.items():
            for version, expected in versions.items():
                path = self._state_path(pid, version)
                if expected and sha256(path, skip=HASH_BYTES) != expected:
                    raise ValueError(f"the state {STATES}/{pid}/{path.name} is damaged")
        return Checkpoint(folder, manifest["round"], manifest["about"], states)


def sha256(path: Path, skip: int = 0) -> str:
    """Return the SHA-256 of a file without its first `skip` bytes."""
    with plain_file(path, math.inf).open("rb") as file:
        file.seek(skip)
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- when a run writes a checkpoint, and how it continues from one
# Bytes that a run may need for its records, in addition to two models: the final one, and a new
# best one that is written before the old one is removed.
RECORDS = 2**20


class Checkpoints(Callback):
    """Writes the checkpoints of a run, and restores a resumed run from its checkpoint.

    Args:
        recorder: the recorder of the run folder.
        folder: the run's checkpoints.
        every: seconds between two checkpoints; 0: one after each step; None: none.
        found: the checkpoint from which to continue, or None.
    """

    def __init__(
        self,
        recorder: Recorder,
        folder: CheckpointFolder,
        every: float | None,
        found: Checkpoint | None = None,
    ) -> None:
        self._recorder = recorder
        self._folder = folder
        self._every = every
        self._found = found
        self._written = found is not None
        self._last = time.monotonic()

    def begun(self, loop: Loop) -> None:
        """Restore what the run and the callbacks before this one remembered.

        Raises:
            RunFailed: the checkpoint does not fit these objects.
        """
        if (found := self._found) is None:
            return
        try:
            self._put_back(loop, found)
        except (ValueError, KeyError, TypeError, RuntimeError, OSError) as error:
            raise RunFailed(f"the checkpoint {found.folder} cannot be used: {error}") from error
        self._pin(loop)
        loop.round = found.round

    def _put_back(self, loop: Loop, found: Checkpoint) -> None:
        strategy, device = loop.method, loop.method.workspace.device
        before = strategy.weights
        nodes = json.loads((found.folder / VALUES).read_text(encoding="utf-8"))
        tensors = safetensors.torch.load_file(found.folder / TENSORS)
        strategy.run = RunState(**unpacked(nodes[RUN], tensors, device))
        for callback in loop.callbacks:
            put_back(callback, nodes.get(callback.name, {}), tensors, device)
        if set(strategy.weights) != set(before):
            raise ValueError(f"it has the slots {sorted(strategy.weights)}")
        for name, tree in before.items():  # checks no values, because weights may have diverged
            trees.check_form(f"the slot {name!r}", strategy.weights[name], tree)
        lengths = tuple(entry.rounds for entry in continued(strategy.phases, found))
        strategy.run = replace(strategy.run, lengths=lengths)
        if (store := loop.transport.store) is None:
            return
        for pid, versions in found.states.items():
            for version in versions:
                state = DiskStore(found.folder.parent / STATES).load(pid, version)
                if state is None:
                    raise ValueError(f"the state of client {pid} of round {version} is missing")
                store.save(pid, version, state, list(versions))

    # ---- after a step
    def step_ended(self, loop: Loop, row: Row) -> None:
        """Write a checkpoint if it is due, or after the last step if the run already has one.

        If the evaluation of the step failed, no checkpoint is written, so that a resumed run
        repeats the step with its evaluation.
        """
        if self._every is None or loop.row is not None:
            return
        if time.monotonic() - self._last >= self._every or (loop.last and self._written):
            self._write(loop)
            self._last = time.monotonic()

    def _write(self, loop: Loop) -> None:
        """Write a checkpoint; if that fails, log the reason and continue."""
        strategy, store = loop.method, loop.transport.store
        packer = MemoryPacker()
        try:
            nodes = {c.name: packer.memory(c, c.name) for c in loop.callbacks if c.memory}
            nodes[RUN] = packer.value(vars(strategy.run), RUN)
            about = {
                "seconds": self._recorder.seconds,
                "rows": self._recorder.rows,
                "at_sites": store is None,
                "run_id": strategy.run_id,
                "timetable": [
                    [entry.name, entry.rounds, entry.phase.rounds] for entry in strategy.timetable
                ],
            }
            # The states with which the clients continue, and the states of their best evaluation.
            needs = all_needs(
                {pid: [version] for pid, version in versions.items()}
                for versions in (strategy.run.versions, *strategy.run.pinned.values())
            )
            room = RECORDS + 2 * sum(map(trees.nbytes, strategy.weights.values()))
            self._folder.write(loop.round, about, nodes, packer.tensors, needs, store, room)
        except (OSError, TypeError, ValueError) as error:
            log.warning("round %d has no checkpoint: %s", loop.round, error)
            return
        self._written = True
        self._pin(loop)

    def _pin(self, loop: Loop) -> None:
        """If clients store their own states, make them keep the states that checkpoints need."""
        if loop.transport.store is None:
            loop.method.kept_back = self._folder.needs


def continued(timetable: Sequence[TimetableEntry], found: Checkpoint) -> list[TimetableEntry]:
    """Return the timetable of a resumed run: phases that have ended keep their number of rounds.

    The last phase may have more rounds than in the run of the checkpoint.

    Raises:
        ValueError: the checkpoint's run had other phases.
    """
    noted = found.about["timetable"]
    if [name for name, _, _ in noted] != [entry.name for entry in timetable]:
        raise ValueError(f"its phases are {', '.join(name for name, _, _ in noted)}")
    left = found.round
    entries = []
    for entry, (_, rounds, planned) in zip(timetable, noted, strict=True):
        over = left > rounds or (left == rounds and rounds != planned)
        entries.append(replace(entry, rounds=rounds) if over else entry)
        left -= rounds
    return entries

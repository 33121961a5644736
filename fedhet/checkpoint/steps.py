"""When a run writes a checkpoint, and how it goes on from one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedhet.checkpoint.folder import Checkpoint, CheckpointFolder, all_needs
from fedhet.core import trees
from fedhet.core.callbacks import Callback, Row
from fedhet.core.errors import RunFailed
from fedhet.core.memory import MemoryPacker, put_back
from fedhet.core.phases import TimetableEntry

if TYPE_CHECKING:
    from fedhet.core.loop import Loop
    from fedhet.core.state import Store
    from fedhet.core.strategy import FedStrategy
    from fedhet.record.run_folder import Recorder

log = logging.getLogger("fedhet")
# Bytes that a run may still need beside its final models, and a new best one while it has the old.
RECORDS = 2**20


class Checkpoints(Callback):
    """Writes the checkpoints of a run, and puts back the one with which it goes on.

    Args:
        recorder: the recorder of its folder.
        folder: its checkpoints.
        every: seconds between two of them, 0 for one after each step, None for none.
        found: the one to go on from, or None.
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
        self._parts: dict[str, object] = {}
        self._strategy: FedStrategy
        self._store: Store | None = None

    def begun(self, loop: Loop) -> None:
        """Put back what the parts of the run, and the callbacks before this one, did remember.

        Raises:
            RunFailed: the checkpoint does not fit these objects.
        """
        self._strategy = loop.method
        self._store = loop.courier.store
        others = {callback.name: callback for callback in loop.callbacks if callback.memory}
        self._parts = {**loop.method.parts, **others}
        found, self._found = self._found, None
        if found is None:
            return
        try:
            self._put_back(found)
        except (ValueError, KeyError, TypeError, RuntimeError, OSError) as error:
            raise RunFailed(f"the checkpoint {found.folder} cannot be used: {error}") from error
        self._pin()
        loop.round = found.round

    def _put_back(self, found: Checkpoint) -> None:
        strategy = self._strategy
        before = {name: dict(tree) for name, tree in strategy.weights.items()}
        nodes, tensors = found.values()
        for name, part in self._parts.items():
            put_back(part, nodes.get(name, {}), tensors, strategy.workspace.device, name)
        if set(strategy.weights) != set(before):
            raise ValueError(f"it has the slots {sorted(strategy.weights)}")
        for name, tree in before.items():
            shapes = [
                {key: (t.shape, t.dtype) for key, t in one.items()}
                for one in (strategy.weights[name], tree)
            ]
            if shapes[0] != shapes[1]:  # diverged weights may be of any value
                raise ValueError(f"the tensors of the slot {name!r} are not those of this model")
        expected = self._recorder.rows[-1]["weights_sha256"]
        if trees.sha256(strategy.weights) != expected:
            raise ValueError("its weights are not those of the last line of rounds.jsonl")
        strategy.timetable = continued(strategy.timetable, found)
        if self._store is None:
            return
        for pid, versions in found.needs.items():
            for version in versions:
                state = found.state(pid, version)
                if state is None:
                    raise ValueError(f"the state of client {pid} of round {version} is missing")
                self._store.save(pid, version, state, versions)

    # ---- after a step
    def settled(self, loop: Loop, row: Row) -> None:
        """Write a checkpoint if it is due; the last step of a run that has one has one too.

        A step whose evaluation has failed has none, so that the run goes on with that evaluation.
        """
        if self._every is None or loop.row is not None:
            return
        if time.monotonic() - self._last >= self._every or (loop.last and self._written):
            self._write()
            self._last = time.monotonic()

    def _write(self) -> None:
        """Write a checkpoint; if that is not possible, the run goes on and the log says so."""
        current = self._strategy.current
        packer = MemoryPacker()
        try:
            nodes = {name: packer.memory(part, name) for name, part in self._parts.items()}
            self._folder.write(
                current.round,
                self._about(),
                nodes,
                packer.tensors,
                # From which the clients go on, and those of their best evaluation.
                all_needs(
                    {pid: [version] for pid, version in versions.items()}
                    for versions in (self._strategy.versions, *self._strategy.pinned.values())
                ),
                self._store.load if self._store else None,
                RECORDS + 2 * sum(map(trees.nbytes, self._strategy.weights.values())),
            )
        except (OSError, TypeError, ValueError) as error:
            log.warning("round %d has no checkpoint: %s", current.round, error)
            return
        self._written = True
        self._pin()

    def _about(self) -> dict[str, Any]:
        return {
            "seconds": self._recorder.seconds,
            "rows": self._recorder.rows,
            "at_sites": self._store is None,
            "run_id": self._strategy.run_id,
            "timetable": [
                [entry.name, entry.rounds, entry.phase.rounds] for entry in self._strategy.timetable
            ],
        }

    def _pin(self) -> None:
        """Let clients that keep their states themselves keep those that checkpoints need."""
        if self._store is None:
            self._strategy.kept_back = self._folder.needs


def continued(timetable: Sequence[TimetableEntry], found: Checkpoint) -> list[TimetableEntry]:
    """The timetable with the phases that have ended as they did; the last may have more rounds.

    Raises:
        ValueError: these are not the phases of the checkpoint's run.
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

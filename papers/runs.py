"""The runs of a folder that have a result, each with its peers for comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fedhet.data.storage import read_tensors
from fedhet.study.report.results import DIVERGED, FoundRun, Results

if TYPE_CHECKING:
    from fedhet.core.trees import Tree

TRAIN = "train"
Point = tuple[int, float]  # the number of a training round, and a score


@dataclass
class ReproducedRun:
    """A run with a result.

    Attributes:
        cell: the run.
        results: all runs of the folder.
        peers: label of a method -> the run with the same setting and seed; this run included.
        methods: the labels of all methods of the experiment.
        host: the label of the base method to which the paper adds something; None: no base method.
    """

    cell: FoundRun
    results: Results
    peers: dict[str, ReproducedRun]
    methods: frozenset[str]
    host: str | None = None

    @property
    def rivals(self) -> list[ReproducedRun]:
        """The other peers; empty if a method has no run, because a part of them would mislead."""
        others = [peer for peer in self.peers.values() if peer is not self]
        return others if self.methods <= self.peers.keys() else []

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of rounds.jsonl."""
        return self.results.steps(self.cell)

    @property
    def planned(self) -> int:
        """The planned number of training rounds."""
        return max(int(self.cell.summary.get("rounds") or 0), self.rounds_of(TRAIN))

    @property
    def diverged(self) -> bool:
        """Whether its model is no longer finite."""
        return self.cell.status == DIVERGED

    @cached_property
    def curve(self) -> list[Point]:
        """The score at each evaluation.

        It is the global model's score on the global test set, or without such a set the mean score
        over the clients' own test data.
        """
        return self.recorded("acc_global", "acc_clients_mean")

    @cached_property
    def clients_curve(self) -> list[Point]:
        """The mean score over the clients' own test data at each evaluation."""
        return self.recorded("acc_clients_mean")

    def recorded(self, *keys: str) -> list[Point]:
        """Return each training round with its value; the first key that the round has counts."""
        points = []
        for step in self.steps:
            value = next((float(step[key]) for key in keys if step.get(key) is not None), None)
            if step["phase"] == TRAIN and value is not None:
                points.append((int(step["step"]), value))
        return points

    def arrays(self, component: str) -> Tree:
        """Return the arrays of a plug-in from the last training round; empty if there are none."""
        last = max((step["step"] for step in self.steps if step["phase"] == TRAIN), default=0)
        path = self.cell.folder / "arrays" / f"{component}-{last}.safetensors"
        return read_tensors(path) if path.exists() else {}

    def rounds_of(self, phase: str) -> int:
        """Return the number of rounds of a phase."""
        return sum(step["phase"] == phase for step in self.steps)


def runs_of(
    results: Results, compare: str, hosts: Mapping[str, str] | None = None
) -> list[ReproducedRun]:
    """Return the runs of a folder that have a result, each with its peers.

    Args:
        results: all runs of the folder.
        compare: the axis on which peers differ.
        hosts: label of a method -> label of its base method.
    """
    together: dict[tuple[tuple[str, str], ...], dict[str, ReproducedRun]] = {}
    methods = frozenset(map(str, results.axes.get(compare, ())))
    runs = []
    for cell in results.cells:
        if not cell.counts:
            continue
        others = tuple((axis, str(v)) for axis, v in cell.axes.items() if axis != compare)
        peers = together.setdefault(others, {})
        label = str(cell.axes.get(compare))
        peers[label] = run = ReproducedRun(cell, results, peers, methods, (hosts or {}).get(label))
        runs.append(run)
    return runs

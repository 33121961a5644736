"""The runs of a folder that have a result, each with those that it is compared with."""

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
        peers: those of the same setting and seed, itself included; label of the method -> run.
        methods: the labels of all methods that the experiment has.
        host: the label of the method without what the paper adds to it; None: it adds nothing.
    """

    cell: FoundRun
    results: Results
    peers: dict[str, ReproducedRun]
    methods: frozenset[str]
    host: str | None = None

    @property
    def rivals(self) -> list[ReproducedRun]:
        """The peers without itself; empty if one of them is missing, as a part would mislead."""
        others = [peer for peer in self.peers.values() if peer is not self]
        return others if self.methods <= self.peers.keys() else []

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of rounds.jsonl."""
        return self.results.steps(self.cell)

    @property
    def planned(self) -> int:
        """How many rounds of training the run was to have."""
        return max(int(self.cell.summary.get("rounds") or 0), self.rounds_of(TRAIN))

    @property
    def diverged(self) -> bool:
        """Whether its model is no longer finite."""
        return self.cell.status == DIVERGED

    @cached_property
    def curve(self) -> list[Point]:
        """The score of each evaluation.

        It is that of the global model on the global test set, where there is one, else its mean
        over the clients' own test data.
        """
        return self.recorded("acc_global", "acc_clients_mean")

    @cached_property
    def clients_curve(self) -> list[Point]:
        """The mean score over the clients' own test data at each evaluation."""
        return self.recorded("acc_clients_mean")

    def recorded(self, *keys: str) -> list[Point]:
        """What each round of training has recorded under the first of the keys that it has."""
        points = []
        for step in self.steps:
            value = next((float(step[key]) for key in keys if step.get(key) is not None), None)
            if step["phase"] == TRAIN and value is not None:
                points.append((int(step["step"]), value))
        return points

    def arrays(self, component: str) -> Tree:
        """What a plug-in has recorded in arrays/ of the last round; empty if nothing."""
        last = max((step["step"] for step in self.steps if step["phase"] == TRAIN), default=0)
        path = self.cell.folder / "arrays" / f"{component}-{last}.safetensors"
        return read_tensors(path) if path.exists() else {}

    def rounds_of(self, phase: str) -> int:
        """How many rounds a phase had."""
        return sum(step["phase"] == phase for step in self.steps)


def runs_of(
    results: Results, compare: str, hosts: Mapping[str, str] | None = None
) -> list[ReproducedRun]:
    """The runs of a folder that have a result, each with its peers.

    Args:
        results: the folder.
        compare: the axis on which peers differ.
        hosts: label of a method -> that of its host.
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

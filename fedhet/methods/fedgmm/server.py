"""FedGMM's server half: pools the clients' mixtures and hands them to everyone."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from fedhet.core.check import counted
from fedhet.core.errors import ConfigError
from fedhet.core.messages import Broadcast, Update
from fedhet.core.phases import Phase
from fedhet.core.trees import Tree
from fedhet.maths import fedgmm as maths
from fedhet.maths.fedgmm import Mixture
from fedhet.methods.fedgmm.client import COUNTS, GENERATED, GLOBAL_MAX
from fedhet.methods.fedgmm.mixtures import MIXTURES, checked_size, pack, unpack
from fedhet.methods.fedgmm.options import MixtureOptions

log = logging.getLogger("fedhet")


class MixtureServer(MixtureOptions):
    """Declares the phases `fit` and `share`, merges their replies, and schedules the training."""

    memory = ("_d", "_pooled", "_global_max", "_counts", "_generated")
    releases = {"fit": 2}

    @property
    def refuses_noise(self) -> str:
        augmented = self.agg_count == "augmented"
        return "agg_count=augmented needs exact counts; use original" if augmented else ""

    @property
    def changes_weights(self) -> bool:
        return self.agg_count == "augmented"

    def setup(self) -> None:
        task = self.server.workspace.task
        task.check_classes("plugin 'fedgmm'")
        task.check_density(self.name)
        weighs_by_samples = self.server.base_weight(Update(0, num_examples=2)) == 2
        if self.agg_count == "augmented" and not weighs_by_samples:
            raise ConfigError(
                f"plugin 'fedgmm' refuses method={self.server.name} with"
                " plugin.fedgmm.agg_count=augmented: it adds drawn samples to n_k, by which this"
                " method does not weigh clients; use agg_count=original"
            )
        # The number of pixels; without a global test set the first client's mixtures decide.
        self._d = None if task.test is None else math.prod(task.test.x.shape[1:])
        self._pooled: Tree = {}  # the packed mixtures of all clients, until they are shared
        self._global_max = 0  # the largest class of any client
        self._counts: dict[int, list[int]] = {}  # client -> samples by class, until it has drawn
        self._generated: dict[int, int] = {}  # client -> how many samples it drew

    def phases(self) -> list[Phase]:
        return [
            Phase("fit", 1, self._pool_mixtures, check=self._check_fit, slot="", cohort=1.0),
            Phase("share", 1, self._note_generated, check=self._check_share, slot="", cohort=1.0),
        ]

    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        if msg.phase == "fedgmm.share":
            msg.extras[MIXTURES] = self._pooled
            if self.target == "global_max":
                msg.extras[GLOBAL_MAX] = self._global_max
        if msg.trains:  # algorithm 1, line 8
            # The rate has client.lr_decay in it already; of the two decays the stronger applies.
            decay = min(1.0, (1 - self.psi) / self.server.setting.lr_decay)
            msg.local = replace(msg.local, lr=msg.local.lr * decay ** (msg.step - 1))

    # ---- phase "fit"
    def _check_fit(self, update: Update) -> None:
        """Every class with enough samples has a mixture, of no more components than it may have."""
        counts, mixtures = self._unpacked(update)
        for c, n in enumerate(counts):
            if (n >= self.min_class_samples) != (c in mixtures):
                raise ValueError(
                    f"extra {MIXTURES!r}, class {c}: {counted(n, 'sample')} and"
                    f" {'a' if c in mixtures else 'no'} mixture; a mixture is expected if and only"
                    f" if there are min_class_samples={self.min_class_samples} samples"
                )
            if c not in mixtures:
                continue
            most = maths.components(n, self.components)
            if len(mixtures[c].pi) > most:
                raise ValueError(
                    f"extra {MIXTURES!r}, class {c}: {counted(len(mixtures[c].pi), 'component')} of"
                    f" {counted(n, 'sample')}; expected: at most {most}"
                )
        if mixtures and self._d is None:
            self._d = next(iter(mixtures.values())).mu.shape[1]

    def _unpacked(self, update: Update) -> tuple[list[int], dict[int, Mixture]]:
        """A reply's samples by class, and its mixtures by class."""
        classes = self.server.workspace.task.classes
        least = 0 if self.server.workspace.noise else self.server.workspace.min_count
        counts = update.counts(COUNTS, update.num_examples, classes, least)
        return counts.tolist(), unpack(update.tree(MIXTURES), self._d, classes, self.reg_covar)

    def _pool_mixtures(self, updates: Iterator[Update], old: Tree) -> Tree:
        """The merge of `fit`: concatenate the clients' mixtures of each class.

        They are in the order of client ids, whatever that of the cohort.
        """
        replies = {update.pid: self._unpacked(update) for update in updates}
        pids = sorted(replies)
        counts = torch.tensor([replies[pid][0] for pid in pids])
        pooled: dict[int, Mixture] = {}
        for c in range(self.server.workspace.task.classes):
            mixture = maths.aggregate(
                counts[:, c].tolist(), [replies[pid][1].get(c) for pid in pids]
            )
            if mixture is not None and self.max_components is not None:
                mixture = maths.reduce(mixture, self.max_components)
            if mixture is not None:
                pooled[c] = mixture
        self._counts = {pid: replies[pid][0] for pid in pids}
        absent = self._warn_of_absent(pooled)
        thin = self._warn_of_thin(replies.values())
        d = self._d or 0
        self._pooled = pack(pooled, d)
        self._global_max = int(counts.max())
        components = len(self._pooled["label"])
        megabytes = checked_size("all clients", components, d, self.max_payload_mb)
        sent = counted(components, "component")
        log.info("fedgmm: %s, %.1f MB to each client", sent, megabytes)
        self.recorded = {
            "counts": counts,
            "pids": torch.tensor(pids),
            "components": components,
            "thin": thin,
            "megabytes": megabytes,
            "absent": absent,
        }
        return {}

    def _warn_of_absent(self, pooled: dict[int, Mixture]) -> int:
        """Return the number of classes without any mixture; warn where there are some."""
        absent = [c for c in range(self.server.workspace.task.classes) if c not in pooled]
        if absent:
            log.warning(
                "fedgmm: no client has a mixture of the classes %s; nothing is generated for them",
                absent,
            )
        return len(absent)

    def _warn_of_thin(self, replies: Iterable[tuple[list[int], dict[int, Mixture]]]) -> int:
        """Return the number of clients' mixtures with fewer than 10 samples per component.

        Warn where there are some, and components may be of two samples.
        """
        shares = [
            counts[c] / len(mixture.pi) for counts, sent in replies for c, mixture in sent.items()
        ]
        thin = sum(share < 10 for share in shares)
        if thin and self.server.workspace.min_count < 5:
            log.warning(
                "fedgmm: privacy: %d of %s have fewer than 10 samples per component; with"
                " privacy.min_count=%d their components may be near-copies of images",
                thin,
                counted(len(shares), "mixture"),
                self.server.workspace.min_count,
            )
        return thin

    # ---- phase "share"
    def _check_share(self, update: Update) -> None:
        """How many samples the client drew follows from the counts that it has sent.

        Where its counts were not accepted, nothing follows, and the number is not used.
        """
        if self.server.workspace.noise:
            return
        generated = update.integer(GENERATED)
        if update.pid not in self._counts:
            return
        if generated != (expected := self._lacking(self._counts[update.pid])):
            raise ValueError(
                f"extra {GENERATED!r} is {generated}; {expected} would follow from the counts that"
                " the client has sent"
            )

    def _lacking(self, counts: list[int]) -> int:
        labels = set(self._pooled["label"].tolist())
        available = torch.tensor([c in labels for c in range(len(counts))])
        lacking = maths.generate_counts(
            torch.tensor(counts), available, self.target, self._global_max
        )
        return int(lacking.sum())

    def _note_generated(self, updates: Iterator[Update], old: Tree) -> Tree:
        """The merge of `share`: note how many samples each client drew, and drop the mixtures."""
        if not self.server.workspace.noise:  # then no client sends how many
            drawn = {update.pid: update.integer(GENERATED) for update in updates}
            self._generated = {pid: n for pid, n in drawn.items() if pid in self._counts}
            self.recorded = {"generated": sum(self._generated.values())}
        self._pooled, self._counts = {}, {}
        return {}

    # ---- training
    def incoming(self, updates: Iterator[Update], old: Tree) -> Iterator[Update]:
        for update in updates:
            if self.agg_count == "augmented":
                generated = self._generated.get(update.pid, 0)
                update.weight *= 1 + generated / update.num_examples
            yield update

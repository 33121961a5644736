"""FedDisk's server half: averages the MADEs, stops their training, and records what it cost."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from fedhet.core import trees
from fedhet.core.check import MOST_SAMPLES, counted
from fedhet.core.errors import ConfigError
from fedhet.core.messages import Broadcast, Recorded, Update
from fedhet.core.metrics import comm_cost
from fedhet.core.phases import EarlyStopping, Phase
from fedhet.core.trees import Tree
from fedhet.methods.feddisk import networks
from fedhet.methods.feddisk.client import ESS, VAL, held_out_of
from fedhet.methods.feddisk.options import DensityOptions

log = logging.getLogger("fedhet")

SLOT = "density"  # the global MADE


class DensityServer(DensityOptions):
    """Declares the phases `density` and `weigh`, and merges their replies."""

    memory = ("_early", "_best", "_made_rounds", "_train_rounds")

    def setup(self) -> None:
        self.server.workspace.task.check_density(self.name)
        self._check_ratio()
        unsized = self.server.workspace.task.unsized
        largest = MOST_SAMPLES if unsized else max(self.server.sizes)
        if self.ratio != "raw" and largest < self._weighed:
            log.warning(
                "feddisk: every client has fewer than min_samples=%d samples: all weights are 1",
                self._weighed,
            )
        held_out = held_out_of(largest) if largest >= self.min_samples else 0
        if self.ratio != "raw" and held_out < max(1, self.server.workspace.min_count):
            log.warning(
                "feddisk: no client validates the global MADE, because none has min_samples=%d and"
                " holds out privacy.min_count=%d: all made_max_rounds=%d rounds are executed",
                self.min_samples,
                self.server.workspace.min_count,
                self.made_max_rounds,
            )
        self._early = EarlyStopping(self.made_patience)
        self._best: Tree = {}  # the global MADE with the lowest validation loss
        self._made_rounds = 0  # E_1
        self._train_rounds = 0  # E_2

    @property
    def _weighed(self) -> int:
        """The smallest number of samples of a client that estimates density ratios."""
        return max(self.min_samples, self.server.workspace.min_count)

    def _check_ratio(self) -> None:
        """Warn of ratio=raw, and refuse it where it is not a simulation's.

        Raises:
            ConfigError: the ratio does not fit the engine.
        """
        if self.ratio != "raw":
            return
        if not self.server.workspace.simulated:
            raise ConfigError(
                "plugin.feddisk.ratio=raw (FedDiskAb) pools the clients' raw data, which only a"
                " simulation can do: run it with engine=local or engine=ray"
            )
        log.warning(
            "feddisk: ratio=raw (FedDiskAb) pools the raw data of all clients; it is a"
            " simulation, not federated learning"
        )

    @property
    def refuses_noise(self) -> str:
        return "ratio=raw pools the clients' raw data" if self.ratio == "raw" else ""

    def slots(self) -> dict[str, Tree]:
        if self.ratio == "raw":
            return {}
        workspace = self.server.workspace
        return {
            SLOT: networks.initial_made(workspace, workspace.task.inputs[0].numel(), self.hidden)
        }

    def phases(self) -> list[Phase]:
        density = Phase(
            "density",
            self.made_max_rounds,
            self._average_mades,
            check=self._check_density,
            slot=SLOT,
            cohort=1.0,
            until=self._stopped,
            after=self._restore_best,
        )
        weigh = Phase(
            "weigh",
            1,
            self._record_effective_sizes,
            check=self._check_weigh,
            slot="" if self.ratio == "raw" else SLOT,
            cohort=1.0,
            uploads=False,
        )
        return [weigh] if self.ratio == "raw" else [density, weigh]

    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        if msg.trains:
            self._train_rounds += 1
        self.recorded = self._costs()

    # ---- phase 1, "density": the federation trains the global MADE
    def _check_density(self, update: Update) -> None:
        if self.server.workspace.noise:  # no loss leaves a client, so all rounds are executed
            return
        if VAL in update.extras or update.num_examples >= self.min_samples:
            _validation(update)

    def _average_mades(self, updates: Iterator[Update], old: Tree) -> Tree:
        """The merge of `density`: equation 12, by n_k whatever the host's own weights are.

        The clients' validation losses are those of the MADE with which the round began.
        """
        change = self.server.setting.merge.average()
        total_loss = 0.0
        validating = 0  # the samples of the clients that validate
        for update in updates:
            n = update.num_examples
            change.add(update.change, n)
            if VAL in update.extras and (val := _validation(update)) is not None:
                total_loss += n * val
                validating += n
        self._made_rounds += 1
        self.recorded = self._costs()
        if validating:
            loss = total_loss / validating
            self.recorded["val_loss"] = loss
            self._early(loss)
            if not self._early.stale:
                self._best = old
        return trees.add(change.mean(reuse=True), old)

    def _stopped(self) -> bool:
        return self._early.stale >= self._early.patience

    def _restore_best(self) -> None:
        """Put the best MADE back.

        If the last validated MADE was the best so far, keep the one trained from it, which no
        client has validated.
        """
        if self._early.stale:
            self.server.weights[SLOT] = self._best

    # ---- phase 2, "weigh": each client estimates the density ratio of its samples
    def _check_weigh(self, update: Update) -> None:
        if ESS not in update.metrics and not self.server.workspace.noise:
            raise ValueError(f"the reply lacks the metric {ESS!r}")
        if not 0 <= (share := update.metrics.get(ESS, 0.0)) <= 1 + 1e-6:
            raise ValueError(f"metric {ESS!r} is {share:g}; a share of the samples is expected")

    def _record_effective_sizes(self, updates: Iterator[Update], old: Tree) -> Tree:
        """The merge of `weigh`: record the clients' effective sample sizes; no weights change."""
        shares = {u.pid: u.metrics[ESS] for u in updates if ESS in u.metrics}
        if not shares:  # under privacy.noise the weights are not sent
            return {}
        low = [pid for pid, share in shares.items() if share < 0.5]
        if low:
            worst = min(low, key=shares.__getitem__)
            log.warning(
                "feddisk: the effective sample size is below n_k / 2 for %d of %s, the"
                " lowest %.2f n_k for client %d: the weights make their updates noisier",
                len(low),
                counted(len(shares), "client"),
                shares[worst],
                worst,
            )
        ess = torch.tensor(list(shares.values()), dtype=torch.float64)
        self.recorded = {
            "ess": ess,
            "pids": torch.tensor(list(shares)),
            "ess_mean": float(ess.mean()),
            "ess_min": float(ess.min()),
            "unweighted": sum(self.server.sizes[pid] < self._weighed for pid in shares),
            **self._costs(),
        }
        return {}

    # ---- costs
    def _costs(self) -> Recorded:
        """E_1, and how many numbers one client has sent and received so far.

        That is equation 19, or equation 18 without a MADE.
        """
        made = self._numbers(SLOT) if SLOT in self.server.weights else 0
        cost = comm_cost(self._numbers("model"), self._train_rounds, made, self._made_rounds)
        return {"E1": self._made_rounds, "cost": cost}

    def _numbers(self, slot: str) -> int:
        """How many numbers travel one way with this slot."""
        sent = self.server.sent(slot)
        return sum(t.numel() for t in sent.values() if t.is_floating_point())


def _validation(update: Update) -> float | None:
    """A client's validation loss; None where it withholds that of too few samples.

    Raises:
        ValueError: the extra is missing, or neither of these.
    """
    if isinstance(update.extras.get(VAL), torch.Tensor) and not len(update.tensor(VAL, ndim=1)):
        return None
    if (loss := update.scalar(VAL)) < 0:
        raise ValueError(f"extra {VAL!r} is {loss:g}; a negative log-likelihood of bits is >= 0")
    return loss

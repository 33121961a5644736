"""FedDisk (Nguyen, Wu and Chang, "Federated learning for distribution skewed data using sample
weights"): a wrapper of any host.

    MADE_g <- sum_k (n_k / n) MADE_k, until the n-weighted validation loss stops falling (eq. 12);
    MADE_k: on the client's own data h: a classifier of label 0 = local against 1 = global; r_i =
    h_i / (1 - h_i) n_local / n_global (eq. 16) w_i = clip(r_i, lo, hi) / mean; the host then trains
    on (1/|B|) sum_b w_b l_b (eq. 10)

    down: `density` slot (phase density, then weigh), then the host's      up: `density` slot,
    `feddisk.val` (density), then the host's client keeps: w (n_k floats)      server keeps: the
    best global MADE, E_1

What the classifier sees (`ratio`): `sampled` (section 5.5) draws n_k points from each MADE, takes z
= MADE_k's outputs of both and evaluates at z_i of the client's own samples, a density-ratio
estimate; `outputs` (5.3, literally) sees both MADEs' outputs of the same x_i and tells the networks
apart, so w is mostly 1; `raw` is FedDiskAb: own pixels against n_k drawn from the union of all
clients' data, which no real federation has: simulation only.

Masks and the first weights are functions of the run's seed, so local MADEs start where the global
one does and nothing but weights travels. Deviations: Adam 1e-3 for the MADEs (the authors' program;
the paper prints SGD .01); a patience of 3 rounds; the clip and the mean of 1, which keeps the
learning rate's meaning, are not in the paper."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedhet import check, density, streams, trees
from fedhet.client import FedClient
from fedhet.errors import ConfigError
from fedhet.maths import feddisk
from fedhet.messages import Broadcast, LocalSettings, Update
from fedhet.metrics import comm_cost
from fedhet.phases import EarlyStopping, Phase
from fedhet.plugin import Plugin, Report
from fedhet.site import Site
from fedhet.strategy import FedStrategy
from fedhet.task import Samples
from fedhet.trees import Tree

log = logging.getLogger("fedhet")
SLOT, VAL, ESS, KEPT = "density", "feddisk.val", "feddisk.ess", "feddisk.w"
HELD_OUT = 0.1  # of a client's training data, to validate MADEs


class FedDiskPlugin(Plugin):
    """Phases `density` and `weigh`, then sample weights in every training."""

    name = "feddisk"

    def __init__(
        self,
        *,
        ratio: str = "sampled",
        hidden: int = 50,
        masks: str = "even",
        features: str = "outputs",
        binarise: bool = False,
        made_optimizer: str = "adam",
        made_lr: float = 1e-3,
        made_batch_size: int = 64,
        made_local_epochs: int = 2,
        made_patience: int = 3,
        made_max_rounds: int = 500,
        local_patience: int = 5,
        local_max_epochs: int = 500,
        clf_hidden: int = 100,
        clf_lr: float = 0.01,
        clf_batch_size: int = 32,
        clf_patience: int = 10,
        clf_tolerance: float = 1e-4,
        clf_max_epochs: int = 200,
        normalise: str = "mean1",
        lo: float = 0.1,
        hi: float = 10.0,
        eps: float = 1e-6,
        min_samples: int = 10,
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(**options)

        def word(name: str, *allowed: str) -> str:
            return check.one_of(f"plugin.feddisk.{name}", self.settings[name], allowed)

        def whole(name: str, low: int = 1) -> int:
            return check.integer(f"plugin.feddisk.{name}", self.settings[name], low=low)

        def number(name: str, **limits: float) -> float:
            return check.number(f"plugin.feddisk.{name}", self.settings[name], **limits)

        self.ratio, self.masks = (
            word("ratio", "sampled", "outputs", "raw"),
            word("masks", "even", "random"),
        )
        self.features, self.normalise = (
            word("features", "outputs", "conditional"),
            word("normalise", "mean1", "minmax2", "none"),
        )
        self.binarise, self.hidden = (
            check.boolean("plugin.feddisk.binarise", binarise),
            whole("hidden"),
        )
        self.made = LocalSettings(
            number("made_lr", open_low=0),
            whole("made_local_epochs"),
            whole("made_batch_size"),
            optimizer=word("made_optimizer", "adam", "sgd"),
        )
        self.made_patience, self.made_max_rounds = whole("made_patience"), whole("made_max_rounds")
        self.local, self.local_patience = (
            replace(self.made, epochs=whole("local_max_epochs")),
            whole("local_patience"),
        )
        self.clf = LocalSettings(
            number("clf_lr", open_low=0), whole("clf_max_epochs"), whole("clf_batch_size")
        )
        self.clf_hidden, self.clf_patience, self.clf_tolerance = (
            whole("clf_hidden"),
            whole("clf_patience"),
            number("clf_tolerance", low=0),
        )
        self.lo, self.hi = number("lo", open_low=0, high=1), number("hi", low=1)
        self.eps, self.min_samples = (
            number("eps", open_low=0, open_high=0.5),
            whole("min_samples", low=2),
        )
        if binarise and ratio == "raw":
            raise ConfigError(
                "plugin.feddisk.binarise=true is for the MADEs; plugin.feddisk.ratio=raw has none"
            )
        self._early = EarlyStopping(self.made_patience)
        self._best: Tree = {}
        self._made_rounds = self._train_rounds = 0
        self._stop = False

    def mask(self, dim: int, seed: int) -> feddisk.Masks:
        return feddisk.masks(
            dim,
            self.hidden,
            streams.generator(seed, "feddisk.masks") if self.masks == "random" else None,
        )

    def initial(self, site: Site, dim: int) -> Tree:
        """The common first MADE."""
        draw = torch.Generator().manual_seed(streams.integer(site.seed, "feddisk.init"))
        return trees.map(lambda t: t.to(site.device), feddisk.initial(dim, self.hidden, draw))

    # ---- server
    def setup(self) -> None:
        site, method = self.server.site, self.server.name
        site.task.check_density(self.name)
        if self.ratio == "raw":
            if not site.simulated:
                raise ConfigError(
                    "plugin.feddisk.ratio=raw (FedDiskAb) pools the clients' raw data; that is a"
                    " simulation: run it with engine=local or engine=ray"
                )
            log.warning(
                "feddisk: ratio=raw (FedDiskAb) pools the raw data of all clients; it is a"
                " simulation, not federated learning"
            )
        elif method == "feddiskab":
            raise ConfigError(
                "method=feddiskab is FedDisk with plugin.feddisk.ratio=raw and refuses"
                f" ratio={self.ratio}; leave plugin=[feddisk] and the ratio out, or use"
                " method=feddisk"
            )
        elif max(self.server.sizes) < self.min_samples:
            log.warning(
                "feddisk: every client has fewer than min_samples=%d samples: all weights are 1,"
                " and nobody validates the global MADE, so all made_max_rounds=%d rounds are run",
                self.min_samples,
                self.made_max_rounds,
            )

    def slots(self) -> dict[str, Tree]:
        if self.ratio == "raw":
            return {}
        site = self.server.site
        return {SLOT: self.initial(site, site.task.inputs[0].numel())}

    def phases(self) -> list[Phase]:
        if self.ratio == "raw":
            return [
                Phase("weigh", 1, self._weighed, check=self._check_weighed, slot="", cohort=1.0)
            ]
        return [
            Phase(
                "density",
                self.made_max_rounds,
                self._average,
                check=self._check_density,
                slot=SLOT,
                cohort=1.0,
                until=lambda: self._stop,
                after=self._restore,
            ),
            Phase(
                "weigh",
                1,
                self._weighed,
                check=self._check_weighed,
                slot=SLOT,
                cohort=1.0,
                uploads=False,
            ),
        ]

    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        self._train_rounds += msg.trains
        self.report = self._costs()

    def _check_density(self, update: Update) -> None:
        if VAL in update.extras or update.num_examples >= self.min_samples:
            update.scalar(VAL)

    def _check_weighed(self, update: Update) -> None:
        if ESS not in update.metrics:
            raise ValueError(f"the reply lacks the metric {ESS!r}")

    def _average(self, updates: Iterator[Update], old: Tree) -> Tree:
        """Equation 12, by n_k whatever the host's own weights are; and how good the MADE is that
        the round began with."""
        total, loss, samples = trees.Sum(), 0.0, 0
        for update in updates:
            n = update.num_examples
            total.add(update.change, n)
            if VAL in update.extras:
                loss, samples = loss + n * update.scalar(VAL), samples + n
        self._made_rounds += 1
        self.report = self._costs()
        if samples:
            self.report["val_loss"] = loss / samples
            self._stop = self._early(loss / samples)
            self._best = self._best if self._early.stale else old
        return trees.add(total.mean(reuse=True), old)

    def _restore(self) -> None:
        """The best MADE, unless the loss fell until the last permitted round: then the newest,
        which nobody has validated."""
        if self._early.stale:
            self.server.weights[SLOT] = self._best

    def _weighed(self, updates: Iterator[Update], old: Tree) -> Tree:
        found = {update.pid: update.metrics[ESS] for update in updates}
        low = [pid for pid, share in found.items() if share < 0.5]
        if low:
            worst = min(low, key=found.__getitem__)
            log.warning(
                "feddisk: the effective sample size is below n_k / 2 for %d of %d clients, the"
                " lowest %.2f n_k for client %d: the weights make their updates noisier",
                len(low),
                len(found),
                found[worst],
                worst,
            )
        shares = torch.tensor(list(found.values()), dtype=torch.float64)
        self.report = {
            "ess": shares,
            "pids": torch.tensor(list(found)),
            "ess_mean": float(shares.mean()),
            "ess_min": float(shares.min()),
            "unweighted": sum(self.server.sizes[pid] < self.min_samples for pid in found),
            **self._costs(),
        }
        return {}

    def _costs(self) -> Report:
        """E1 and equation 19 so far."""
        sizes = {
            slot: sum(t.numel() for t in self.server.sent(slot).values() if t.is_floating_point())
            for slot in ("model", SLOT)
            if slot in self.server.weights
        }
        cost = comm_cost(sizes["model"], self._train_rounds, sizes.get(SLOT, 0), self._made_rounds)
        return {"E1": self._made_rounds, "cost": cost}

    # ---- client
    def density(self, msg: Broadcast) -> Update:
        """Local epochs of the global MADE, and the validation loss of the one received."""
        client, x = self.client, self._inputs()
        train, held = self._split(x)
        mask, made = self._mask(x), self._trainable(msg.weights)
        update = Update(client.pid, client.num_examples)
        if len(held):
            update.extras[VAL] = density.mean_nll(made, mask, held)
        *_, update.metrics["feddisk.nll"] = density.made_epochs(
            "global MADE", made, mask, train, self.made, self._draws("made")
        )
        update.weights = trees.map(Tensor.detach, made)
        return update

    def weigh(self, msg: Broadcast) -> Update:
        """This client's sample weights, which it keeps; the local MADE and the classifier are
        forgotten."""
        x, pid = self._inputs(), self.client.pid
        n = len(x)
        w = torch.ones(n)
        if n >= self.min_samples:
            local, globe, own = self._compared(x, msg.weights)
            with self.client.site.seeded("feddisk.classifier", pid=pid):
                stop = EarlyStopping(self.clf_patience, self.clf_tolerance)
                p = density.classify(
                    local, globe, own, self.clf_hidden, self.clf, stop, self._draws("classifier")
                )
            r = feddisk.density_ratio(p.cpu(), len(local), len(globe), self.eps)
            w = feddisk.sample_weights(r, self.lo, self.hi, self.normalise).float()
        self.client.state.put(KEPT, {"w": w})
        return Update(pid, n, metrics={ESS: feddisk.effective_size(w.double()) / n})

    def sample_weights(self, data: Samples) -> Tensor:
        """(n,): the weights of the client's own samples, which come first; samples that another
        plug-in has added get 1."""
        kept = self.client.state.get(KEPT)
        if kept is None:
            raise ValueError(
                "it has no sample weights: phase 'feddisk.weigh' has not reached it, or failed"
                " there"
            )
        w = kept["w"]
        if len(data) < len(w):
            raise ValueError(f"it trains on {len(data)} samples, but has weights for {len(w)}")
        return torch.cat([w, w.new_ones(len(data) - len(w))]).to(data.x.device)

    def _draws(self, purpose: str) -> torch.Generator:
        client = self.client
        name = f"feddisk.{purpose}", client.msg.phase, client.msg.step, client.pid
        return streams.torch_generator(client.site.seed, *name)

    def _inputs(self) -> Tensor:
        """(n, D) in [0, 1], before any normalisation; with `binarise` one Bernoulli draw of each,
        the same in every phase."""
        site, pid = self.client.site, self.client.pid
        x = self._pixels(pid)
        if self.binarise:
            draws = torch.Generator().manual_seed(
                streams.integer(site.seed, "feddisk.binarise", pid=pid)
            )
            x = (torch.rand(x.shape, generator=draws).to(site.device) < x).float()
        return x

    def _pixels(self, pid: int) -> Tensor:
        site = self.client.site
        x = site.floating(site.task.clients[pid].train).x.flatten(1).float()
        try:
            feddisk.check_pixels(x)
        except ValueError as error:
            raise ValueError(
                f"the data of client {pid}: {error}"
            ) from error  # which may be another's, from whose data this one draws
        return x

    def _mask(self, x: Tensor) -> feddisk.Masks:
        site = self.client.site
        return feddisk.Masks(*(t.to(site.device) for t in self.mask(x.shape[1], site.seed)))

    def _trainable(self, made: Tree) -> Tree:
        return trees.map(lambda t: t.to(self.client.site.device, copy=True).requires_grad_(), made)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(training part, held-out part); clients below `min_samples` hold out nothing."""
        n = len(x)
        order = streams.generator(
            self.client.site.seed, "feddisk.split", pid=self.client.pid
        ).permutation(n)
        held = max(1, int(HELD_OUT * n + 0.5)) if n >= self.min_samples else 0
        return x[torch.from_numpy(order[held:])], x[torch.from_numpy(order[:held])]

    @torch.no_grad()
    def _features(self, made: Tree, mask: feddisk.Masks, x: Tensor) -> Tensor:
        out = feddisk.logits(made, mask, x).sigmoid()
        return out if self.features == "outputs" else x * out + (1 - x) * (1 - out)

    def _compared(self, x: Tensor, received: Tree) -> tuple[Tensor, Tensor, Tensor]:
        """What the classifier sees: local features (label 0), global ones (label 1), and where it
        is evaluated, at the n own samples."""
        if not received:
            return x, self._pooled(len(x)), x
        mask, globe = self._mask(x), trees.map(lambda t: t.to(x.device), received)
        local = density.fit_made(
            self._trainable(self.initial(self.client.site, x.shape[1])),
            mask,
            *self._split(x),
            self.local,
            self.local_patience,
            self._draws("local"),
        )
        own = self._features(local, mask, x)
        if self.ratio == "outputs":
            return own, self._features(globe, mask, x), own
        draws = self._draws("samples")
        drawn = [
            feddisk.sample(made, mask, torch.rand(x.shape, generator=draws).to(x.device))
            for made in (local, globe)
        ]
        return self._features(local, mask, drawn[0]), self._features(local, mask, drawn[1]), own

    def _pooled(self, n: int) -> Tensor:
        """FedDiskAb: n samples of the union of all clients' training data, without replacement."""
        sizes = self.client.site.task.sizes
        chosen = streams.generator(
            self.client.site.seed, "feddisk.pool", pid=self.client.pid
        ).choice(sum(sizes), n, replace=False)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        row = np.arange(sum(sizes)) - np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
        return torch.cat(
            [
                self._pixels(pid)[torch.from_numpy(row[chosen[owner[chosen] == pid]])]
                for pid in np.unique(owner[chosen])
            ]
        )


class FedDiskClient(FedClient):
    """Plain FedAvg training; the plug-in weighs the samples."""


class FedDisk(FedStrategy):
    """FedAvg with the plug-in above (conf/method/feddisk.yaml lists it)."""

    name = "feddisk"
    client_cls = FedDiskClient
    requires = "feddisk"


class FedDiskAb(FedStrategy):
    """FedDisk with ratio=raw, the paper's ablation (conf/method/feddiskab.yaml)."""

    name = "feddiskab"
    client_cls = FedDiskClient
    requires = "feddisk"

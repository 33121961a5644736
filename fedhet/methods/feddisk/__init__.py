"""FedDisk: each sample is weighted by the ratio of the global to the local density.

Nguyen, Wu and Chang, "Federated learning for distribution skewed data using sample weights".
FedDisk is a plug-in for any base method, in three phases:

1. "density": the federation trains one MADE, a model of the density of all clients' inputs.
2. "weigh": each client fits a MADE to its own inputs, and trains a classifier h to distinguish
   local from global samples. The classifier gives the density ratio, and so the weight, of each
   sample.
3. Training: the base method trains on weighted samples.

h_i is the classifier's probability that sample i is global (label 1) and not local (label 0). The
classifier was trained on n_local local and n_global global samples.

    MADE_g <- sum_k (n_k / n) MADE_k                      (eq. 12, phase 1)
    r_i     = h_i / (1 - h_i) n_local / n_global          (eq. 16, phase 2)
    w_i     = clip(r_i, lo, hi), divided by its mean      (eq. 11, phase 2)
    loss    = (1 / |B|) sum_b w_b l_b                     (eq. 10, phase 3)

Phase 1 ends when the n_k-weighted mean of the clients' validation losses no longer falls. A client
withholds this loss if it holds out fewer than `privacy.min_count` samples. It withholds
`feddisk.nll`, the training loss of its last epoch, if it trains on fewer samples than that. If it
has fewer training samples in total, it returns the MADE unchanged. `privacy.min_count=0` is the
paper's method.

    density  down: slot `density`               up: slot `density`, `feddisk.val` ((0,): withheld),
                                                    the metric `feddisk.nll`
    weigh    down: slot `density`               up: the metric `feddisk.ess`
    train    down: what the base method sends   up: what the base method sends

Under ratio=raw there is no MADE, so there is no phase 1 and no slot, and `weigh` sends no MADE.
Under privacy.noise, clients send none of `feddisk.val`, `feddisk.nll` and `feddisk.ess`.

    client keeps: w (n_k,)
    server keeps: the best global MADE with its loss, and the number E_1 of rounds of `density`

Only the weights of a MADE travel. Masks and initial weights are functions of the run's seed, so
local MADEs start from the same weights as the global MADE.

The option `ratio` chooses the inputs of the classifier:
- "sampled" (section 5.5): the classifier learns to distinguish n_k samples of the local MADE from
  n_k samples of the global MADE. It is then evaluated at the client's own samples. For every
  sample, its input is the local MADE's output. This estimates a density ratio.
- "outputs" (section 5.3, literally): the classifier distinguishes the local MADE's outputs for the
  client's own samples from the global MADE's outputs for the same samples. So it distinguishes the
  networks rather than the samples, and w is mostly 1.
- "raw" (FedDiskAb, section 6): the classifier distinguishes the client's pixels from n_k samples of
  the union of all clients' data. No real federation has this union, so "raw" is for simulations
  only.

Deviations and choices: MADEs are trained by Adam at 1e-3 as in the authors' program; the paper
prints SGD at 1e-2. Phase 1 has a patience of 3 rounds; the paper ends it once the loss starts to
increase. The paper neither clips r nor divides the weights by their mean. With a mean of 1, a
learning rate has the same effect as without weights.

Defaults: H = 50 hidden units is the paper's value for Chest-Xray (400 for FEMNIST, 30 for MNIST).
These defaults are also the paper's: at most 500 rounds of the global MADE (made_max_rounds) with 2
local epochs each, at most 500 epochs of the local MADE (local_max_epochs), and a classifier with
100 units, trained by SGD at 1e-2. The limit clf_max_epochs = 200 is not from the paper.

The plug-in below has its server half first. Both halves follow the order of the phases.
densities.py has the equations, and trains the MADEs and the classifier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf

import numpy as np
import torch
from torch import Tensor

from fedhet.core import streams
from fedhet.core.authors import (
    AnyTree,
    ClientContext,
    ConfigError,
    Expected,
    LocalSettings,
    Merged,
    Message,
    Phase,
    Plugin,
    Recorded,
    Result,
    RunSetup,
    State,
    Step,
    Term,
    Tree,
    Update,
    Workspace,
    log,
    serves,
    setting,
    trees,
)
from fedhet.core.check import MOST_EPOCHS, MOST_SAMPLES, counted
from fedhet.core.client.descent import EarlyStopping
from fedhet.core.metrics import comm_cost
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.feddisk import densities

SLOT = "density"  # the global MADE
HELD_OUT = 0.1  # share of a client's training samples that validate MADEs


def pixels(workspace: Workspace, pid: int) -> Tensor:
    """Return the training inputs (n, D) of a client in [0, 1], before any normalisation."""
    return workspace.unit(pid).x.flatten(1).float()


def pooled(workspace: Workspace, pid: int, n: int) -> Tensor:
    """Draw n samples of all clients' training data, without replacement, (n, D) (FedDiskAb)."""
    first = np.cumsum([0, *workspace.task.sizes])  # samples are numbered client by client
    draws = streams.generator(workspace.seed, "feddisk.pool", pid=pid)
    chosen = draws.choice(first[-1], n, replace=False)
    rows = [chosen[(low <= chosen) & (chosen < end)] - low for low, end in pairwise(first)]
    parts = [(other, torch.from_numpy(own)) for other, own in enumerate(rows) if len(own)]
    return torch.cat([pixels(workspace, other)[own] for other, own in parts])


def trainable(made: AnyTree) -> Tree:
    """Return a copy of a MADE with tensors that require gradients."""
    return trees.map(lambda t: t.clone().requires_grad_(), made)


def weight_of_sample(params: AnyTree, batch: None, own: Tree) -> Tensor:
    """Return w (n,), which multiplies the losses in eq. 10."""
    return own["w"]


@dataclass(frozen=True, kw_only=True)
class FedDiskPlugin(Plugin):
    """Adds the phases `density` and `weigh`, then weights the samples in every training.

    conf/plugin/feddisk.yaml explains the options. The server's state has "E1", the number of rounds
    of `density` so far; "best", the lowest validation loss, and "made", the MADE with this loss;
    and "stale", the number of validated MADEs in a row that were no better.
    """

    name = "feddisk"

    ratio: str = setting("sampled", allowed=("sampled", "outputs", "raw"))
    hidden: int = setting(50, low=1)
    masks: str = setting("even", allowed=("even", "random"))
    features: str = setting("outputs", allowed=("outputs", "conditional"))
    binarise: bool = False
    made_optimizer: str = setting("adam", allowed=("adam", "sgd"))
    made_lr: float = setting(1e-3, open_low=0)
    made_batch_size: int = setting(64, low=1, high=MOST_SAMPLES)
    made_local_epochs: int = setting(2, low=1, high=MOST_EPOCHS)
    made_patience: int = setting(3, low=1)
    made_max_rounds: int = setting(500, low=1)
    local_patience: int = setting(5, low=1)
    local_max_epochs: int = setting(500, low=1, high=MOST_EPOCHS)
    clf_hidden: int = setting(100, low=1)
    clf_lr: float = setting(0.01, open_low=0)
    clf_batch_size: int = setting(32, low=1, high=MOST_SAMPLES)
    clf_patience: int = setting(10, low=1)
    clf_tolerance: float = setting(1e-4, low=0)
    clf_max_epochs: int = setting(200, low=1, high=MOST_EPOCHS)
    normalise: str = setting("mean1", allowed=("mean1", "minmax2", "none"))
    lo: float = setting(0.1, open_low=0, high=1)
    hi: float = setting(10.0, low=1)
    eps: float = setting(1e-6, open_low=0, open_high=0.5)
    min_samples: int = setting(10, low=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.binarise and self._raw:
            raise ConfigError(
                "plugin.feddisk.binarise=true changes the inputs of MADEs, but"
                " plugin.feddisk.ratio=raw has no MADE; use binarise=false or another ratio"
            )

    @property
    def breaks(self) -> Mapping[str, str]:
        return {"noise": "ratio=raw pools the clients' raw data"} if self._raw else {}

    @property
    def _raw(self) -> bool:
        return self.ratio == "raw"

    # ---- server
    def setup(self, setup: RunSetup) -> State:
        """Refuse inputs outside [0, 1], and refuse ratio=raw outside of simulations.

        Raises:
            ConfigError: the task's inputs are not in [0, 1], or ratio=raw in a real federation.
        """
        workspace = setup.workspace
        workspace.task.check_density(self.name)
        if self._raw and not workspace.simulated:
            raise ConfigError(
                "plugin.feddisk.ratio=raw (FedDiskAb) pools the clients' raw data, which only a"
                " simulation can do: use engine=local or engine=ray, or another ratio"
            )
        if self._raw:
            log.warning(
                "feddisk: ratio=raw (FedDiskAb) pools the raw data of all clients; it is a"
                " simulation, not federated learning"
            )
        else:
            self._warn_of_few(workspace)
        return {"E1": 0, "best": inf, "stale": 0, "made": {}}

    def _warn_of_few(self, workspace: Workspace) -> None:
        """Warn if no client has enough samples to validate a MADE."""
        largest = MOST_SAMPLES if workspace.task.unsized else max(workspace.task.sizes)
        if self._held_out(largest) < max(1, workspace.min_count):
            log.warning(
                "feddisk: no client has enough samples to validate the global MADE: it needs at"
                " least min_samples=%d samples, and must hold out at least privacy.min_count=%d of"
                " them. So the phase `density` cannot stop early, and takes all"
                " made_max_rounds=%d rounds",
                self.min_samples,
                workspace.min_count,
                self.made_max_rounds,
            )

    def _min_for_ratio(self, workspace: Workspace) -> int:
        """Return the smallest number of samples with which a client estimates density ratios."""
        return max(self.min_samples, workspace.min_count)

    def _held_out(self, n: int) -> int:
        """Return how many of n samples a client holds out to validate MADEs."""
        return max(1, int(HELD_OUT * n + 0.5)) if n >= self.min_samples else 0

    def slots(self, setup: RunSetup) -> dict[str, Tree]:
        workspace = setup.workspace
        dim = workspace.task.inputs[0].numel()
        return {} if self._raw else {SLOT: self._initial(workspace, dim)}

    def phases(self, setup: RunSetup) -> list[Phase]:
        slot = "" if self._raw else SLOT
        weigh = Phase("weigh", 1, self._record, slot=slot, cohort=1.0, uploads=False)
        rounds, until = self.made_max_rounds, self._stopped
        density = Phase("density", rounds, self._average, slot=SLOT, cohort=1.0, until=until)
        return [weigh] if self._raw else [density, weigh]

    def expects(self, step: Step) -> Mapping[str, Expected]:
        if step.workspace.noise:  # clients send no loss, so all rounds are executed
            return {}
        if step.phase == "density":  # val is a mean binary cross-entropy, so it is >= 0
            return {"val": Expected(low=0, statistic=True)}
        share = Expected(metric=True, low=0, high=1 + 1e-6)  # the effective sample size / n_k
        return {"ess": share} if step.phase == "weigh" else {}

    def _average(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        """Merge the phase `density`, by equation 12.

        The weights are n_k, even if the base method uses other weights. The clients have validated
        the MADE with which the round began. The last merge restores the MADE with the lowest loss.
        There is one exception: if the last round began with this MADE, the server keeps the MADE
        that the round has trained, although no client has validated it.
        """
        change = step.average()
        total_loss = 0.0
        validating = 0  # training samples of the clients that sent a validation loss
        for update in updates:
            change.add(update.change, update.n)
            if (val := update.extras.get("val")) is not None:
                total_loss += update.n * val
                validating += update.n
        new = trees.add(change.mean(reuse=True), old)
        state = {**state, "E1": state["E1"] + 1}
        recorded = self._costs(step, state)
        if validating:
            loss = recorded["val_loss"] = total_loss / validating
            better = {"best": loss, "stale": 0, "made": old}
            state |= better if loss < state["best"] else {"stale": state["stale"] + 1}
        if state["stale"] and (self._stopped(state) or step.number == self.made_max_rounds):
            new = state["made"]
        return Merged(new, state, recorded)

    def _stopped(self, state: State) -> bool:
        return bool(state["stale"] >= self.made_patience)

    def _record(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        """Merge the phase `weigh`: record the effective sample sizes, and change no weights."""
        costs = self._costs(step, state)
        shares = {update.pid: update["ess"] for update in updates if "ess" in update}
        if not shares:  # under privacy.noise, clients send no effective sample size
            return Merged({}, state, costs)
        low_pids = [pid for pid, share in shares.items() if share < 0.5]
        if low_pids:
            worst = min(low_pids, key=shares.__getitem__)
            log.warning(
                "feddisk: the effective sample size is below n_k / 2 for %d of %s, the"
                " lowest %.2f n_k for client %d: the weights make their updates noisier",
                len(low_pids),
                counted(len(shares), "client"),
                shares[worst],
                worst,
            )
        ess = torch.tensor(list(shares.values()), dtype=torch.float64)
        sizes, least = step.workspace.task.sizes, self._min_for_ratio(step.workspace)
        recorded: Recorded = {
            "ess": ess,
            "pids": torch.tensor(list(shares)),
            "ess_mean": float(ess.mean()),
            "ess_min": float(ess.min()),
            "unweighted": sum(sizes[pid] < least for pid in shares),
            **costs,
        }
        return Merged({}, state, recorded)

    def after(
        self, step: Step, state: State, old: Tree, new: Tree, updates: Sequence[Update]
    ) -> Merged:
        return Merged(new, state, self._costs(step, state, step.number))

    def _costs(self, step: Step, state: State, trained: int = 0) -> Recorded:
        """Return E_1, and how many numbers one client has sent and received so far.

        The cost is equation 19, or equation 18 without a MADE. `trained` is E_2.
        """
        model = trees.pick(step.workspace.initial, step.workspace.shared)
        model_size, made_size = (
            sum(t.numel() for t in tree.values() if t.is_floating_point())
            for tree in (model, step.slots.get(SLOT, {}))
        )
        return {"E1": state["E1"], "cost": comm_cost(model_size, trained, made_size, state["E1"])}

    # ---- client
    @serves
    def density(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        """Validate the received global MADE, and train it for some local epochs.

        A client with fewer than `workspace.min_count` samples returns the MADE unchanged. No client
        sends a loss over fewer samples than that.
        """
        least, noise = ctx.workspace.min_count, ctx.workspace.noise
        made, val = msg.weights, None
        metrics: dict[str, float] = {}
        if len(ctx.own) >= least:
            train, held_out = self._split(ctx, msg.pid, self._inputs(ctx, msg.pid))
            masks, made = self._masks(ctx, train), trainable(made)
            if len(held_out) >= max(1, least) and not noise:
                val = densities.mean_nll(made, masks, held_out)
            settings, draws = self._training(self.made_local_epochs), ctx.stream("feddisk.made")
            for loss in densities.made_epochs(
                "global MADE", made, masks, train, settings, draws, ctx.workspace.batcher
            ):
                if len(train) >= least:
                    metrics["feddisk.nll"] = loss  # at the end, the loss of the last epoch
        return Result(trees.map(Tensor.detach, made), {} if noise else {"val": val}, metrics), state

    @serves
    def weigh(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        """Compute the sample weights and keep them; discard the networks that gave them."""
        x = self._inputs(ctx, msg.pid)
        w = torch.ones(len(x))
        if len(x) >= self._min_for_ratio(ctx.workspace):
            r = self._density_ratio(msg, ctx, x)
            w = densities.sample_weights(r, self.lo, self.hi, self.normalise).float()
        ess = densities.effective_size(w.double()) / len(x)
        return Result(metrics={"feddisk.ess": ess}), {"w": {"w": w}}

    def _density_ratio(self, msg: Message, ctx: ClientContext, x: Tensor) -> Tensor:
        """Return r (n,), the global over the local density at x (n, D) (eq. 16)."""
        z_local, z_global, z = self._classifier_inputs(msg, ctx, x)
        settings = LocalSettings(
            lr=self.clf_lr, epochs=self.clf_max_epochs, batch_size=self.clf_batch_size
        )
        with ctx.workspace.seeded("feddisk.classifier", pid=msg.pid):
            p = densities.classify(
                z_local,
                z_global,
                z,
                self.clf_hidden,
                settings,
                EarlyStopping(self.clf_patience, self.clf_tolerance),
                ctx.stream("feddisk.classifier"),
                ctx.workspace.batcher,
            )
        return densities.density_ratio(p.cpu(), len(z_local), len(z_global), self.eps)

    def _classifier_inputs(
        self, msg: Message, ctx: ClientContext, x: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the classifier's inputs for local, for global, and for the client's own samples.

        The classifier is trained on local (label 0) and global samples (label 1), and evaluated at
        the client's n own samples.
        """
        if self._raw:
            return x, pooled(ctx.workspace, msg.pid, len(x)), x
        masks = self._masks(ctx, x)
        local_made = densities.fit_made(
            trainable(self._initial(ctx.workspace, x.shape[1])),
            masks,
            *self._split(ctx, msg.pid, x),
            self._training(self.local_max_epochs),
            self.local_patience,
            ctx.stream("feddisk.local"),
            ctx.workspace.batcher,
        )
        z = self._features(local_made, masks, x)
        if self.ratio == "outputs":
            return z, self._features(msg.weights, masks, x), z
        draws = ctx.stream("feddisk.samples")
        x_local, x_global = (
            densities.sample(made, masks, torch.rand(x.shape, generator=draws).to(x.device))
            for made in (local_made, msg.weights)
        )
        z_local = self._features(local_made, masks, x_local)
        return z_local, self._features(local_made, masks, x_global), z

    @torch.no_grad()
    def _features(self, made: AnyTree, masks: densities.Masks, x: Tensor) -> Tensor:
        """Return z (n, D), the classifier's inputs that a MADE computes from samples x (n, D)."""
        outputs = densities.logits(made, masks, x).sigmoid()
        return outputs if self.features == "outputs" else x * outputs + (1 - x) * (1 - outputs)

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        """Weight the client's own samples, which come first, by w, and added samples by 1."""
        n = len(ctx.data)
        if "w" not in state:
            raise ValueError(
                "the client has no sample weights: phase 'feddisk.weigh' has not reached it, or"
                " failed there"
            )
        w = state["w"]["w"]
        if n < len(w):
            raise ValueError(
                f"the client trains on {counted(n, 'sample')}, but has weights for {len(w)}"
            )
        return [Term("weight", weight_of_sample, {"w": torch.cat([w, w.new_ones(n - len(w))])})]

    # ---- inputs, masks and MADEs
    def _inputs(self, ctx: ClientContext, pid: int) -> Tensor:
        """Return x (n, D) in [0, 1], before any normalisation.

        With `binarise`, x is one Bernoulli draw of each pixel, the same in every phase.
        """
        workspace = ctx.workspace
        x = pixels(workspace, pid)
        if self.binarise:
            draws = streams.torch_generator(workspace.seed, "feddisk.binarise", pid=pid)
            x = (torch.rand(x.shape, generator=draws).to(workspace.device) < x).float()
        for width in ("hidden", "clf_hidden"):  # limits weights (D, H) and activations (n, H)
            largest = max(x.shape), getattr(self, width)
            workspace.limits.check_array(f"plugin.feddisk.{width}={largest[1]}", *largest)
        return x

    def _split(self, ctx: ClientContext, pid: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the training part and the held-out part.

        With fewer than `min_samples` samples, the held-out part is empty.
        """
        draws = streams.generator(ctx.workspace.seed, "feddisk.split", pid=pid)
        order = torch.from_numpy(draws.permutation(len(x)))
        held_out = self._held_out(len(x))
        return x[order[held_out:]], x[order[:held_out]]

    def _initial(self, workspace: Workspace, dim: int) -> Tree:
        """Return the initial weights of every MADE of the run, which follow from the run's seed."""
        draws = streams.torch_generator(workspace.seed, "feddisk.init")
        made = densities.initial(dim, self.hidden, draws)
        return trees.map(lambda t: t.to(workspace.device), made)

    def _masks(self, ctx: ClientContext, x: Tensor) -> densities.Masks:
        """Return the masks of every MADE of the run, for x (n, D)."""
        masks = densities.masks(x.shape[1], self.hidden, self.masks, ctx.workspace.seed)
        return densities.Masks(*(t.to(x.device) for t in masks))

    def _training(self, epochs: int) -> LocalSettings:
        """Return the settings that train MADEs."""
        lr, size, optimizer = self.made_lr, self.made_batch_size, self.made_optimizer
        return LocalSettings(lr=lr, epochs=epochs, batch_size=size, optimizer=optimizer)


@dataclass(frozen=True, kw_only=True)
class FedDisk(FedAvg):
    """FedAvg with the plug-in `feddisk`."""

    name = "feddisk"
    requires = FedDiskPlugin


@dataclass(frozen=True, kw_only=True)
class FedDiskAb(FedAvg):
    """FedDisk with ratio=raw, the paper's ablation."""

    name = "feddiskab"
    requires = partial(FedDiskPlugin, ratio="raw")

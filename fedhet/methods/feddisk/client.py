"""FedDisk's client half: the three phases in which a client finds and uses its sample weights."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedhet.core import streams, trees
from fedhet.core.check import counted
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.phases import EarlyStopping
from fedhet.core.task import Samples
from fedhet.core.trees import Tree
from fedhet.maths import feddisk
from fedhet.maths.feddisk import Masks
from fedhet.methods.feddisk import networks
from fedhet.methods.feddisk.options import DensityOptions

VAL = "feddisk.val"  # extra: the validation loss of the MADE that the client received
ESS = "feddisk.ess"  # metric: the effective sample size of the weights, as a share of n_k
KEPT = "feddisk.w"  # state: w (n_k,)

WITHHELD = torch.empty(0)  # in place of the loss of too few samples
HELD_OUT = 0.1  # share of a client's training samples on which MADEs are validated


def held_out_of(n: int) -> int:
    """How many of n samples a client holds out to validate MADEs."""
    return max(1, int(HELD_OUT * n + 0.5))


class DensityClient(DensityOptions):
    """Serves the phases `density` and `weigh`, and weighs the samples in every training."""

    # ---- phase 1, "density": the federation trains the global MADE
    def density(self, msg: Broadcast) -> Update:
        """Train the global MADE for some local epochs, and validate it as it was received.

        A client with fewer than `workspace.min_count` samples returns it unchanged, and none sends
        the loss of fewer samples.
        """
        client = self.client
        least = client.workspace.min_count
        if client.num_examples < least:
            untrained = dict(msg.weights)
            withheld: Extras = {} if client.workspace.noise else {VAL: WITHHELD}
            return Update(client.pid, client.num_examples, untrained, extras=withheld)
        train, held_out = self._split(self._inputs())
        masks = self._device_masks(train)
        made = self._trainable(msg.weights)
        update = Update(client.pid, client.num_examples)
        if len(held_out) and not client.workspace.noise:
            enough = len(held_out) >= least
            update.extras[VAL] = networks.mean_nll(made, masks, held_out) if enough else WITHHELD
        draws = client.generator("feddisk.made")
        for loss in networks.made_epochs(
            "global MADE", made, masks, train, self.global_made, draws, client.workspace.performer
        ):
            if len(train) >= least:
                update.metrics["feddisk.nll"] = loss  # that of the last epoch remains
        update.weights = trees.map(Tensor.detach, made)
        return update

    # ---- phase 2, "weigh": each client estimates the density ratio of its samples
    def weigh(self, msg: Broadcast) -> Update:
        """Compute the sample weights, which stay here; the networks behind them are discarded."""
        x = self._inputs()
        n = len(x)
        weights = torch.ones(n)
        if n >= max(self.min_samples, self.client.workspace.min_count):
            r = self._density_ratio(x, msg.weights)
            weights = feddisk.sample_weights(r, self.lo, self.hi, self.normalise).float()
        self.client.state.put(KEPT, {"w": weights})
        ess = feddisk.effective_size(weights.double()) / n
        return Update(self.client.pid, n, metrics={ESS: ess})

    def _density_ratio(self, x: Tensor, global_made: Tree) -> Tensor:
        """r (n,), the global over the local density at x (n, D) (eq. 16)."""
        z_local, z_global, z = self._classifier_inputs(x, global_made)
        with self.client.workspace.seeded("feddisk.classifier", pid=self.client.pid):
            p = networks.classify(
                z_local,
                z_global,
                z,
                self.clf_hidden,
                self.classifier,
                EarlyStopping(self.clf_patience, self.clf_tolerance),
                self.client.generator("feddisk.classifier"),
                self.client.workspace.performer,
            )
        return feddisk.density_ratio(p.cpu(), len(z_local), len(z_global), self.eps)

    def _classifier_inputs(self, x: Tensor, global_made: Tree) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of local samples (label 0), global ones (label 1), and the client's own n."""
        if self.ratio == "raw":
            return x, self._pooled(len(x)), x
        masks = self._device_masks(x)
        global_made = trees.map(lambda t: t.to(x.device), global_made)
        local_made = networks.fit_made(
            self._trainable(networks.initial_made(self.client.workspace, x.shape[1], self.hidden)),
            masks,
            *self._split(x),
            self.local_made,
            self.local_patience,
            self.client.generator("feddisk.local"),
            self.client.workspace.performer,
        )
        z = self._features(local_made, masks, x)
        if self.ratio == "outputs":
            return z, self._features(global_made, masks, x), z
        draws = self.client.generator("feddisk.samples")
        x_local, x_global = (
            feddisk.sample(made, masks, torch.rand(x.shape, generator=draws).to(x.device))
            for made in (local_made, global_made)
        )
        z_local = self._features(local_made, masks, x_local)
        z_global = self._features(local_made, masks, x_global)
        return z_local, z_global, z

    @torch.no_grad()
    def _features(self, made: Tree, masks: Masks, x: Tensor) -> Tensor:
        """z (n, D) of the samples x (n, D), as a MADE sees them."""
        outputs = feddisk.logits(made, masks, x).sigmoid()
        if self.features == "outputs":
            return outputs
        return x * outputs + (1 - x) * (1 - outputs)

    def _pooled(self, n: int) -> Tensor:
        """(n, D): n samples of all clients' training data, without replacement (FedDiskAb)."""
        workspace = self.client.workspace
        sizes = workspace.task.sizes
        draws = streams.generator(workspace.seed, "feddisk.pool", pid=self.client.pid)
        chosen = draws.choice(sum(sizes), n, replace=False)
        # For each sample of the union: whose it is, and which of that client's samples.
        owner = np.repeat(np.arange(len(sizes)), sizes)
        row = np.arange(sum(sizes)) - np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
        parts = []
        for pid in np.unique(owner[chosen]):
            rows = row[chosen[owner[chosen] == pid]]
            parts.append(self._pixels(pid)[torch.from_numpy(rows)])
        return torch.cat(parts)

    # ---- phase 3, training: the host trains on weighted samples
    def sample_weights(self, data: Samples) -> Tensor:
        """w (n,): those of the client's own samples, which come first, then 1.

        Samples that another plug-in has added thus have weight 1.
        """
        kept = self.client.state.get(KEPT)
        if kept is None:
            raise ValueError(
                "the client has no sample weights: phase 'feddisk.weigh' has not reached it, or"
                " failed there"
            )
        w = kept["w"]
        if len(data) < len(w):
            raise ValueError(
                f"the client trains on {counted(len(data), 'sample')}, but has weights for {len(w)}"
            )
        return torch.cat([w, w.new_ones(len(data) - len(w))]).to(data.x.device)

    # ---- inputs and masks
    def _inputs(self) -> Tensor:
        """x (n, D) in [0, 1], before any normalisation.

        With `binarise` it is one Bernoulli draw of each pixel, the same in every phase.
        """
        workspace = self.client.workspace
        pid = self.client.pid
        x = self._pixels(pid)
        if self.binarise:
            draws = streams.torch_generator(workspace.seed, "feddisk.binarise", pid=pid)
            x = (torch.rand(x.shape, generator=draws).to(workspace.device) < x).float()
        for width in ("hidden", "clf_hidden"):  # of weights, and of what samples become
            largest = max(x.shape), getattr(self, width)
            workspace.limits.check_array(f"plugin.feddisk.{width}={largest[1]}", *largest)
        return x

    def _pixels(self, pid: int) -> Tensor:
        """(n, D) the training inputs of a client, which under ratio=raw may be another one."""
        workspace = self.client.workspace
        x = workspace.floating(workspace.task.clients[pid].train).x.flatten(1).float()
        try:
            feddisk.check_pixels(x)
        except ValueError as error:
            raise ValueError(f"the data of client {pid}: {error}") from error
        return x

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(training part, held-out part); clients below `min_samples` hold out nothing."""
        n = len(x)
        draws = streams.generator(self.client.workspace.seed, "feddisk.split", pid=self.client.pid)
        order = torch.from_numpy(draws.permutation(n))
        held_out = held_out_of(n) if n >= self.min_samples else 0
        return x[order[held_out:]], x[order[:held_out]]

    def make_masks(self, dim: int, seed: int) -> Masks:
        """The masks of every MADE of a run with this seed, for inputs (n, dim)."""
        draws = streams.generator(seed, "feddisk.masks") if self.masks == "random" else None
        return feddisk.masks(dim, self.hidden, draws)

    def _device_masks(self, x: Tensor) -> Masks:
        workspace = self.client.workspace
        return Masks(*(t.to(workspace.device) for t in self.make_masks(x.shape[1], workspace.seed)))

    def _trainable(self, made: Tree) -> Tree:
        """A copy of a MADE whose tensors require gradients."""
        return trees.map(
            lambda t: t.to(self.client.workspace.device, copy=True).requires_grad_(), made
        )

"""FedDisk: samples weighted by the global over the local density (Nguyen, Wu and Chang).

Nguyen, Wu and Chang, "Federated learning for distribution skewed data using sample weights". A
plug-in for any host, in three phases:

1. "density": the federation trains one MADE, a model of the density of all clients' inputs.
2. "weigh": each client fits a MADE to its own inputs and trains a classifier h to tell local from
   global samples, which gives the density ratio and so the weight of each sample.
3. Training: the host trains on weighted samples.

h_i is the classifier's probability that sample i is global (label 1) and not local (label 0), and
n_local and n_global are the numbers of samples on which it was trained.

    MADE_g <- sum_k (n_k / n) MADE_k                      (eq. 12, phase 1)
    r_i     = h_i / (1 - h_i) n_local / n_global          (eq. 16, phase 2)
    w_i     = clip(r_i, lo, hi), divided by its mean      (eq. 11, phase 2)
    loss    = (1 / |B|) sum_b w_b l_b                     (eq. 10, phase 3)

Phase 1 ends when the n_k-weighted mean of the clients' validation losses no longer falls. A client
that holds out fewer than `privacy.min_count` samples withholds its loss, and one that has fewer in
all returns the MADE as it was (0 is the paper's method).

    density  down: slot `density`            up: slot `density`, `feddisk.val`
    weigh    down: slot `density`            up: the metric `feddisk.ess`
    train    down: what the host sends       up: what the host sends

Under ratio=raw there is no MADE: phase 1 and the slot are absent, and `weigh` sends no weights.

    client keeps: w (n_k,)
    server keeps: the best global MADE, and the numbers of rounds E_1 (density) and E_2 (train)

Only weights travel. Masks and initial weights are functions of the run's seed, so that local MADEs
start where the global one does.

What the classifier sees (`ratio`):
- "sampled" (section 5.5): n_k samples drawn from the local MADE against n_k from the global one,
  all as the local MADE's outputs, and evaluated at its outputs of the client's own samples. This
  estimates a density ratio.
- "outputs" (section 5.3, literally): both MADEs' outputs of the client's own samples. This
  separates the networks rather than the samples, so that w is mostly 1.
- "raw" (FedDiskAb, section 6): the client's pixels against n_k samples of the union of all clients'
  data, which no real federation has. It is for simulations only.

Deviations and choices: MADEs are trained by Adam at 1e-3 (the authors' program; the paper prints
SGD at 1e-2). Phase 1 has a patience of 3 rounds, while the paper ends it once the loss starts to
increase. The clip of r, and the mean of 1, with which the learning rate keeps its meaning, are not
in the paper.

Defaults: H = 50 hidden units are the paper's for Chest-Xray (400 for FEMNIST, 30 for MNIST). The
paper's too are at most 500 rounds of the global MADE (made_max_rounds) with 2 local epochs each, at
most 500 epochs of the local one (local_max_epochs), and a classifier with 100 units at SGD 1e-2.
The classifier's own limit, clf_max_epochs = 200, is not among them.

client.py and server.py hold the two halves of the plug-in, each in the order of the phases.
networks.py trains the MADEs and the classifier; fedhet/maths/feddisk.py has the equations.
"""

from __future__ import annotations

from dataclasses import replace

from fedhet.core import check
from fedhet.core.errors import ConfigError
from fedhet.core.messages import LocalSettings
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.feddisk.client import DensityClient
from fedhet.methods.feddisk.server import DensityServer


class FedDiskPlugin(DensityClient, DensityServer):
    """The phases `density` and `weigh`, then sample weights in every training."""

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
        self.ratio = check.one_of("plugin.feddisk.ratio", ratio, ("sampled", "outputs", "raw"))
        self.hidden = check.integer("plugin.feddisk.hidden", hidden, low=1)
        self.masks = check.one_of("plugin.feddisk.masks", masks, ("even", "random"))
        self.features = check.one_of(
            "plugin.feddisk.features", features, ("outputs", "conditional")
        )
        self.binarise = check.boolean("plugin.feddisk.binarise", binarise)
        self.global_made = LocalSettings(
            lr=check.number("plugin.feddisk.made_lr", made_lr, open_low=0),
            epochs=check.integer("plugin.feddisk.made_local_epochs", made_local_epochs, low=1),
            batch_size=check.integer("plugin.feddisk.made_batch_size", made_batch_size, low=1),
            optimizer=check.one_of(
                "plugin.feddisk.made_optimizer", made_optimizer, ("adam", "sgd")
            ),
        )
        self.made_patience = check.integer("plugin.feddisk.made_patience", made_patience, low=1)
        self.made_max_rounds = check.integer(
            "plugin.feddisk.made_max_rounds", made_max_rounds, low=1
        )
        self.local_made = replace(
            self.global_made,
            epochs=check.integer("plugin.feddisk.local_max_epochs", local_max_epochs, low=1),
        )
        self.local_patience = check.integer("plugin.feddisk.local_patience", local_patience, low=1)
        self.classifier = LocalSettings(
            lr=check.number("plugin.feddisk.clf_lr", clf_lr, open_low=0),
            epochs=check.integer("plugin.feddisk.clf_max_epochs", clf_max_epochs, low=1),
            batch_size=check.integer("plugin.feddisk.clf_batch_size", clf_batch_size, low=1),
        )
        self.clf_hidden = check.integer("plugin.feddisk.clf_hidden", clf_hidden, low=1)
        self.clf_patience = check.integer("plugin.feddisk.clf_patience", clf_patience, low=1)
        self.clf_tolerance = check.number("plugin.feddisk.clf_tolerance", clf_tolerance, low=0)
        self.normalise = check.one_of(
            "plugin.feddisk.normalise", normalise, ("mean1", "minmax2", "none")
        )
        self.lo = check.number("plugin.feddisk.lo", lo, open_low=0, high=1)
        self.hi = check.number("plugin.feddisk.hi", hi, low=1)
        self.eps = check.number("plugin.feddisk.eps", eps, open_low=0, open_high=0.5)
        self.min_samples = check.integer("plugin.feddisk.min_samples", min_samples, low=2)
        if self.binarise and self.ratio == "raw":
            raise ConfigError(
                "plugin.feddisk.binarise=true is for the MADEs; plugin.feddisk.ratio=raw has none"
            )
        super().__init__(
            ratio=ratio,
            hidden=hidden,
            masks=masks,
            features=features,
            binarise=binarise,
            made_optimizer=made_optimizer,
            made_lr=made_lr,
            made_batch_size=made_batch_size,
            made_local_epochs=made_local_epochs,
            made_patience=made_patience,
            made_max_rounds=made_max_rounds,
            local_patience=local_patience,
            local_max_epochs=local_max_epochs,
            clf_hidden=clf_hidden,
            clf_lr=clf_lr,
            clf_batch_size=clf_batch_size,
            clf_patience=clf_patience,
            clf_tolerance=clf_tolerance,
            clf_max_epochs=clf_max_epochs,
            normalise=normalise,
            lo=lo,
            hi=hi,
            eps=eps,
            min_samples=min_samples,
        )


FedDisk = FedAvg.preset("FedDisk", FedDiskPlugin)
FedDiskAb = FedAvg.preset("FedDiskAb", FedDiskPlugin, ratio="raw")  # the paper's ablation

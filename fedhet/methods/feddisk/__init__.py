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

options.py has the options; client.py and server.py hold the two halves of the plug-in, each in the
order of the phases. networks.py trains the MADEs and the classifier; fedhet/maths/feddisk.py has
the equations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedhet.methods.fedavg import FedAvg
from fedhet.methods.feddisk.client import DensityClient
from fedhet.methods.feddisk.server import DensityServer


class FedDiskPlugin(DensityClient, DensityServer):
    """The phases `density` and `weigh`, then sample weights in every training."""

    name = "feddisk"


@dataclass(frozen=True, kw_only=True)
class FedDisk(FedAvg):
    """FedAvg with the plug-in `feddisk`."""

    name = "feddisk"
    requires = FedDiskPlugin


@dataclass(frozen=True, kw_only=True)
class FedDiskAb(FedAvg):
    """FedDisk with ratio=raw, the paper's ablation."""

    name = "feddiskab"
    requires = FedDiskPlugin
    fixed: ClassVar = {"ratio": "raw"}

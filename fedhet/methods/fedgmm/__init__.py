"""FedGMM: missing classes filled from mixtures that clients share (Nagaraju, Sen and Mohan).

Nagaraju, Sen and Mohan, "Handling data heterogeneity in federated learning with global data
distribution". A plug-in for any host: once, before the training, clients share a mixture of
Gaussians of each class, and draw from everyone's mixtures the samples that they lack.

    p_ic   = sum_k pi_ick N(mu_ick, diag var_ick)            (section 4.1)
    p_c    = sum_i n_ic p_ic / sum_i n_ic                    (algorithm 1, line 1)
    T_i    = max_c n_ic                                      (algorithm 1, line 3)
    gen_ic = max(0, T_i - n_ic)                              (algorithm 1, line 3)
    lr    <- (1 - psi) lr, after each round                  (algorithm 1, line 8)

p_ic is fitted by EM to client i's n_ic samples of class c, with pixels in [0, 1]. p_c has all
components, with the weights n_ic pi_ick / sum_i n_ic. Client i draws gen_ic samples of class c.

    fit    down: nothing
           up: `fedgmm.counts` (C,), `fedgmm.mixtures`: label (K,), pi (K,), mu (K, d), var (K, d)
    share  down: `fedgmm.mixtures` of all clients, `fedgmm.global_max` where it is the target
           up: `fedgmm.generated`, as it follows from `fedgmm.counts`
    train  down: x
           up: w_k, n_k

    client keeps: its generated samples
    server keeps: the mixtures until they are shared, then how many samples each client drew

Deviations and choices:
- The paper does not define how mixtures are "aggregated". Concatenation is the density of the
  pooled samples. Averaging component k over clients would mean nothing, since the labels of
  components are arbitrary.
- `num_examples`, and so p_i = N_i / sum N, counts the real samples; `agg_count=augmented` counts
  the generated ones too.
- A client keeps its samples as uint8, which takes a quarter of the memory of what it trains on and
  moves a pixel by 1/510 at most. It does not keep the mixtures to draw anew, because their size
  grows with the number of clients.
- The paper decays the learning rate of FedAvg and FedProx, its baselines, in the same way. Here psi
  is FedGMM's, and other methods have a constant rate by default, so a comparison by the defaults is
  not the paper's. `client.lr_decay=0.98` is, for all three: `client.lr_decay` and 1 - psi do not
  multiply; the smaller of the two applies.
- The paper claims privacy without analysis. With few samples, components are copies of images. So a
  class of fewer than `privacy.min_count` samples has no mixture, and no component of several has
  fewer than four times as many: EM gets fewer components, and those that are smaller in the end are
  merged with the closest one, which keeps the mean and the variance of the class. Its count is sent
  as 0, and the number of samples that it says it drew, which `agg_count=augmented` uses, follows
  from the counts that it has sent. With `privacy.min_count=0`, the paper's method, a warning
  names thin mixtures.

Defaults: 5 components and `psi = .02` are the paper's. Its momentum .9, weight decay, batch size
128 and one local epoch are settings of the client (conf/client).

options.py has the options, client.py and server.py the two halves of the plug-in, mixtures.py the
form in which mixtures travel, and fedhet/maths/fedgmm.py the equations.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedgmm.client import MixtureClient
from fedhet.methods.fedgmm.server import MixtureServer


class FedGMMPlugin(MixtureClient, MixtureServer):
    """The phases `fit` and `share`, once each and with everyone, then training on more samples."""

    name = "fedgmm"


@dataclass(frozen=True, kw_only=True)
class FedGMM(FedAvg):
    """FedAvg with the plug-in `fedgmm`."""

    name = "fedgmm"
    requires = FedGMMPlugin

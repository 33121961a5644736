"""FedSA: aggregation by the dispersion of each entry (Wang, Liao, Yuan and Zhang).

Wang, Liao, Yuan and Zhang, "The key of parameter skew in federated learning". Entries on which the
participants disagree most are averaged by clusters of similar clients, all others uniformly.

For each tensor, with W (K, M) the values of K participants at its M entries:

    cv_m     = std_k(W_km) / |mean_k W_km|                              (eq. 2-4)
    m is high where (cv_m - min cv) / (max cv - min cv) > cv_t          (eq. 5, 6)

    low m:
    x_m     <- mean_k W_km                                              (eq. 7)

    high m:
    MIC_km   = class in 1..C of client k's squared deviation            (eq. 8, 9)
    SIM_ab   = share of the high entries at which MIC_a = MIC_b         (eq. 10)
    MAC_sm   = most frequent MIC_km in cluster s of similar clients     (eq. 11)
    wbar_sm  = mean_k W_km over the members of cluster s                (eq. 12)
    n_sc     = #{high m: MAC_sm = c}                                    (eq. 14)
    alpha_sm = n_{s,MAC_sm} / sum_s' n_{s',MAC_s'm}                     (eq. 14)
    x_m     <- sum_s alpha_sm wbar_sm                                   (eq. 13, 15)

    down: x
    up: w_k, n_k
    client keeps: nothing
    server keeps: x

Deviations and choices: equation 8 bins the squared deviations themselves, nearly all of which are
in the lowest bin; here they are divided by the largest at the entry (`mic_scale`). Equation 14
divides by S C, which is not a weighting; here the weights of an entry sum to 1 (`alpha_mode`).

Equation 5 is taken literally. It then makes about 1 / cv_t entries of a tensor high, whatever its
size, so that FedSA is nearly the uniform mean; the recorded `frac_high` says how nearly. Buffers
are never aggregated by FedSA.

Defaults: cv_t .2, sim_t .2 and C = S = 4 are the paper's for CIFAR-10. It has C = S = 5 for
CIFAR-100 and 8 for Tiny-ImageNet.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedhet.core import check
from fedhet.core.client import FedClient
from fedhet.core.messages import Update
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.trees import Tree
from fedhet.maths.fedsa import Options, aggregate_tensor


class FedSAClient(FedClient):
    """Plain FedAvg training."""


class FedSA(FedStrategy):
    """Changes the aggregation only, so it works with any client-side plug-in or server optimiser.

    The options are those of fedhet.maths.fedsa.Options, and `client_weighting`: the weights of the
    means in equations 7 and 12, "uniform" or by n_k ("samples").
    """

    name = "fedsa"
    client_cls = FedSAClient
    needs_all = True
    only_weights = True
    enters = "means of clusters of clients"
    otherwise = {"weighted": "method.client_weighting=samples"}
    refuses = {
        "krum": "it selects the clients that are alike, and FedSA needs those that differ",
        "norm_clip": "it shortens differences of the weights, by which FedSA finds clusters",
    }

    def __init__(
        self,
        setting: Setting,
        *,
        cv_t: float = 0.2,
        sim_t: float = 0.2,
        C: int = 4,
        S: int = 4,
        cv_clip_quantile: float | None = None,
        mic_scale: str = "entry",
        alpha_mode: str = "normalised",
        threshold: str = "at_full",
        client_weighting: str = "uniform",
    ) -> None:
        self.options = Options(
            cv_t=cv_t,
            sim_t=sim_t,
            C=C,
            S=S,
            cv_clip_quantile=cv_clip_quantile,
            mic_scale=mic_scale,
            alpha_mode=alpha_mode,
            threshold=threshold,
        )
        self.client_weighting = check.one_of(
            "method.client_weighting", client_weighting, ("uniform", "samples")
        )
        self.weighted = self.client_weighting == "samples"
        super().__init__(setting)

    def base_weight(self, update: Update) -> float:
        return float(update.num_examples) if self.client_weighting == "samples" else 1.0

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        received = list(updates)
        weights = None
        if self.client_weighting == "samples":
            weights = torch.tensor(
                [update.weight for update in received],
                dtype=torch.float64,
                device=self.workspace.device,
            )
        new: Tree = {}
        high: list[int] = []  # the number of high entries of each tensor
        unclustered: list[float] = []  # the share of clients in no cluster, where there are any
        for name, before in old.items():
            # The weights themselves, since their changes would be float64 copies of them.
            values = [update.weights[name].reshape(-1) for update in received]
            aggregate = aggregate_tensor(values, self.options, weights)
            new[name] = aggregate.w.view(before.shape)
            high.append(len(aggregate.high))
            if len(aggregate.high):
                clustered = sum(len(members) for members in aggregate.clusters)
                unclustered.append(1 - clustered / len(received))
        sizes = torch.tensor([before.numel() for before in old.values()])
        self.recorded = {
            "frac_high": sum(high) / int(sizes.sum()),
            "high": sum(high),
            "unclustered": sum(unclustered) / len(unclustered) if unclustered else 0.0,
            "frac_high_per_tensor": torch.tensor(high, dtype=torch.float64) / sizes,
        }
        return new

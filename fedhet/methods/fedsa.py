"""FedSA (Wang, Liao, Yuan & Zhang, "The key of parameter skew in federated learning"): aggregation
by dispersion.

Per tensor, with W (K, M) the participants' values:

    cv_m = std_k(W_km) / |mean_k W_km|; high where (cv_m - min cv) / (max cv - min cv) > cv_t (eq.
        2-6)
    low:  x_m <- mean_k W_km (eq. 7)
    high: MIC_km in 1..C, the class of client k's squared deviation (eq. 8, 9); SIM_ab, the share of
        high entries with equal MIC (eq. 10); clusters of similar clients; MAC_sm, the most frequent
        MIC in cluster s, and wbar_sm, its mean (eq. 11, 12) x_m <- sum_s alpha_sm wbar_sm, alpha_sm
        = n_{s,MAC_sm} / sum_s' n_{s',MAC_s'm}, n_sc = #{high m: MAC_sm = c} (eq. 13-15)

    down: x      up: w_k, n_k      client keeps: nothing      server keeps: x

Deviations: equation 8 bins the squared deviations themselves, nearly all of which lie in the lowest
bin: here they are divided by the largest at the entry. Equation 14 divides by S C, which is not a
weighting: here the weights sum to 1. cv_t .2, sim_t .2, C = S = 4 are the paper's for CIFAR-10 (5
and 5 for CIFAR-100, 8 and 8 for Tiny-ImageNet).

Equation 5, taken literally as here, calls some 1/cv_t entries of a tensor high, whatever its size,
so FedSA is nearly the uniform mean; the recorded `frac_high` says how nearly. Buffers never pass
through it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedhet import check
from fedhet.client import FedClient
from fedhet.maths.fedsa import Options, aggregate_tensor
from fedhet.messages import Update
from fedhet.setting import Setting
from fedhet.strategy import FedStrategy
from fedhet.trees import Tree


class FedSAClient(FedClient):
    """Plain FedAvg training."""


class FedSA(FedStrategy):
    """Owns the aggregation only, so any client-side plug-in and any server optimiser composes with
    it."""

    name = "fedsa"
    client_cls = FedSAClient
    needs_all = True

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
            cv_t, sim_t, C, S, cv_clip_quantile, mic_scale, alpha_mode, threshold
        )
        self.client_weighting = check.one_of(
            "method.client_weighting", client_weighting, ("uniform", "samples")
        )
        super().__init__(setting)

    @property
    def refuses(self) -> dict[str, str]:
        if self.client_weighting == "samples":
            return {}
        return {
            "fednorm": (
                "it changes aggregation weights, which FedSA reads with"
                " method.client_weighting=samples only"
            )
        }

    def base_weight(self, update: Update) -> float:
        return float(update.num_examples) if self.client_weighting == "samples" else 1.0

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        received = list(updates)
        # The weights as they came, not their differences: those would be float64 trees.
        trees = [update.weights for update in received]
        weights = torch.tensor([update.weight for update in received], dtype=torch.float64)
        new: Tree = {}
        high, alone = [], []
        for name, before in old.items():
            values = [tree[name].reshape(-1) for tree in trees]
            found = aggregate_tensor(
                values,
                self.options,
                weights.to(before.device) if self.client_weighting == "samples" else None,
            )
            new[name] = found.w.view(before.shape)
            high.append(len(found.high))
            if len(found.high):
                alone.append(1 - sum(map(len, found.clusters)) / len(received))
        sizes = torch.tensor([before.numel() for before in old.values()])
        self.report = {
            "frac_high": sum(high) / int(sizes.sum()),
            "high": sum(high),
            "unclustered": sum(alone) / len(alone) if alone else 0.0,
            "frac_high_per_tensor": torch.tensor(high, dtype=torch.float64) / sizes,
        }
        return new

"""FedSA: aggregation by the dispersion of each entry (Wang, Liao, Yuan and Zhang).

Wang, Liao, Yuan and Zhang, "The key of parameter skew in federated learning". The server finds the
entries on which the participants disagree most. It averages these entries by clusters of similar
clients, and all other entries uniformly.

For each tensor, with W (K, M) the values of K participants at its M entries:

    cv_m     = std_k(W_km) / |mean_k W_km|                              (eq. 2-4)
    m is high if (cv_m - min cv) / (max cv - min cv) > cv_t             (eq. 5, 6)

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

Deviations and choices: equation 8 bins the squared deviations themselves, and nearly all of them
fall into the lowest bin. Here they are divided by the largest squared deviation at the entry
(`mic_scale`). Equation 14 divides by S C, so the weights do not sum to 1. Here the weights of an
entry sum to 1 (`alpha_mode`).

Equation 5 is taken literally. It makes about 1 / cv_t entries of a tensor high, whatever the size
of the tensor, so FedSA is nearly the uniform mean. The recorded `frac_high` is the share of high
entries. FedSA does not apply to buffers; the setting `buffers` decides about them.

Defaults: cv_t .2, sim_t .2 and C = S = 4 are the paper's values for CIFAR-10. The paper has
C = S = 5 for CIFAR-100 and 8 for Tiny-ImageNet.

The functions aggregate one tensor. Shapes: K participants, M entries of the tensor, H entries of
high dispersion, S clusters, C classes, b entries of a block. W is a sequence of K tensors of M
entries each, or one (K, M) tensor. The arithmetic is in float64, in blocks of entries that fit into
the processor's cache. Sums over clients follow their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedhet.core.authors import (
    ConfigError,
    Merged,
    Method,
    Recorded,
    RunSetup,
    State,
    Step,
    Tree,
    Update,
    setting,
)
from fedhet.core.server.merging import Mean

TIE = 1e-12  # similarities that differ by less are treated as equal
BLOCK_VALUES = 2**18  # float64 values of a block: 2 MiB; three blocks are in memory at a time


class Aggregate(NamedTuple):
    """The aggregate of one tensor, with the intermediate results.

    Attributes:
        w: (M,) the aggregate.
        cv: (M,) the coefficients of variation.
        high: (H,) the positions of the entries of high dispersion.
        mic: (K, H) the micro classes of the entries of high dispersion, from 1.
        mac: (S, H) the macro classes of the entries of high dispersion, from 1.
        sim: (K, K) the similarities of the clients.
        clusters: the clients of each cluster.
    """

    w: Tensor
    cv: Tensor
    high: Tensor
    mic: Tensor
    mac: Tensor
    sim: Tensor
    clusters: list[list[int]]


def aggregate_tensor(
    W: Sequence[Tensor] | Tensor, options: FedSA, weights: Tensor | None = None
) -> Aggregate:
    """Return FedSA's aggregate of one flat tensor, in float64 (eq. 2 to 15).

    Args:
        W: the participants' values, K tensors of M entries each, finite.
        options: the method's options.
        weights: (K,) the clients' weights in equations 7 and 12, or None for uniform ones, as in
            the paper.

    """
    w, cv, largest = _dispersion(W, weights, scaled=options.mic_scale == "layer")
    high = high_dispersion(cv, options)
    spans = list(_spans(len(high), len(W)))
    dtype = torch.uint8 if options.C < 256 else torch.int32
    mic = torch.empty(len(W), len(high), dtype=dtype, device=w.device)
    agreements = torch.zeros(len(W), len(W), dtype=torch.int64, device=w.device)
    for span in spans:
        mic[:, span] = micro_classes(_block(W, high[span]), options, largest)
        agreements += (mic[:, None, span] == mic[:, span]).sum(-1)
    if not len(high):
        sim = torch.ones_like(agreements, dtype=torch.float64)
        return Aggregate(w, cv, high, mic, mic[:0], sim, [])
    sim = agreements.double() / len(high)  # eq. 10
    clusters = cluster(sim, options)
    mac = torch.empty(len(clusters), len(high), dtype=dtype, device=w.device)
    if clusters:
        for span in spans:
            mac[:, span] = macro_classes(mic[:, span], clusters, options.C)
        counts = class_counts(mac, options.C)
        for span in spans:
            alpha = cluster_weights(mac[:, span], counts, options)
            means = cluster_means(_block(W, high[span]), clusters, weights)
            w[high[span]] = (alpha * means).sum(0)  # eq. 13, 15
    return Aggregate(w, cv, high, mic, mac, sim, clusters)


def _spans(entries: int, clients: int) -> Iterator[slice]:
    size = max(1, BLOCK_VALUES // clients)
    return (slice(i, min(i + size, entries)) for i in range(0, entries, size))


def _block(W: Sequence[Tensor] | Tensor, entries: slice | Tensor) -> Tensor:
    """Return the participants' values at some entries, (K, b) float64."""
    return torch.stack([w[entries] for w in W]).double()


def _mean(rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean over the first dimension, summed in its order.

    It is a weighted mean if `weights` are given, unless all of them are 0.
    """
    if weights is not None and weights.any():
        return _mean(rows * weights[:, None]).div_(_mean(weights))
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.div_(len(rows))


def _dispersion(
    W: Sequence[Tensor] | Tensor, weights: Tensor | None, *, scaled: bool
) -> tuple[Tensor, Tensor, float]:
    """Return the mean and the coefficient of variation of each entry, and the largest deviation.

    Returns:
        (M,) the means of eq. 7; (M,) the coefficients of variation of eq. 2 to 4; and the largest
        squared deviation of the tensor if `scaled`, otherwise 0.
    """
    w = torch.empty(len(W[0]), dtype=torch.float64, device=W[0].device)
    cv = torch.empty_like(w)
    largest = w.new_zeros(())
    for span in _spans(len(w), len(W)):
        block = _block(W, span)
        mu = _mean(block)
        w[span] = mu if weights is None else _mean(block, weights)
        s = block.sub_(mu).square_()
        if scaled:
            largest = torch.maximum(largest, s.max())
        torch.div(_mean(s).sqrt_(), mu.abs_(), out=cv[span])
    cv.nan_to_num_(nan=0.0, posinf=math.inf)  # 0/0: all values are zero, so there is no spread
    # If the mean is zero and there is some spread, cv is infinite. Such an entry gets the largest
    # finite cv.
    finite = cv.isfinite()
    if not finite.all():
        cv[~finite] = cv[finite].max() if finite.any() else 1.0
    return w, cv, float(largest)


def high_dispersion(cv: Tensor, options: FedSA) -> Tensor:
    """Return the positions of the entries of high dispersion (eq. 5, 6), (H,).

    An entry has high dispersion if its cv, scaled to [0, 1] over the tensor, exceeds cv_t. If all
    cv are equal, no entry has. The distribution of a cv has a 1/|mean| tail, so about 1/cv_t
    entries exceed cv_t, whatever M is. cv_clip_quantile cuts this tail first.

    Args:
        cv: (M,) the coefficients of variation.
        options: the method's options.
    """
    if not len(cv):
        return cv.long()
    if options.cv_clip_quantile is not None:
        # torch.quantile takes at most 2**24 values.
        cv = cv.clamp(max=float(np.quantile(cv.cpu().numpy(), options.cv_clip_quantile)))
    lowest, highest = cv.aminmax()
    # If all cv are equal, 0/0 is NaN, which does not exceed cv_t.
    return ((cv - lowest).div_(highest - lowest) > options.cv_t).nonzero().flatten()


def micro_classes(block: Tensor, options: FedSA, largest: float) -> Tensor:
    """Return the micro classes MIC = 1 + #{c in 1..C-1 : u > c/C} (eq. 8, 9), (K, b) in 1..C.

    u is the squared deviation from the mean, divided by the largest squared deviation at the entry
    (mic_scale=entry) or in the layer (mic_scale=layer). With mic_scale=none it is not divided, and
    a u above 1 is in class C.

    Args:
        block: (K, b) the participants' values.
        options: the method's options.
        largest: the largest squared deviation in the layer, used by mic_scale=layer only.
    """
    u = (block - _mean(block)).square_()
    if options.mic_scale == "entry":
        u /= u.amax(0)
    elif options.mic_scale == "layer":
        u /= largest
    bounds = torch.arange(1, options.C, dtype=torch.float64, device=u.device) / options.C
    return torch.bucketize(u, bounds, out_int32=True) + 1


def macro_classes(mic: Tensor, clusters: Sequence[list[int]], C: int) -> Tensor:
    """Return the macro classes MAC (eq. 11), shape (S, b), from the micro classes (K, b).

    MAC is the most frequent MIC in each cluster. If several MIC are equally frequent, MAC is the
    smallest of them.
    """
    votes = (
        torch.stack([(mic[members] == c).sum(0) for c in range(1, C + 1)]) for members in clusters
    )
    return torch.stack([of_cluster.argmax(0) + 1 for of_cluster in votes])


def class_counts(mac: Tensor, C: int) -> Tensor:
    """Return n_sc, the number of entries at which MAC of cluster s is c: (S, H) -> (S, C)."""
    return torch.stack([(mac == c).sum(1) for c in range(1, C + 1)], 1).double()


def cluster_weights(mac: Tensor, counts: Tensor, options: FedSA) -> Tensor:
    """Return the clusters' weights alpha (eq. 14), shape (S, b).

    alpha is n_sc for the class c that the cluster has at the entry, divided by the sum of these
    n_sc over the clusters. With alpha_mode=shrink it is divided by S times the number of high
    entries instead, so the weights sum to less than 1.

    Args:
        mac: (S, b) the macro classes.
        counts: (S, C) the n_sc, over all high entries.
        options: the method's options.
    """
    alpha = counts.gather(1, mac.long() - 1)
    return alpha / (alpha.sum(0) if options.alpha_mode == "normalised" else counts.sum())


def cluster_means(
    block: Tensor, clusters: Sequence[list[int]], weights: Tensor | None = None
) -> Tensor:
    """Return wbar (eq. 12), the mean of each cluster's members: (K, b) -> (S, b).

    The mean is weighted if `weights` (K,) are given, unless all members have the weight 0.
    """
    return torch.stack(
        [_mean(block[own], None if weights is None else weights[own]) for own in clusters]
    )


def cluster(sim: Tensor, options: FedSA) -> list[list[int]]:
    """Return the clusters in the order of their creation; a client may be in none.

    As long as there are fewer than S clusters, each step takes the most similar pair: a free client
    joins a cluster, or two free clients form a new cluster. Once there are S clusters, each
    remaining client joins the most similar cluster if that similarity exceeds sim_t; otherwise it
    stays alone. With threshold=always every pair must exceed sim_t, also before there are S
    clusters.

    The similarity of a client and a cluster is the mean over the cluster's members. Among equally
    similar pairs, a pair of a client and a cluster precedes a pair of two clients; then the lower
    index decides.

    Args:
        sim: (K, K) the similarities.
        options: the method's options.
    """
    clients = len(sim)
    clusters: list[list[int]] = []
    pairs = sim.double().masked_fill(torch.ones_like(sim, dtype=torch.bool).tril(), -math.inf)
    free = torch.ones(clients, dtype=torch.bool, device=sim.device)

    def to_clusters() -> Tensor:
        """Return the similarities to the clusters, (K, clusters), -inf for clients not free."""
        if not clusters:
            return sim.new_empty(clients, 0).double()
        means = [sim[:, members].double().mean(1) for members in clusters]
        return torch.stack(means, 1).masked_fill(~free[:, None], -math.inf)

    while free.any() and len(clusters) < options.S:
        joins = to_clusters()
        opens = pairs.where(free & free[:, None], -math.inf)
        values = torch.cat([joins.flatten(), opens.flatten()])
        best = float(values.max())
        if best == -math.inf or (options.threshold == "always" and best <= options.sim_t + TIE):
            break
        position = int((values >= best - TIE).nonzero()[0])
        if position < joins.numel():
            client, home = divmod(position, len(clusters))
            clusters[home].append(client)
            joined = [client]
        else:
            joined = list(divmod(position - joins.numel(), clients))
            clusters.append(joined)
        free[joined] = False
    if len(clusters) == options.S:
        # All remaining clients are compared with the clusters as they are now, so the order of the
        # clients does not matter.
        joins = to_clusters()
        best_of = joins.amax(1)  # -inf for clients not free
        for client in (best_of > options.sim_t + TIE).nonzero().flatten().tolist():
            home = int((joins[client] >= best_of[client] - TIE).nonzero()[0])
            clusters[home].append(client)
    return [sorted(members) for members in clusters]


@dataclass(frozen=True, kw_only=True)
class FedSA(Method):
    """Changes only the aggregation, and works with any client-side plug-in or server optimiser.

    Attributes:
        cv_t: the threshold of the scaled coefficient of variation (eq. 5).
        sim_t: the similarity that a client needs to join one of S clusters.
        C: the number of micro classes.
        S: the largest number of clusters.
        cv_clip_quantile: the quantile at which the coefficients are clipped first; None for no
            clipping, as in the paper.
        mic_scale: the divisor of the squared deviations: the largest squared deviation of the
            "entry" or of the "layer", or "none".
        alpha_mode: "normalised" or "shrink", see `cluster_weights`.
        threshold: when `sim_t` applies: "at_full" or "always", see `cluster`.
        client_weighting: the weights of the means in equations 7 and 12: "uniform", or by n_k
            ("samples").
    """

    name = "fedsa"
    needs_all = True

    cv_t: float = setting(0.2, low=0, high=1)
    sim_t: float = setting(0.2, low=0, high=1)
    C: int = setting(4, low=1)
    S: int = setting(4, low=1)
    cv_clip_quantile: float | None = setting(None, open_low=0, high=1)
    mic_scale: str = setting("entry", allowed=("entry", "layer", "none"))
    alpha_mode: str = setting("normalised", allowed=("normalised", "shrink"))
    threshold: str = setting("at_full", allowed=("at_full", "always"))
    client_weighting: str = setting("uniform", allowed=("uniform", "samples"))

    @property
    def breaks(self) -> dict[str, str]:
        uniform = {"used weights": "its means are uniform"}
        ignored = uniform if self.client_weighting == "uniform" else {}
        return {"means": "means of clusters of clients", **ignored}

    def setup(self, setup: RunSetup) -> State:
        if type(setup.merge).select is not Mean.select:
            raise ConfigError(
                f"method=fedsa refuses merge={setup.merge.name}: it leaves out or shortens updates"
                " that differ, and FedSA needs these differences to find clusters; use merge=mean"
            )
        return {}

    def weight(self, step: Step, update: Update) -> float:
        return float(update.n) if self.client_weighting == "samples" else 1.0

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        received = list(updates)
        given = torch.tensor([update.weight for update in received], dtype=torch.float64)
        by_samples = self.client_weighting == "samples"
        weights = given.to(step.workspace.device) if by_samples else None
        new: Tree = {}
        high: list[int] = []  # the number of high entries of each tensor
        unclustered: list[float] = []  # shares of clients in no cluster, if there are high entries
        for name, before in old.items():
            # The weights and not their changes, which would be float64 copies.
            values = [update.weights[name].reshape(-1) for update in received]
            aggregate = aggregate_tensor(values, self, weights)
            new[name] = aggregate.w.view(before.shape)
            high.append(len(aggregate.high))
            if len(aggregate.high):
                clustered = sum(len(members) for members in aggregate.clusters)
                unclustered.append(1 - clustered / len(received))
        sizes = torch.tensor([before.numel() for before in old.values()])
        recorded: Recorded = {
            "frac_high": sum(high) / int(sizes.sum()),
            "high": sum(high),
            "unclustered": sum(unclustered) / len(unclustered) if unclustered else 0.0,
            "frac_high_per_tensor": torch.tensor(high, dtype=torch.float64) / sizes,
        }
        return Merged(new, state, recorded)

"""FedSA (Wang et al., The key of parameter skew in federated learning), equations 2 to 15: the
aggregation of one tensor.

Shapes: K participants, M entries of the tensor, H of them of high dispersion, S clusters. W is K
tensors of M entries, or one (K, M) tensor. Arithmetic in float64, in blocks of entries that stay in
the cache; sums over clients in their order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedhet import check

BLOCK = 2**18  # float64 values in a block: 2 MiB, of which three are alive at a time
TIE = 1e-12  # similarities that differ by less are equal


@dataclass(frozen=True)
class Options:
    """The options of conf/method/fedsa.yaml that the equations read; ConfigError where one is out
    of range."""

    cv_t: float = 0.2
    sim_t: float = 0.2
    C: int = 4
    S: int = 4
    cv_clip_quantile: float | None = None
    mic_scale: str = "entry"
    alpha_mode: str = "normalised"
    threshold: str = "at_full"

    def __post_init__(self) -> None:
        check.number("method.cv_t", self.cv_t, low=0, high=1)
        check.number("method.sim_t", self.sim_t, low=0, high=1)
        check.integer("method.C", self.C, low=1)
        check.integer("method.S", self.S, low=1)
        check.optional(
            check.number, "method.cv_clip_quantile", self.cv_clip_quantile, open_low=0, high=1
        )
        check.one_of("method.mic_scale", self.mic_scale, ("entry", "layer", "none"))
        check.one_of("method.alpha_mode", self.alpha_mode, ("normalised", "shrink"))
        check.one_of("method.threshold", self.threshold, ("at_full", "always"))


class Aggregate(NamedTuple):
    """w (M,), cv (M,), high (H,) positions; for these mic (K, H) and mac (S, H), classes from 1;
    sim (K, K); clusters of clients."""

    w: Tensor
    cv: Tensor
    high: Tensor
    mic: Tensor
    mac: Tensor
    sim: Tensor
    clusters: list[list[int]]


def aggregate_tensor(
    W: Sequence[Tensor] | Tensor, options: Options, weights: Tensor | None = None
) -> Aggregate:
    """FedSA's value of one tensor, flat, float64.

    Args:
        W: the participants' values, K tensors of M entries each.
        weights: (K,) client weights of equations 7 and 12, which the paper leaves uniform (None).
    Raises:
        ValueError: W holds NaN or infinite values; it says whose.
    """
    w, cv, top = _dispersion(W, weights, scaled=options.mic_scale == "layer")
    high = high_dispersion(cv, options)
    at = list(_spans(len(high), len(W)))
    kind = torch.uint8 if options.C < 256 else torch.int32
    mic = torch.empty(len(W), len(high), dtype=kind, device=w.device)
    agree = torch.zeros(len(W), len(W), dtype=torch.int64, device=w.device)
    for span in at:
        mic[:, span] = micro_classes(_block(W, high[span]), options, top)
        agree += (mic[:, None, span] == mic[:, span]).sum(-1)
    if not len(high):
        return Aggregate(w, cv, high, mic, mic[:0], torch.ones_like(agree, dtype=torch.float64), [])
    sim = agree.double() / len(high)  # eq. 10
    clusters, _ = cluster(sim, options)
    mac = torch.empty(len(clusters), len(high), dtype=kind, device=w.device)
    for span in at:
        mac[:, span] = macro_classes(mic[:, span], clusters, options.C)
    counts = class_counts(mac, options.C)
    for span in at if clusters else []:
        alpha = cluster_weights(mac[:, span], counts, options)
        # eq. 13, 15
        w[high[span]] = (alpha * cluster_means(_block(W, high[span]), clusters, weights)).sum(0)
    return Aggregate(w, cv, high, mic, mac, sim, clusters)


def _spans(entries: int, clients: int) -> Iterator[slice]:
    size = max(1, BLOCK // clients)
    return (slice(i, min(i + size, entries)) for i in range(0, entries, size))


def _block(W: Sequence[Tensor] | Tensor, at: slice | Tensor) -> Tensor:
    """(K, b) float64: the participants' values at some entries."""
    return torch.stack([w[at] for w in W]).double()


def _mean(rows: Tensor) -> Tensor:
    """Over the first dimension, summed in its order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.div_(len(rows))


def _dispersion(
    W: Sequence[Tensor] | Tensor, weights: Tensor | None, *, scaled: bool
) -> tuple[Tensor, Tensor, float]:
    """The mean (eq. 2, 7), the coefficient of variation (eq. 3, 4), and if `scaled` the largest
    squared deviation of all."""
    w = torch.empty(len(W[0]), dtype=torch.float64, device=W[0].device)
    cv, top = torch.empty_like(w), w.new_zeros(())
    for span in _spans(len(w), len(W)):
        block = _block(W, span)
        mu = _mean(block)
        w[span] = mu if weights is None else _weighted(block, weights)
        s = block.sub_(mu).square_()
        if scaled:
            top = torch.maximum(top, s.max())
        torch.div(_mean(s).sqrt_(), mu.abs_(), out=cv[span])
    if not torch.isfinite(w).all():
        bad = [k for k, values in enumerate(W) if not torch.isfinite(values).all()]
        raise ValueError(
            f"the weights of participants {bad} hold NaN or infinite values; all must be finite"
        )
    cv.nan_to_num_(nan=0.0, posinf=math.inf)  # 0/0: all zero, no spread
    # A mean of zero with some spread: as dispersed as the most dispersed entry that can be
    # compared.
    finite = cv.isfinite()
    if not finite.all():
        cv[~finite] = cv[finite].max() if finite.any() else 1.0
    return w, cv, float(top)


def _weighted(rows: Tensor, weights: Tensor) -> Tensor:
    return _mean(rows * weights[:, None]).div_(_mean(weights))


def high_dispersion(cv: Tensor, options: Options) -> Tensor:
    """Positions of the entries whose cv, scaled to [0, 1] over the tensor, exceeds cv_t (eq. 5, 6);
    none where all cv are equal.

    A cv has a 1/|mean| tail, so about 1/cv_t entries exceed cv_t, whatever M is; cv_clip_quantile
    cuts the tail first."""
    if options.cv_clip_quantile is not None and len(cv):
        cv = cv.clamp(max=_quantile(cv, options.cv_clip_quantile))
    if not len(cv) or cv.max() == cv.min():
        return torch.empty(0, dtype=torch.int64, device=cv.device)
    low, most = cv.min(), cv.max()
    return ((cv - low).div_(most - low) > options.cv_t).nonzero().flatten()


def _quantile(x: Tensor, q: float) -> float:
    """By linear interpolation; torch.quantile takes no more than 2**24 values."""
    at = q * (len(x) - 1)
    low, most = (float(x.kthvalue(int(i) + 1).values) for i in (math.floor(at), math.ceil(at)))
    return low + (most - low) * (at - math.floor(at))


def micro_classes(block: Tensor, options: Options, top: float) -> Tensor:
    """MIC (eq. 8, 9): 1 + #{c in 1..C-1 : u > c/C}, u the squared deviation by its largest at the
    entry (or in the layer: `top`).

    block (K, b) -> (K, b) in 1..C; not scaled (mic_scale=none), a deviation above 1 is in class C.
    """
    s = (block - _mean(block)).square_()
    if options.mic_scale == "entry":
        s /= s.amax(0)
    elif options.mic_scale == "layer":
        s /= top
    bounds = torch.arange(1, options.C, dtype=torch.float64, device=s.device) / options.C
    return torch.bucketize(s, bounds, out_int32=True) + 1


def cluster(sim: Tensor, options: Options) -> tuple[list[list[int]], list[int]]:
    """Clusters of clients in the order of their opening, and the clients in none.

    Until there are S clusters, the most similar of all (free client, cluster) and (free, free)
    pairs joins, or opens one; then each free client joins the cluster that is most similar to it,
    if that exceeds sim_t, and else stays alone. A similarity to a cluster is the mean over its
    members. Of equal pairs, a client with a cluster comes first, then the lower index.
    threshold=always asks every pair to exceed sim_t, not only those after the S-th cluster."""
    if sim.ndim != 2 or sim.shape[0] != sim.shape[1] or not torch.isfinite(sim).all():
        raise ValueError(
            f"similarities of shape {tuple(sim.shape)}; a square matrix of finite values is"
            " expected"
        )
    clients, clusters = len(sim), list[list[int]]()
    pairs = sim.double().masked_fill(torch.ones_like(sim, dtype=torch.bool).tril(), -math.inf)
    free = torch.ones(clients, dtype=torch.bool, device=sim.device)

    def to_clusters() -> Tensor:
        """(K, clusters), -inf for a client that is not free."""
        means = [sim[:, members].double().mean(1) for members in clusters]
        return (
            torch.stack(means, 1).masked_fill(~free[:, None], -math.inf)
            if means
            else sim.new_empty(clients, 0).double()
        )

    while free.any() and len(clusters) < options.S:
        joins, opens = to_clusters(), pairs.where(free & free[:, None], -math.inf)
        values = torch.cat([joins.flatten(), opens.flatten()])
        best = float(values.max())
        if best == -math.inf or (options.threshold == "always" and best <= options.sim_t + TIE):
            break
        at = int((values >= best - TIE).nonzero()[0])
        if at < joins.numel():
            client, home = divmod(at, len(clusters))
            clusters[home].append(client)
            new = [client]
        else:
            new = list(divmod(at - joins.numel(), clients))
            clusters.append(new)
        free[new] = False
    # as they stand now, so that the order of the remaining clients does not matter
    if len(clusters) == options.S:
        joins = to_clusters()
        for client in free.nonzero().flatten().tolist():
            best = float(joins[client].max())
            if best > options.sim_t + TIE:
                clusters[int((joins[client] >= best - TIE).nonzero()[0])].append(client)
                free[client] = False
    return [sorted(members) for members in clusters], free.nonzero().flatten().tolist()


def macro_classes(mic: Tensor, clusters: Sequence[list[int]], C: int) -> Tensor:
    """MAC (eq. 11): the most frequent MIC in each cluster, of equal ones the smaller. (K, b) -> (S,
    b)."""
    found = [
        torch.stack([(mic[members] == c).sum(0) for c in range(1, C + 1)]).argmax(0) + 1
        for members in clusters
    ]
    return torch.stack(found) if found else mic[:0]


def class_counts(mac: Tensor, C: int) -> Tensor:
    """n_sc: at how many entries cluster s is in class c. (S, H) -> (S, C)."""
    return torch.stack([(mac == c).sum(1) for c in range(1, C + 1)], 1).double()


def cluster_weights(mac: Tensor, counts: Tensor, options: Options) -> Tensor:
    """alpha (eq. 14): n_sc of the cluster's class at the entry, over the sum across clusters. (S,
    b) -> (S, b).

    alpha_mode=shrink divides by S times the number of high entries instead: the weights then sum to
    less than 1."""
    alpha = counts.gather(1, mac.long() - 1)
    return alpha / (alpha.sum(0) if options.alpha_mode == "normalised" else counts.sum())


def cluster_means(
    block: Tensor, clusters: Sequence[list[int]], weights: Tensor | None = None
) -> Tensor:
    """wbar (eq. 12): the mean of each cluster's members, plain also where all of them have weight
    0. (K, b) -> (S, b)."""
    return torch.stack(
        [
            (
                _mean(block[m])
                if weights is None or not weights[m].any()
                else _weighted(block[m], weights[m])
            )
            for m in clusters
        ]
    )

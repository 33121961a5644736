"""FedSA's section 3 read literally, entry by entry, in numpy and lists.

The package is compared with this implementation.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def similarity(sim: np.ndarray, client: int, members: list[int]) -> float:
    return sum(float(sim[client, k]) for k in members) / len(members)


def cluster(sim: np.ndarray, S: int, sim_t: float) -> list[list[int]]:
    """Steps 1 to 3 below equation 10.

    Of equal pairs, a client with a cluster comes first, then the lower index. Fractions are rounded
    so that equal ones compare equal.
    """
    clusters: list[list[int]] = []
    free = list(range(len(sim)))

    def rounded(client: int, members: list[int]) -> float:
        return round(similarity(sim, client, members), 9)

    while free and len(clusters) < S:
        # (-similarity, a client with a cluster before two clients, indices); the smallest is taken
        pairs = [(-rounded(k, c), 0, k, s) for k in free for s, c in enumerate(clusters)]
        pairs += [(-round(float(sim[i, j]), 9), 1, i, j) for i in free for j in free if i < j]
        if not pairs:
            break
        _, opens, first, second = min(pairs)
        if opens:
            clusters.append([first, second])
            free = [k for k in free if k not in (first, second)]
        else:
            clusters[second].append(first)
            free.remove(first)
    if len(clusters) == S:
        joins = []
        for k in free:
            similarities = [rounded(k, c) for c in clusters]
            best = max(similarities)
            if best > round(sim_t, 9):
                joins.append((k, similarities.index(best)))
        for k, s in joins:
            clusters[s].append(k)
    return clusters


def aggregate(
    W: np.ndarray, cv_t: float = 0.2, sim_t: float = 0.2, C: int = 4, S: int = 4
) -> dict[str, Any]:
    """The aggregate of W (K, M), in which no entry has a mean of zero."""
    K, M = W.shape
    mu = [sum(W[:, m]) / K for m in range(M)]  # eq. 2
    s = [[(W[k, m] - mu[m]) ** 2 for m in range(M)] for k in range(K)]  # eq. 3
    cv = [(sum(s[k][m] for k in range(K)) / K) ** 0.5 / abs(mu[m]) for m in range(M)]  # eq. 4
    spread = max(cv) - min(cv)
    high = [m for m in range(M) if spread > 0 and (cv[m] - min(cv)) / spread > cv_t]  # eq. 5
    w = np.array(mu)  # eq. 7
    if not high:
        return {"w": w, "high": [], "clusters": [], "alpha": {}}
    mic = [dict.fromkeys(high, 0) for _ in range(K)]
    for m in high:
        for k in range(K):
            u = s[k][m] / max(s[p][m] for p in range(K))
            mic[k][m] = next(c for c in range(1, C + 1) if u <= c / C)  # eq. 8, 9
    sim = np.empty((K, K))
    for a in range(K):
        for b in range(K):
            sim[a, b] = 1 - sum(mic[a][m] != mic[b][m] for m in high) / len(high)  # eq. 10
    clusters = cluster(sim, S, sim_t)
    mac = []
    for members in clusters:  # eq. 11
        votes = {m: [sum(mic[k][m] == c for k in members) for c in range(1, C + 1)] for m in high}
        mac.append({m: 1 + votes[m].index(max(votes[m])) for m in high})
    alpha: dict[int, list[float]] = {}
    for m in high:
        n = [sum(own[q] == own[m] for q in high) for own in mac]
        alpha[m] = [x / sum(n) for x in n]  # eq. 14
        wbar = [np.mean([W[k, m] for k in members]) for members in clusters]  # eq. 12
        w[m] = sum(a * mean for a, mean in zip(alpha[m], wbar, strict=True))  # eq. 15
    return {"w": w, "high": high, "clusters": [sorted(c) for c in clusters], "alpha": alpha}

"""FedSA's section 3 read literally, entry by entry, in numpy and lists: what the package is
compared with."""

from __future__ import annotations

from typing import Any

import numpy as np


def similarity(sim: np.ndarray, client: int, members: list[int]) -> float:
    return sum(float(sim[client, k]) for k in members) / len(members)


def cluster(sim: np.ndarray, S: int, sim_t: float) -> list[list[int]]:
    """Steps 1 to 3 below equation 10, with the ties of the ruling; fractions are rounded so that
    equal ones are equal."""
    clusters: list[list[int]] = []
    free = list(range(len(sim)))
    while free and len(clusters) < S:
        # (similarity, a client with a cluster before two clients, indices): the smallest tuple is
        # taken
        found = [
            (-round(similarity(sim, k, c), 9), 0, k, s)
            for k in free
            for s, c in enumerate(clusters)
        ]
        found += [(-round(float(sim[i, j]), 9), 1, i, j) for i in free for j in free if i < j]
        if not found:
            break
        _, opens, first, second = min(found)
        if opens:
            clusters.append([first, second])
            free = [k for k in free if k not in (first, second)]
        else:
            clusters[second].append(first)
            free.remove(first)
    if len(clusters) == S:
        joins = []
        for k in free:
            best = max(round(similarity(sim, k, c), 9) for c in clusters)
            if best > round(sim_t, 9):
                joins.append(
                    (
                        k,
                        next(
                            s
                            for s, c in enumerate(clusters)
                            if round(similarity(sim, k, c), 9) == best
                        ),
                    )
                )
        for k, s in joins:
            clusters[s].append(k)
    return clusters


def aggregate(
    W: np.ndarray, cv_t: float = 0.2, sim_t: float = 0.2, C: int = 4, S: int = 4
) -> dict[str, Any]:
    """W (K, M), no entry with a mean of zero."""
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
    sim = np.array(
        [
            [1 - sum(mic[a][m] != mic[b][m] for m in high) / len(high) for b in range(K)]
            for a in range(K)
        ]
    )  # eq. 10
    clusters = cluster(sim, S, sim_t)
    mac = []
    for members in clusters:  # eq. 11
        votes = {m: [sum(mic[k][m] == c for k in members) for c in range(1, C + 1)] for m in high}
        mac.append({m: 1 + votes[m].index(max(votes[m])) for m in high})
    alpha: dict[int, list[float]] = {}
    for m in high:
        n = [sum(own[q] == own[m] for q in high) for own in mac]
        alpha[m] = [x / sum(n) for x in n]  # eq. 14
        w[m] = sum(
            a * np.mean([W[k, m] for k in c]) for a, c in zip(alpha[m], clusters, strict=True)
        )  # eq. 12, 15
    return {"w": w, "high": high, "clusters": [sorted(c) for c in clusters], "alpha": alpha}

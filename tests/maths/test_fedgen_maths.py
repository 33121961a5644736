"""FedGen's equations, term by term."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedhet.methods.fedgen import diversity, ensemble, label_shares


def test_shares_and_ensemble() -> None:
    draw = np.random.default_rng(0)
    counts = np.array([[3, 0, 1], [1, 0, 0]])
    logits = draw.normal(size=(2, 4, 3))
    y = np.array([0, 2, 2, 0])
    shares = label_shares(torch.from_numpy(counts))
    assert shares.tolist() == [[0.75, 0, 1], [0.25, 0, 0]]
    expected = [sum(float(shares[k, y[b]]) * logits[k, b] for k in range(2)) for b in range(4)]
    actual = ensemble(torch.from_numpy(logits), shares.double(), torch.from_numpy(y))
    np.testing.assert_allclose(actual, np.stack(expected), rtol=1e-12)


def test_diversity() -> None:
    draw = np.random.default_rng(0)
    z, eps = draw.normal(size=(5, 4)), draw.normal(size=(5, 3))
    total = 0.0
    for i in range(5):
        for j in range(5):
            total += np.abs(z[i] - z[j]).mean() * np.square(eps[i] - eps[j]).mean()
    term = diversity(torch.from_numpy(z), torch.from_numpy(eps))
    assert float(term) == pytest.approx(np.exp(-total / 25), rel=1e-10)
    assert float(diversity(torch.from_numpy(2 * z), torch.from_numpy(eps))) < float(term)
    assert float(diversity(torch.ones(5, 4), torch.from_numpy(eps).float())) == 1

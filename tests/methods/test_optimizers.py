"""The local optimisers are torch's, bit for bit."""

from __future__ import annotations

import pytest
import torch
from maths.cases import named_case
from torch import nn

from fedhet.core.client.optimizers import clip_norm, make
from fedhet.core.messages import LocalSettings

SETTINGS = [
    {},
    {"momentum": 0.9},
    {"weight_decay": 0.01},
    {"clip": 0.5},
    {"clip": 100.0},
    {"momentum": 0.7, "weight_decay": 0.1, "clip": 1.0},
    {"optimizer": "adam"},
    {"optimizer": "adam", "weight_decay": 0.01, "clip": 0.3},
]


def reference(params: list[nn.Parameter], local: LocalSettings) -> torch.optim.Optimizer:
    if local.optimizer == "adam":
        return torch.optim.Adam(params, lr=local.lr, weight_decay=local.weight_decay)
    return torch.optim.SGD(
        params, lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay
    )


def test_same_bits_as_torch() -> None:
    for options in SETTINGS:
        with named_case(options):
            local = LocalSettings(lr=0.07, **options)
            draws = torch.Generator().manual_seed(0)
            start = [torch.randn(shape, generator=draws) for shape in [(7, 5), (7,), ()]]
            ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
            optimizer = make(local, ours)
            expected = reference(theirs, local)
            for _ in range(25):
                grads = [torch.randn(t.shape, generator=draws) for t in start]
                for p, g in zip(theirs, grads, strict=True):
                    p.grad = g.clone()
                if local.clip is not None:
                    nn.utils.clip_grad_norm_(theirs, local.clip)
                expected.step()
                with torch.no_grad():
                    if local.clip is not None:
                        clip_norm(grads, local.clip)
                    optimizer.step(grads)
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_gradients_in_rows_are_clipped_one_by_one() -> None:
    """Those below the limit stay as they are."""
    draws = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0.0, 0.01, 1.0, 30.0])
    rows = [
        torch.randn(4, *shape, generator=draws) * sizes.view(-1, *[1] * len(shape))
        for shape in [(7, 5), (7,), ()]
    ]
    alone = [[t[i].clone() for t in rows] for i in range(4)]
    norms = [float(torch.cat([g.flatten() for g in one]).norm()) for one in alone]
    assert norms[1] < 1 < 5 < norms[2] < 10 < norms[3]
    before = [t.clone() for t in rows]
    clip_norm(rows, 10.0, rows=True)
    for i, one in enumerate(alone):
        clip_norm(one, 10.0)
        for row, g, old in zip(rows, one, before, strict=True):
            torch.testing.assert_close(row[i], g)
            assert torch.equal(row[i], old[i]) is (i < 3)


def test_an_unknown_optimiser_is_named() -> None:
    with pytest.raises(ValueError, match=r"client\.optimizer=lion "):
        LocalSettings(lr=0.1, optimizer="lion")

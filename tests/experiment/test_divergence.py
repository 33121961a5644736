"""Which failures of a run are results."""

from __future__ import annotations

import pytest

from fedhet.core.errors import has_diverged


@pytest.mark.parametrize(
    "reason, diverged",
    [
        (
            "client 8: weights, tensor 'a': holds NaN or infinite values, or values beyond 1e+15",
            True,
        ),
        ("metric 'val.personal.loss' is nan; allowed for n: the client's number of samples", True),
        ("metric 'val.personal.loss' is inf, which it cannot be", True),
        ("client 3 failed: no reply", False),
        (None, False),
    ],
)
def test_what_counts_as_divergence(reason: str | None, diverged: bool) -> None:
    assert has_diverged(reason) == diverged

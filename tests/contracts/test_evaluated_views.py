"""Which of a method's models are evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from contracts.runs import SHORT, validated, without_seconds
from contracts.short import slow

from fedhet.core.errors import ConfigError
from fedhet.runs.config import compose

Launch = Callable[..., Any]


@pytest.mark.parametrize("buffers", ["average", *slow("local")])
def test_a_method_with_personal_models_is_evaluated_by_its_shared_weights(
    launch: Launch, buffers: str
) -> None:
    """Ditto's are FedAvg's, and so are the statistics of batch norm that belong to them."""
    lines = (*SHORT, f"buffers={buffers}", "eval.personal=false")
    fedavg, ditto = (
        launch(*lines, f"method={method}", task=validated(norm=True))
        for method in ("fedavg", "ditto")
    )
    # Ditto's clients also train their own models, and so take twice as many steps.
    expected = without_seconds(fedavg, "bytes", "client_state", "metrics")
    assert without_seconds(ditto, "bytes", "client_state", "metrics") == expected
    assert "acc_clients_mean" in expected[-1]
    assert fedavg.summary["models"] == ditto.summary["models"]
    assert not ditto.summary["personal_models"]["kept"]


def test_a_method_without_shared_weights_has_nothing_else_to_evaluate(launch: Launch) -> None:
    with pytest.raises(ConfigError, match=r"eval\.personal=false: method=fedpcl .*personal"):
        launch(*SHORT, "method=fedpcl", "eval.personal=false", task=validated())
    with pytest.raises(ConfigError, match=r"deliver=true .*eval\.personal=true"):
        compose(["deliver=true", "eval.personal=false"])

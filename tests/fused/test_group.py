"""What a client was trained with does not change its bytes, where the network is of linear layers.

docs/performance.md says for which networks that is so.
"""

from __future__ import annotations

import pytest
from contracts.short import SHORT as SHORTER
from contracts.short import slow_unless
from contracts.test_compositions import METHODS
from fused.fusing import LINES, Launch, digits

from fedhet.models import Logistic

LOCAL = ["client.momentum=0.5", "client.weight_decay=0.01", "client.clip=0.3"]
# FedGen's generator has batch norm. The channels of all clients are one dimension under vmap, so
# that their number must be a multiple of what the processor computes at once.
SHORT = SHORTER | {"fedgen": [*SHORTER["fedgen"], "method.hidden=32"]}
# What trains something beside the model, has draws or penalties, or learns on the server.
FAST = {"fedavg", "fedala", "fedgen", "fedrod", "feddisk", "fedpcl"}


@pytest.mark.parametrize("method", slow_unless(FAST, METHODS))
def test_the_size_of_the_group_makes_no_difference(launch: Launch, method: str) -> None:
    lines = [f"method={method}", *LINES, *SHORT.get(method, []), "fraction=1"]
    hashes = {
        k: launch(*lines, f"engine.fused={k}", task=digits()).summary["weights_sha256"]
        for k in (1, 2, 3, 7, 60)
    }
    assert len(set(hashes.values())) == 1, hashes


def test_of_linear_models_too(launch: Launch) -> None:
    task = digits(lambda: Logistic(shape=(1, 8, 8), classes=10))
    lines = ["method=fedavg", *LINES, "fraction=1", "client.batch_size=32", *LOCAL]
    hashes = {
        launch(*lines, f"engine.fused={k}", task=task).summary["weights_sha256"]
        for k in (1, 2, 3, 7, 60)
    }
    assert len(hashes) == 1

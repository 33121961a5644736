"""Which networks count as one: only those of which one may compute for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fedhet.engines.fused.stacks import layers


class Own(nn.Module):
    """A network of one's own, whose attributes are no modules."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        vars(self).update(attributes)


def test_what_a_module_computes_with_belongs_to_its_form() -> None:
    assert layers(Own(act=torch.relu)) == layers(Own(act=torch.relu))
    assert layers(Own(act=torch.relu)) != layers(Own(act=torch.tanh))
    assert layers(Own(settings={"k": 1})) == layers(Own(settings={"k": 1}))
    assert layers(Own(settings={"k": 1})) != layers(Own(settings={"k": 2}))
    assert layers(Own(_scale=2.0)) != layers(Own(_scale=3.0))


def test_tensors_that_are_not_stacked_are_nobody_elses() -> None:
    fixed = torch.ones(2)
    assert layers(Own(fixed=fixed)) == layers(Own(fixed=fixed))
    assert layers(Own(fixed=fixed)) != layers(Own(fixed=fixed.clone()))
    one, other = Own(), Own()
    for module in (one, other):
        module.register_buffer("features", torch.ones(2), persistent=False)
    assert layers(one) != layers(other)

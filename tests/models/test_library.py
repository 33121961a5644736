"""Models of torchvision and timm by name: where they are cut, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from composing import check_overrides
from maths.cases import named_case
from models.configured import layer, size
from models.small_nets import cut, net
from torch import nn

from fedhet.core.errors import ConfigError
from fedhet.models import Timm, Torchvision
from fedhet.runs.config import compose

SMALL = "shufflenet_v2_x0_5"


def test_the_last_linear_layer_is_the_head() -> None:
    torch.manual_seed(0)
    whole = net(3)
    before = {name: t.clone() for name, t in whole.state_dict().items()}
    random_state = torch.get_rng_state()
    model = cut(whole)
    assert torch.equal(torch.get_rng_state(), random_state)  # the trial consumes no random number
    body = [f"body.{name}" for name in before if not name.startswith("5.")]
    assert list(model.state_dict()) == [*body, "head.weight", "head.bias"]
    values = model.state_dict().values()  # with the running means
    assert all(torch.equal(a, b) for a, b in zip(before.values(), values, strict=True))
    x = torch.randn(5, 3, 4, 4)
    fresh = net(3)
    fresh.load_state_dict(before)
    assert torch.equal(model.eval()(x), fresh.eval()(x))
    assert torch.equal(model(x), model.head(model.features(x)))
    assert model.features(x).shape == (5, 4)


class _Scaled(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class _TwoOutputs(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return (super().forward(x), x) if self.training else super().forward(x)


def convolution() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3))


NOT_CUT = "is not, .*features followed by a linear layer with 3 outputs"


def test_what_is_refused() -> None:
    cases = [
        (
            lambda: nn.Sequential(nn.Conv2d(3, 3, 4), nn.Flatten()),
            (3, 4, 4),
            "has no linear layer",
        ),
        (lambda: _Scaled(*net(3)), (3, 4, 4), NOT_CUT),
        (lambda: _TwoOutputs(*net(3)), (3, 4, 4), NOT_CUT),
        (lambda: net(4), (3, 4, 4), NOT_CUT),
        (lambda: nn.Sequential(*net(3), nn.Softmax(1)), (3, 4, 4), NOT_CUT),
        (
            lambda: nn.Sequential(
                *net(3), nn.Unflatten(1, (3, 1)), nn.Flatten(), nn.BatchNorm1d(3)
            ),
            (3, 4, 4),
            f"{NOT_CUT}.*: .*size",
        ),
        (
            convolution,
            (1, 4, 4),
            r"does not take images .*\(1, 4, 4\): .*3 channels, but got 1",
        ),
        (convolution, (3, 2, 4), r"does not take images .*\(3, 2, 4\): "),
        (lambda: net(3), (80,), r"takes images \(C, H, W\).*\(80,\)"),
    ]
    for whole, shape, message in cases:
        with (
            named_case(whole, shape, message),
            pytest.raises(ConfigError, match=f"^model: .*lib/net {message}"),
        ):
            cut(whole(), shape=shape)


def test_torchvision_by_name() -> None:
    torch.manual_seed(0)
    model = Torchvision(shape=(3, 32, 32), classes=7, name=SMALL)
    published = 1_366_792  # torchvision's table
    assert size(model) == published - layer(1024, 1000) + layer(1024, 7)
    torch.manual_seed(0)
    whole = torchvision.models.get_model(SMALL, num_classes=7)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.eval()(x), whole.eval()(x))
    message = rf"^model: torchvision/{SMALL} .*\(1, 28, 28\): .*3 channels"
    with pytest.raises(ConfigError, match=message):
        Torchvision(shape=(1, 28, 28), classes=7, name=SMALL)
    message = r"^model\.name=resnet17 .*mean resnet1"
    with pytest.raises(ConfigError, match=message):
        Torchvision(shape=(3, 32, 32), classes=7, name="resnet17")


def test_timm_by_name() -> None:
    pytest.importorskip("timm", reason="timm is not a dependency of fedhet")
    model = Timm(shape=(1, 32, 32), classes=7, name="mobilenetv3_small_050").eval()
    x = torch.randn(2, 1, 32, 32)
    assert torch.equal(model(x), model.head(model.features(x)))
    assert model(x).shape == (2, 7)
    message = r"timm/vit_tiny_patch16_224 .*\(3, 32, 32\): .*224"
    with pytest.raises(ConfigError, match=message):
        Timm(shape=(3, 32, 32), classes=7, name="vit_tiny_patch16_224")
    # timm would fetch the first of these from the internet.
    for name in ("hf-hub:timm/resnet18", "resnet17"):
        with pytest.raises(ConfigError, match=rf"^model\.name={name}: timm "):
            Timm(shape=(3, 32, 32), classes=7, name=name)


def test_a_missing_timm_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ConfigError, match=r"model=timm .*timm, .*-e '\.\[timm\]'"):
        Timm(shape=(3, 32, 32), classes=7, name="resnet18")


# ---- on the command line


def test_both_spellings_give_the_same_settings() -> None:
    short = compose([f"model=torchvision/{SMALL}"])
    long = compose(["model=torchvision", f"model.name={SMALL}"])
    assert short.cfg == long.cfg and short.cfg.model.name == SMALL
    assert short.choices["model"] == f"torchvision/{SMALL}"
    assert long.choices["model"] == "torchvision"
    assert compose(["model=timm/vit.a_tag", "model.weights=/a.pth"]).cfg.model == {
        "_target_": "fedhet.models.Timm",
        "name": "vit.a_tag",
        "weights": "/a.pth",
    }
    sweep = ["model=torchvision/resnet18,mlp,timm/resnet18", "seed=0,1"]
    assert len(check_overrides(sweep, sweep=True)) == 6


def test_wrong_spellings() -> None:
    cases = [
        ("model=torchvision", "^model.name has no default; write model.name=<value>"),
        (
            "model=torchvison/resnet18",
            r"unknown model 'torchvison/resnet18' \(did you mean torchvision",
        ),
        ("model=mlp/resnet18", "unknown model 'mlp/resnet18'"),
        ("model=timm/", "unknown model|cannot read"),
        ("model=torchvision/a/b", "unknown model 'torchvision/a/b'"),
        ("dataset=torchvision/a", "unknown dataset"),
    ]
    for override, message in cases:
        with named_case(override, message), pytest.raises(ConfigError, match=message):
            compose([override])

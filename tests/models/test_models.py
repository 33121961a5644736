"""Models: shapes, published sizes, and forward = head(features)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from fedhet.errors import ConfigError
from fedhet.models import CNN, MLP, Classifier, ResNet18

CONF = Path(__file__).parents[2] / "conf" / "model"
SHAPES = [(1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 9, 13)]


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_model_fits_every_shape(path: Path, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    model: Classifier = instantiate(OmegaConf.load(path), shape=shape, classes=7)
    x = torch.randn(3, *shape)
    model.eval()
    features = model.features(x)
    assert features.shape == (3, model.head.in_features)
    assert torch.equal(model(x), model.head(features))
    assert model(x).shape == (3, 7)
    assert type(model.head) is nn.Linear and list(model.state_dict())[-2:] == ["head.weight", "head.bias"]
    if path.stem != "resnet18":
        assert features.min() == 0  # after the ReLU
    nn.functional.cross_entropy(model.train()(x), torch.tensor([0, 3, 6])).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_same_seed_same_weights(path: Path) -> None:
    trees = []
    for _ in range(2):
        torch.manual_seed(3)
        trees.append(instantiate(OmegaConf.load(path), shape=(1, 8, 8), classes=4).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(trees[0].values(), trees[1].values(), strict=True))


def test_published_sizes() -> None:
    assert parameters(CNN(shape=(1, 28, 28), classes=10)) == 1_663_370  # McMahan et al. 2017, section 3
    assert parameters(MLP(shape=(1, 28, 28), classes=10, hidden=[200, 200])) == 199_210
    # torchvision's 11,689,512 less its 7x7 stem and 1000 classes, plus a 3x3 stem and 10 classes
    size = 11_689_512 - 64 * 3 * (49 - 9) - 513 * (1000 - 10)
    assert parameters(ResNet18(shape=(3, 32, 32), classes=10, norm="batch")) == size
    assert parameters(ResNet18(shape=(3, 32, 32), classes=10, norm="group")) == size  # scale and shift per channel in both


def test_resnet_keeps_the_resolution_in_its_stem() -> None:
    model = ResNet18(shape=(3, 32, 32), classes=10, norm="group")
    sizes = {}
    for name in ("maxpool", "layer1", "layer4"):
        getattr(model.body, name).register_forward_hook(lambda _, __, out, name=name: sizes.update({name: tuple(out.shape[1:])}))
    model(torch.zeros(1, 3, 32, 32))
    assert sizes == {"maxpool": (64, 32, 32), "layer1": (64, 32, 32), "layer4": (512, 4, 4)}


def test_resnet_stem_is_initialised_like_the_other_convolutions() -> None:
    torch.manual_seed(0)
    model = ResNet18(shape=(1, 8, 8), classes=2, norm="batch")
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 20
    for layer in convolutions:  # He et al. 2015: variance 2 / (output channels x kernel area)
        assert layer.weight.std().item() == pytest.approx((2 / (layer.out_channels * layer.kernel_size[0] ** 2)) ** 0.5, rel=0.1)


def test_group_norm_has_no_buffers_and_no_batch_effects() -> None:
    torch.manual_seed(0)
    model = ResNet18(shape=(1, 8, 8), classes=3, norm="group").train()
    assert not list(model.buffers())
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    assert {module.num_groups for module in model.modules() if isinstance(module, nn.GroupNorm)} == {32}
    x = torch.randn(4, 1, 8, 8)
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-5)


def test_mlp_without_hidden_layers_is_linear() -> None:
    model = MLP(shape=(1, 2, 3), classes=4, hidden=[])
    x = torch.rand(5, 1, 2, 3)
    assert torch.equal(model.features(x), x.flatten(1))
    assert parameters(model) == 4 * 7


def test_mlp_with_batch_norm() -> None:
    """Before each ReLU: a scale and a shift per hidden unit."""
    model = MLP(shape=(1, 28, 28), classes=10, hidden=[200, 100], norm="batch")
    assert [type(layer).__name__ for layer in model.body] == ["Flatten", *2 * ["Linear", "BatchNorm1d", "ReLU"]]
    assert parameters(model) == parameters(MLP(shape=(1, 28, 28), classes=10, hidden=[200, 100])) + 2 * 300


def test_impossible_settings() -> None:
    for shape in ((1, 3, 28), (3, 28, 2)):
        with pytest.raises(ConfigError, match=str(shape).replace("(", r"\(").replace(")", r"\)")):
            CNN(shape=shape, classes=10)
    assert CNN(shape=(1, 4, 7), classes=10)(torch.zeros(1, 1, 4, 7)).shape == (1, 10)
    with pytest.raises(ConfigError, match=r"model\.norm='layer': must be one of batch, group"):
        ResNet18(shape=(3, 32, 32), classes=10, norm="layer")
    with pytest.raises(ConfigError, match=r"model\.norm=group is not allowed.*none, batch"):
        MLP(shape=(1, 8, 8), classes=10, hidden=[4], norm="group")
    for hidden in ([0], [200, 2.5], ["200"]):
        with pytest.raises(ConfigError, match=r"model\.hidden="):
            MLP(shape=(1, 8, 8), classes=10, hidden=hidden)

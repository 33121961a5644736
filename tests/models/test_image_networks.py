"""torchvision's networks for small images: ResNet, MobileNetV2 and VGG-16."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from maths.cases import named_case
from models.configured import layer, size
from torch import nn

from fedhet.core.client.training import norms
from fedhet.models import VGG16, Classifier, MobileNetV2, ResNet18, ResNet34


@pytest.fixture
def no_values() -> Iterator[None]:
    """Build models without values, whose sizes can be compared at no cost."""
    with torch.device("meta"):
        yield


@pytest.mark.usefixtures("no_values")
def test_sizes_of_resnet() -> None:
    """The sizes that torchvision publishes, with another stem and another number of classes."""
    for cls, published in [(ResNet18, 11_689_512), (ResNet34, 21_797_672)]:
        with named_case(cls, published):
            for norm in ("batch", "group"):  # both have a scale and a shift per channel
                expected = published - 64 * 3 * (49 - 9) - layer(512, 1000) + layer(512, 10)
                assert size(cls(shape=(3, 32, 32), classes=10, norm=norm)) == expected
            imagenet = cls(shape=(3, 32, 32), classes=1000, norm="batch", stem="imagenet")
            assert size(imagenet) == published


@pytest.mark.usefixtures("no_values")
def test_sizes_of_mobilenet() -> None:
    for stem in ["cifar", "imagenet"]:
        for norm in ["batch", "group"]:
            with named_case(stem, norm):
                published = 3_504_872
                model = MobileNetV2(
                    shape=(3, 32, 32), classes=10, norm=norm, stem=stem, dropout=0.2
                )
                assert size(model) == published - layer(1280, 1000) + layer(1280, 10)


@pytest.mark.usefixtures("no_values")
def test_sizes_of_vgg16() -> None:
    for channels in [3, 1]:
        for norm, published in [("none", 138_357_544), ("batch", 138_365_992)]:
            with named_case(channels, norm, published):
                shape = (channels, 32, 32)
                model = VGG16(shape=shape, classes=10, hidden=[512, 128], norm=norm, dropout=0.5)
                connected = layer(512 * 49, 4096) + layer(4096, 4096) + layer(4096, 1000)
                convolutions = published - connected - (3 - channels) * 9 * 64
                head = layer(512, 512) + layer(512, 128) + layer(128, 10)
                assert size(model) == convolutions + head
                assert model.head.in_features == 128  # FedNorm's latents


def test_vgg16_computes_what_torchvisions_layers_compute() -> None:
    """The same values in the same order: a 32x32 image leaves one pixel, which is its average."""
    from torchvision.models import vgg

    torch.manual_seed(0)
    ours = VGG16(shape=(3, 32, 32), classes=5, hidden=[16, 8], norm="none", dropout=0.5).eval()
    theirs = nn.Sequential(
        *vgg.make_layers(vgg.cfgs["D"]),
        nn.Flatten(),
        nn.Linear(512, 16),
        nn.ReLU(),
        nn.Linear(16, 8),
        nn.ReLU(),
    )
    values = ours.body.state_dict().values()
    theirs.load_state_dict(dict(zip(theirs.state_dict(), values, strict=True)))
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours.features(x), theirs(x))
    dropouts = [module for module in ours.body if isinstance(module, nn.Dropout)]
    assert [module.p for module in dropouts] == [0.5, 0.5]


def output_shapes(
    model: nn.Module, names: tuple[str, ...], x: torch.Tensor
) -> dict[str, tuple[int, ...]]:
    """The shapes of the named modules' outputs for x, without the batch dimension."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda _, __, out, name=name: shapes.update({name: tuple(out.shape[1:])})
        )
    model(x)
    return shapes


def test_stems() -> None:
    x = torch.zeros(2, 3, 32, 32)
    for stem, first in (("cifar", 32), ("imagenet", 8)):
        model = ResNet18(shape=(3, 32, 32), classes=10, norm="group", stem=stem)
        assert output_shapes(model, ("body.layer1", "body.layer4"), x) == {
            "body.layer1": (64, first, first),
            "body.layer4": (512, first // 8, first // 8),
        }
    for stem, last in (("cifar", 2), ("imagenet", 1)):
        mobile = MobileNetV2(shape=(3, 32, 32), classes=10, norm="group", stem=stem, dropout=0)
        shapes = output_shapes(mobile, ("body.features",), x)
        assert shapes == {"body.features": (1280, last, last)}


def resnet(norm: str) -> Classifier:
    return ResNet18(shape=(1, 8, 8), classes=3, norm=norm)


def mobilenet(norm: str) -> Classifier:
    return MobileNetV2(shape=(1, 8, 8), classes=3, norm=norm, stem="cifar", dropout=0)


@pytest.mark.parametrize("make", [resnet, mobilenet])
def test_the_stem_is_initialised_like_the_other_convolutions(
    make: Callable[[str], Classifier],
) -> None:
    torch.manual_seed(0)
    convolutions = [module for module in make("batch").modules() if isinstance(module, nn.Conv2d)]
    for conv in convolutions:  # He et al. 2015: variance 2 / (output channels x kernel area)
        deviation = (2 / (conv.out_channels * conv.kernel_size[0] ** 2)) ** 0.5
        assert conv.weight.std().item() == pytest.approx(deviation, rel=0.15), conv
    assert convolutions[0].in_channels == 1


@pytest.mark.parametrize(("make", "groups"), [(resnet, 32), (mobilenet, 8)])
def test_group_norm_has_no_buffers_and_no_batch_effects(
    make: Callable[[str], Classifier], groups: int
) -> None:
    torch.manual_seed(0)
    model = make("group").train()
    assert not list(model.buffers()) and list(make("batch").buffers())
    assert not norms(model)
    group_norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert {module.num_groups for module in group_norms} == {groups}
    x = torch.randn(4, 1, 8, 8)
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-5)

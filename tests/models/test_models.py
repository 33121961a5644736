"""Models: shapes, published sizes, and forward = head(features)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from fedhet.config.targets import instantiate
from fedhet.errors import ConfigError
from fedhet.methods.fedavg import FedAvg
from fedhet.models import (
    CNN,
    MLP,
    VGG16,
    Classifier,
    FedDiskCNN,
    FedLExCNN,
    Logistic,
    MobileNetV2,
    ResNet18,
    ResNet34,
)
from fedhet.task import ClientData, Task

CONF = Path(__file__).parents[2] / "conf" / "model"
# The named ones of torchvision and timm, and those for text, have tests of their own.
NAMES = sorted(
    path.stem
    for path in CONF.glob("*.yaml")
    if path.stem not in ("torchvision", "timm", "char_lstm")
)
TABLES = ("logistic", "mlp")
SMALLEST = {
    "cnn": 4,
    "femnist_cnn": 4,
    "fedlex_cnn": 6,
    "feddisk_cnn": 16,
}  # pixels; the others take every size
SHAPES = [(1, 28, 28), (3, 32, 32), (1, 64, 64), (1, 8, 8), (2, 9, 13)]
LARGE = (
    "resnet34",
    "vgg16",
    "mobilenet_v2",
)  # make test-all tries them in every shape, and in a round


def model_of(name: str, shape: tuple[int, ...], classes: int, **settings: Any) -> Classifier:
    model: Classifier = instantiate(
        OmegaConf.create({"model": OmegaConf.load(CONF / f"{name}.yaml")}).model,
        shape=shape,
        classes=classes,
        **settings,
    )
    return model


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


FITS = [
    pytest.param(
        name,
        shape,
        marks=[pytest.mark.matrix]
        if shape == (1, 64, 64) or (name in LARGE and shape != (1, 28, 28))
        else [],
    )
    for name in NAMES
    for shape in SHAPES
    if min(shape[1:]) >= SMALLEST.get(name, 1)
]


@pytest.mark.parametrize(("name", "shape"), FITS)
def test_every_model_fits_every_shape(name: str, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    model = model_of(name, shape, 7)
    x = torch.randn(3, *shape)
    model.eval()
    features = model.features(x)
    assert features.shape == (3, model.head.in_features)
    assert torch.equal(model(x), model.head(features))
    assert model(x).shape == (3, 7)
    assert type(model.head) is nn.Linear and list(model.state_dict())[-2:] == [
        "head.weight",
        "head.bias",
    ]
    if name not in ("logistic", "resnet18", "resnet34", "mobilenet_v2"):
        assert features.min() == 0  # after the ReLU
    model = model.train()
    for module in model.modules():
        module.p = (
            0.0 if isinstance(module, nn.Dropout) else getattr(module, "p", None)
        )  # it would hide gradients
    nn.functional.cross_entropy(model(x), torch.tensor([0, 3, 6])).backward()
    assert [
        key
        for key, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.abs().sum() > 0
    ] == []


@pytest.mark.parametrize("name", TABLES)
def test_tables_have_no_channels(name: str) -> None:
    assert model_of(name, (5,), 3)(torch.randn(4, 5)).shape == (4, 3)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TABLES])
def test_image_models_refuse_what_is_no_image_or_too_small(name: str) -> None:
    smallest = SMALLEST.get(name, 1)
    refused: list[tuple[int, ...]] = [(80,), (28, 28), (1, smallest - 1, 28), (3, 28, smallest - 1)]
    for shape in refused:
        said = (
            rf"^model: the .* takes images \(C, H, W\) of {smallest}x{smallest}"
            rf" .*{re.escape(str(shape))}$"
        )
        with pytest.raises(ConfigError, match=said):
            model_of(name, shape, 10)
    if smallest > 1:
        assert model_of(name, (1, smallest, smallest + 3), 10).eval()(
            torch.zeros(1, 1, smallest, smallest + 3)
        ).shape == (1, 10)


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_weights(name: str) -> None:
    trees = []
    for _ in range(2):
        torch.manual_seed(3)
        trees.append(model_of(name, (1, 16, 16), 4).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(trees[0].values(), trees[1].values(), strict=True))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.matrix] if name in LARGE else []) for name in NAMES],
)
def test_a_round_of_fedavg(name: str, federation: Callable[..., Any]) -> None:
    """One batch at each of two clients moves every tensor that is trained, and leaves all of them
    finite."""
    draw = torch.Generator().manual_seed(0)
    clients = [
        ClientData((torch.rand(2, 3, 16, 16, generator=draw), torch.tensor([0, label])))
        for label in (1, 2)
    ]
    task = Task(
        lambda: model_of(name, (3, 16, 16), 3),
        nn.CrossEntropyLoss(reduction="none"),
        clients,
        None,
        3,
    )
    run = federation(task, FedAvg, batch_size=2, rounds=1)
    before = dict(run.model)
    run.run()
    assert all(t.isfinite().all() for t in run.model.values())
    assert not torch.equal(run.model["head.weight"], before["head.weight"])
    assert run.model.keys() == before.keys()


def layer(inputs: int, outputs: int, area: int = 1) -> int:
    """Weights and biases."""
    return (inputs * area + 1) * outputs


def test_published_sizes() -> None:
    # McMahan et al. 2017, section 3
    assert parameters(CNN(shape=(1, 28, 28), classes=10)) == 1_663_370
    # LEAF's: 5x5x32, 5x5x64, 2048, 62
    assert parameters(CNN(shape=(1, 28, 28), classes=62, hidden=2048)) == 6_603_710
    assert parameters(MLP(shape=(1, 28, 28), classes=10, hidden=[200, 200])) == 199_210
    assert parameters(Logistic(shape=(1, 28, 28), classes=10)) == layer(784, 10)
    for shape in ((1, 28, 28), (1, 32, 32)):  # FedLEx's program: "1,663,370 parameters"
        assert parameters(FedLExCNN(shape=shape, classes=10)) == 1_663_370
    # FedDisk, table of communication costs: 447,000 for FEMNIST, 39,000 for chest X-rays, 12,000
    # for MNIST
    for channels, side, classes, size in (
        (128, 28, 62, 447_406),
        (32, 32, 2, 39_442),
        (16, 28, 10, 11_178),
    ):
        model = FedDiskCNN(shape=(1, side, side), classes=classes, channels=channels)
        left = {28: 4, 32: 5}[side] ** 2
        assert parameters(model) == size
        assert size == (
            layer(1, channels, 25)
            + layer(channels, channels, 25)
            + 2 * 2 * channels
            + layer(channels * left, 16)
            + layer(16, classes)
        )


@pytest.fixture
def no_values() -> Iterator[None]:
    """Models of sizes only, which cost nothing."""
    with torch.device("meta"):
        yield


@pytest.mark.usefixtures("no_values")
def test_sizes_of_torchvisions() -> None:
    """The sizes that torchvision publishes, less their stems and classes for ImageNet, plus
    ours."""
    for cls, published in ((ResNet18, 11_689_512), (ResNet34, 21_797_672)):
        for norm in ("batch", "group"):  # scale and shift per channel in both
            size = published - 64 * 3 * (49 - 9) - layer(512, 1000) + layer(512, 10)
            assert parameters(cls(shape=(3, 32, 32), classes=10, norm=norm)) == size
        assert (
            parameters(cls(shape=(3, 32, 32), classes=1000, norm="batch", stem="imagenet"))
            == published
        )
    published = 3_504_872
    for norm in ("batch", "group"):
        for stem in ("cifar", "imagenet"):
            mobile = MobileNetV2(shape=(3, 32, 32), classes=10, norm=norm, stem=stem, dropout=0.2)
            assert parameters(mobile) == published - layer(1280, 1000) + layer(1280, 10)


@pytest.mark.usefixtures("no_values")
def test_sizes_of_vgg16() -> None:
    connected = layer(512 * 49, 4096) + layer(4096, 4096) + layer(4096, 1000)
    for norm, published in (("none", 138_357_544), ("batch", 138_365_992)):
        for channels in (3, 1):
            model = VGG16(
                shape=(channels, 32, 32), classes=10, hidden=[512, 128], norm=norm, dropout=0.5
            )
            convolutions = published - connected - (3 - channels) * 9 * 64
            assert parameters(model) == convolutions + layer(512, 512) + layer(512, 128) + layer(
                128, 10
            )
            assert model.head.in_features == 128  # FedNorm's latents


def test_vgg16_is_torchvisions_where_its_layers_are() -> None:
    """The same values in the same order: a 32x32 image leaves one pixel, whose average it is."""
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
    theirs.load_state_dict(
        dict(zip(theirs.state_dict(), list(ours.body.state_dict().values()), strict=True))
    )
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours.features(x), theirs(x))
    dropouts = [module for module in ours.body if isinstance(module, nn.Dropout)]
    assert [module.p for module in dropouts] == [0.5, 0.5]


def shapes_of(
    model: nn.Module, names: tuple[str, ...], x: torch.Tensor
) -> dict[str, tuple[int, ...]]:
    """What the named modules give for x, without the batch."""
    found: dict[str, tuple[int, ...]] = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda _, __, out, name=name: found.update({name: tuple(out.shape[1:])})
        )
    model(x)
    return found


def test_stems() -> None:
    x = torch.zeros(2, 3, 32, 32)
    for stem, first in (("cifar", 32), ("imagenet", 8)):
        model = ResNet18(shape=(3, 32, 32), classes=10, norm="group", stem=stem)
        assert shapes_of(model, ("body.layer1", "body.layer4"), x) == {
            "body.layer1": (64, first, first),
            "body.layer4": (512, first // 8, first // 8),
        }
    for stem, last in (("cifar", 2), ("imagenet", 1)):
        mobile = MobileNetV2(shape=(3, 32, 32), classes=10, norm="group", stem=stem, dropout=0)
        assert shapes_of(mobile, ("body.features",), x) == {"body.features": (1280, last, last)}


@pytest.mark.parametrize(
    "make",
    [
        lambda: ResNet18(shape=(1, 8, 8), classes=2, norm="batch"),
        lambda: MobileNetV2(shape=(1, 8, 8), classes=2, norm="batch", stem="cifar", dropout=0),
    ],
)
def test_stem_is_initialised_like_the_other_convolutions(make: Callable[[], Classifier]) -> None:
    torch.manual_seed(0)
    convolutions = [module for module in make().modules() if isinstance(module, nn.Conv2d)]
    for conv in convolutions:  # He et al. 2015: variance 2 / (output channels x kernel area)
        deviation = (2 / (conv.out_channels * conv.kernel_size[0] ** 2)) ** 0.5
        assert conv.weight.std().item() == pytest.approx(deviation, rel=0.15), conv
    assert convolutions[0].in_channels == 1


@pytest.mark.parametrize(
    ("make", "groups"),
    [
        (lambda norm: ResNet18(shape=(1, 8, 8), classes=3, norm=norm), 32),
        (
            lambda norm: MobileNetV2(
                shape=(1, 8, 8), classes=3, norm=norm, stem="cifar", dropout=0
            ),
            8,
        ),
    ],
)
def test_group_norm_has_no_buffers_and_no_batch_effects(
    make: Callable[[str], Classifier], groups: int
) -> None:
    torch.manual_seed(0)
    model = make("group").train()
    assert not list(model.buffers()) and list(make("batch").buffers())
    assert not any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    )
    assert {
        module.num_groups for module in model.modules() if isinstance(module, nn.GroupNorm)
    } == {groups}
    x = torch.randn(4, 1, 8, 8)
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-5)


def test_mlp_without_hidden_layers_is_logistic_regression() -> None:
    model = Logistic(shape=(1, 2, 3), classes=4)
    x = torch.rand(5, 1, 2, 3)
    assert torch.equal(model.features(x), x.flatten(1))
    assert (
        model.state_dict().keys()
        == MLP(shape=(1, 2, 3), classes=4, hidden=[]).state_dict().keys()
        == {"head.weight", "head.bias"}
    )


def test_mlp_with_batch_norm() -> None:
    """Before each ReLU: a scale and a shift per hidden unit."""
    model = MLP(shape=(1, 28, 28), classes=10, hidden=[200, 100], norm="batch")
    assert [type(layer).__name__ for layer in model.body] == [
        "Flatten",
        *2 * ["Linear", "BatchNorm1d", "ReLU"],
    ]
    assert (
        parameters(model)
        == parameters(MLP(shape=(1, 28, 28), classes=10, hidden=[200, 100])) + 2 * 300
    )


def test_impossible_settings() -> None:
    with pytest.raises(ConfigError, match=r"model\.norm=group is not allowed.*none, batch"):
        MLP(shape=(1, 8, 8), classes=10, hidden=[4], norm="group")
    for hidden in ([0], [200, 2.5], ["200"]):
        with pytest.raises(ConfigError, match=r"^model\.hidden\[[01]\]=.*a whole number >= 1"):
            MLP(shape=(1, 8, 8), classes=10, hidden=hidden)
    refused = [
        ("resnet18", "norm", "layer"),
        ("resnet34", "stem", "none"),
        ("mobilenet_v2", "norm", "none"),
        ("mobilenet_v2", "stem", 1),
        ("mobilenet_v2", "dropout", 1),
        ("vgg16", "norm", "group"),
        ("vgg16", "dropout", -0.1),
        ("vgg16", "hidden", []),
        ("vgg16", "hidden[0]", [0]),
        ("mlp", "hidden", 5),
        ("mlp", "hidden", None),
        ("cnn", "hidden", 0),
        ("feddisk_cnn", "channels", 1.5),
    ]
    for name, key, value in refused:
        with pytest.raises(ConfigError, match=rf"^model\.{re.escape(key)}="):
            model_of(name, (3, 32, 32), 10, **{key.partition("[")[0]: value})

"""What every model must do: its shapes, forward = head(features), and training."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from maths.cases import named_case
from models.configured import CONF, layer, model_of, size
from torch import nn

from fedhet.core.errors import ConfigError
from fedhet.core.task import ClientData, Task
from fedhet.methods.fedavg import FedAvg
from fedhet.models import CNN, MLP, FedDiskCNN, FedLExCNN, Logistic

# The models of torchvision and timm by name, and those for text, have tests of their own.
OTHERS = ("torchvision", "timm", "char_lstm", "text")
NAMES = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem not in OTHERS)
TABLES = ("logistic", "mlp")
# The smallest sides in pixels; the other models take every size.
SMALLEST = {"cnn": 4, "femnist_cnn": 4, "fedlex_cnn": 6, "feddisk_cnn": 16}
SHAPES = [(1, 28, 28), (3, 32, 32), (1, 64, 64), (1, 8, 8), (2, 9, 13)]
# `make test-all` tries these models with every shape, and in a round.
LARGE = ("resnet34", "vgg16", "mobilenet_v2")
RESIDUAL = [("resnet18", shape) for shape in SHAPES[:2]]


def marks(name: str, shape: tuple[int, ...] = (1, 28, 28)) -> list[pytest.MarkDecorator]:
    if shape == (1, 64, 64) or (name in LARGE and shape != (1, 28, 28)):
        return [pytest.mark.matrix]
    return [pytest.mark.slow] if name in LARGE or (name, shape) in RESIDUAL else []


FITS = [
    pytest.param(name, shape, marks=marks(name, shape))
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
    assert type(model.head) is nn.Linear
    assert list(model.state_dict())[-2:] == ["head.weight", "head.bias"]
    if name not in ("logistic", "resnet18", "resnet34", "mobilenet_v2"):
        assert features.min() == 0  # after the ReLU
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # dropout would hide gradients
    nn.functional.cross_entropy(model(x), torch.tensor([0, 3, 6])).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


def test_tables_have_no_channels() -> None:
    for name in TABLES:
        with named_case(name):
            assert model_of(name, (5,), 3)(torch.randn(4, 5)).shape == (4, 3)


def test_image_models_refuse_other_data_and_images_that_are_too_small() -> None:
    for name in [name for name in NAMES if name not in TABLES]:
        with named_case(name):
            smallest = SMALLEST.get(name, 1)
            for shape in ((80,), (28, 28), (1, smallest - 1, 28), (3, 28, smallest - 1)):
                message = rf"^model: .*least {smallest}x{smallest} .*{re.escape(str(shape))}"
                with pytest.raises(ConfigError, match=message):
                    model_of(name, shape, 10)
            if smallest > 1:
                model = model_of(name, (1, smallest, smallest + 3), 10).eval()
                assert model(torch.zeros(1, 1, smallest, smallest + 3)).shape == (1, 10)


@pytest.mark.parametrize(
    "names",
    [
        [name for name in NAMES if name not in LARGE],
        pytest.param(LARGE, marks=pytest.mark.slow),
    ],
    ids=["small", "large"],
)
def test_same_seed_same_weights(names: list[str]) -> None:
    for name in names:
        trees = []
        for _ in range(2):
            torch.manual_seed(3)
            trees.append(model_of(name, (1, 16, 16), 4).state_dict())
        with named_case(name):
            one, other = (tree.values() for tree in trees)
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


A_ROUND = {**dict.fromkeys(LARGE, pytest.mark.matrix), "resnet18": pytest.mark.slow}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=A_ROUND.get(name, [])) for name in NAMES]
)
def test_a_round_of_fedavg(name: str, federation: Callable[..., Any]) -> None:
    """One batch at each of two clients changes the head and leaves every tensor finite."""
    draw = torch.Generator().manual_seed(0)
    clients = [
        ClientData((torch.rand(2, 3, 16, 16, generator=draw), torch.tensor([0, label])))
        for label in (1, 2)
    ]
    criterion = nn.CrossEntropyLoss(reduction="none")
    task = Task(lambda: model_of(name, (3, 16, 16), 3), criterion, clients, None, 3)
    run = federation(task, FedAvg, batch_size=2, rounds=1)
    before = dict(run.model)
    run.run()
    assert all(t.isfinite().all() for t in run.model.values())
    assert not torch.equal(run.model["head.weight"], before["head.weight"])
    assert run.model.keys() == before.keys()


def test_published_sizes() -> None:
    # McMahan et al. 2017, section 3
    assert size(CNN(shape=(1, 28, 28), classes=10)) == 1_663_370
    # LEAF: 5x5x32, 5x5x64, 2048, 62
    assert size(CNN(shape=(1, 28, 28), classes=62, hidden=2048)) == 6_603_710
    assert size(MLP(shape=(1, 28, 28), classes=10, hidden=[200, 200])) == 199_210
    assert size(Logistic(shape=(1, 28, 28), classes=10)) == layer(784, 10)
    for shape in ((1, 28, 28), (1, 32, 32)):  # FedLEx's program: "1,663,370 parameters"
        assert size(FedLExCNN(shape=shape, classes=10)) == 1_663_370


def test_sizes_of_feddisks_network() -> None:
    """The paper's table: 447,000 for FEMNIST, 39,000 for chest X-rays, 12,000 for MNIST."""
    for channels, side, classes, expected in [
        (128, 28, 62, 447_406),
        (32, 32, 2, 39_442),
        (16, 28, 10, 11_178),
    ]:
        with named_case(channels, side, classes, expected):
            model = FedDiskCNN(shape=(1, side, side), classes=classes, channels=channels)
            pixels = {28: 4, 32: 5}[side] ** 2
            assert size(model) == expected
            assert expected == (
                layer(1, channels, 25)
                + layer(channels, channels, 25)
                + 2 * 2 * channels
                + layer(channels * pixels, 16)
                + layer(16, classes)
            )


def test_an_mlp_without_hidden_layers_is_logistic_regression() -> None:
    model = Logistic(shape=(1, 2, 3), classes=4)
    x = torch.rand(5, 1, 2, 3)
    assert torch.equal(model.features(x), x.flatten(1))
    mlp = MLP(shape=(1, 2, 3), classes=4, hidden=[])
    assert model.state_dict().keys() == mlp.state_dict().keys() == {"head.weight", "head.bias"}


def test_an_mlp_with_batch_norm() -> None:
    """Before each ReLU, batch norm has a scale and a shift per hidden unit."""
    plain = MLP(shape=(1, 28, 28), classes=10, hidden=[200, 100])
    model = MLP(shape=(1, 28, 28), classes=10, hidden=[200, 100], norm="batch")
    types = [type(module).__name__ for module in model.body]
    assert types == ["Flatten", *2 * ["Linear", "BatchNorm1d", "ReLU"]]
    assert size(model) == size(plain) + 2 * 300


def test_impossible_settings_of_an_mlp() -> None:
    with pytest.raises(ConfigError, match=r"model\.norm=group .*none, batch"):
        MLP(shape=(1, 8, 8), classes=10, hidden=[4], norm="group")
    for hidden in ([0], [200, 2.5], ["200"]):
        with pytest.raises(ConfigError, match=r"^model\.hidden\[[01]\]=.*whole number >= 1"):
            MLP(shape=(1, 8, 8), classes=10, hidden=hidden)


def test_impossible_settings() -> None:
    cases = [
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
    for name, key, value in cases:
        with (
            named_case(name, key, value),
            pytest.raises(ConfigError, match=rf"^model\.{re.escape(key)}="),
        ):
            model_of(name, (3, 32, 32), 10, **{key.partition("[")[0]: value})

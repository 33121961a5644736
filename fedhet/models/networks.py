"""The built-in networks: those in the papers of fedhet's methods, and networks of torchvision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn

from fedhet.core import check
from fedhet.core.errors import ConfigError
from fedhet.models.base import Classifier, image_shape, norm_layer


class MLP(Classifier):
    """Linear layers with ReLU between them; `hidden` [200, 200] is McMahan et al.'s 2NN (2017).

    Args:
        shape: the shape of an input, which is flattened.
        classes: the number of outputs: of classes, labels or numbers.
        hidden: the widths of the hidden layers, each >= 1.
        norm: "none", or "batch" for batch norm before each ReLU.
    """

    def __init__(
        self, *, shape: tuple[int, ...], classes: int, hidden: Sequence[int], norm: str = "none"
    ) -> None:
        widths = [math.prod(shape), *check.each(check.integer, "model.hidden", hidden, low=1)]
        check.one_of("model.norm", norm, ("none", "batch"))
        super().__init__()
        norms = [nn.BatchNorm1d] if norm == "batch" else []
        layers = [
            layer
            for inputs, outputs in pairwise(widths)
            for layer in (nn.Linear(inputs, outputs), *(new(outputs) for new in norms), nn.ReLU())
        ]
        self.body = nn.Sequential(nn.Flatten(), *layers)
        self.head = nn.Linear(widths[-1], classes)


class Logistic(MLP):
    """Multinomial logistic regression: one linear layer; its features are the flattened input."""

    def __init__(self, *, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(shape=shape, classes=classes, hidden=[])


class CNN(Classifier):
    """The CNN of McMahan et al. 2017.

    It has two 5x5 convolutions (32 and 64 channels), each followed by ReLU and 2x2 max pooling,
    and one hidden layer. With 512 hidden units it has 1,663,370 parameters for 28x28 greyscale
    images in 10 classes, as in the paper. With 2048 it is LEAF's model for FEMNIST (Caldas et al.
    2018), with 6,603,710 parameters for 62 classes.

    Args:
        shape: (C, H, W) of an input; H and W are at least 4 because of the two poolings.
        classes: the number of outputs: of classes, labels or numbers.
        hidden: the width of the hidden layer, >= 1.
    """

    def __init__(self, *, shape: tuple[int, ...], classes: int, hidden: int = 512) -> None:
        channels, height, width = image_shape("CNN", shape, 4)
        check.integer("model.hidden", hidden, low=1)
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=5, padding="same"),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=5, padding="same"),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (height // 4) * (width // 4), hidden),
            nn.ReLU(),
        )
        self.head = nn.Linear(hidden, classes)


class FedLExCNN(Classifier):
    """The two-layer CNN of FedLEx's published program.

    The paper itself only cites McMahan et al. 2017. The program pads convolutions and poolings by
    one pixel and averages their output to 7x7. The network therefore has McMahan's 1,663,370
    parameters for greyscale images of every size.

    Args:
        shape: (C, H, W) of an input; H and W are at least 6.
        classes: the number of outputs: of classes, labels or numbers.
    """

    def __init__(self, *, shape: tuple[int, ...], classes: int) -> None:
        channels, _, _ = image_shape("FedLEx CNN", shape, 6)
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=5, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, padding=1),
            nn.Conv2d(32, 64, kernel_size=5, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, padding=1),
            nn.AdaptiveAvgPool2d(7),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 512),
            nn.ReLU(),
        )
        self.head = nn.Linear(512, classes)


class FedDiskCNN(Classifier):
    """The CNN of FedDisk.

    It has two 5x5 convolutions without padding, each followed by 2x2 max pooling and batch norm,
    and a layer of 16 units. The paper does not name the activations; here every layer is followed
    by ReLU. The numbers of parameters in the paper's table, and in this network:

        FEMNIST          447,000    447,406 (128 channels)
        chest X-rays      39,000     39,442 (32 channels, 1x32x32)
        MNIST             12,000     11,178 (16 channels)

    Args:
        shape: (C, H, W) of an input; H and W are at least 16.
        classes: the number of outputs: of classes, labels or numbers.
        channels: the channels of both convolutions, >= 1.
    """

    def __init__(self, *, shape: tuple[int, ...], classes: int, channels: int) -> None:
        inputs, height, width = image_shape("FedDisk CNN", shape, 16)
        check.integer("model.channels", channels, low=1)
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, channels, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(channels),
            nn.Conv2d(channels, channels, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(channels),
            nn.Flatten(),
            nn.Linear(channels * rows * columns, 16),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, classes)


class _ResNet(Classifier):
    """torchvision's ResNet (He et al. 2016).

    The network halves H and W three times, or five times with the "imagenet" stem. The 512
    features are the averages over the remaining pixels.

    Args:
        shape: (C, H, W) of an input, of any size.
        classes: the number of outputs: of classes, labels or numbers.
        norm: "batch", or "group" for group norm in 32 groups, the default of Wu & He 2018. Group
            norm has no running statistics to average; Hsieh et al. 2020 recommend it where the
            clients' labels differ.
        stem: "cifar" (section 4.2) for a 3x3 convolution of stride 1 without max pooling,
            "imagenet" for a 7x7 convolution of stride 2 with max pooling.
    """

    depth: ClassVar[int]

    def __init__(
        self, *, shape: tuple[int, ...], classes: int, norm: str, stem: str = "cifar"
    ) -> None:
        channels, _, _ = image_shape(f"ResNet-{self.depth}", shape)
        make_norm = norm_layer(norm, groups=32)
        check.one_of("model.stem", stem, ("cifar", "imagenet"))
        from torchvision import models

        super().__init__()
        self.body = models.get_model(f"resnet{self.depth}", norm_layer=make_norm)
        if stem == "cifar":
            first = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
            self.body.maxpool = nn.Identity()
        else:
            first = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        # torchvision initialises all convolutions of its ResNets in this way.
        nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")
        self.body.conv1 = first
        self.body.fc = nn.Identity()
        self.head = nn.Linear(512, classes)


class ResNet18(_ResNet):
    """ResNet-18: 11,173,962 parameters for 32x32 colour images in 10 classes."""

    depth = 18


class ResNet34(_ResNet):
    """ResNet-34: 21,282,122 parameters for 32x32 colour images in 10 classes."""

    depth = 34


class MobileNetV2(Classifier):
    """MobileNetV2 (Sandler et al. 2018).

    The 1280 features are the averages over the pixels of its last layer.

    Args:
        shape: (C, H, W) of an input, of any size.
        classes: the number of outputs: of classes, labels or numbers.
        norm: "batch", or "group" for group norm in 8 groups, which divide all its widths.
        stem: the stride of the first convolution: "cifar" is 1, "imagenet" 2. The network halves
            H and W four times with "cifar", and five times with "imagenet".
        dropout: the dropout of the features, in [0, 1).
    """

    def __init__(
        self, *, shape: tuple[int, ...], classes: int, norm: str, stem: str, dropout: float
    ) -> None:
        channels, _, _ = image_shape("MobileNetV2", shape)
        make_norm = norm_layer(norm, groups=8)
        check.one_of("model.stem", stem, ("cifar", "imagenet"))
        check.number("model.dropout", dropout, low=0, open_high=1)
        from torchvision.models import mobilenet_v2

        super().__init__()
        self.body = mobilenet_v2(norm_layer=make_norm, dropout=dropout)
        stride = 1 if stem == "cifar" else 2
        first = nn.Conv2d(channels, 32, kernel_size=3, stride=stride, padding=1, bias=False)
        nn.init.kaiming_normal_(first.weight, mode="fan_out")  # as in torchvision
        self.body.features[0][0] = first
        self.body.classifier[1] = nn.Identity()
        self.head = nn.Linear(1280, classes)


class VGG16(Classifier):
    """torchvision's VGG-16 (Simonyan & Zisserman 2015) with hidden layers for small images.

    The output of the convolutions is averaged over the pixels to 512 features; the network for
    ImageNet keeps 7x7 pixels instead. (A 32x32 image leaves a single pixel.) The hidden layers
    follow, and the head reads the last of them (128 units in FedNorm). Poolings round sizes up,
    which changes nothing for multiples of 32 and admits smaller images.

    Args:
        shape: (C, H, W) of an input, of any size.
        classes: the number of outputs: of classes, labels or numbers.
        hidden: the widths of the hidden layers, at least one, each >= 1.
        norm: "none" as in the paper, or "batch" for batch norm after each convolution, as in
            torchvision's vgg16_bn.
        dropout: the dropout after each hidden layer, in [0, 1).
    """

    def __init__(
        self,
        *,
        shape: tuple[int, ...],
        classes: int,
        hidden: Sequence[int],
        norm: str,
        dropout: float,
    ) -> None:
        channels, _, _ = image_shape("VGG-16", shape)
        widths = [512, *check.each(check.integer, "model.hidden", hidden, low=1)]
        if len(widths) == 1:
            raise ConfigError("model.hidden=[] is not allowed; it must have at least one width")
        check.one_of("model.norm", norm, ("none", "batch"))
        check.number("model.dropout", dropout, low=0, open_high=1)
        from torchvision.models import vgg

        super().__init__()
        convolutions = vgg.make_layers(vgg.cfgs["D"], batch_norm=norm == "batch")
        convolutions[0] = nn.Conv2d(channels, 64, kernel_size=3, padding=1)
        for layer in convolutions:
            if isinstance(layer, nn.MaxPool2d):
                layer.ceil_mode = True
            if isinstance(layer, nn.Conv2d):  # as in torchvision
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        connected = [
            layer
            for inputs, outputs in pairwise(widths)
            for layer in (nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout))
        ]
        self.body = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *connected)
        self.head = nn.Linear(widths[-1], classes)


class CharLSTM(Classifier):
    """The LSTM of LEAF (Caldas et al. 2018) and McMahan et al. 2017, which predicts a character.

    An embedding is followed by LSTM layers. A linear layer on their last state predicts the
    character after the window. With the defaults of conf/ and 80 characters the network has 819,920
    parameters. It has a few more than theirs, because torch's LSTM has two biases instead of one.

    Args:
        shape: (T,), the length of a window.
        classes: the number of characters in the alphabet.
        embedding: the width of a character's embedding, >= 1.
        hidden: the width of a layer's state, >= 1.
        layers: the number of LSTM layers, >= 1.
    """

    text: ClassVar[bool] = True

    def __init__(
        self, *, shape: tuple[int, ...], classes: int, embedding: int, hidden: int, layers: int
    ) -> None:
        if len(shape) != 1:
            raise ConfigError(
                "model: the CharLSTM takes text, windows of (T,) token numbers;"
                f" the samples have the shape {tuple(shape)}"
            )
        for key, value in (("embedding", embedding), ("hidden", hidden), ("layers", layers)):
            check.integer(f"model.{key}", value, low=1)
        super().__init__()
        self.embedding = nn.Embedding(classes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the last state: token numbers x (B, T) in 0 .. classes - 1 -> (B, hidden)."""
        states, _ = self.lstm(self.embedding(x.int()))
        return states[:, -1]


class TextMLP(Classifier):
    """The mean of the embeddings of a text's tokens, followed by hidden layers with ReLU.

    Without hidden layers it is the classifier of fastText (Joulin et al. 2017, "Bag of tricks for
    efficient text classification") for single tokens. The mean leaves out padding, so the amount of
    padding does not change a sample's output. The mean of a text without tokens is 0.

    Args:
        shape: (T,), the number of tokens of a sample, padding included.
        classes: the number of outputs: classes, labels or numbers.
        vocabulary: the number of different tokens.
        padding: the token that fills up short texts; None: there is none.
        embedding: the width of a token's embedding, >= 1.
        hidden: the widths of the hidden layers, each >= 1.
    """

    text: ClassVar[bool] = True

    def __init__(
        self,
        *,
        shape: tuple[int, ...],
        classes: int,
        vocabulary: int,
        padding: int | None,
        embedding: int,
        hidden: Sequence[int],
    ) -> None:
        if len(shape) != 1 or vocabulary < 1:
            raise ConfigError(
                "model: the TextMLP takes texts, (T,) token numbers; the samples have the shape"
                f" {tuple(shape)} and {vocabulary} different tokens"
            )
        first = check.integer("model.embedding", embedding, low=1)
        widths = [first, *check.each(check.integer, "model.hidden", hidden, low=1)]
        super().__init__()
        self.padding = padding
        self.embedding = nn.Embedding(vocabulary, first)
        layers = [
            layer
            for inputs, outputs in pairwise(widths)
            for layer in (nn.Linear(inputs, outputs), nn.ReLU())
        ]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the head: token numbers x (B, T) -> (B, d)."""
        x = x.int()
        tokens = self.embedding(x)
        if self.padding is None:
            return self.body(tokens.mean(1))
        mask = (x != self.padding).unsqueeze(2).to(tokens.dtype)
        return self.body((tokens * mask).sum(1) / mask.sum(1).clamp(min=1))

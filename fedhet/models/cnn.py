"""The papers' small convolutional networks, each with two 5x5 convolutions."""

from __future__ import annotations

from torch import Tensor, nn

from fedhet.core import check
from fedhet.models.base import Classifier, image_shape


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

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)


class FedLExCNN(Classifier):
    """The two-layer CNN of FedLEx's published program.

    The paper itself only cites McMahan et al. 2017. The program pads convolutions and poolings by
    one pixel and averages their output to 7x7, so that the network has McMahan's 1,663,370
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

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)


class FedDiskCNN(Classifier):
    """The CNN of FedDisk.

    It has two 5x5 convolutions without padding, each followed by 2x2 max pooling and batch norm,
    and a layer of 16 units. The paper does not name the activations; here every layer is followed
    by ReLU. The sizes in the paper's table, and those of this network:

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

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

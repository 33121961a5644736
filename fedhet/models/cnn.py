"""Small convolutional networks of the papers, each with two 5x5 convolutions."""

from __future__ import annotations

from torch import Tensor, nn

from fedhet import check
from fedhet.models.base import Classifier, image_shape


class CNN(Classifier):
    """The CNN of McMahan et al. 2017: two 5x5 convolutions (32, 64 channels), each with ReLU and
    2x2 max pooling, and a hidden layer.

    With 512 hidden units it has 1,663,370 parameters for 28x28 grey images in 10 classes, as in the
    paper. With 2048 it is LEAF's for FEMNIST (Caldas et al. 2018): 6,603,710 parameters in 62
    classes.

    Args:
        shape: (C, H, W) of an input; H and W are 4 at least, for the two poolings.
        classes: number of classes.
        hidden: width of the hidden layer, >= 1.
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
    """The two-layer CNN of FedLEx's published program: McMahan's in 1,663,370 parameters, for
    images of every size.

    The paper names McMahan et al. 2017 only. The program pads convolutions and poolings by one
    pixel, and averages what they leave to 7x7.

    Args:
        shape: (C, H, W) of an input; H and W are 6 at least.
        classes: number of classes.
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
    """The CNN of FedDisk: two 5x5 convolutions without padding, each with 2x2 max pooling and batch
    norm, and a layer of 16.

    The paper's table counts 447,000 parameters for FEMNIST (128 channels; 447,406 here), 39,000 for
    chest X-rays (32; 39,442 at 1x32x32) and 12,000 for MNIST (16; 11,178 here). It does not name
    the activations: ReLU after each layer.

    Args:
        shape: (C, H, W) of an input; H and W are 16 at least.
        classes: number of classes.
        channels: of both convolutions, >= 1.
    """

    def __init__(self, *, shape: tuple[int, ...], classes: int, channels: int) -> None:
        inputs, height, width = image_shape("FedDisk CNN", shape, 16)
        check.integer("model.channels", channels, low=1)
        left = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
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
            nn.Linear(channels * left[0] * left[1], 16),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

"""Models. Each is `head(features(x))`; `features(x)` (B, d) is the input of the last linear layer.

Importing this package does not import torchvision; the models that need it do so when they are
built.

It may import core and data.
"""

from fedhet.models.base import Classifier
from fedhet.models.library import Timm, Torchvision
from fedhet.models.networks import (
    CNN,
    MLP,
    VGG16,
    CharLSTM,
    FedDiskCNN,
    FedLExCNN,
    Logistic,
    MobileNetV2,
    ResNet18,
    ResNet34,
    TextMLP,
)

__all__ = [
    "CNN",
    "MLP",
    "VGG16",
    "CharLSTM",
    "Classifier",
    "FedDiskCNN",
    "FedLExCNN",
    "Logistic",
    "MobileNetV2",
    "ResNet18",
    "ResNet34",
    "TextMLP",
    "Timm",
    "Torchvision",
]

"""Models. Each is `head(features(x))`; `features(x)` (B, d) is the input of the last linear layer.

Importing this package does not import torchvision; the models that need it do so when they are
built.
"""

from fedhet.models.base import Classifier
from fedhet.models.cnn import CNN, FedDiskCNN, FedLExCNN
from fedhet.models.library import Timm, Torchvision
from fedhet.models.lstm import CharLSTM
from fedhet.models.mlp import MLP, Logistic
from fedhet.models.mobilenet import MobileNetV2
from fedhet.models.resnet import ResNet18, ResNet34
from fedhet.models.text import TextMLP
from fedhet.models.vgg import VGG16

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

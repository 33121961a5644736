"""Models: each is `head(features(x))`, with `features(x)` (B, d) what its last linear layer reads."""

from fedhet.models.base import Classifier
from fedhet.models.cnn import CNN
from fedhet.models.lstm import CharLSTM
from fedhet.models.mlp import MLP
from fedhet.models.resnet import ResNet18

__all__ = ["CNN", "MLP", "CharLSTM", "Classifier", "ResNet18"]

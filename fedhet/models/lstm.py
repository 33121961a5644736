"""Recurrent networks for text."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from fedhet.core import check
from fedhet.core.errors import ConfigError
from fedhet.models.base import Classifier


class CharLSTM(Classifier):
    """The LSTM of LEAF (Caldas et al. 2018) and McMahan et al. 2017, which predicts a character.

    An embedding is followed by LSTM layers and by a linear layer on their last state, which
    predicts the character after the window. With the defaults of conf/ and 80 characters it has
    819,920 parameters (torch's LSTM has two biases where theirs has one).

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

"""Recurrent networks for text."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from fedhet import check
from fedhet.errors import ConfigError
from fedhet.models.base import Classifier


class CharLSTM(Classifier):
    """The next character of a window, as LEAF (Caldas et al. 2018) and McMahan et al. 2017 predict
    it.

    An embedding, LSTM layers, and a linear layer on the last state. 819,920 parameters with the
    defaults of conf/ and 80 characters (torch's LSTM adds two biases where theirs add one).

    Args:
        shape: (T,), the length of a window.
        classes: the number of characters, of which windows are made and one of which follows.
        embedding: width of a character's vector, >= 1.
        hidden: width of a layer's state, >= 1.
        layers: LSTM layers, >= 1.
    """

    text: ClassVar[bool] = True

    def __init__(
        self, *, shape: tuple[int, ...], classes: int, embedding: int, hidden: int, layers: int
    ) -> None:
        if len(shape) != 1:
            raise ConfigError(
                "model: the CharLSTM reads text, windows of (T,) token numbers; these samples are"
                f" {tuple(shape)}"
            )
        for key, value in (("embedding", embedding), ("hidden", hidden), ("layers", layers)):
            check.integer(f"model.{key}", value, low=1)
        super().__init__()
        self.embedding = nn.Embedding(classes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def features(self, x: Tensor) -> Tensor:
        """x (B, T), token numbers in 0 .. classes - 1 -> (B, hidden)."""
        states, _ = self.lstm(self.embedding(x.int()))
        return states[:, -1]

"""A model for whole texts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn

from fedhet.core import check
from fedhet.core.errors import ConfigError
from fedhet.models.base import Classifier


class TextMLP(Classifier):
    """The mean of the embeddings of a text's tokens, followed by hidden layers with ReLU.

    Without hidden layers it is the classifier of fastText (Joulin et al. 2017, "Bag of tricks for
    efficient text classification") for single tokens. Padding takes no part in the mean, so a
    sample's output does not depend on how far its text is filled up. The mean of a text without
    tokens is 0.

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
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def features(self, x: Tensor) -> Tensor:
        """Return what the head reads: token numbers x (B, T) -> (B, d)."""
        x = x.int()
        tokens = self.embedding(x)
        if self.padding is None:
            return self.body(tokens.mean(1))
        mask = (x != self.padding).unsqueeze(2).to(tokens.dtype)
        return self.body((tokens * mask).sum(1) / mask.sum(1).clamp(min=1))

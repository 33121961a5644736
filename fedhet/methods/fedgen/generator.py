"""FedGen's generator of features, and the draws of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedhet.core.trees import Tree


class Generator(nn.Module):
    """noise (B, noise_dim), labels (B,) -> features (B, width)."""

    def __init__(self, noise_dim: int, classes: int, hidden: int, width: int) -> None:
        super().__init__()
        self.noise_dim = noise_dim
        self.classes = classes
        self.layers = nn.Sequential(
            nn.Linear(noise_dim + classes, hidden, bias=False),  # batch norm subtracts the mean
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, width),
        )

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        labels = functional.one_hot(y, self.classes).to(noise.dtype)
        features: Tensor = self.layers(torch.cat([noise, labels], 1))
        return features

    @classmethod
    def from_tree(cls, tree: Tree, classes: int) -> Generator:
        """The generator with these weights, in eval mode and without gradients.

        Nothing is initialised, because that would draw from the random stream of dropout.
        """
        hidden, inputs = tree["layers.0.weight"].shape
        width = len(tree["layers.3.weight"])
        with torch.device("meta"):
            generator = cls(inputs - classes, classes, hidden, width)
        generator.load_state_dict(tree, assign=True)
        return generator.eval().requires_grad_(False)


class NoiseSource:
    """Draws noise, "normal" or "uniform", and labels by their relative frequencies, the law.

    The random stream is on the CPU, so that every device sees the same draws.
    """

    def __init__(
        self, generator: Generator, stream: torch.Generator, *, law: Tensor, noise: str
    ) -> None:
        self._noise_dim = generator.noise_dim
        self._like = next(generator.parameters())
        self._stream = stream
        self._law = law.cpu()
        self._draw = torch.rand if noise == "uniform" else torch.randn

    def noise(self, n: int) -> Tensor:
        """(n, noise_dim) noise."""
        size = (n, self._noise_dim)
        drawn = self._draw(size, generator=self._stream, dtype=self._like.dtype)
        return drawn.to(self._like.device, non_blocking=True)

    def labels(self, n: int) -> Tensor:
        """(n,) labels by the law."""
        drawn = torch.multinomial(self._law, n, replacement=True, generator=self._stream)
        return drawn.to(self._like.device, non_blocking=True)

"""The clients' data: a dataset's samples, divided by a partition.

A client's samples are copied from the dataset when they are accessed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.core.errors import ConfigError
from fedhet.core.objects import are_pixels
from fedhet.core.streams import generator
from fedhet.core.targets.target import constant
from fedhet.core.task import ClientData, Samples
from fedhet.data.dataset import OWN, Dataset, label_counts
from fedhet.data.moments import Own
from fedhet.data.partition import Partition, check_split

PADDING = 4  # pixels added to each side of an image before it is cropped


def _part_sizes(n: int, fractions: Sequence[float]) -> tuple[int, int, int]:
    """Return how many of n samples are training, validation and test samples."""
    _, val, test = check_split(fractions)
    n_val = min(math.floor(n * val + 0.5), max(n - 1, 0))
    n_test = min(math.floor(n * test + 0.5), max(n - 1 - n_val, 0))
    return n - n_val - n_test, n_val, n_test


def split(
    n: int, fractions: Sequence[float], seed: int, pid: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shuffle 0 .. n-1 and cut it into training, validation and test indices.

    The order is drawn from the client's random stream (seed, "split", pid). Validation and test get
    floor(n f + 1/2) samples each, but training keeps at least one; test is shortened first.
    """
    n_train, n_val, _ = _part_sizes(n, fractions)
    order = generator(seed, "split", pid=pid).permutation(n)
    return order[:n_train], order[n_train : n_train + n_val], order[n_train + n_val :]


class FederatedData(Sequence[ClientData]):
    """The clients of a partition. Each access copies the client's samples from the dataset.

    An empty validation or test part is None. `train` is empty only if the client has no samples.

    Args:
        dataset: the samples of all clients.
        partition: which samples each client has.
        fractions: (train, validation, test) of each client, see `split`.
        seed: the seed of the run.
        noise: feature skew: client k = 1 .. K gets Gaussian noise of variance noise * k / K on its
            pixels in [0, 1], clipped to [0, 1]. This is FedDisk's noisy MNIST (with noise 0.1),
            after NIID-Bench (https://arxiv.org/abs/2102.02079). All three parts of a client get
            noise, which is the same on each access. The global test set gets none.

    Raises:
        ConfigError: noise is set, but the samples are not images.
    """

    def __init__(
        self,
        dataset: Dataset,
        partition: Partition,
        fractions: Sequence[float],
        seed: int,
        noise: float = 0.0,
    ) -> None:
        self._dataset = dataset
        self._indices = partition.indices
        self._fractions = fractions
        self._seed = seed
        self._noise = noise
        if noise and dataset.x.ndim != 4:
            raise ConfigError(
                f"partition.noise={noise}: noise is for images (C, H, W); the samples of"
                f" {dataset.name} have shape {dataset.shape}"
            )

    def __len__(self) -> int:
        return len(self._indices)

    # An index selects one client; there are no slices.
    def __getitem__(self, pid: int) -> ClientData:  # type: ignore[override]
        pid = range(len(self))[operator.index(pid)]
        own = self._indices[pid]
        parts = split(len(own), self._fractions, self._seed, pid)
        if self._noise:
            noisy = self._add_noise(self._gather(own), pid)
            train, val, test = (Samples(noisy.x[part], noisy.y[part]) for part in parts)
        else:
            train, val, test = (self._gather(own[part]) for part in parts)
        if self._dataset.by_client and len(train):
            ready = Own.of(self._dataset, train.x)
            train, val, test = (ready.samples(part) for part in (train, val, test))
        return ClientData(train, val if len(val) else None, test if len(test) else None)

    def _gather(self, indices: np.ndarray) -> Samples:
        rows = torch.from_numpy(indices)
        return Samples(self._dataset.x.index_select(0, rows), self._dataset.y.index_select(0, rows))

    def own(self, pid: int) -> Own:
        """Return the statistics of client `pid`'s training part, which must have a sample."""
        indices = self._indices[pid]
        train = split(len(indices), self._fractions, self._seed, pid)[0]
        return Own.of(self._dataset, self._gather(indices[train]).x)

    def _add_noise(self, samples: Samples, pid: int) -> Samples:
        """Add noise to all samples of a client at once, so that it does not depend on the split."""
        x = samples.x.float().div_(255) if are_pixels(samples.x) else samples.x
        draws = generator(self._seed, "noise", pid=pid).standard_normal(x.shape, dtype=np.float32)
        noise = torch.from_numpy(draws).mul_(self.noise_sd(pid))
        return Samples(noise.add_(x).clamp_(0, 1), samples.y)

    def noise_sd(self, pid: int) -> float:
        """Return the standard deviation of client `pid`'s noise."""
        return math.sqrt(self._noise * (pid + 1) / len(self))

    @property
    def part_sizes(self) -> list[tuple[int, int, int]]:
        """Each client's numbers of training, validation and test samples; copies nothing."""
        of = {n: _part_sizes(n, self._fractions) for n in {*map(len, self._indices)}}
        return [of[len(indices)] for indices in self._indices]

    @property
    def sizes(self) -> list[int]:
        """The number of each client's training samples."""
        return [train for train, _, _ in self.part_sizes]


@dataclass(frozen=True)
class Normalize:
    """(x - mean) / std per channel, for floating x (B, C, ...) in [0, 1] on any device."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return self.in_place(x.clone())

    def in_place(self, x: Tensor) -> Tensor:
        """Normalise x in place.

        This avoids a second tensor of a client's images, for which the system would allocate and
        free memory each time.
        """
        shape = -1, *(1,) * (x.ndim - 2)  # broadcasts to images or rows
        mean, std = (constant(v, x.device, x.dtype).view(shape) for v in (self.mean, self.std))
        return x.sub_(mean).div_(std)


def transform(dataset: Dataset) -> Normalize | None:
    """Return the function that turns pixels in [0, 1], or columns, into the model's input.

    The function can be pickled. It is None for text, because models read the tokens themselves, and
    for dataset.mean=own, because the clients' samples are already normalised.

    Raises:
        ConfigError: the dataset's mean or std is not measured yet.
    """
    if dataset.text or dataset.mean == OWN:
        return None
    if isinstance(dataset.mean, str) or isinstance(dataset.std, str):
        raise ConfigError(
            f"dataset.mean or dataset.std of {dataset.name} is auto: a run measures it on the"
            " clients' training samples, which needs a partition (RunData)"
        )
    return Normalize(tuple(dataset.mean), tuple(dataset.std))


def target_scale(dataset: Dataset) -> tuple[Sequence[float], Sequence[float]] | None:
    """Return (mean, std) of the predicted numbers; None if they are not measured, or not used."""
    mean, std = dataset.target_mean, dataset.target_std
    if dataset.target != "number" or isinstance(mean, str) or isinstance(std, str):
        return None
    return mean, std


def class_counts(dataset: Dataset, partition: Partition) -> np.ndarray:
    """Return how many samples each client has of each class, or with each label.

    The array is (clients, classes) int64. It has no columns if numbers are predicted.
    """
    y, classes = dataset.y.numpy(), len(dataset.classes)
    return np.stack([label_counts(y[own], dataset.target, classes) for own in partition.indices])


@dataclass(frozen=True)
class CropFlip:
    """Pad images by PADDING black pixels, crop them at random, and mirror half of them.

    The images are already normalised; `black` is the normalised value of black in each channel.
    """

    black: tuple[float, ...]

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return new images of the same shape (B, C, H, W).

        All random numbers come from `generator`, which is on the CPU even if the images are not.
        """
        b, c, h, w = x.shape
        corners = torch.randint(0, 2 * PADDING + 1, (2, b, 1, 1), generator=generator)
        dy, dx = corners.to(x.device, non_blocking=True)
        mirrored = torch.randint(0, 2, (b, 1, 1), generator=generator)
        mirrored = mirrored.to(x.device, non_blocking=True)
        # `padded` holds all padded images twice: first unchanged, then mirrored.
        padded = x.new_empty(2, b, c, h + 2 * PADDING, w + 2 * PADDING)
        for channel, black in enumerate(self.black):
            padded[:, :, channel] = black
        inner = padded[..., PADDING:-PADDING, PADDING:-PADDING]
        inner[0] = x
        inner[1] = x.flip(-1)
        # `starts` holds the position in `padded` at which each row of a crop starts. Rows are
        # contiguous in `padded`, so whole rows are gathered instead of pixels.
        channel_size = padded[0, 0, 0].numel()
        line = padded.shape[-1]
        channels = torch.arange(b * c, device=x.device).view(b, c, 1)
        starts = (channels + mirrored * (b * c)) * channel_size
        starts = starts + (torch.arange(h, device=x.device) + dy) * line + dx
        return padded.view(-1).unfold(0, w, 1).index_select(0, starts.flatten()).view(b, c, h, w)


def augmentation(dataset: Dataset) -> CropFlip | None:
    """Return the augmentation that `dataset.augment` names, for normalised images."""
    if dataset.augment == "none":
        return None
    mean, std = (torch.tensor(values) for values in (dataset.mean, dataset.std))
    return CropFlip(tuple(((0 - mean) / std).tolist()))  # the same arithmetic as Normalize


# ---- the description of a dataset
def described(dataset: Dataset) -> dict[str, Any]:
    """Return the entries of partition.json from which a model can be built and used."""
    normalised: dict[str, Any] = {"mean": dataset.mean, "std": dataset.std}
    if dataset.mean != OWN:
        normalised = {key: list(values) for key, values in normalised.items()}
    scale = target_scale(dataset)
    return {
        "normalised": None if dataset.text else normalised,
        "shape": list(dataset.shape),
        "columns": list(dataset.columns),
        "target": dataset.target,
        "classes": list(dataset.classes),
        "numbers": list(dataset.numbers),
        "target_scale": scale and {"mean": list(scale[0]), "std": list(scale[1])},
        "vocabulary": dataset.vocabulary,
        "padding": dataset.padding,
        "missing": dataset.missing,
    }

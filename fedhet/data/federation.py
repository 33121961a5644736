"""The clients' data: a dataset's samples, shared out by a partition, as a configuration says.

A client's samples are copied from the one dataset when they are accessed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from fedhet.config.targets import instantiate
from fedhet.core.errors import ConfigError
from fedhet.core.objects import are_pixels
from fedhet.core.streams import generator
from fedhet.core.targets import WITH_CLASSES
from fedhet.core.task import ClientData, Samples
from fedhet.data.array_cache import Arrays, cached_arrays
from fedhet.data.arrays import listed
from fedhet.data.dataset import AUTO, OWN, Dataset
from fedhet.data.moments import Own, moments
from fedhet.data.partition import Partition, Scheme, check_split, labels_digest

log = logging.getLogger("fedhet.data")
PADDING = 4  # pixels around an image, of which a crop is taken


def _part_sizes(n: int, fractions: Sequence[float]) -> tuple[int, int, int]:
    """The numbers of training, validation and test samples among n samples."""
    _, val, test = check_split(fractions)
    n_val = min(math.floor(n * val + 0.5), max(n - 1, 0))
    n_test = min(math.floor(n * test + 0.5), max(n - 1 - n_val, 0))
    return n - n_val - n_test, n_val, n_test


def split(
    n: int, fractions: Sequence[float], seed: int, pid: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shuffle 0 .. n-1 and cut it into training, validation and test indices.

    The order is drawn from the client's stream (seed, "split", pid). Validation and test have
    floor(n f + 1/2) samples, except that training keeps at least one, taken from test first.
    """
    n_train, n_val, _ = _part_sizes(n, fractions)
    order = generator(seed, "split", pid=pid).permutation(n)
    return order[:n_train], order[n_train : n_train + n_val], order[n_train + n_val :]


class FederatedData(Sequence[ClientData]):
    """The clients of a partition; a client's samples are copied from the dataset on each access.

    An empty validation or test part is None; `train` is empty only for a client without any
    samples.

    Args:
        dataset: the samples of all clients.
        partition: which samples each client has.
        fractions: (train, validation, test) of each client, see `split`.
        seed: the seed of the run.
        noise: feature skew: client k = 1 .. K has Gaussian noise of variance noise * k / K on its
            pixels in [0, 1], clipped to [0, 1]. This is FedDisk's noisy MNIST, after NIID-Bench
            (https://arxiv.org/abs/2102.02079), whose value is 0.1. The noise is the client's own,
            in all three parts, and the same on each access; the global test set stays clean.

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

    # one client at a time, no slices
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
        """What client `pid` takes of its training part, where it has any sample."""
        indices = self._indices[pid]
        train = split(len(indices), self._fractions, self._seed, pid)[0]
        return Own.of(self._dataset, self._gather(indices[train]).x)

    def _add_noise(self, samples: Samples, pid: int) -> Samples:
        """Add noise to all of a client's samples, so that it does not depend on the split."""
        x = samples.x.float().div_(255) if are_pixels(samples.x) else samples.x
        draws = generator(self._seed, "noise", pid=pid).standard_normal(x.shape, dtype=np.float32)
        noise = torch.from_numpy(draws).mul_(self.noise_sd(pid))
        return Samples(noise.add_(x).clamp_(0, 1), samples.y)

    def noise_sd(self, pid: int) -> float:
        """The standard deviation of client `pid`'s noise."""
        return math.sqrt(self._noise * (pid + 1) / len(self))

    @property
    def part_sizes(self) -> list[tuple[int, int, int]]:
        """The numbers of each client's training, validation and test samples; nothing is copied."""
        return [_part_sizes(len(indices), self._fractions) for indices in self._indices]

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
        return (x - _constant(self.mean, x)).div_(_constant(self.std, x))

    def in_place(self, x: Tensor) -> Tensor:
        """Normalise x itself.

        A second tensor of a client's images is memory that the system would take back and hand out
        again each time.
        """
        return x.sub_(_constant(self.mean, x)).div_(_constant(self.std, x))


def _constant(values: tuple[float, ...], like: Tensor) -> Tensor:
    """One value per channel, in a shape that broadcasts to `like`."""
    return _cached_constant(values, like.ndim, like.device, like.dtype)


@lru_cache
def _cached_constant(
    values: tuple[float, ...], ndim: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    # The tensor is kept: a first call in inference mode must not make it unusable in training.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).view(-1, *(1,) * (ndim - 2))


def transform(dataset: Dataset) -> Normalize | None:
    """The function that turns pixels in [0, 1], or columns, into the model's input.

    It can be pickled. None for text, whose tokens are passed on unchanged, and where the clients'
    samples are normalised already.

    Raises:
        ConfigError: the dataset's mean or std is still to be measured.
    """
    if dataset.text or dataset.mean == OWN:
        return None
    if isinstance(dataset.mean, str) or isinstance(dataset.std, str):
        raise ConfigError(
            f"dataset.mean or dataset.std of {dataset.name} is auto: it is measured on the clients'"
            " training samples, and these have no partition (RunData)"
        )
    return Normalize(tuple(dataset.mean), tuple(dataset.std))


def target_scale(dataset: Dataset) -> tuple[Sequence[float], Sequence[float]] | None:
    """(mean, std) of the numbers that are predicted, once they are measured; else None."""
    mean, std = dataset.target_mean, dataset.target_std
    if dataset.target != "number" or isinstance(mean, str) or isinstance(std, str):
        return None
    return mean, std


def class_counts(dataset: Dataset, partition: Partition) -> np.ndarray:
    """The number of samples of each class, or with each label, that each client has.

    It is (clients, classes) int64, without columns where numbers are predicted.
    """
    y = dataset.y.numpy()
    classes = len(dataset.classes)
    if dataset.target not in WITH_CLASSES:
        rows = [y[indices, :classes].sum(0).astype(np.int64) for indices in partition.indices]
    else:
        rows = [np.bincount(y[indices], minlength=classes) for indices in partition.indices]
    return np.stack(rows)


@dataclass(frozen=True)
class CropFlip:
    """Crop each image at random after padding it by PADDING black pixels, and mirror half of them.

    The images are already normalised: `black` is the value of a black pixel in each channel.
    """

    black: tuple[float, ...]

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """(B, C, H, W) -> new images of the same shape.

        All draws come from `generator`, which is on the CPU whatever the device of the images.
        """
        b, c, h, w = x.shape
        corners = torch.randint(0, 2 * PADDING + 1, (2, b, 1, 1), generator=generator)
        dy, dx = corners.to(x.device, non_blocking=True)
        mirrored = torch.randint(0, 2, (b, 1, 1), generator=generator)
        mirrored = mirrored.to(x.device, non_blocking=True)
        # All images padded, as they are and mirrored.
        padded = x.new_empty(2, b, c, h + 2 * PADDING, w + 2 * PADDING)
        for channel, black in enumerate(self.black):
            padded[:, :, channel] = black
        inner = padded[..., PADDING:-PADDING, PADDING:-PADDING]
        inner[0] = x
        inner[1] = x.flip(-1)
        # The start of each row of a crop in `padded`. A row is contiguous there, so that rows are
        # gathered, not pixels.
        channel_size = padded[0, 0, 0].numel()
        line = padded.shape[-1]
        channels = torch.arange(b * c, device=x.device).view(b, c, 1)
        starts = (channels + mirrored * (b * c)) * channel_size
        starts = starts + (torch.arange(h, device=x.device) + dy) * line + dx
        rows = padded.view(-1).unfold(0, w, 1).index_select(0, starts.flatten())
        return rows.view(b, c, h, w)


def augmentation(dataset: Dataset) -> CropFlip | None:
    """The augmentation that `dataset.augment` names, for the dataset's normalised images."""
    if dataset.augment == "none":
        return None
    mean, std = (torch.tensor(values) for values in (dataset.mean, dataset.std))
    return CropFlip(tuple(((0 - mean) / std).tolist()))  # exactly Normalize of 0


# ---- the data of a configuration
@dataclass(frozen=True)
class RunData:
    """The data of a run, which `dataset`, `partition` and `seed` of `cfg` determine.

    The mean and std of `dataset` are numbers here: `of` has replaced `auto` by what it measured on
    the clients' training samples.
    """

    cfg: DictConfig
    scheme: Scheme
    dataset: Dataset
    partition: Partition
    example: ClassVar[None] = None  # the data themselves are here

    @classmethod
    def of(cls, cfg: DictConfig) -> RunData:
        """Load the dataset of a configuration and assign its samples to clients."""
        # The scheme first: a setting that is out of range is reported before any data are read.
        scheme: Scheme = instantiate(cfg.partition)
        dataset: Dataset = instantiate(cfg.dataset, data_dir=cfg.data_dir)
        if not isinstance(dataset, Dataset):
            raise ConfigError(
                "dataset=local: the sites' data are their own, and there is no partition of them to"
                " describe, save or export"
            )
        if scheme.by_class and dataset.target not in WITH_CLASSES:
            raise ConfigError(
                f"partition={scheme.name} divides the samples by their class, and"
                f" dataset.target={dataset.target} has none; choose from: iid, quantity, natural,"
                " noise, saved"
            )
        if scheme.pool_test:
            dataset = dataset.pooled()
            if scheme.split[2] == 0:
                log.warning(
                    "partition.pool_test=true with partition.split=%s: there is neither a global"
                    " test set nor a client's own",
                    list(scheme.split),
                )
        labels = dataset.y.numpy()
        partition = scheme.assign(labels, cfg.seed, dataset.owners, dataset.owner_names)
        data = cls(cfg, scheme, dataset, partition)
        data._warn_of_left_out()
        data = replace(data, dataset=data._measured())
        return replace(data, dataset=data._tested())

    @cached_property
    def clients(self) -> FederatedData:
        """The clients' data."""
        return FederatedData(
            self.dataset, self.partition, self.scheme.split, self.cfg.seed, self.scheme.noise
        )

    def _warn_of_left_out(self) -> None:
        """Say how many samples, and which classes, are at no client."""
        dataset = self.dataset
        if sum(map(len, self.partition.indices)) == len(dataset.y):  # nobody shares a sample
            return
        left_out = np.ones(len(dataset.y), bool)
        left_out[np.concatenate(self.partition.indices)] = False
        missing: list[str] = []
        if dataset.target in WITH_CLASSES:
            at_clients, at_all = (
                np.bincount(dataset.y.numpy()[rows], minlength=len(dataset.classes)) > 0
                for rows in (~left_out, slice(None))
            )
            missing = [dataset.classes[c] for c in np.flatnonzero(at_all & ~at_clients)]
        tested = [] if dataset.test is None else dataset.test.y.unique().tolist()
        names = [name for name in missing if dataset.classes.index(name) in tested]
        where = f"; the global test set has {'them' if names == missing else listed(names)}"
        log.log(
            logging.WARNING if missing else logging.INFO,
            "partition=%s gives %d of %d samples to no client%s",
            *(self.partition.name, left_out.sum(), len(left_out)),
            f", and no client has the classes {listed(missing)}{where if names else ''}"
            if missing
            else "",
        )

    def _measured(self) -> Dataset:
        """The dataset with numbers in the place of `auto`.

        They are cached, because in a deployment every message is handled by a new process.
        """
        dataset = self.dataset
        found: dict[str, Any] = {}
        for part, prefix in {"x": "", "y": "target_"}.items():
            auto = [name for name in ("mean", "std") if getattr(dataset, prefix + name) == AUTO]
            if not auto or (prefix and dataset.target != "number"):
                continue
            key = {
                "moments": dataset.source,
                "partition": self.partition.hash,
                "split": self.scheme.split,
                "noise": self.scheme.noise,
                "seed": self.cfg.seed,
                "numpy": np.__version__,  # its random streams, and the order of its sums
                **({"of": "targets"} if prefix else {}),
            }
            measure = partial(self._moments, part)
            arrays = cached_arrays(dataset.name, key, measure) if dataset.source else measure()
            measured = {prefix + name: arrays[name].tolist() for name in auto}
            log.info(
                "%s: auto is measured on the clients' %d training samples: %s",
                dataset.name,
                sum(self.clients.sizes),
                ", ".join(f"{name} {values}" for name, values in measured.items()),
            )
            found |= measured
        return replace(dataset, **found)

    def _moments(self, part: str) -> Arrays:
        return moments(getattr(client.train, part).numpy() for client in self.clients).arrays

    def _tested(self) -> Dataset:
        """The dataset with each sample of the global test set made ready as its owner's are.

        Raises:
            ConfigError: `dataset.mean=own`, and a sample has no owner among the clients.
        """
        dataset = self.dataset
        if dataset.test is None or not dataset.by_client:
            return dataset
        x = dataset.test.x.clone()
        named = np.full(len(x), "") if dataset.test_owners is None else dataset.test_owners
        for pid, owner in enumerate(self.partition.owners):
            if (rows := named == owner).any():
                x[rows] = self.clients.own(pid)(x[rows])
        if (others := ~np.isin(named, self.partition.owners)).any():
            x[others] = Own.unknown(dataset)(x[others])
        return replace(dataset, test=Samples(x, dataset.test.y))

    def _own(self) -> dict[str, Any]:
        """What each client takes of its own training part, where any does."""
        if not self.dataset.by_client:
            return {}
        sizes = enumerate(self.clients.sizes)
        return {str(pid): self.clients.own(pid).record for pid, size in sizes if size}

    @property
    def digest(self) -> str:
        """16 hex digits of the labels and of who has which samples.

        Measured statistics are not part of it: their last bits may differ between processors.
        """
        dataset = self.dataset
        kind = [list(dataset.shape), dataset.target, list(dataset.outputs)]
        labels = labels_digest(dataset.y.numpy())
        content = json.dumps([self.partition.hash, labels, *kind])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def partition_record(self) -> dict[str, Any]:
        """The content of partition.json: the partition, its settings, and its statistics.

        `partition=saved` reads it.
        """
        dataset = self.dataset
        settings: Any = OmegaConf.to_container(self.cfg.partition)
        del settings["_target_"]
        return {
            "name": self.partition.name,
            "clients": len(self.partition.indices),
            "hash": self.partition.hash,
            "settings": {
                **settings,
                "split": list(self.scheme.split),
                "noise": self.scheme.noise,
                "pool_test": self.scheme.pool_test,
            },
            "seed": self.cfg.seed,
            "samples": len(dataset.y),
            "labels": labels_digest(dataset.y.numpy()),
            **described(dataset),
            "own": self._own(),
            "owners": list(self.partition.owners),
            "train_sizes": self.clients.sizes,
            "counts": class_counts(dataset, self.partition).tolist(),
            "indices": [indices.tolist() for indices in self.partition.indices],
        }


def described(dataset: Dataset) -> dict[str, Any]:
    """What partition.json says about the samples, from which a model can be built and used."""
    normalize = transform(dataset)
    normalised: dict[str, Any] | None = None
    if normalize is not None:
        normalised = {"mean": list(normalize.mean), "std": list(normalize.std)}
    elif dataset.mean == OWN:
        normalised = {"mean": OWN, "std": OWN}
    scale = target_scale(dataset)
    return {
        "normalised": normalised,
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

"""Augmentation of training batches, on the device that holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedhet.data.dataset import Dataset

PADDING = 4


@dataclass(frozen=True)
class CropFlip:
    """A random crop of each image after padding it by PADDING black pixels, then a mirror image of
    half of them.

    It is for images that are already normalised: `black` is each channel's value of a black pixel.
    """

    black: tuple[float, ...]

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """(B, C, H, W) -> new images of the same shape; all draws come from `generator`, a CPU one
        on every device."""
        b, c, h, w = x.shape
        dy, dx = torch.randint(0, 2 * PADDING + 1, (2, b, 1, 1), generator=generator).to(x.device)
        mirrored = torch.randint(0, 2, (b, 1, 1), generator=generator).to(x.device)
        padded = x.new_empty(2, b, c, h + 2 * PADDING, w + 2 * PADDING)  # as they are, and mirrored
        padded.copy_(x.new_tensor(self.black).view(c, 1, 1))
        inner = padded[..., PADDING:-PADDING, PADDING:-PADDING]
        inner[0], inner[1] = x, x.flip(-1)
        # Where each row of a crop begins in `padded`; it lies there in one piece, so that rows are
        # gathered, not pixels.
        image, line = padded[0, 0, 0].numel(), padded.shape[-1]
        rows = torch.arange(b * c, device=x.device).view(b, c, 1) * image + mirrored * (
            b * c * image
        )
        rows = rows + (torch.arange(h, device=x.device) + dy) * line + dx
        return padded.view(-1).unfold(0, w, 1).index_select(0, rows.flatten()).view(b, c, h, w)


def augmentation(dataset: Dataset) -> CropFlip | None:
    """What `dataset.augment` names, for the normalised images of the dataset."""
    if dataset.augment == "none":
        return None
    mean, std = (torch.tensor(values) for values in (dataset.mean, dataset.std))
    return CropFlip(tuple(((0 - mean) / std).tolist()))  # exactly what Normalize makes of 0

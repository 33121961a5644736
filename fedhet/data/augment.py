"""Augmentation of training batches, on the device that holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedhet.data.dataset import Dataset

PADDING = 4


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

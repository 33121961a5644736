"""VGG for small images, with torchvision's convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fedhet import check
from fedhet.errors import ConfigError
from fedhet.models.base import Classifier, image_shape


class VGG16(Classifier):
    """torchvision's VGG-16 (Simonyan & Zisserman 2015) with fully connected layers for small
    images.

    The convolutions end in the average over the pixels, 512 features (one pixel of a 32x32 image),
    where ImageNet's end in 7x7 pixels. `hidden` follows; its last width is what the head reads,
    FedNorm's 128. Poolings round up, which changes nothing for multiples of 32 and lets smaller
    images through.

    Args: shape: (C, H, W) of an input, of any size. classes: number of classes. hidden: widths of
        the hidden layers, one at least, each >= 1. norm: "none" as in the paper, or "batch": batch
        norm after each convolution, torchvision's vgg16_bn. dropout: after each hidden layer, in
        [0, 1).
    """

    def __init__(
        self,
        *,
        shape: tuple[int, ...],
        classes: int,
        hidden: Sequence[int],
        norm: str,
        dropout: float,
    ) -> None:
        channels, _, _ = image_shape("VGG-16", shape)
        if not check.each(check.integer, "model.hidden", hidden, low=1):
            raise ConfigError("model.hidden=[]: needs one width at least")
        check.one_of("model.norm", norm, ("none", "batch"))
        check.number("model.dropout", dropout, low=0, open_high=1)
        from torchvision.models import vgg

        super().__init__()
        convolutions = vgg.make_layers(vgg.cfgs["D"], batch_norm=norm == "batch")
        convolutions[0] = nn.Conv2d(channels, 64, kernel_size=3, padding=1)
        for layer in convolutions:
            if isinstance(layer, nn.MaxPool2d):
                layer.ceil_mode = True
            if isinstance(layer, nn.Conv2d):  # as torchvision
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        widths = zip([512, *hidden], hidden, strict=False)
        connected = [
            layer for a, b in widths for layer in (nn.Linear(a, b), nn.ReLU(), nn.Dropout(dropout))
        ]
        self.body = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *connected)
        self.head = nn.Linear(hidden[-1], classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

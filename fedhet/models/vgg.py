"""VGG for small images, with torchvision's convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from fedhet.core import check
from fedhet.core.errors import ConfigError
from fedhet.models.base import Classifier, image_shape


class VGG16(Classifier):
    """torchvision's VGG-16 (Simonyan & Zisserman 2015) with hidden layers for small images.

    The output of the convolutions is averaged over the pixels to 512 features (a 32x32 image
    leaves a single pixel), where the network for ImageNet keeps 7x7 pixels. The hidden layers
    follow; the head reads the last one (FedNorm's 128 units). Poolings round up, which changes
    nothing for multiples of 32 and admits smaller images.

    Args:
        shape: (C, H, W) of an input, of any size.
        classes: the number of outputs: of classes, labels or numbers.
        hidden: the widths of the hidden layers, at least one, each >= 1.
        norm: "none" as in the paper, or "batch" for batch norm after each convolution, as in
            torchvision's vgg16_bn.
        dropout: the dropout after each hidden layer, in [0, 1).
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
        widths = [512, *check.each(check.integer, "model.hidden", hidden, low=1)]
        if len(widths) == 1:
            raise ConfigError("model.hidden=[] is not allowed; it must have at least one width")
        check.one_of("model.norm", norm, ("none", "batch"))
        check.number("model.dropout", dropout, low=0, open_high=1)
        from torchvision.models import vgg

        super().__init__()
        convolutions = vgg.make_layers(vgg.cfgs["D"], batch_norm=norm == "batch")
        convolutions[0] = nn.Conv2d(channels, 64, kernel_size=3, padding=1)
        for layer in convolutions:
            if isinstance(layer, nn.MaxPool2d):
                layer.ceil_mode = True
            if isinstance(layer, nn.Conv2d):  # as in torchvision
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        connected: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            connected += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout)]
        self.body = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *connected)
        self.head = nn.Linear(widths[-1], classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

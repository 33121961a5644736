"""torchvision's residual networks with a stem for small images."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from fedhet.core import check
from fedhet.models.base import Classifier, image_shape, norm_layer


class _ResNet(Classifier):
    """torchvision's ResNet (He et al. 2016).

    The network halves H and W three times, or five times with the "imagenet" stem. The 512
    features are the averages over the remaining pixels.

    Args:
        shape: (C, H, W) of an input, of any size.
        classes: the number of outputs: of classes, labels or numbers.
        norm: "batch", or "group" for group norm in 32 groups, the default of Wu & He 2018. Group
            norm has no running statistics to average; Hsieh et al. 2020 recommend it where the
            clients' labels differ.
        stem: "cifar" (section 4.2) for a 3x3 convolution of stride 1 without max pooling,
            "imagenet" for a 7x7 convolution of stride 2 with max pooling.
    """

    depth: ClassVar[int]

    def __init__(
        self, *, shape: tuple[int, ...], classes: int, norm: str, stem: str = "cifar"
    ) -> None:
        channels, _, _ = image_shape(f"ResNet-{self.depth}", shape)
        make_norm = norm_layer(norm, groups=32)
        check.one_of("model.stem", stem, ("cifar", "imagenet"))
        from torchvision import models

        super().__init__()
        self.body = models.get_model(f"resnet{self.depth}", norm_layer=make_norm)
        if stem == "cifar":
            first = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
            self.body.maxpool = nn.Identity()
        else:
            first = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        # torchvision initialises all convolutions of its ResNets in this way.
        nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")
        self.body.conv1 = first
        self.body.fc = nn.Identity()
        self.head = nn.Linear(512, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)


class ResNet18(_ResNet):
    """ResNet-18: 11,173,962 parameters for 32x32 colour images in 10 classes."""

    depth = 18


class ResNet34(_ResNet):
    """ResNet-34: 21,282,122 parameters for 32x32 colour images in 10 classes."""

    depth = 34

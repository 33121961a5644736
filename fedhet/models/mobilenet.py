"""torchvision's MobileNetV2, with a stem for small images."""

from __future__ import annotations

from torch import Tensor, nn

from fedhet import check
from fedhet.models.base import Classifier, image_shape, norm_layer


class MobileNetV2(Classifier):
    """MobileNetV2 (Sandler et al. 2018); the average over the pixels of its last layer is the 1280
    features.

    Args: shape: (C, H, W) of an input, of any size; "imagenet" halves H and W five times, "cifar"
        four times. classes: number of classes. norm: "batch", or "group": group normalisation in 8
        groups, which divide all its widths. stem: stride of the first convolution: "cifar" 1,
        "imagenet" 2. dropout: of the features, in [0, 1).
    """

    def __init__(
        self, *, shape: tuple[int, ...], classes: int, norm: str, stem: str, dropout: float
    ) -> None:
        channels, _, _ = image_shape("MobileNetV2", shape)
        norm_of = norm_layer(norm, groups=8)
        check.one_of("model.stem", stem, ("cifar", "imagenet"))
        check.number("model.dropout", dropout, low=0, open_high=1)
        from torchvision.models import mobilenet_v2

        super().__init__()
        self.body = mobilenet_v2(norm_layer=norm_of, dropout=dropout)
        first = nn.Conv2d(
            channels, 32, kernel_size=3, stride=1 if stem == "cifar" else 2, padding=1, bias=False
        )
        nn.init.kaiming_normal_(first.weight, mode="fan_out")  # as torchvision
        self.body.features[0][0] = first
        self.body.classifier[1] = nn.Identity()
        self.head = nn.Linear(1280, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

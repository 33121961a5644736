"""torchvision's MobileNetV2 with a stem for small images."""

from __future__ import annotations

from torch import Tensor, nn

from fedhet.core import check
from fedhet.models.base import Classifier, image_shape, norm_layer


class MobileNetV2(Classifier):
    """MobileNetV2 (Sandler et al. 2018).

    The 1280 features are the averages over the pixels of its last layer.

    Args:
        shape: (C, H, W) of an input, of any size.
        classes: the number of outputs: of classes, labels or numbers.
        norm: "batch", or "group" for group norm in 8 groups, which divide all its widths.
        stem: the stride of the first convolution: "cifar" is 1, "imagenet" 2. The network halves
            H and W four times with "cifar", and five times with "imagenet".
        dropout: the dropout of the features, in [0, 1).
    """

    def __init__(
        self, *, shape: tuple[int, ...], classes: int, norm: str, stem: str, dropout: float
    ) -> None:
        channels, _, _ = image_shape("MobileNetV2", shape)
        make_norm = norm_layer(norm, groups=8)
        check.one_of("model.stem", stem, ("cifar", "imagenet"))
        check.number("model.dropout", dropout, low=0, open_high=1)
        from torchvision.models import mobilenet_v2

        super().__init__()
        self.body = mobilenet_v2(norm_layer=make_norm, dropout=dropout)
        stride = 1 if stem == "cifar" else 2
        first = nn.Conv2d(channels, 32, kernel_size=3, stride=stride, padding=1, bias=False)
        nn.init.kaiming_normal_(first.weight, mode="fan_out")  # as in torchvision
        self.body.features[0][0] = first
        self.body.classifier[1] = nn.Identity()
        self.head = nn.Linear(1280, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

"""The model of the app in docs/flower.md, "The classic API"."""

from torch import Tensor, nn


class Net(nn.Module):
    """FedNorm needs its `features` and `head`."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

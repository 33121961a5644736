"""FedDisk's options, which both halves of the plug-in read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedhet.core.check import setting
from fedhet.core.errors import ConfigError
from fedhet.core.messages import LocalSettings
from fedhet.core.plugin import Plugin


@dataclass(kw_only=True, eq=False)
class DensityOptions(Plugin):
    """What conf/plugin/feddisk.yaml explains.

    Attributes:
        global_made, local_made, classifier: how the three networks are trained.
    """

    ratio: str = setting("sampled", allowed=("sampled", "outputs", "raw"))
    hidden: int = setting(50, low=1)
    masks: str = setting("even", allowed=("even", "random"))
    features: str = setting("outputs", allowed=("outputs", "conditional"))
    binarise: bool = False
    made_optimizer: str = setting("adam", allowed=("adam", "sgd"))
    made_lr: float = setting(1e-3, open_low=0)
    made_batch_size: int = setting(64, low=1)
    made_local_epochs: int = setting(2, low=1)
    made_patience: int = setting(3, low=1)
    made_max_rounds: int = setting(500, low=1)
    local_patience: int = setting(5, low=1)
    local_max_epochs: int = setting(500, low=1)
    clf_hidden: int = setting(100, low=1)
    clf_lr: float = setting(0.01, open_low=0)
    clf_batch_size: int = setting(32, low=1)
    clf_patience: int = setting(10, low=1)
    clf_tolerance: float = setting(1e-4, low=0)
    clf_max_epochs: int = setting(200, low=1)
    normalise: str = setting("mean1", allowed=("mean1", "minmax2", "none"))
    lo: float = setting(0.1, open_low=0, high=1)
    hi: float = setting(10.0, low=1)
    eps: float = setting(1e-6, open_low=0, open_high=0.5)
    min_samples: int = setting(10, low=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.global_made = LocalSettings(
            lr=self.made_lr,
            epochs=self.made_local_epochs,
            batch_size=self.made_batch_size,
            optimizer=self.made_optimizer,
        )
        self.local_made = replace(self.global_made, epochs=self.local_max_epochs)
        self.classifier = LocalSettings(
            lr=self.clf_lr, epochs=self.clf_max_epochs, batch_size=self.clf_batch_size
        )
        if self.binarise and self.ratio == "raw":
            raise ConfigError(
                "plugin.feddisk.binarise=true is for the MADEs; plugin.feddisk.ratio=raw has none"
            )

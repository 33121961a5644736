"""FedGMM's options, which both halves of the plug-in read."""

from __future__ import annotations

from dataclasses import dataclass

from fedhet.core import check
from fedhet.core.check import setting
from fedhet.core.plugin import Plugin
from fedhet.maths.fedgmm import TARGETS


@dataclass(kw_only=True, eq=False)
class MixtureOptions(Plugin):
    """What conf/plugin/fedgmm.yaml explains."""

    components: int = setting(5, low=1)
    reg_covar: float = setting(1e-6, open_low=0)
    psi: float = setting(0.02, low=0, open_high=1)
    target: str | int = "client_max"
    min_class_samples: int = setting(2, low=1)
    max_components: int | None = setting(None, low=1)
    agg_count: str = setting("original", allowed=("original", "augmented"))
    gen_weight: float = setting(1.0, low=0)
    max_payload_mb: float = setting(1000.0, open_low=0)

    def __post_init__(self) -> None:
        if isinstance(self.target, str):
            check.one_of("plugin.fedgmm.target", self.target, TARGETS)
        else:
            check.integer("plugin.fedgmm.target", self.target, low=0)
        super().__post_init__()

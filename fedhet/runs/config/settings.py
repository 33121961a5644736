"""All settings of one run that the project itself reads, as checked objects; imports no torch.

What names a class (data set, partition, model, method, plug-ins, server optimiser, merge, tracker)
is checked by that class.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedhet.core.check import Checked, integer, one_of, setting
from fedhet.core.errors import ConfigError
from fedhet.core.groups import Course, Evaluation, LocalSettings, Noise, Speed


@dataclass(frozen=True, kw_only=True)
class Engine(Checked):
    """Where clients run, and with what (conf/engine/*.yaml).

    Attributes:
        name: local, ray or flwr.
        workers: processes or nodes that serve the clients; None: as many as there are clients.
        threads: threads of each process.
        num_cpus, num_gpus: what a client asks for.
        address: the Ray cluster to use; None for one of the run's own.
        speed: how the local steps are computed.
        fused: how many clients train as one: "off" for none, or "auto" for what suits the model.
    """

    GROUP = "engine"
    name: str
    workers: int | None = setting(low=1)
    threads: int = setting(low=1)
    num_cpus: float = setting(open_low=0)
    num_gpus: float = setting(low=0)
    address: str | None
    speed: Speed
    fused: int | str

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.fused, str):
            one_of("engine.fused", self.fused, ("off", "auto"))
            return
        integer("engine.fused", self.fused, low=1)
        other = {
            f"engine={self.name}": self.name != "local",
            f"engine.workers={self.workers}": self.workers != 1,
            "engine.compile=true": self.speed.compile,
        }
        for setting_, excludes in other.items():
            if excludes:
                raise ConfigError(
                    f"engine.fused={self.fused} with {setting_}: clients train as one in one"
                    " process of engine=local, without engine.compile"
                )

    @property
    def may_fuse(self) -> bool:
        """Whether clients may train as one."""
        alone = self.name == "local" and self.workers == 1
        return self.fused != "off" and alone and not self.speed.compile


@dataclass(frozen=True, kw_only=True)
class RunSettings(Course):
    """What the configuration of a run says, but for what names a class.

    Attributes:
        seed: the run's seed.
        data_dir: the folder of the data sets that are not built in.
        device: auto, cpu or cuda.
        figures: whether to draw the figures of the run.
        buffers: what becomes of batch statistics: average, local or frozen.
        local: how clients train in the first round.
        min_count: the least number of samples of which a statistic is sent (`privacy.min_count`).
        noise: the noise on replies (the rest of `privacy`).
        evaluation: when and what the run evaluates.
        checkpoint_every: seconds between two checkpoints; 0: each step; None: never.
        engine: where clients run.
    """

    seed: int = setting(low=0, high=2**63 - 1)
    data_dir: str
    device: str = setting(allowed=("auto", "cpu", "cuda"))
    figures: bool
    buffers: str = setting(allowed=("average", "local", "frozen"))
    local: LocalSettings
    min_count: int = setting(name="privacy.min_count", low=0)
    noise: Noise
    evaluation: Evaluation
    checkpoint_every: float | None = setting(name="checkpoint.every", low=0)
    engine: Engine

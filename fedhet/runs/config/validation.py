"""Turns a composed configuration into checked objects, and checks what no constructor can check.

The objects hold all settings that fedhet itself reads. Settings that name a class (data set,
partition, model, method, plug-ins, server optimiser, merge, tracker) are checked by that class.
It imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf

from fedhet.core.check import (
    MOST_EPOCHS,
    Checked,
    did_you_mean,
    integer,
    number,
    one_of,
    setting,
)
from fedhet.core.errors import ConfigError
from fedhet.core.groups import (
    Course,
    Evaluation,
    LocalSettings,
    Noise,
    ReplyLimits,
    Speed,
    Stopping,
)
from fedhet.runs.config import catalogue
from fedhet.runs.config.instantiation import walk

_GROUPS = (
    "dataset",
    "partition",
    "model",
    "client",
    "method",
    "server_opt",
    "merge",
    "tracker",
    "engine",
    "replies",
    "privacy",
    "eval",
    "checkpoint",
    "early_stopping",
)
T = TypeVar("T")
# Matches every `${` except `${a.b}`, the full name of another setting. Other forms would read the
# machine's state or call a resolver; `hydra` contains folders and environment variables.
_OTHER = re.compile(r"\$\{(?!(?!hydra\b)[A-Za-z_]\w*(\.\w+)*\})")


@dataclass(frozen=True, kw_only=True)
class Engine(Checked):
    """Where clients run, and with what (conf/engine/*.yaml).

    Attributes:
        name: local, ray or flwr.
        workers: processes or nodes that serve the clients; None: as many as there are clients.
        threads: threads of each process.
        num_cpus, num_gpus: CPUs and GPUs per client.
        address: the Ray cluster to use; None: the run starts its own.
        speed: how the local steps are computed.
        fused: how many clients train in one batch; "off": none; "auto": as suits the model.
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
                    f"engine.fused={self.fused} with {setting_}: clients are fused only in one"
                    " process of engine=local, with engine.workers=1 and engine.compile=false"
                )

    @property
    def may_fuse(self) -> bool:
        """Whether clients may train in one batch (fused)."""
        alone = self.name == "local" and self.workers == 1
        return self.fused != "off" and alone and not self.speed.compile


@dataclass(frozen=True, kw_only=True)
class RunSettings(Course):
    """The settings of a run that name no class.

    Attributes:
        seed: the run's seed.
        data_dir: the folder of the data sets that are not built in.
        device: auto, cpu or cuda.
        figures: whether to draw the figures of the run.
        buffers: how batch statistics are treated: average, local or frozen.
        local: how clients train in the first round.
        min_count: clients send no statistic of fewer samples (`privacy.min_count`).
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


def validate(cfg: DictConfig) -> RunSettings:
    """Return the checked settings that name no class, after a comparison of the groups.

    Raises:
        ConfigError: a value is out of range, or two settings contradict each other.
    """
    # LocalSettings allows 0, because a plug-in may set 0 for a step; a run may not.
    number("client.lr", cfg.client.lr, open_low=0)
    integer("client.epochs", cfg.client.epochs, low=1, high=MOST_EPOCHS)
    run = _of(
        RunSettings,
        cfg,
        lr_decay=cfg.client.lr_decay,
        schedule=cfg.client.schedule,
        replies=_of(ReplyLimits, cfg.replies),
        early_stopping=_of(Stopping, cfg.early_stopping),
        local=_of(LocalSettings, cfg.client),
        min_count=cfg.privacy.min_count,
        noise=_of(Noise, cfg.privacy, multiplier=cfg.privacy.noise),
        evaluation=_of(Evaluation, cfg.eval),
        checkpoint_every=cfg.checkpoint.every,
        engine=_of(Engine, cfg.engine, speed=_of(Speed, cfg.engine)),
    )
    _check_together(run)
    return run


def _of(cls: type[T], group: DictConfig, **given: object) -> T:
    """Build an object with the fields in `given`; all other fields are settings of the group."""
    names = [field.name for field in fields(cls) if field.name not in given]  # type: ignore[arg-type]
    return cls(**{name: getattr(group, name) for name in names}, **given)


def _check_together(run: RunSettings) -> None:
    """Refuse settings of different groups that exclude each other."""
    evaluation, noise, patience = run.evaluation, run.noise, run.early_stopping.patience
    if run.deliver and not evaluation.personal:
        raise ConfigError(
            "deliver=true needs eval.personal=true, because a site keeps what it has evaluated"
        )
    if patience is not None and not evaluation.clients:
        raise ConfigError(
            f"early_stopping.patience={patience} needs eval.clients=true, because early stopping"
            " uses the scores on the clients' validation data"
        )
    if run.replies.oversample and run.fraction * (1 + run.replies.oversample) > 1:
        raise ConfigError(
            f"replies.oversample={run.replies.oversample:g} with fraction={run.fraction:g}: a round"
            f" would need more clients than there are; allowed: at most {1 / run.fraction - 1:g}"
        )
    if noise and evaluation.clients:
        raise ConfigError(
            f"privacy.noise={noise.multiplier:g} needs eval.clients=false: clients would send their"
            " scores, also those for early stopping and the best model, without noise"
        )
    if noise and evaluation.finetune_epochs:
        raise ConfigError(
            f"eval.finetune_epochs={evaluation.finetune_epochs} with"
            f" privacy.noise={noise.multiplier:g}: with noise, clients evaluate nothing; use"
            " eval.finetune_epochs=0"
        )


def check_keys(cfg: DictConfig, where: str, skip: Collection[str] = ()) -> None:
    """Refuse keys that no part of fedhet reads, such as misspelt keys of a file in conf/.

    If the choices of a group name a class, its constructor checks the keys of the group instead.

    Args:
        cfg: the settings.
        where: their place, for messages.
        skip: keys that are not checked.

    Raises:
        ConfigError: a key is unknown; the message names it and the closest known keys.
    """
    known = _known_keys()
    if "experiment" in cfg:
        raise ConfigError(f"{where} must begin with the line `# @package _global_`")
    for key in map(str, cfg):
        if key not in (*skip, *known):
            below = [f"{group}: {{{key}: ...}}" for group, keys in known.items() if key in keys]
            group, _, inner = key.partition(".")
            below += [f"{group}: {{{inner}: ...}}"] if inner and group in known else []
            raise ConfigError(
                f"unknown setting {key!r} in {where}{did_you_mean(key, known, below)};"
                f" {catalogue.ALL_SETTINGS}"
            )
        node, allowed = cfg._get_node(key), known.get(key, [])
        if allowed and key not in _GROUPS and not isinstance(node, DictConfig):
            raise ConfigError(
                f"{key}={node} in {where}: {key} is a group of settings: {', '.join(allowed)}"
            )
        for name in map(str, node) if allowed and isinstance(node, DictConfig) else ():
            if name not in allowed:
                hint = did_you_mean(name, allowed, catalogue.RENAMED.get(f"{key}.{name}", ()))
                raise ConfigError(
                    f"unknown setting '{key}.{name}' in {where}{hint};"
                    f" {key} has {', '.join(allowed)}"
                )


def _known_keys() -> dict[str, list[str]]:
    """Return top-level key -> the keys below it; an empty list allows any key."""
    known = {group: _keys(group) for group in catalogue.groups() if group != "experiment"}
    for key, value in catalogue.content("config").items():
        if key not in ("defaults", "hydra"):
            known[key] = [*value] if isinstance(value, dict) else []
    return known


def _keys(group: str) -> list[str]:
    """Return the keys in the files of a group; [] if a file names a class, which checks the keys.

    The files of own components may add keys.
    """
    keys: dict[str, None] = {}
    for choice in catalogue.choices(group):
        content = catalogue.content(group, choice)
        if "_target_" in content:
            return []
        keys |= dict.fromkeys(content)
    return list(keys)


def check_fixed_choices(choices: Mapping[str, str]) -> None:
    """Refuse a choice that contradicts the definition of the chosen method.

    Raises:
        ConfigError: such as for method=fedadam with server_opt=fedyogi.
    """
    method = choices["method"]
    for group, choice in catalogue.fixed_choices("method", method).items():
        if choices[group] != choice:
            raise ConfigError(
                f"method={method} is defined by {group}={choice}; for {group}={choices[group]} use"
                " method=fedavg"
            )


def check_structure(cfg: DictConfig) -> None:
    """Refuse a missing value, and a plain value in place of a group of settings.

    Raises:
        ConfigError: there is one; the message names the key.
    """
    for key in sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigError(f"{key} has no default; write {key}=<value>")
    plugins = cfg.plugin if isinstance(cfg.plugin, DictConfig) else {}
    if "_target_" in plugins:
        raise ConfigError(
            f"plugin._target_={cfg.plugin._target_}: the plug-in's file must begin with the line"
            " `# @package plugin.<name>`"
        )
    for key in (*_GROUPS, "plugin", *(f"plugin.{name}" for name in plugins)):
        value = OmegaConf.select(cfg, key)
        if not isinstance(value, DictConfig):
            raise ConfigError(
                f"{key}={value}: this is a group of settings; write {key}.<setting>=<value>"
            )


def check_server_opt(cfg: DictConfig, choice: str) -> None:
    """Refuse a `kind` that differs from the definition of the chosen server optimiser.

    Raises:
        ConfigError: such as for server_opt=fedadam with server_opt.kind=yogi.
    """
    kind = OmegaConf.select(cfg.server_opt, "kind")
    own = catalogue.content("server_opt", choice).get("kind")
    if kind != own:
        raise ConfigError(
            f"server_opt.kind={kind}: server_opt={choice} is defined by kind={own}; choose"
            f" server_opt=fed{kind}"
        )


# ---- interpolations
# A resolver such as `${oc.env:NAME}` reads the state of the machine, and the result would get into
# the messages and the record of the run. So no setting of a run may call a resolver.
def resolve(cfg: DictConfig) -> None:
    """Replace references to settings by their values, and refuse resolvers, which read the machine.

    Raises:
        ConfigError: a value calls a resolver; the message names the key.
    """
    _refuse(
        _OTHER,
        cfg,
        "resolvers such as oc.env read the machine's state, which would get into messages and"
        " records; write the value itself. A setting may refer to another one by its full name,"
        " such as ${client.lr}",
    )
    OmegaConf.resolve(cfg)
    # Whoever reads such a text would resolve it.
    _refuse(re.compile(r"\$\{"), cfg, "a setting cannot contain '${' as text")


def _refuse(texts: re.Pattern[str], cfg: DictConfig, reason: str) -> None:
    for key, _, value in walk(OmegaConf.to_container(cfg)):
        if isinstance(value, str) and texts.search(value):
            raise ConfigError(f"{key}={value} is refused: {reason}")

"""Checks of a composed configuration that no constructor makes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedhet.config import catalogue
from fedhet.core.check import (
    MOST_EPOCHS,
    MOST_SAMPLES,
    MOST_STEPS,
    boolean,
    did_you_mean,
    each,
    integer,
    number,
    one_of,
    optional,
    text,
)
from fedhet.core.errors import ConfigError

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
# Beyond these, the accountant's squares of the noise multiplier overflow or vanish.
_LEAST_NOISE, _MOST_NOISE = 1e-6, 1e6
_WITHOUT_NOISE = {"clip": 1.0, "delta": 1e-5, "budget": None}  # the defaults of conf/config.yaml


def validate(cfg: DictConfig) -> None:
    """Check the settings that no constructor checks: those without a group, client.* and engine.*.

    Raises:
        ConfigError: a value is out of range, or two settings contradict each other.
    """
    _validate_run(cfg)
    _validate_replies(cfg.replies)
    _validate_privacy(cfg)
    _validate_client(cfg.client)
    _validate_engine(cfg.engine)


def _validate_run(cfg: DictConfig) -> None:
    integer("seed", cfg.seed, low=0, high=2**63 - 1)
    integer("rounds", cfg.rounds, low=1)
    number("fraction", cfg.fraction, open_low=0, high=1)
    text("data_dir", cfg.data_dir)
    if re.fullmatch(r"cuda:\d+", str(cfg.device)):
        raise ConfigError(
            f"device={cfg.device} is not allowed; choose this GPU by device=cuda, with"
            f" CUDA_VISIBLE_DEVICES={cfg.device[5:]} in the environment"
        )
    one_of("device", cfg.device, ("auto", "cpu", "cuda"))
    one_of("on_failure", cfg.on_failure, ("stop", "skip"))
    one_of("on_lost_state", cfg.on_lost_state, ("stop", "restart"))
    boolean("figures", cfg.figures)
    boolean("deliver", cfg.deliver)
    one_of("buffers", cfg.buffers, ("average", "local", "frozen"))
    integer("privacy.min_count", cfg.privacy.min_count, low=0)
    integer("eval.every", cfg.eval.every, low=1)
    boolean("eval.clients", cfg.eval.clients)
    boolean("eval.train", cfg.eval.train)
    boolean("eval.personal", cfg.eval.personal)
    integer("eval.finetune_epochs", cfg.eval.finetune_epochs, low=0, high=MOST_EPOCHS)
    optional(number, "eval.personal_mb", cfg.eval.personal_mb, low=0)
    integer("eval.last_k", cfg.eval.last_k, low=1)
    each(number, "eval.targets", cfg.eval.targets, open_low=0, high=1)
    optional(number, "checkpoint.every", cfg.checkpoint.every, low=0)
    patience = optional(integer, "early_stopping.patience", cfg.early_stopping.patience, low=1)
    number("early_stopping.min_delta", cfg.early_stopping.min_delta, low=0)
    if cfg.eval.train and not cfg.eval.clients:
        raise ConfigError(
            "eval.train=true needs eval.clients=true, because it is the clients that evaluate"
        )
    if cfg.deliver and not cfg.eval.personal:
        raise ConfigError(
            "deliver=true needs eval.personal=true, because a site keeps what it has evaluated"
        )
    if patience is not None and not cfg.eval.clients:
        raise ConfigError(
            f"early_stopping.patience={patience} needs eval.clients=true, because it watches the"
            " clients' validation data"
        )


def _validate_replies(replies: DictConfig) -> None:
    optional(number, "replies.deadline", replies.deadline, open_low=0)
    number("replies.grace", replies.grace, low=0)
    optional(number, "replies.enough", replies.enough, open_low=0, high=1)
    number("replies.oversample", replies.oversample, low=0)
    integer("replies.least", replies.least, low=1)
    integer("replies.bad_steps", replies.bad_steps, low=0)
    number("replies.max_lost", replies.max_lost, low=0, high=1)
    number("replies.join", replies.join, low=0)
    optional(integer, "replies.min_nodes", replies.min_nodes, low=1)
    optional(number, "replies.max_jump", replies.max_jump, open_low=1)
    number("replies.max_mb", replies.max_mb, open_low=0)


def _validate_privacy(cfg: DictConfig) -> None:
    noise = number("privacy.noise", cfg.privacy.noise, low=0, high=_MOST_NOISE)
    if 0 < noise < _LEAST_NOISE:
        raise ConfigError(
            f"privacy.noise={noise:g} is not allowed; it must be 0, which is off, or a number in"
            f" [{_LEAST_NOISE:g}, {_MOST_NOISE:g}]"
        )
    number("privacy.clip", cfg.privacy.clip, open_low=0)
    number("privacy.delta", cfg.privacy.delta, open_low=0, open_high=1)
    optional(number, "privacy.budget", cfg.privacy.budget, open_low=0)
    for key, default in _WITHOUT_NOISE.items():
        if not noise and cfg.privacy[key] != default:
            raise ConfigError(
                f"privacy.{key}={cfg.privacy[key]} needs privacy.noise > 0, without which it has no"
                " effect"
            )
    if noise and cfg.eval.clients:
        raise ConfigError(
            f"privacy.noise={noise:g} needs eval.clients=false: the clients' scores would leave"
            " them without noise, and so would what early stopping and the best model go by"
        )
    if noise and cfg.eval.finetune_epochs:
        raise ConfigError(
            f"eval.finetune_epochs={cfg.eval.finetune_epochs} with privacy.noise={noise:g}: clients"
            " evaluate nothing; use eval.finetune_epochs=0"
        )


def _validate_client(client: DictConfig) -> None:
    one_of("client.optimizer", client.optimizer, ("sgd", "adam"))
    number("client.lr", client.lr, open_low=0)
    integer("client.epochs", client.epochs, low=1, high=MOST_EPOCHS)
    optional(integer, "client.steps", client.steps, low=1, high=MOST_STEPS)
    integer("client.batch_size", client.batch_size, low=1, high=MOST_SAMPLES)
    number("client.momentum", client.momentum, low=0, open_high=1)
    number("client.weight_decay", client.weight_decay, low=0)
    number("client.lr_decay", client.lr_decay, open_low=0, high=1)
    one_of("client.schedule", client.schedule, ("constant", "cosine"))
    optional(number, "client.clip", client.clip, open_low=0)


def _validate_engine(engine: DictConfig) -> None:
    optional(integer, "engine.workers", engine.workers, low=1)
    integer("engine.threads", engine.threads, low=1)
    number("engine.num_cpus", engine.num_cpus, open_low=0)
    number("engine.num_gpus", engine.num_gpus, low=0)
    optional(text, "engine.address", engine.address)
    boolean("engine.compile", engine.compile)
    boolean("engine.amp", engine.amp)
    boolean("engine.channels_last", engine.channels_last)
    if engine.vectorize != "auto":
        integer("engine.vectorize", engine.vectorize, low=0)
    if engine.vectorize and engine.name != "local":
        raise ConfigError(
            f"engine.vectorize={engine.vectorize} with engine={engine.name}: only engine=local"
            " trains several clients at once"
        )


def check_keys(cfg: DictConfig) -> None:
    """Refuse keys that no part of fedhet reads, as a file of conf/ may misspell them.

    Those of a group whose choices name a class are left to its constructor.

    Args:
        cfg: what the files and the overrides are composed to, with Hydra's own settings.

    Raises:
        ConfigError: naming the first such key, and the closest ones that there are.
    """
    known = _known_keys()
    name = cfg.hydra.runtime.choices.get("experiment")
    where = "a file of the chosen groups" if name is None else f"the file of experiment={name}"
    if "experiment" in cfg:
        raise ConfigError(f"{where} must begin with the line `# @package _global_`")
    for key in map(str, cfg):
        if key not in ("hydra", *known):
            below = [f"{group}: {{{key}: ...}}" for group, keys in known.items() if key in keys]
            group, _, inner = key.partition(".")
            below += [f"{group}: {{{inner}: ...}}"] if inner and group in known else []
            raise ConfigError(
                f"unknown setting {key!r} in {where}{did_you_mean(key, known, below)}; the top"
                f" level has {', '.join(known)}"
            )
        if not known.get(key):
            continue
        node = cfg._get_node(key)
        if not isinstance(node, DictConfig):
            if key in _GROUPS:
                continue  # `check_structure` refuses it
            raise ConfigError(f"{key}={node}: this has settings: {', '.join(known[key])}")
        allowed = {*known[key], *_own_keys(key)} if {*node} - known[key].keys() else known[key]
        for setting in map(str, node):
            if setting not in allowed:
                raise ConfigError(
                    f"unknown setting '{key}.{setting}' in {where}"
                    f"{did_you_mean(setting, known[key])}; {key} has {', '.join(known[key])}"
                )


@lru_cache(maxsize=1)
def _known_keys() -> dict[str, dict[str, None]]:
    """The keys of the top level, and those below them; none where any key may stand."""
    settings: Any = OmegaConf.to_container(OmegaConf.load(catalogue.file("config")))
    del settings["defaults"], settings["hydra"]
    known = {group: dict[str, None]() for group in catalogue.groups() if group != "experiment"}
    for group in known:
        contents = [catalogue.content(group, choice) for choice in catalogue.built_in(group)]
        if not any("_target_" in content for content in contents):
            known[group] = dict.fromkeys(key for content in contents for key in content)
    inner = {key: value if isinstance(value, dict) else {} for key, value in settings.items()}
    return known | {key: dict.fromkeys(map(str, below)) for key, below in inner.items()}


def _own_keys(group: str) -> Iterator[str]:
    """The keys that files of one's own give a group in addition."""
    for choice in catalogue.choices(group) if group in catalogue.groups() else ():
        yield from catalogue.content(group, choice)


def check_fixed_choices(choices: Mapping[str, str]) -> None:
    """Refuse a choice that contradicts the definition of the chosen method.

    Raises:
        ConfigError: method=fedadam with server_opt=fedyogi, for example.
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
        ConfigError: naming the key.
    """
    for key in sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigError(f"{key} has no default; write {key}=<value>")
    if "_target_" in cfg.plugin:
        raise ConfigError(
            f"plugin._target_={cfg.plugin._target_}: the plug-in's file must begin with the line"
            " `# @package plugin.<name>`"
        )
    for key in (*_GROUPS, *(f"plugin.{name}" for name in cfg.plugin)):
        value = OmegaConf.select(cfg, key)
        if not isinstance(value, DictConfig):
            raise ConfigError(
                f"{key}={value}: this is a group of settings; write {key}.<setting>=<value>"
            )


def check_server_opt(cfg: DictConfig, choice: str) -> None:
    """Refuse another `kind` than the one that defines the chosen server optimiser.

    Raises:
        ConfigError: server_opt=fedadam with server_opt.kind=yogi, for example.
    """
    kind = OmegaConf.select(cfg.server_opt, "kind")
    own = catalogue.content("server_opt", choice).get("kind")
    if kind != own:
        raise ConfigError(
            f"server_opt.kind={kind}: server_opt={choice} is defined by kind={own}; choose"
            f" server_opt=fed{kind}"
        )

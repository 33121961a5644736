"""What fits together: methods, plug-ins, merges and settings state facts, and a table decides.

A fact is an attribute that says something of the thing itself: that a method's clients take no
local step, or that a plug-in changes aggregation weights. A rule says which facts exclude each
other, and why, so that nothing has to know another thing's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fedhet.core.client import FedClient
from fedhet.core.errors import ConfigError
from fedhet.core.merging import Mean
from fedhet.core.phases import cohort_size
from fedhet.core.targets import Classes

if TYPE_CHECKING:
    from fedhet.core.strategy import FedStrategy


class Rule(NamedTuple):
    """A fact of a method, and what it excludes.

    Attributes:
        fact: the name of the method's attribute.
        value: the value with which it excludes something.
        excludes: (plug-in or merge, method) -> whether it is excluded; `because` may name what this
            returns as {found}.
        because: the reason, in the words of the refusal; it may also name facts of {method}.
    """

    fact: str
    value: bool
    excludes: Callable[[Any, FedStrategy], object]
    because: str


PLUGINS = (
    Rule(
        "takes_steps",
        False,
        lambda plugin, _: plugin.needs_steps,
        "it acts on local steps only, and this method's clients take none",
    ),
    Rule(
        "receives_model",
        False,
        lambda plugin, _: plugin.needs_model,
        "it refers to the received model, and this method's clients receive none",
    ),
    Rule(
        "sends_weights",
        False,
        lambda plugin, _: plugin.compares,
        "it compares the models that clients send, and this method's clients send none",
    ),
    Rule(
        "weighted",
        False,
        lambda plugin, _: plugin.changes_weights,
        "it changes aggregation weights, which this method ignores",
    ),
    Rule(
        "by_samples",
        False,
        lambda plugin, _: plugin.adds_samples,
        "it adds drawn samples to n_k, by which this method does not weigh clients",
    ),
    Rule(
        "plain_steps",
        True,
        lambda plugin, _: plugin.changes_gradients,
        "it changes the local steps, from which this method recovers gradients",
    ),
    Rule(
        "sgd_steps",
        True,
        lambda plugin, _: plugin.changes_optimizer,
        "it changes the local optimiser, and this method knows the length of SGD's steps only",
    ),
)
MERGES = (
    Rule("sends_weights", False, lambda merge, _: merge.compares, "its clients send no weights"),
    Rule(
        "only_means",
        False,
        lambda merge, _: merge.replaces_mean,
        "{method.enters} enter its merge, and it would not bound them",
    ),
    Rule(
        "only_weights",
        False,
        lambda merge, _: merge.rescales,
        "{method.enters} enter its merge, and it would not bound them",
    ),
    Rule(
        "weighted",
        True,
        lambda merge, method: not merge.weighted and _first(method, "changes_weights"),
        "plugin {found!r} changes the aggregation weights, which it ignores",
    ),
    Rule(
        "counts_steps",
        True,
        lambda merge, method: merge.name != Mean.name and unknown_steps(method),
        "plugin {found!r} changes the number of local steps, so that nobody can check the one that"
        " a client claims, by which it would outvote the others; client.steps=<number> sets it",
    ),
)
NOISE = (
    Rule(
        "counts_steps",
        True,
        lambda _, method: _first(method, "changes_steps"),
        "the number of steps would reveal how many samples {found!r} has added",
    ),
)
# The settings of local training that a fact requires, and why.
CLIENT: tuple[tuple[str, bool, Mapping[str, Any], str], ...] = (
    (
        "plain_steps",
        True,
        {"optimizer": "sgd", "momentum": 0, "weight_decay": 0, "clip": None},
        "recovers gradients from the local steps, which must be those of plain SGD",
    ),
    ("sgd_steps", True, {"optimizer": "sgd"}, "knows the length of SGD's local steps only"),
    (
        "takes_steps",
        False,
        {"optimizer": "sgd", "momentum": 0, "steps": None},
        "takes no local step but one of SGD on the server, where server_opt acts",
    ),
)


def check(method: FedStrategy) -> None:
    """Refuse a method with plug-ins, a merge or settings that do not fit it.

    Raises:
        ConfigError: it says what refuses what, and why.
    """
    for refusal in _refusals(method):
        raise ConfigError(refusal)


def _refusals(method: FedStrategy) -> Iterator[str]:
    """All reasons, the most basic ones first."""
    merge = method.setting.merge
    names = [plugin.name for plugin in method.plugins]
    for name in (name for i, name in enumerate(names) if name in names[:i]):
        yield f"the plug-in {name!r} is in Setting.plugins twice; it acts once"
    yield from _preset_refusals(method)
    yield from _client_refusals(method)
    yield from _noise_refusals(method)
    for plugin in method.plugins:
        if reason := method.refuses.get(plugin.name) or _reason(PLUGINS, plugin, method):
            yield f"method={method.name} refuses plugin {plugin.name!r}: {reason}"
    if reason := method.refuses.get(merge.name) or _reason(MERGES, merge, method):
        yield f"method={method.name} refuses merge={merge.name}: {reason}"
    yield from _setting_refusals(method)
    for plugin in method.plugins:
        for other, reason in plugin.refuses.items():
            if other in (method.name, merge.name, *names):
                yield f"plugin {plugin.name!r} refuses {other!r}: {reason}"


def _reason(rules: tuple[Rule, ...], piece: object, method: FedStrategy) -> str:
    """Why the method refuses the piece, and the option with which it does not; "" if it fits."""
    for fact, value, excludes, because in rules:
        if (found := excludes(piece, method)) and bool(getattr(method, fact)) is value:
            other = method.otherwise.get(fact) or getattr(piece, "otherwise", {}).get(fact)
            return because.format(found=found, method=method) + (f"; use {other}" if other else "")
    return ""


def _preset_refusals(method: FedStrategy) -> Iterator[str]:
    """Why the plug-in without which the method would be FedAvg is not as the method has it."""
    if method.requires is None:
        return
    name = method.requires.name
    own = next((plugin for plugin in method.plugins if plugin.name == name), None)
    if own is None:
        yield (
            f"method={method.name} without its plug-in {name!r} would be FedAvg: add the plug-in to"
            f" Setting.plugins, as conf/method/{method.name}.yaml does"
        )
        return
    for key, value in method.fixed.items():
        if (given := own.settings[key]) != value:
            yield (
                f"method={method.name} is FedAvg with plugin.{name}.{key}={value} and refuses"
                f" {key}={given}; leave plugin=[{name}] and its {key} out"
            )


def _client_refusals(method: FedStrategy) -> Iterator[str]:
    for fact, value, settings, because in CLIENT:
        for key, required in settings.items() if bool(getattr(method, fact)) is value else ():
            if (given := getattr(method.setting.local, key)) != required:
                yield (
                    f"client.{key}={given}: method={method.name} {because}; use"
                    f" client.{key}={'null' if required is None else required}"
                    + (f" or {method.otherwise[fact]}" if fact in method.otherwise else "")
                )


def _noise_refusals(method: FedStrategy) -> Iterator[str]:
    """Why a method or a plug-in sends what noise cannot cover."""
    noise = method.workspace.noise
    named = [(f"method={method.name}", method.refuses_noise or _reason(NOISE, noise, method))]
    named += [(f"plugin {plugin.name}", plugin.refuses_noise) for plugin in method.plugins]
    for name, reason in named if noise else ():
        if reason:
            yield f"privacy.noise={noise.multiplier:g} with {name}: {reason}"


def _setting_refusals(method: FedStrategy) -> Iterator[str]:
    """Why settings of the server need a model, or a score, that there is not."""
    if method.setting.server_opt is not None and not method.receives_model:
        yield (
            f"method={method.name} has no global model that a server optimiser could update; use"
            " server_opt=none"
        )
    evaluation = method.workspace.evaluation
    epochs = evaluation.finetune_epochs
    if epochs and "global" not in method.evaluates:
        yield (
            f"eval.finetune_epochs={epochs}: method={method.name} has no global model to fine-tune"
        )
    if not evaluation.personal and "global" not in method.evaluates:
        yield f"eval.personal=false: method={method.name} has personal models only; use true"
    target = method.workspace.task.scoring
    if evaluation.scores == "all" and target.name != Classes.name:
        yield f"eval.scores=all: of a task with target={target.name} there are no others; use basic"
    if evaluation.thresholds and not target.score():
        yield (
            f"eval.thresholds={list(evaluation.thresholds)}: a task with target={target.name} has"
            " no score that could reach them"
        )


def _first(method: FedStrategy, fact: str) -> str:
    """The name of the first plug-in of which this holds; "" if there is none."""
    return next((plugin.name for plugin in method.plugins if getattr(plugin, fact)), "")


def unknown_steps(method: FedStrategy) -> str:
    """The plug-in because of which the server cannot know a client's number of local steps.

    It is "" where that follows from the client's samples, or from client.steps.
    """
    return "" if method.setting.local.steps is not None else _first(method, "changes_steps")


def check_phases(method: FedStrategy) -> None:
    """Refuse a phase of the method with the name of something else that clients have.

    Raises:
        ConfigError: the client would serve the phase "fit" with Flower's method, for example.
    """
    for phase in (entry.phase for entry in method.timetable if not entry.owner):
        if phase.name != "train" and hasattr(FedClient, phase.name):
            raise ConfigError(
                f"method={method.name}: its phase {phase.name!r} needs another name, because"
                f" FedClient.{phase.name} is something else"
            )


def check_cohorts(method: FedStrategy) -> None:
    """Refuse a merge that needs or keeps more updates than a step can have.

    Raises:
        ConfigError: it says how many clients take part.
    """
    rule = method.setting.merge
    eligible = sum(n > 0 for n in method.sizes)
    for phase in (entry.phase for entry in method.timetable if entry.phase.compared):
        cohort = cohort_size(phase.cohort, method.setting.share(phase), eligible)
        keep = getattr(rule, "keep", None) or 1
        least = rule.needs(method.sent(phase.slot), method.mergeable(phase.slot))
        has = f"a step of the phase {phase.name!r} has {cohort} clients"
        if least > cohort:
            raise ConfigError(f"merge={rule.name} needs {least} updates in a step, and {has}")
        if keep > cohort:
            raise ConfigError(
                f"merge.keep={keep} is not allowed: {has}; choose a whole number from 1 to {cohort}"
            )

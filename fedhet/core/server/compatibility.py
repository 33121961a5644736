"""Checks whether methods, plug-ins, merges and settings fit together.

Each component states words for properties of the training (`fedhet.core.kernel.WORDS`): the
properties that it needs, and the properties that it breaks, which means makes untrue. Two
components do not fit if one of them needs a word that the other breaks. So no component needs to
know the names of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fedhet.core.errors import ConfigError
from fedhet.core.kernel import Component, Method, Plugin
from fedhet.core.server.merging import Mean
from fedhet.core.server.phases import cohort_size
from fedhet.core.targets import Classes

if TYPE_CHECKING:
    from fedhet.core.server.run_setup import RunSetup
    from fedhet.core.server.strategy import FedStrategy
    from fedhet.core.workspace import Workspace

# Why a method refuses a plug-in, by the word that one of them needs and the other breaks.
PLUGIN = {
    "local steps": "it acts on local steps only, and this method's clients take none",
    "model": "it refers to the received model, and this method's clients receive none",
    "weights": "it compares the models that clients send, and this method's clients send none",
    "used weights": "it changes aggregation weights, which this method ignores",
    "sample weights": "it adds drawn samples to n_k, but this method does not weigh clients by n_k",
    "plain steps": "it changes the local steps, but this method recovers gradients from them",
    "sgd steps": "it changes the local optimiser, but this method knows only the length of SGD's"
    " steps",
}
# Why a method refuses a merge; {why} is the method's reason.
MERGE = {
    "weights": "its clients send no weights",
    "means": "{why} enter its merge, and it would not bound them",
    "weights alone": "{why} enter its merge, and it would not bound them",
}
# The settings of local training that a word demands, and why.
CLIENT: dict[str, tuple[Mapping[str, Any], str]] = {
    "plain steps": (
        {"optimizer": "sgd", "momentum": 0, "weight_decay": 0, "clip": None},
        "recovers gradients from the local steps, so they must be plain SGD steps",
    ),
    "sgd steps": ({"optimizer": "sgd"}, "knows only the length of SGD's local steps"),
}
WITHOUT_STEPS = (
    {"optimizer": "sgd", "momentum": 0, "steps": None},
    "takes no local steps; its only step is one of SGD on the server, where server_opt acts",
)


def broken(method: Method, workspace: Workspace) -> dict[str, str]:
    """Return the words that the method makes untrue for this model, each with the reason."""
    without = {} if workspace.mergeable else {"model": "", "weights": ""}
    return {**without, **method.breaks}


def check(method: Method, setup: RunSetup) -> None:
    """Refuse a method if its plug-ins, its merge or its settings do not fit it.

    Raises:
        ConfigError: says which component refuses which, and why.
    """
    for refusal in _refusals(method, setup):
        raise ConfigError(refusal)


def _refusals(method: Method, setup: RunSetup) -> Iterator[str]:
    """Yield all reasons to refuse this combination, the most basic ones first."""
    names = [plugin.name for plugin in setup.plugins]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"RunSetup.plugins has the plug-in {name!r} twice; name each plug-in once"
    yield from _preset_refusals(method, setup.plugins)
    yield from _client_refusals(method, setup)
    yield from _noise_refusals(method, setup)
    yield from _component_refusals(method, setup)
    yield from _setting_refusals(method, setup)


def _preset_refusals(method: Method, plugins: Sequence[Plugin]) -> Iterator[str]:
    """Yield why the plug-in that the method requires is missing, or has other options.

    Without this plug-in, the method would be FedAvg.
    """
    if method.requires is None:
        return
    required = partial(method.requires)
    name = required.func.name  # type: ignore[attr-defined]
    own = next((plugin for plugin in plugins if plugin.name == name), None)
    if own is None:
        yield (
            f"method={method.name} without its plug-in {name!r} would be FedAvg: add the plug-in to"
            f" RunSetup.plugins, as conf/method/{method.name}.yaml does"
        )
        return
    for key, value in required.keywords.items():
        if (given := own.settings[key]) != value:
            yield (
                f"method={method.name} is FedAvg with plugin.{name}.{key}={value} and refuses"
                f" {key}={given}; leave out plugin=[{name}] and its {key}"
            )


def _client_refusals(method: Method, setup: RunSetup) -> Iterator[str]:
    """Yield why the method cannot use the settings of local training."""
    required = [(word, *CLIENT[word]) for word in CLIENT if word in method.needs]
    if "local steps" in method.breaks:
        required.append(("local steps", *WITHOUT_STEPS))
    for word, settings, because in required:
        for key, value in settings.items():
            if (given := getattr(setup.local, key)) != value:
                yield (
                    f"client.{key}={given}: method={method.name} {because}; use"
                    f" client.{key}={'null' if value is None else value}"
                    + _remedy(method, word).replace("; use ", " or ")
                )
    if "plain steps" in method.needs and not setup.local.lr:
        yield (
            f"client.lr=0: method={method.name} recovers gradients from the local steps, and cannot"
            " if they have length 0; use a rate > 0"
            + _remedy(method, "plain steps").replace("; use ", " or ")
        )


def _noise_refusals(method: Method, setup: RunSetup) -> Iterator[str]:
    """Yield why noise does not fit the method or a plug-in."""
    noise = setup.workspace.noise
    for component in (method, *setup.plugins) if noise else ():
        if reason := component.breaks.get("noise"):
            kind = "method=" if component is method else "plugin "
            yield f"privacy.noise={noise.multiplier:g} with {kind}{component.name}: {reason}"


def _component_refusals(method: Method, setup: RunSetup) -> Iterator[str]:
    """Yield why the method refuses a plug-in, or the merge."""
    merge, breaks = setup.merge, broken(method, setup.workspace)
    for plugin in setup.plugins:
        for word in PLUGIN:
            refused = word in plugin.needs and word in breaks
            if refused or (word in method.needs and word in plugin.breaks):
                remedy = _remedy(method, word) or (_remedy(plugin, word) if refused else "")
                yield f"method={method.name} refuses plugin {plugin.name!r}: {PLUGIN[word]}{remedy}"
    refuses = f"method={method.name} refuses merge={merge.name}:"
    for word in MERGE:
        if word in merge.needs_words and word in breaks:
            yield f"{refuses} {MERGE[word].format(why=breaks[word])}{_remedy(method, word)}"
    weighing = [plugin.name for plugin in setup.plugins if "used weights" in plugin.needs]
    if weighing and "used weights" in merge.breaks and "used weights" not in breaks:
        yield (
            f"{refuses} plugin {weighing[0]!r} changes the aggregation weights, which this merge"
            " ignores"
        )


def _setting_refusals(method: Method, setup: RunSetup) -> Iterator[str]:
    """Yield why settings of the server need a model or a score that the run does not have."""
    workspace, name = setup.workspace, f"method={method.name}"
    evaluation, target = workspace.evaluation, workspace.task.scoring
    epochs, no_global = evaluation.finetune_epochs, "global" not in method.evaluates(workspace)
    refused = {
        f"{name} has no global model that a server optimiser could update; use server_opt=none": (
            setup.server_opt is not None and not workspace.mergeable
        ),
        f"eval.finetune_epochs={epochs}: {name} has no global model to fine-tune": (
            epochs and no_global
        ),
        f"eval.personal=false: {name} has personal models only; use true": (
            not evaluation.personal and no_global
        ),
        f"eval.scores=all: a task with target={target.name} has the basic scores only; use basic": (
            evaluation.scores == "all" and target.name != Classes.name
        ),
        f"eval.thresholds={list(evaluation.thresholds)}: a task with target={target.name} has no"
        " score to compare with thresholds; use []": evaluation.thresholds and not target.score(),
    }
    yield from (why for why, is_so in refused.items() if is_so)


def _remedy(component: Component, word: str) -> str:
    """Return "; use <group>.<option>=<value>" if a value of an option removes the conflict.

    Otherwise return "".

    Args:
        component: a method or plug-in.
        word: the word that it needs or breaks.
    """
    for option in fields(component) if word in {*component.needs, *component.breaks} else ():  # type: ignore[arg-type]
        for value in option.metadata.get("limits", {}).get("allowed", ()):
            other = replace(component, **{option.name: value})  # type: ignore[type-var]
            if word not in {*other.needs, *other.breaks}:
                return f"; use {component.GROUP}.{option.name}={value}"
    return ""


def changing_data(setup: RunSetup) -> str:
    """Return the name of a plug-in that may change a client's number of samples; "" for none.

    With such a plug-in, the server cannot know a client's number of local steps, unless
    `client.steps` sets it.
    """
    return next((plugin.name for plugin in setup.plugins if plugin.overrides("data")), "")


def check_claims(strategy: FedStrategy) -> None:
    """Refuse a merge other than the mean, and noise, if the server cannot check clients' steps.

    This is so if a plug-in changes the data, and the method expects each reply to have the client's
    number of local steps. With `client.steps`, such merges are allowed.

    Raises:
        ConfigError: says what refuses the merge or the noise.
    """
    setup, name = strategy.setup, changing_data(strategy.setup)
    merge, noise = setup.merge, setup.workspace.noise
    if not name or not (noise or (merge.name != Mean.name and setup.local.steps is None)):
        return
    expected = strategy.expected(strategy.timetable[-1])["method"]
    if any(one.exactly for one in expected.values()):
        raise ConfigError(
            f"privacy.noise={noise.multiplier:g} with method={strategy.name}: the number of steps"
            f" would reveal how many samples plugin {name!r} has added"
            if noise
            else f"method={strategy.name} refuses merge={merge.name}: plugin {name!r} changes the"
            " number of local steps, so the server cannot check the number that a client claims,"
            " and a false one could outvote the other clients; set client.steps=<number>"
        )


def check_cohorts(strategy: FedStrategy) -> None:
    """Refuse a merge that needs or keeps more updates than a step can have.

    Raises:
        ConfigError: says how many clients take part.
    """
    rule = strategy.setup.merge
    eligible = sum(n > 0 for n in strategy.sizes)
    for phase in (entry.phase for entry in strategy.timetable if entry.phase.compared):
        cohort = cohort_size(phase.cohort, strategy.setup.share(phase), eligible)
        keep = getattr(rule, "keep", None) or 1
        least = rule.needs(strategy.sent(phase.slot), strategy.mergeable(phase.slot))
        has = f"a step of the phase {phase.name!r} has {cohort} clients"
        if least > cohort:
            raise ConfigError(f"merge={rule.name} needs {least} updates in a step, and {has}")
        if keep > cohort:
            raise ConfigError(
                f"merge.keep={keep} is not allowed: {has}; choose a whole number from 1 to {cohort}"
            )

"""What fits together: methods, plug-ins, merges and settings.

Each piece says by words (`fedhet.core.kernel.WORDS`) what it needs and what it makes untrue. Two
pieces do not fit if one of them needs what the other breaks, so that nothing has to know another
thing's name.
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

# Why a method refuses a plug-in, by the word on which they differ.
PLUGIN = {
    "local steps": "it acts on local steps only, and this method's clients take none",
    "model": "it refers to the received model, and this method's clients receive none",
    "weights": "it compares the models that clients send, and this method's clients send none",
    "used weights": "it changes aggregation weights, which this method ignores",
    "sample weights": "it adds drawn samples to n_k, by which this method does not weigh clients",
    "plain steps": "it changes the local steps, from which this method recovers gradients",
    "sgd steps": "it changes the local optimiser, and this method knows the length of SGD's steps"
    " only",
}
# The same of a merge; {why} is the method's reason.
MERGE = {
    "weights": "its clients send no weights",
    "means": "{why} enter its merge, and it would not bound them",
    "weights alone": "{why} enter its merge, and it would not bound them",
}
# The settings of local training that a word stands for, and why.
CLIENT: dict[str, tuple[Mapping[str, Any], str]] = {
    "plain steps": (
        {"optimizer": "sgd", "momentum": 0, "weight_decay": 0, "clip": None},
        "recovers gradients from the local steps, which must be those of plain SGD",
    ),
    "sgd steps": ({"optimizer": "sgd"}, "knows the length of SGD's local steps only"),
}
WITHOUT_STEPS = (
    {"optimizer": "sgd", "momentum": 0, "steps": None},
    "takes no local step but one of SGD on the server, where server_opt acts",
)


def broken(method: Method, workspace: Workspace) -> dict[str, str]:
    """What the method makes untrue of a run with this model -> why."""
    without = {} if workspace.mergeable else {"model": "", "weights": ""}
    return {**without, **method.breaks}


def check(method: Method, setup: RunSetup) -> None:
    """Refuse a method with plug-ins, a merge or settings that do not fit it.

    Raises:
        ConfigError: it says what refuses what, and why.
    """
    for refusal in _refusals(method, setup):
        raise ConfigError(refusal)


def _refusals(method: Method, setup: RunSetup) -> Iterator[str]:
    """All reasons, the most basic ones first."""
    names = [plugin.name for plugin in setup.plugins]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"the plug-in {name!r} is in RunSetup.plugins twice; it acts once"
    yield from _preset_refusals(method, setup.plugins)
    yield from _client_refusals(method, setup)
    yield from _noise_refusals(method, setup)
    yield from _component_refusals(method, setup)
    yield from _setting_refusals(method, setup)


def _preset_refusals(method: Method, plugins: Sequence[Plugin]) -> Iterator[str]:
    """Why the plug-in without which the method would be FedAvg is not as the method has it."""
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
                f" {key}={given}; leave plugin=[{name}] and its {key} out"
            )


def _client_refusals(method: Method, setup: RunSetup) -> Iterator[str]:
    """Why settings of local training are not those that the method can use."""
    required = [(word, *CLIENT[word]) for word in CLIENT if word in method.needs]
    if "local steps" in method.breaks:
        required.append(("local steps", *WITHOUT_STEPS))
    for word, settings, because in required:
        for key, value in settings.items():
            if (given := getattr(setup.local, key)) != value:
                yield (
                    f"client.{key}={given}: method={method.name} {because}; use"
                    f" client.{key}={'null' if value is None else value}"
                    + _way_out(method, word).replace("; use ", " or ")
                )
    if "plain steps" in method.needs and not setup.local.lr:
        yield (
            f"client.lr=0: method={method.name} recovers gradients from the local steps, which then"
            " have no length; use a rate > 0"
            + _way_out(method, "plain steps").replace("; use ", " or ")
        )


def _noise_refusals(method: Method, setup: RunSetup) -> Iterator[str]:
    """Why a method or a plug-in sends what noise cannot cover."""
    noise = setup.workspace.noise
    for component in (method, *setup.plugins) if noise else ():
        if reason := component.breaks.get("noise"):
            kind = "method=" if component is method else "plugin "
            yield f"privacy.noise={noise.multiplier:g} with {kind}{component.name}: {reason}"


def _component_refusals(method: Method, setup: RunSetup) -> Iterator[str]:
    """Why the method refuses a plug-in, or the merge."""
    merge, breaks = setup.merge, broken(method, setup.workspace)
    for plugin in setup.plugins:
        for word in PLUGIN:
            refused = word in plugin.needs and word in breaks
            if refused or (word in method.needs and word in plugin.breaks):
                way = _way_out(method, word) or (_way_out(plugin, word) if refused else "")
                yield f"method={method.name} refuses plugin {plugin.name!r}: {PLUGIN[word]}{way}"
    refuses = f"method={method.name} refuses merge={merge.name}:"
    for word in MERGE:
        if word in merge.needs_words and word in breaks:
            yield f"{refuses} {MERGE[word].format(why=breaks[word])}{_way_out(method, word)}"
    weighing = [plugin.name for plugin in setup.plugins if "used weights" in plugin.needs]
    if weighing and "used weights" in merge.breaks and "used weights" not in breaks:
        yield (
            f"{refuses} plugin {weighing[0]!r} changes the aggregation weights, which it ignores"
        )


def _setting_refusals(method: Method, setup: RunSetup) -> Iterator[str]:
    """Why settings of the server need a model, or a score, that there is not."""
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
        f"eval.scores=all: of a task with target={target.name} there are no others; use basic": (
            evaluation.scores == "all" and target.name != Classes.name
        ),
        f"eval.thresholds={list(evaluation.thresholds)}: a task with target={target.name} has no"
        " score that could reach them": evaluation.thresholds and not target.score(),
    }
    yield from (why for why, is_so in refused.items() if is_so)


def _way_out(component: Component, word: str) -> str:
    """The option with which the piece does not need, or break, this, for a message."""
    for one in fields(component) if word in {*component.needs, *component.breaks} else ():  # type: ignore[arg-type]
        for value in one.metadata.get("limits", {}).get("allowed", ()):
            other = replace(component, **{one.name: value})  # type: ignore[type-var]
            if word not in {*other.needs, *other.breaks}:
                return f"; use {component.GROUP}.{one.name}={value}"
    return ""


def changing_data(setup: RunSetup) -> str:
    """The plug-in that may change how many samples a client trains on; "" for none.

    The server then cannot know a client's number of local steps, unless it is client.steps.
    """
    return next((plugin.name for plugin in setup.plugins if plugin.overrides("data")), "")


def check_claims(strategy: FedStrategy) -> None:
    """Refuse a merge, and noise, where replies have a number of steps that nobody can check.

    Raises:
        ConfigError: a plug-in changes the data, and the method expects such a number.
    """
    setup, name = strategy.setup, changing_data(strategy.setup)
    merge, noise = setup.merge, setup.workspace.noise
    if not name or not (noise or (merge.name != Mean.name and setup.local.steps is None)):
        return
    expected = strategy.expected(strategy.timetable[-1])["method"]
    if any(one.exactly for one in expected.values()):
        raise ConfigError(
            f"privacy.noise={noise.multiplier:g} with method={strategy.name}: the number of steps"
            f" would reveal how many samples {name!r} has added"
            if noise
            else f"method={strategy.name} refuses merge={merge.name}: plugin {name!r} changes the"
            " number of local steps, so that nobody can check the one that a client claims, by"
            " which it would outvote the others; client.steps=<number> sets it"
        )


def check_cohorts(strategy: FedStrategy) -> None:
    """Refuse a merge that needs or keeps more updates than a step can have.

    Raises:
        ConfigError: it says how many clients take part.
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

"""Which methods and plug-ins refuse a choice of the group `merge`, and the ranges of options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from composing import composed
from contracts.short import STATED
from omegaconf import OmegaConf

import fedhet
from fedhet.core import trees
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.groups import ReplyLimits
from fedhet.core.kernel import Merged, Plugin, State, Step, Update
from fedhet.core.server.compatibility import check_cohorts
from fedhet.core.server.merging import Krum, Mean, Median, NormClip, NormFilter, TrimmedMean
from fedhet.core.trees import Tree
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedbn import FedBN
from fedhet.runs.config import Config, catalogue
from fedhet.runs.job import Job

Federation = Callable[..., Any]

# Methods whose merge takes more of the replies than a mean.
ITS_OWN = {"scaffold", "fednova", "fedgen", "fedsa", "fedpcl", "fedproto"}
REFUSED = {
    "median": {*ITS_OWN, "fednorm"},
    "trimmed_mean": {*ITS_OWN, "fednorm"},
    "krum": {"fedsa", "fedpcl", "fedproto", "fedsgd", "local"},
    "norm_clip": {*ITS_OWN - {"fedgen"}, "fedsgd", "local", "sgdm"},
    "norm_filter": set(),
    "mean": set(),
}


def with_merge(settings: Config, merge: str) -> Config:
    """The settings with another choice of the group merge, which Hydra composes once for all."""
    cfg = settings.cfg.copy()
    OmegaConf.set_readonly(cfg, False)
    cfg.merge = composed("method=fedavg", f"merge={merge}").cfg.merge
    OmegaConf.set_readonly(cfg, True)
    return replace(settings, cfg=cfg)


@pytest.fixture(scope="module")
def refused(methods: dict[str, Config]) -> dict[str, set[str]]:
    """Each choice of the group merge, and the methods that refuse it."""
    found: dict[str, set[str]] = {merge: set() for merge in catalogue.choices("merge")}
    task = toy_task(7)
    for merge in found:
        for method, settings in methods.items():
            try:
                strategy = Job(with_merge(settings, merge), task).strategy
                assert strategy.setup.merge.name == merge
            except ConfigError as error:
                assert f"merge={merge}" in str(error)
                found[merge].add(method)
    return found


def test_each_method_takes_a_merge_or_refuses_it(refused: dict[str, set[str]]) -> None:
    assert {merge: methods & STATED for merge, methods in refused.items()} == REFUSED


@pytest.mark.slow
@pytest.mark.parametrize("merge", catalogue.choices("merge"))
def test_no_method_changes_the_choice_of_a_merge(methods: dict[str, Config], merge: str) -> None:
    for method, settings in methods.items():
        expected = composed(f"method={method}", f"merge={merge}").cfg
        assert with_merge(settings, merge).cfg == expected, method


@dataclass(frozen=True, kw_only=True)
class Own(FedAvg):
    """Its merge sums by itself."""

    name = "own"
    breaks = {"means": "sums of its own", "weights alone": "sums of its own"}

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        return Merged(trees.add(trees.mean((u.change, 1.0) for u in updates), old), state)


@dataclass(frozen=True, kw_only=True)
class Known(FedAvg):
    name = "known"
    breaks = {}

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        return super().merge(step, state, old, updates)


@dataclass(frozen=True, kw_only=True)
class Weighs(Plugin):
    name = "weighs"
    needs = frozenset({"used weights"})

    def weight(self, step: Step, state: State, update: Update) -> float:
        return update.weight


@dataclass(frozen=True, kw_only=True)
class Needs(Plugin):
    """Changes no weights by itself, and says that they must count."""

    name = "needs"
    needs = frozenset({"used weights"})


def test_a_merge_of_ones_own_says_that_it_takes_other_means(federation: Federation) -> None:
    for merge in (Median(), NormClip()):
        with pytest.raises(ConfigError, match=f"method=own .*merge={merge.name}.*sums"):
            federation(toy_task(), Own, merge=merge)
    federation(toy_task(), Own, merge=Krum(attackers=0))
    federation(toy_task(), Known, merge=Median())


@pytest.mark.parametrize("base", [FedAvg, Known])
def test_a_merge_that_does_not_say_what_it_takes_is_refused(base: Any) -> None:
    with pytest.raises(TypeError, match=r"Silent .*merge.*`breaks`"):

        class Silent(base):  # type: ignore[misc]
            def merge(self, step: Any, state: Any, old: Any, updates: Any) -> Any:
                return super().merge(step, state, old, updates)


@dataclass(frozen=True, kw_only=True)
class Again(FedAvg):
    name = "again"
    breaks = {}

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        largest = max(update.n for update in updates)
        return super().merge(step, {"largest": largest}, old, updates)


def test_updates_that_are_read_a_second_time_are_refused(federation: Federation) -> None:
    with pytest.raises(TypeError, match=r"once.*list\(updates\)"):
        federation(toy_task(), Again).step()


@pytest.mark.parametrize("plugin", [Weighs, Needs])
def test_plugins_that_do_not_fit(federation: Federation, plugin: type[Plugin]) -> None:
    def plugins() -> list[Plugin]:
        return [plugin()]

    with pytest.raises(ConfigError, match=rf"merge=median: plugin '{plugin.name}'.*weights"):
        federation(toy_task(), FedAvg, plugins=plugins, merge=Median())
    federation(toy_task(), FedAvg, plugins=plugins, merge=Krum(attackers=0))


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: TrimmedMean(share=0.5), r"merge\.share=0\.5"),
        (lambda: TrimmedMean(share=-0.1), r"merge\.share=-0\.1"),
        (lambda: Krum(attackers=-1), r"merge\.attackers=-1"),
        (lambda: Krum(keep=0), r"merge\.keep=0"),
        (lambda: NormClip(factor=0), r"merge\.factor=0"),
        (lambda: NormClip(norm=0), r"merge\.norm=0"),
        (lambda: NormFilter(factor=0.9), r"merge\.factor=0\.9"),
    ],
)
def test_options_are_checked(make: Callable[[], Mean], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key} "):
        make()


@pytest.mark.parametrize(
    ("merge", "least"),
    [
        (Krum(attackers=2), 7),
        (TrimmedMean(share=0.2), 5),
        (TrimmedMean(share=0.3), 4),
        (Median(), 3),
        (NormClip(), 3),
        (NormFilter(), 3),
    ],
)
def test_too_few_updates(federation: Federation, merge: Mean, least: int) -> None:
    """Known before the run where the cohort is too small, and else when a client fails."""

    def one_lost(plan: list[Any], replies: list[Any]) -> list[Any]:
        return replies[1:]

    match = f"merge={merge.name} .*{least} updates .*'train' .*{least - 1} clients"
    with pytest.raises(ConfigError, match=match):
        check_cohorts(federation(toy_task(least - 1), FedAvg, merge=merge).strategy)
    run = federation(toy_task(least), FedAvg, merge=merge, on_failure="skip")
    match = rf"{least - 1} .*{least} replies .*\(merge={merge.name}\)"
    with pytest.raises(RunFailed, match=match):
        run.step(one_lost)
    federation(toy_task(least), FedAvg, merge=merge).step()


def test_too_small_a_cohort_is_refused_before_the_run(tmp_path: Path) -> None:
    """By the clients of the run itself: settings are tried on fewer, and fractions of those."""
    lines = ["method=fedavg", "merge=median", "rounds=1", "eval.clients=false"]
    with pytest.raises(ConfigError, match=r"merge=median .*3 updates .* 2 clients"):
        fedhet.run([*lines, "fraction=.2", f"hydra.run.dir={tmp_path / 'refused'}"])
    assert not (tmp_path / "refused").exists()
    run = fedhet.run([*lines, "fraction=.3", f"hydra.run.dir={tmp_path / 'run'}"])
    assert run.summary["status"] == "ok"


def test_replies_least_is_named_where_it_decides(federation: Federation) -> None:
    replies = ReplyLimits(least=3)
    run = federation(toy_task(4), FedAvg, merge=Median(), replies=replies, on_failure="skip")
    with pytest.raises(RunFailed, match=r"2 .*3 replies .*\(replies\.least\)"):
        run.step(lambda plan, received: received[2:])


def test_merges_that_keep_more_than_there_are(federation: Federation) -> None:
    match = r"merge\.keep=8 .* 7 clients.* 1 to 7"
    with pytest.raises(ConfigError, match=match):
        check_cohorts(federation(toy_task(7), FedAvg, merge=Krum(keep=8)).strategy)


def test_few_are_enough_where_nothing_is_compared(federation: Federation) -> None:
    for merge in (TrimmedMean(share=0.0), NormClip(norm=1.0), Mean()):
        federation(toy_task(1), FedAvg, merge=merge).step()


def test_a_fixed_norm_needs_three_where_buffers_are_averaged(federation: Federation) -> None:
    """They have no fixed bound: with one or two replies, any buffers would pass whole."""

    def two(plan: list[Any], replies: list[Any]) -> list[Any]:
        return replies[:2]

    def settings(clients: int) -> dict[str, Any]:
        return {"task": toy_task(clients, norm=True), "merge": NormClip(norm=1.0)}

    with pytest.raises(ConfigError, match=r"merge=norm_clip .*3 updates .* 2 clients"):
        check_cohorts(federation(cls=FedAvg, **settings(2)).strategy)
    run = federation(cls=FedAvg, **settings(3), on_failure="skip")
    with pytest.raises(RunFailed, match=r"2 .*3 replies .*\(merge=norm_clip\)"):
        run.step(two)
    check_cohorts(federation(cls=FedBN, **settings(2)).strategy)
    check_cohorts(federation(cls=FedAvg, **settings(2), buffers="local").strategy)

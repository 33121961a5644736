"""Which methods and plug-ins refuse a choice of the group `merge`, and the ranges of options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from composing import composed

from fedhet import trees
from fedhet.config import catalogue
from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError, RunFailed
from fedhet.job import Job
from fedhet.merging.coordinates import Median, TrimmedMean
from fedhet.merging.krum import Krum
from fedhet.merging.mean import Mean
from fedhet.merging.norms import NormClip, NormFilter
from fedhet.messages import Update
from fedhet.methods.fedavg import FedAvg
from fedhet.plugin import Plugin
from fedhet.trees import Tree

Federation = Callable[..., Any]

REFUSED = {
    "median": {"scaffold", "fednova", "fedgen", "fedsa", "fedpcl", "fednorm"},
    "trimmed_mean": {"scaffold", "fednova", "fedgen", "fedsa", "fedpcl", "fednorm"},
    "krum": {"fedsa", "fedpcl", "fedsgd"},
    "norm_clip": {"scaffold", "fednova", "fedgen", "fedsa", "fedpcl", "fedsgd", "sgdm"},
    "norm_filter": set(),
    "mean": set(),
}


@pytest.mark.parametrize("merge", catalogue.choices("merge"))
def test_each_method_takes_a_merge_or_refuses_it(merge: str) -> None:
    refused = set()
    for method in catalogue.choices("method"):
        settings = composed(f"method={method}", f"merge={merge}")
        try:
            assert Job(settings, toy_task()).strategy.setting.merge.name == merge
        except ConfigError as error:
            assert f"merge={merge}" in str(error)
            refused.add(method)
    assert refused == REFUSED[merge]


class Own(FedAvg):
    """Its merge sums by itself, and does not say how."""

    name = "own"

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        return trees.add(trees.mean((update.change, 1.0) for update in updates), old)


class Known(FedAvg):
    name = "known"
    averages = True

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        return super().merge(updates, old)


class Derived(Known):
    name = "derived"

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        return super().merge(updates, old)


class Weighs(Plugin):
    name = "weighs"

    def incoming(self, updates: Iterator[Update], old: Tree) -> Iterator[Update]:
        return updates


class Dislikes(Plugin):
    name = "dislikes"

    @property
    def refuses(self) -> dict[str, str]:
        return {"krum": "it needs everyone"}


def test_a_merge_of_ones_own_says_that_it_takes_other_means(federation: Federation) -> None:
    for cls in (Own, Derived):
        for merge in (Median(), NormClip()):
            with pytest.raises(ConfigError, match=f"method={cls.name} refuses merge={merge.name}"):
                federation(toy_task(), cls, merge=merge)
        federation(toy_task(), cls, merge=Krum(attackers=0))
    federation(toy_task(), Known, merge=Median())


def test_plugins_that_do_not_fit(federation: Federation) -> None:
    def weighs() -> list[Plugin]:
        return [Weighs()]

    with pytest.raises(ConfigError, match=r"'weighs'.*weights, which merge=median ignores"):
        federation(toy_task(), FedAvg, plugins=weighs, merge=Median())
    federation(toy_task(), FedAvg, plugins=weighs, merge=Krum(attackers=0))
    with pytest.raises(ConfigError, match="'dislikes' refuses 'krum': it needs everyone"):
        federation(toy_task(), FedAvg, plugins=lambda: [Dislikes()], merge=Krum(attackers=0))


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
    with pytest.raises(ConfigError, match=f"^{key} is not allowed"):
        make()


def test_too_few_updates_for_krum(federation: Federation) -> None:
    with pytest.raises(RunFailed, match=r"4 of at least 7 replies accepted \(merge=krum\)"):
        federation(toy_task(4), FedAvg, merge=Krum(attackers=2)).step()

"""merge=norm_clip and merge=norm_filter: what they compare, and what they do without it."""

from __future__ import annotations

from typing import Any

import pytest
from contracts.steps import VALUES, Federation, after_a_step, moved, sending

from fedhet.core import trees
from fedhet.core.errors import RunFailed
from fedhet.core.messages import Broadcast
from fedhet.core.server.merging import Mean, NormClip, NormFilter
from fedhet.methods.scaffold import Scaffold


@pytest.mark.parametrize("norm", [False, True])
def test_clipped_to_the_median(federation: Federation, norm: bool) -> None:
    """The norms are in proportion to the numbers sent, whose absolute values have the median 1."""
    merge = NormClip(factor=1.0)
    run = after_a_step(federation, merge=merge, alter=sending(VALUES), norm=norm)
    sizes = run.strategy.sizes
    bounded = {pid: max(-1.0, min(1.0, value)) for pid, value in VALUES.items()}
    mean = sum(sizes[pid] * bounded[pid] for pid in bounded) / sum(sizes)
    for name in ["head.bias", *(["body.1.running_mean"] if norm else [])]:
        assert moved(run, name) == pytest.approx(mean, abs=1e-5)
    assert run.current.recorded["norm_clip"]["clipped_pids"].tolist() == [1, 4, 6]


def test_clipped_to_a_fixed_norm(federation: Federation) -> None:
    run = after_a_step(federation, merge=NormClip(norm=1e-3), clients=1)
    change = trees.Difference(run.model, run.workspace.initial)
    assert trees.norm(change) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("component", ["weights", "scaffold.c_plus", "body.1.running_mean"])
def test_the_norm_filter_leaves_out_what_is_far_too_large(
    federation: Federation, component: str
) -> None:
    """The others are merged as without that client, whose state does not advance."""

    def grow(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        reply = replies[2]
        tree = reply.extras.get(component) or reply.weights
        for name in [component] if component in tree else tree:
            if tree[name].is_floating_point():
                tree[name] = tree[name] * 1e4
        return replies

    def absent(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        return replies[:2] + replies[3:]

    settings = {"norm": True, "on_failure": "skip"}
    run = after_a_step(federation, Scaffold, merge=NormFilter(factor=10.0), alter=grow, **settings)
    (failure,) = run.current.failures
    assert failure.reason == "outlier" and "times the median" in failure.cause
    assert run.sha256 == after_a_step(federation, Scaffold, alter=absent, **settings).sha256
    assert failure.pid not in run.strategy.run.versions
    with pytest.raises(RunFailed, match=r"merge\.factor=10 .*median"):
        after_a_step(federation, Scaffold, merge=NormFilter(factor=10.0), alter=grow, norm=True)


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_the_norm_filter_keeps_what_is_just_within_its_factor(
    federation: Federation, factor: float
) -> None:
    """The norms are in proportion to the numbers sent, whose median is 1."""
    values = {0: 0.5, 1: 0.5, 2: 1.0, 3: 0.99 * factor, 4: 1.01 * factor}
    merge = NormFilter(factor=factor)
    given = {"clients": 5, "on_failure": "skip"}
    run = after_a_step(federation, merge=merge, alter=sending(values), **given)
    assert [failure.pid for failure in run.current.failures] == [4]
    sizes = run.strategy.sizes
    mean = sum(sizes[pid] * values[pid] for pid in range(4)) / sum(sizes[:4])
    assert moved(run) == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize("merge", [NormClip(factor=1.0), NormFilter(factor=3.0)])
def test_clients_that_change_nothing_have_no_say_about_norms(
    federation: Federation, merge: Mean
) -> None:
    """Four of seven send what they received; the median is that of the others, 1."""
    values = dict.fromkeys(range(4), 0.0) | {4: 0.5, 5: 1.0, 6: 900.0}
    run = after_a_step(federation, merge=merge, alter=sending(values), on_failure="skip")
    sizes = run.strategy.sizes
    refuses = merge.name == "norm_filter"
    bounded = values | {6: 1.0}
    present = [pid for pid in values if not (refuses and pid == 6)]
    mean = sum(sizes[pid] * bounded[pid] for pid in present) / sum(sizes[pid] for pid in present)
    assert moved(run) == pytest.approx(mean, abs=1e-5)
    assert [failure.pid for failure in run.current.failures] == [6] * refuses


def test_nobody_changes_anything(federation: Federation) -> None:
    for merge in (NormClip(), NormFilter()):
        run = after_a_step(federation, merge=merge, alter=sending(dict.fromkeys(range(7), 0.0)))
        assert moved(run) == 0 and not run.current.failures


def test_the_norm_filter_compares_three_and_keeps_two(federation: Federation) -> None:
    merge, values = NormFilter(), {0: 1.0, 1: 1.0, 2: 900.0}
    given = {"clients": 3, "on_failure": "skip"}
    run = after_a_step(federation, merge=merge, alter=sending(values), **given)
    assert moved(run) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("merge", [NormClip(), NormFilter()])
@pytest.mark.parametrize("changing", [[2], [1, 2]])
def test_one_or_two_among_clients_that_change_nothing_move_nothing(
    federation: Federation, merge: Mean, changing: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """A median of one or two norms would be the attacker's own."""
    values = dict.fromkeys(range(len(changing) + 2), 0.0) | dict.fromkeys(changing, 900.0)
    given = {"clients": len(values), "on_failure": "skip", "norm": True}
    run = after_a_step(federation, merge=merge, alter=sending(values), **given)
    for name in ("head.bias", "body.1.running_mean", "body.1.running_var"):
        assert moved(run, name) == 0
    if merge.name == "norm_filter":
        assert sorted(failed.pid for failed in run.current.failures) == changing
        with pytest.raises(RunFailed, match=r" 3 .*on_failure=skip"):
            after_a_step(federation, merge=merge, alter=sending(values), clients=len(values))
    else:
        assert f"{len(changing)} of {len(values)} updates" in caplog.text


def test_one_sender_of_an_extra_is_compared_with_nobody(federation: Federation) -> None:
    """The others leave out the extra, as clients with few samples do with their statistics."""

    def alone(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        for reply in replies:
            for t in reply.extras["scaffold.c_plus"].values():
                t.mul_(1e6 if reply.pid == 2 else 0)
        return replies

    given = {"merge": NormFilter(), "alter": alone, "on_failure": "skip"}
    run = after_a_step(federation, Scaffold, **given)
    (failure,) = run.current.failures
    assert failure.pid == 2 and "scaffold.c_plus" in failure.cause

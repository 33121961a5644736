"""Functions that are called side by side, each until it asks for something."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import pytest
import torch

from fedhet.core.errors import RunFailed
from fedhet.core.interruptions import signals_noted
from fedhet.core.timing import SHARE, Share
from fedhet.engines.fused.scheduler import Scheduler


@dataclass
class Number:
    """Asks for the sum of all numbers of its kind that are asked for at once."""

    value: int
    kind: str = ""

    @property
    def form(self) -> Hashable:
        return self.kind

    @staticmethod
    def perform(requests: Sequence[Number]) -> list[int]:
        if any(one.value < 0 for one in requests):
            raise ValueError("a negative number")
        return [sum(one.value for one in requests)] * len(requests)


def test_all_wait_for_each_other() -> None:
    """One that has ended is not waited for."""
    scheduler = Scheduler()

    def work(times: int) -> list[int]:
        return [scheduler.ask(Number(10**times)) for _ in range(times)]

    results = scheduler.gather([lambda n=n: work(n) for n in (1, 2, 3)])  # type: ignore[misc]
    assert results == [[1110], [1110, 1100], [1110, 1100, 1000]]


def test_only_what_has_one_form_is_done_as_one() -> None:
    scheduler = Scheduler()
    works = [lambda one=one: scheduler.ask(one) for one in (Number(1, "a"), Number(2), Number(4))]
    assert scheduler.gather(works) == [1, 6, 6]


def test_who_is_alone_is_answered_at_once() -> None:
    scheduler = Scheduler()
    assert scheduler.ask(Number(3)) == 3
    assert scheduler.gather([]) == []
    assert scheduler.gather([lambda: scheduler.ask(Number(4))]) == [4]
    with pytest.raises(ValueError, match="negative"):
        scheduler.ask(Number(-1))


def test_a_meeting_within_a_meeting() -> None:
    """The clients of several runs meet."""
    top = Scheduler()

    def run(first: int) -> list[int]:
        scheduler = Scheduler.here()
        assert scheduler is top
        inner = [lambda k=k: scheduler.ask(Number(first + k)) for k in (1, 2)]
        return [*scheduler.gather(inner), scheduler.ask(Number(first))]

    assert top.gather([lambda: run(10), lambda: run(100)]) == [[226, 226, 110], [226, 226, 110]]
    assert Scheduler.here() is not top


@pytest.mark.parametrize("nested", [False, True])
def test_an_exception_reaches_the_caller_once_all_have_ended(nested: bool) -> None:
    scheduler, ended = Scheduler(), []

    def fails() -> None:
        scheduler.ask(Number(1))
        raise RuntimeError("mine")

    def works() -> None:
        scheduler.ask(Number(2))
        ended.append(scheduler.ask(Number(3)))

    def both() -> None:
        with pytest.raises(RuntimeError, match="mine"):
            scheduler.gather([fails, works])

    scheduler.gather([both]) if nested else both()
    assert ended == [3]


def test_what_fails_for_several_fails_for_each() -> None:
    scheduler = Scheduler()

    def work(value: int) -> str | int:
        try:
            return int(scheduler.ask(Number(value)))
        except ValueError as error:
            return str(error) + f" {scheduler.ask(Number(value + 10))}"

    found = scheduler.gather([lambda n=n: work(n) for n in (-1, 2)])  # type: ignore[misc]
    assert found == ["a negative number 21", "a negative number 21"]


def test_each_has_its_own_random_stream_grad_mode_and_context() -> None:
    scheduler = Scheduler()
    variable = contextvars.ContextVar("variable", default=0)

    def work(seed: int) -> tuple[torch.Tensor, bool, int]:
        assert torch.is_grad_enabled()
        variable.set(seed)
        torch.manual_seed(seed)
        first = torch.rand(2)
        with torch.set_grad_enabled(seed % 2 == 0):
            scheduler.ask(Number(seed))
            second = torch.rand(2)
            grad = torch.is_grad_enabled()
        return torch.cat([first, second]), grad, variable.get()

    torch.manual_seed(9)
    with torch.no_grad():
        found = scheduler.gather([lambda n=n: work(n) for n in (1, 2)])  # type: ignore[misc]
        assert not torch.is_grad_enabled()
    after = torch.rand(1)
    for seed, (drawn, grad, value) in enumerate(found, 1):
        torch.manual_seed(seed)
        assert torch.equal(drawn, torch.cat([torch.rand(2), torch.rand(2)]))
        assert (grad, value) == (seed % 2 == 0, seed)
    torch.manual_seed(9)
    assert torch.equal(after, torch.rand(1))
    assert variable.get() == 0


@pytest.mark.parametrize("where", ["between", "within"])
def test_an_interruption_ends_all(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    scheduler, ended = Scheduler(), []

    def interrupted(requests: Sequence[Number]) -> list[int]:
        raise KeyboardInterrupt

    def work(n: int) -> None:
        try:
            if where == "between" and n == 1:
                raise KeyboardInterrupt
            scheduler.ask(Number(n))
        finally:
            ended.append(n)

    monkeypatch.setattr(Number, "perform", staticmethod(interrupted))
    with pytest.raises(KeyboardInterrupt):
        scheduler.gather([lambda n=n: work(n) for n in (0, 1, 2)])  # type: ignore[misc]
    assert sorted(ended) == ([0, 1] if where == "between" else [0, 1, 2])
    monkeypatch.undo()
    assert scheduler.gather([lambda: scheduler.ask(Number(5))]) == [5]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize("where", ["between", "within"])
def test_what_no_signal_has_raised_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
    """Code of a client calls sys.exit, in its own part or in what is done as one."""
    scheduler, ended = Scheduler(), []

    def perform(requests: Sequence[Number]) -> list[int]:
        if where == "within" and any(one.value == 1 for one in requests):
            raise error(0)
        return [1] * len(requests)

    def work(n: int) -> None:
        if where == "between" and n == 1:
            raise error(0)
        scheduler.ask(Number(n, str(n)))
        scheduler.ask(Number(3))
        ended.append(n)

    monkeypatch.setattr(Number, "perform", staticmethod(perform))
    with (
        signals_noted(),
        pytest.raises(RunFailed, match=rf"{error.__name__}\(0\)"),
    ):
        scheduler.gather([lambda n=n: work(n) for n in (0, 1, 2)])  # type: ignore[misc]
    assert ended == [0, 2]


def test_seconds_are_shared() -> None:
    scheduler = Scheduler()
    shares: list[Share] = []

    def run(n: int) -> None:
        SHARE.set(share := Share())
        shares.append(share)
        scheduler.ask(Number(n))
        share.pause()

    works: list[Callable[[], None]] = [lambda: run(1), lambda: run(2)]
    scheduler.gather(works)
    assert SHARE.get() is None
    assert all(0 < share.seconds < 1 for share in shares)

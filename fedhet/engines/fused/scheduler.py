"""Where clients and runs wait for each other, so that what they wait for is done as one."""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch
from greenlet import getcurrent, greenlet

from fedhet.core.interruptions import exits_as_errors
from fedhet.core.timing import SHARE, Share

Result = TypeVar("Result")


class Request(Protocol):
    """What is done as one with other requests of its type and form."""

    @property
    def form(self) -> Hashable: ...

    @staticmethod
    def perform(requests: Sequence[Any]) -> Sequence[Any]:
        """Carry out requests of one form, and return the result of each."""
        ...


_ACTIVE = threading.local()


class Scheduler:
    """Calls functions side by side in one thread, each until it asks for something.

    Once all of them wait, what they ask for is done. Each has a state of torch's global random
    stream, and of context variables, of its own.
    """

    def __init__(self) -> None:
        self._hub: greenlet | None = None
        self._ready: deque[tuple[greenlet, Any]] = deque()
        self._asking: list[tuple[greenlet, Request]] = []

    @staticmethod
    def here() -> Scheduler:
        """The scheduler of this thread, or a new one."""
        return getattr(_ACTIVE, "scheduler", None) or Scheduler()

    def gather(self, works: Sequence[Callable[[], Result]]) -> list[Result]:
        """Call the functions side by side, and return what they return.

        Raises:
            Exception: what the first of them that fails raises, once all have ended.
        """
        results: list[Any] = [None] * len(works)
        errors: list[Exception] = []
        left = len(works)
        caller = getcurrent()

        def call(i: int) -> None:
            nonlocal left
            try:
                with exits_as_errors():
                    results[i] = works[i]()
            except Exception as error:  # noqa: BLE001 -- for the caller
                errors.append(error)
            left -= 1
            if not left and caller is not hub:
                self._ready.append((caller, None))

        top = self._hub is None
        hub = self._hub = caller if top else self._hub
        tasks = [greenlet(call, hub) for _ in works]
        for task in tasks:
            task.gr_context = contextvars.copy_context()
        self._ready.extend(zip(tasks, range(len(works)), strict=True))
        if top:
            self._until_all_have_ended(tasks)
        elif works:
            self._wait()
        if errors:
            raise errors[0]
        return results

    def ask(self, request: Request) -> Any:
        """Have the request carried out with those of others, and return its result.

        Where nobody else could ask, it is carried out at once.
        """
        if self._hub in (None, getcurrent()):
            return type(request).perform([request])[0]
        self._asking.append((getcurrent(), request))
        result = self._wait()
        if isinstance(result, Exception):
            raise result
        return result

    def _wait(self) -> Any:
        assert self._hub is not None
        state, grad = torch.default_generator.get_state(), torch.is_grad_enabled()
        result = self._hub.switch()
        torch.default_generator.set_state(state)
        torch.set_grad_enabled(grad)
        return result

    def _until_all_have_ended(self, tasks: list[greenlet]) -> None:
        state, grad = torch.default_generator.get_state(), torch.is_grad_enabled()
        _ACTIVE.scheduler = self
        try:
            while self._ready or self._asking:
                while self._ready:
                    task, value = self._ready.popleft()
                    torch.set_grad_enabled(True)  # another one may wait where it is disabled
                    if share := _share(task):
                        share.resume()
                    task.switch(value)
                    if share := _share(task):
                        share.pause()
                self._ready.extend(_carried_out(self._asking))
                self._asking = []
        finally:
            # After an interruption, all others end as if it had reached them.
            waiting = [one[0] for one in (*self._asking, *self._ready)]
            self._asking, self._ready = [], deque()
            for task in (*waiting, *tasks):
                if not task.dead:
                    with suppress(KeyboardInterrupt):
                        task.throw(KeyboardInterrupt)
            self._hub = _ACTIVE.scheduler = None
            torch.default_generator.set_state(state)
            torch.set_grad_enabled(grad)


def _share(task: greenlet) -> Share | None:
    """The seconds of the run to which the task, which does not go on now, belongs."""
    return task.gr_context.get(SHARE) if task.gr_context else None


def _carried_out(asking: Sequence[tuple[greenlet, Request]]) -> list[tuple[greenlet, Any]]:
    """What to give each task: the result of its request, or the exception that it has raised."""
    by_form: dict[Hashable, list[int]] = {}
    for i, (_, request) in enumerate(asking):
        by_form.setdefault((type(request), request.form), []).append(i)
    results: list[Any] = [None] * len(asking)
    for members in by_form.values():
        began = time.perf_counter()
        requests = [asking[i][1] for i in members]
        try:
            with exits_as_errors():
                found = type(requests[0]).perform(requests)
        except Exception as error:  # noqa: BLE001 -- for those who have asked
            found = [error] * len(members)
        seconds = (time.perf_counter() - began) / len(members)
        for i, result in zip(members, found, strict=True):
            results[i] = result
            if share := _share(asking[i][0]):
                share.seconds += seconds
    return [(task, result) for (task, _), result in zip(asking, results, strict=True)]

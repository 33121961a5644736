"""Lets clients and runs wait for each other, so that their requests are computed in one batch."""

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
    """Work that can be done in one batch with other requests of the same type and form."""

    @property
    def form(self) -> Hashable: ...

    @staticmethod
    def perform(requests: Sequence[Any]) -> Sequence[Any]:
        """Compute requests of one form, and return the result of each."""
        ...


_ACTIVE = threading.local()


class Scheduler:
    """Calls functions side by side in one thread; each runs until it makes a request.

    Once all functions wait, their requests are computed. Each function has its own state of torch's
    global random stream, and its own context variables.
    """

    def __init__(self) -> None:
        self._hub: greenlet | None = None
        self._ready: deque[tuple[greenlet, Any]] = deque()
        self._asking: list[tuple[greenlet, Request]] = []

    @staticmethod
    def here() -> Scheduler:
        """Return the scheduler of this thread, or a new scheduler."""
        return getattr(_ACTIVE, "scheduler", None) or Scheduler()

    def gather(self, works: Sequence[Callable[[], Result]]) -> list[Result]:
        """Call the functions side by side, and return what they return.

        Raises:
            Exception: the first exception of a function; raised once all functions have ended.
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
            except Exception as error:  # noqa: BLE001 -- raised in the caller
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
        """Wait until the request is computed with the requests of others, and return its result.

        If no other function runs, compute the request at once.
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
                    torch.set_grad_enabled(True)  # another task may wait with gradients disabled
                    if share := _share(task):
                        share.resume()
                    task.switch(value)
                    if share := _share(task):
                        share.pause()
                self._ready.extend(_carried_out(self._asking))
                self._asking = []
        finally:
            # After an interruption, end all other tasks as if they had been interrupted, too.
            waiting = [entry[0] for entry in (*self._asking, *self._ready)]
            self._asking, self._ready = [], deque()
            for task in (*waiting, *tasks):
                if not task.dead:
                    with suppress(KeyboardInterrupt):
                        task.throw(KeyboardInterrupt)
            self._hub = _ACTIVE.scheduler = None
            torch.default_generator.set_state(state)
            torch.set_grad_enabled(grad)


def _share(task: greenlet) -> Share | None:
    """Return the clock of the run to which a task belongs; the task must not be running."""
    return task.gr_context.get(SHARE) if task.gr_context else None


def _carried_out(asking: Sequence[tuple[greenlet, Request]]) -> list[tuple[greenlet, Any]]:
    """Compute all requests. Return for each task its result, or the exception that was raised."""
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
        except Exception as error:  # noqa: BLE001 -- raised in the tasks that have asked
            found = [error] * len(members)
        seconds = (time.perf_counter() - began) / len(members)
        for i, result in zip(members, found, strict=True):
            results[i] = result
            if share := _share(asking[i][0]):
                share.seconds += seconds
    return [(task, result) for (task, _), result in zip(asking, results, strict=True)]

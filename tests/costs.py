"""What each test costs: a guard that keeps `make test` short.

A test without the marker `slow` may take 2 s of processor time, with its setup, its teardown and
the processes that it starts. Fixtures of a wider scope belong to no test: those of the session may
take 60 s together, and those of one file 15 s, so that none hides a slow test; only those of
tests/test_end_to_end.py, which look at real processes, may take more. Processor time, unlike
seconds, hardly depends on what else the machine does; a machine that takes longer for a fixed piece
of work than the one on which the limits were set has larger ones by as much. The ten most expensive
tests are always printed, and so is each test that takes more than its limit. With --costs=fail the
run fails where a test takes FAILS times its limit: the same test has taken 1.6 s on one machine and
2.5 s on another, so that a smaller excess says more about the machine than about the test.
--costs-table=FILE writes all of them.

`python tests/costs.py COMMIT` times the same piece of work by the clock on the wall, for .ci/run.
Where it takes more than SLOW times as long as usual it prints --third=COMMIT, by which a third of
the files with chosen tests run, drawn by the commit: after 90 minutes no result would count.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

TEST = 2.0  # seconds of processor time
SHARED = 60.0
OF_A_FILE = 15.0
FAILS = 2.0
LONG = {"tests/test_end_to_end.py": SHARED, "all tests": SHARED}
REFERENCE = 0.048  # seconds that `_work` takes on a quiet machine that runs the suite in time
SLOW = 3.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", choices=["show", "fail"], default="show")
    parser.addoption("--costs-table", type=Path, default=None)
    parser.addoption("--third", metavar="COMMIT", help="run a third of the files, drawn by it")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config))


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a third of the files, whole: --dist=loadfile gives each of them to one process."""
    if (commit := config.getoption("third")) is None:
        return
    files = {item.nodeid.partition("::")[0] for item in items}
    drawn = sorted(files, key=lambda file: hashlib.sha256(f"{commit} {file}".encode()).digest())
    kept = {*drawn[: -(-len(drawn) // 3)]}
    left = [item for item in items if item.nodeid.partition("::")[0] not in kept]
    items[:] = [item for item in items if item.nodeid.partition("::")[0] in kept]
    config.hook.pytest_deselected(items=left)


def spent() -> float:
    """The processor time of this process and of all its children, in seconds."""
    total = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += sum(child.cpu_times()[:4])
    return total


def slowness(clock: Callable[[], float] = time.process_time) -> float:
    """How much longer this machine takes now than the one of REFERENCE; at least 1."""
    return max(1.0, sorted(_work(clock) for _ in range(5))[2] / REFERENCE)


def _work(clock: Callable[[], float]) -> float:
    began, x = clock(), 0
    for i in range(1_000_000):
        x = (31 * x + i) % 1_000_003
    return clock() - began


class Costs:
    """Measures in the process that runs a test; adds up and judges in the one that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._last = 0.0
        self._shared = 0.0  # of a file's fixtures in the phase that is measured
        self._session = 0.0  # of the session's
        self._depth = 0
        self._table: dict[str, dict[str, Any]] = {}
        self._slowness = 1.0 if hasattr(config, "workerinput") else slowness()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._last = spent()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        if fixturedef.scope == "function" or self._depth:
            return (yield)
        self._depth += 1
        began = spent()
        try:
            return (yield)
        finally:
            self._depth -= 1
            cost = max(spent() - began, 0.0)  # a child that was not waited for is gone
            if fixturedef.scope == "session":
                self._session += cost
            else:
                self._shared += cost

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        report = yield
        if report.when != "teardown":
            return report
        now = spent()  # once for each test: it looks at every process of the machine
        shared, self._shared = self._shared, 0.0
        session, self._session = self._session, 0.0
        slow = any(map(item.get_closest_marker, ("slow", "matrix")))
        own = max(now - self._last - shared - session, 0.0)
        report.user_properties.append(("costs", (own, shared, session, slow)))
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._table.setdefault(
            report.nodeid, {"cpu": 0.0, "shared": 0.0, "session": 0.0, "wall": 0.0, "slow": False}
        )
        row["wall"] += report.duration
        for name, value in report.user_properties:
            if name == "costs":
                row["cpu"], row["shared"], row["session"], row["slow"] = value

    def offenders(self, factor: float = 1.0) -> list[str]:
        """A sentence for each test, and for the shared fixtures, above `factor` times the limit."""
        allowed = factor * self._slowness
        most = TEST * allowed
        found = [
            f"{test} takes {row['cpu']:.1f} s of processor time, at most {most:.1f} without the"
            " marker slow"
            for test, row in self._table.items()
            if row["cpu"] > most and not row["slow"]
        ]
        shared: dict[str, float] = {}
        for test, row in self._table.items():
            if not row["slow"]:
                for place, cost in ((test.partition("::")[0], "shared"), ("all tests", "session")):
                    shared[place] = shared.get(place, 0.0) + row[cost]
        found += [
            f"fixtures shared by {place} take {cost:.0f} s together, at most"
            f" {LONG.get(place, OF_A_FILE) * allowed:.0f}"
            for place, cost in shared.items()
            if cost > LONG.get(place, OF_A_FILE) * allowed
        ]
        return found

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workerinput"):
            return  # the process that reports judges
        self._slowness = max(self._slowness, slowness())
        if table := self._config.getoption("costs_table"):
            table.write_text(json.dumps(self._table, indent=1))
        if (
            self._config.getoption("costs") == "fail"
            and self.offenders(FAILS)
            and not session.exitstatus
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("processor time")
        rows = sorted(self._table.items(), key=lambda row: -row[1]["cpu"])[:10]
        for test, row in rows:
            terminalreporter.write_line(f"{row['cpu']:6.1f} s  {test}")
        shared = sum(row["shared"] + row["session"] for row in self._table.values())
        terminalreporter.write_line(f"{shared:6.1f} s  shared fixtures")
        for sentence in self.offenders():
            terminalreporter.write_line(sentence, red=True)


if __name__ == "__main__" and (found := slowness(time.perf_counter)) > SLOW:
    told = f"a fixed loop takes {found:.1f} times as long as usual: a third of make test-slow runs"
    print(told, file=sys.stderr)
    print(f"--third={sys.argv[1]}")

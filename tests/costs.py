"""What each test costs: a guard that keeps `make test` short.

A test without the marker `slow` may take 2 s of processor time, with its setup, its teardown and
the processes that it starts. Fixtures of a wider scope belong to no test; together they may take
60 s. Processor time, unlike seconds, hardly depends on what else the machine does. The ten most
expensive tests are always printed; with --costs=fail (`make test`) the run fails where one is too
expensive, and --costs-table=FILE writes all of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

TEST = 2.0  # seconds of processor time
SHARED = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", choices=["show", "fail"], default="show")
    parser.addoption("--costs-table", type=Path, default=None)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config))


def spent() -> float:
    """The processor time of this process and of all its children, in seconds."""
    total = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += sum(child.cpu_times()[:4])
    return total


class Costs:
    """Measures in the process that runs a test; adds up and judges in the one that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._last = 0.0
        self._shared = 0.0  # of the fixtures of wider scope in the phase that is measured
        self._depth = 0
        self._table: dict[str, dict[str, Any]] = {}

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
            self._shared += max(spent() - began, 0.0)  # a child that was not waited for is gone

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        report = yield
        now = spent()
        shared, self._shared = self._shared, 0.0
        slow = item.get_closest_marker("slow") is not None
        own = max(now - self._last - shared, 0.0)
        report.user_properties.append(("costs", (own, shared, slow, time.time())))
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "costs":
                own, shared, slow, _ = value
                row = self._table.setdefault(
                    report.nodeid, {"cpu": 0.0, "shared": 0.0, "wall": 0.0, "slow": slow}
                )
                row["cpu"] += own
                row["shared"] += shared
                row["wall"] += report.duration

    def offenders(self) -> list[str]:
        """A sentence for each test, and for the shared fixtures, that costs too much."""
        found = [
            f"{test} takes {row['cpu']:.1f} s of processor time, at most {TEST:g} without the"
            " marker slow"
            for test, row in self._table.items()
            if row["cpu"] > TEST and not row["slow"]
        ]
        shared = sum(row["shared"] for row in self._table.values() if not row["slow"])
        if shared > SHARED:
            found.append(f"shared fixtures take {shared:.0f} s together, at most {SHARED:g}")
        return found

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workerinput"):
            return  # the process that reports judges
        if table := self._config.getoption("costs_table"):
            table.write_text(json.dumps(self._table, indent=1))
        if (
            self._config.getoption("costs") == "fail"
            and self.offenders()
            and not session.exitstatus
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("processor time")
        rows = sorted(self._table.items(), key=lambda row: -row[1]["cpu"])[:10]
        for test, row in rows:
            terminalreporter.write_line(f"{row['cpu']:6.1f} s  {test}")
        shared = sum(row["shared"] for row in self._table.values())
        terminalreporter.write_line(f"{shared:6.1f} s  shared fixtures")
        for sentence in self.offenders():
            terminalreporter.write_line(sentence, red=True)

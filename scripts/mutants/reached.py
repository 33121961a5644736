"""Which tests reach which mutant: copied into a repository with probes, and loaded by pytest.

A probe is a line `__import__("reached").note(7)` before the statement of mutant 7. It appends the
number and the running test to FILE, in child processes too, whose environment names the test. What
a fixture of a wider scope reaches belongs to every test that uses the fixture.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("reached.tsv")
_noted: set[tuple[int, str]] = set()
_seconds: dict[str, float] = {}  # test -> those of its setup and itself


def note(mutant: int) -> None:
    place = os.environ.get("MUTANTS_FIXTURE") or os.environ.get("PYTEST_CURRENT_TEST", "")
    place = place.rpartition(" (")[0] or place
    if (mutant, place) not in _noted:
        _noted.add((mutant, place))
        with FILE.open("a") as file:
            file.write(f"{mutant}\t{place}\n")


try:
    import pytest
except ImportError:  # a process of the application alone
    pass
else:

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(fixturedef: Any) -> Iterator[Any]:
        outer = os.environ.get("MUTANTS_FIXTURE", "")
        if fixturedef.scope != "function" and not outer:
            os.environ["MUTANTS_FIXTURE"] = f"fixture {fixturedef.baseid}::{fixturedef.argname}"
        try:
            return (yield)
        finally:
            os.environ["MUTANTS_FIXTURE"] = outer

    def pytest_runtest_logreport(report: Any) -> None:
        _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
        if report.when == "call" and report.passed:
            with FILE.open("a") as file:
                file.write(f"passed\t{report.nodeid}\t{_seconds[report.nodeid]}\n")

    def pytest_runtest_setup(item: Any) -> None:
        names = [f"uses {item.nodeid}"]
        for fixtures in item._fixtureinfo.name2fixturedefs.values():
            one = fixtures[-1]
            if one.scope != "function":
                names.append(f"fixture {one.baseid}::{one.argname}")
        if len(names) > 1:
            with FILE.open("a") as file:
                file.write("\t".join(names) + "\n")

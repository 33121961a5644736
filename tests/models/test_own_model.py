"""A model of the user's own, named on the command line: the one printed in docs/models.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from maths.cases import named_case

import fedhet
from fedhet.core.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
(PRINTED,) = re.findall(r"```python\n(# my_package/nets.py\n.*?)```", PAGE, re.DOTALL)
OTHERS = """
class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x.flatten(1))


class Five(Fixed):
    def __init__(self, shape, classes):
        super().__init__()
        self.head = nn.Linear(64, 5)


class Rows(Five):
    def forward(self, x):
        return self.head(x)


class NoModule:
    def __init__(self, shape, classes):
        pass
"""
Launch = Callable[..., fedhet.Run]


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nets.py").write_text(PRINTED + OTHERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEDHET_TRUST", "own_nets")


def settings(name: str, group: str = "logistic") -> list[str]:
    return ["method=fedavg", "rounds=1", f"model={group}", f"model._target_=own_nets.{name}"]


def test_the_printed_model_runs(launch: Launch) -> None:
    run = launch(*settings("Net"), "partition.clients=2", "client.epochs=1")
    assert run.weights["body.1.weight"].shape == (64, 64)  # the digits have 8x8 pixels
    assert run.weights["head.weight"].shape == (10, 64)


def test_what_does_not_fit_is_refused(launch: Launch) -> None:
    cases = [
        (
            settings("Net", "mlp"),
            "own_nets.Net: .*'hidden'; .*shape, classes and .*: hidden, norm$",
        ),
        (settings("Fixed"), "own_nets.Fixed: .*shape, classes and .*: none$"),
        (settings("Five"), r"\(2, 5\) .*digits; expected \(2, 10\)"),
        (settings("Rows"), r"does not take .*\(1, 8, 8\): RuntimeError"),
        (settings("NoModule"), r"makes a NoModule; expected a torch\.nn\.Module"),
    ]
    for lines, message in cases:
        with named_case(lines, message), pytest.raises(ConfigError, match=message):
            launch(*lines)

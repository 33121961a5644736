"""What `fedhet.testing` must notice in a piece of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from own.conftest import forget

from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.testing import Federation, check_choice, sha256, sha256_apart, toy_task

CODE = """
from dataclasses import dataclass
import torch
from fedhet.core.check import setting
from fedhet.core.kernel import Client, Method, Plugin, serves

class FaultyClient(Client):
    @serves
    def train(self, msg, state, ctx):
        result, after = super().train(msg, state, ctx)
        if self.options.how == "Failing":
            raise OSError("battery")
        if self.options.how == "Endless":
            return result, {"x": {"x": torch.tensor(float("inf"))}}
        next(iter(msg.weights.values())).add_(1)
        return result, after

@dataclass(frozen=True, kw_only=True)
class Faulty(Method):
    name = "faulty"
    client = FaultyClient

    how: str = "Greedy"

@dataclass(frozen=True, kw_only=True)
class FaultyPlugin(Plugin):
    name = "faulty"

    a: float = setting(1.0)
    b: float = setting(2.0)
"""


@pytest.mark.parametrize(
    "plugins", [[FedNormPlugin], FedNormPlugin, FedNormPlugin(), ["fednorm"], "fednorm"], ids=str
)
def test_a_federation_has_a_list_of_plugins(plugins: Any) -> None:
    with pytest.raises(TypeError, match=r"plugins=.*list .*\[FedNormPlugin\("):
        Federation(toy_task(), FedAvg, plugins=plugins)


@pytest.fixture
def conf(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The conf folder of the trusted module above; a test writes its yaml files."""
    (site / "faulty_pkg.py").write_text(CODE)
    forget(monkeypatch, "faulty_pkg")
    folder = tmp_path / "conf"
    for group in ("method", "plugin"):
        (folder / group).mkdir(parents=True)
    monkeypatch.setenv("FEDHET_CONF", str(folder))
    monkeypatch.setenv("FEDHET_TRUST", "faulty_pkg")
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("Greedy", "client 3 changed .*tensors .*phase 'train'"),
        ("Endless", "state 'faulty.x.x' .*client 3 .*NaN .*infinite"),
        ("Failing", "client 3 failed .*step 1: OSError: battery"),
    ],
)
def test_a_faulty_client(conf: Path, how: str, message: str) -> None:
    (conf / "method" / "faulty.yaml").write_text(
        "# Faulty\n_target_: faulty_pkg.Faulty\nhow: Greedy\n"
    )
    with pytest.raises(AssertionError, match=message):
        sha256_apart("method=faulty", f"method.how={how}", "rounds=1", task=toy_task())


@pytest.mark.parametrize(
    ("group", "text", "message"),
    [
        ("method", "_target_: faulty_pkg.Faulty\nhow: Greedy\n", "first comment "),
        ("method", "# Faulty\n_target_: faulty_pkg.Faulty\n", "other.yaml .*Faulty differ"),
        ("method", "# Faulty\n_target_: faulty_pkg.Faulty\nhow: x\n", "different defaults"),
        ("method", "# Faulty\n_target_: faulty_pkg.Faulty\nhow: Greedy\n", "name .*'faulty'"),
        (
            "plugin",
            "# @package plugin.other\n# Faulty\n"
            "_target_: faulty_pkg.FaultyPlugin\na: 1.0\nb: 2.0\n",
            "name .*'faulty', .*'other'",
        ),
    ],
)
def test_a_file_that_says_something_else(conf: Path, group: str, text: str, message: str) -> None:
    (conf / group / "other.yaml").write_text(text)
    with pytest.raises(AssertionError, match=message):
        check_choice(group, "other")


def test_the_hash_is_that_of_a_run_and_its_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lines = ["method=scaffold", "rounds=2", "client.lr=.1", "eval.clients=false"]
    whole = sha256(*lines, task=toy_task())
    assert sha256_apart(*lines, task=toy_task()) == whole
    assert sha256(*lines, "seed=1", task=toy_task()) != whole
    assert list(tmp_path.iterdir()) == []

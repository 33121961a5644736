"""DynReg from a package outside of the clone behaves as a built-in method, in every engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from convergence.quadratic import final_weight

import fedhet
from fedhet import __main__ as main
from fedhet.core.kernel import Merged, Plugin, State, Step, Update
from fedhet.runs.config import catalogue, compose
from fedhet.runs.config.instantiation import find_target
from fedhet.testing import Federation, check_choice, check_resume, sha256, sha256_apart, toy_task

pytestmark = pytest.mark.usefixtures("installed")
RUN = ["method=dynreg", "method.alpha=.3", "partition.clients=4", "rounds=2", "fraction=.75"]
FAST = ["rounds=2", "client.lr=.1", "client.batch_size=5", "eval.clients=false"]


def test_it_is_the_method_of_the_paper() -> None:
    """Its limit is the optimum of two quadratic clients, whose drift biases FedAvg."""
    problem = {"a": [1.0, 4.0], "b": [1.0, -1.0], "steps": 10, "lr": 0.05}
    found = final_weight(**problem, method="dynreg", rounds=30, method_args={"alpha": 2.0})
    assert found == pytest.approx(-0.6, abs=1e-6)
    assert final_weight(**problem, method="fedavg", rounds=30) > -0.4


def test_alpha_0_is_fedavg_with_equal_weights() -> None:
    task = toy_task(equal=True)
    fedavg = sha256("method=fedavg", *FAST, task=task)
    assert sha256("method=dynreg", "method.alpha=0", *FAST, task=task) == fedavg
    assert sha256("method=dynreg", *FAST, task=task) != fedavg


@dataclass(frozen=True, kw_only=True)
class Together(Plugin):
    """Leaves the weights as they are, but in proportion: a piece that sees all updates at once."""

    name = "together"
    needs = frozenset({"used weights"})

    def weights(
        self, step: Step, state: State, updates: Sequence[Update]
    ) -> tuple[Sequence[float], Mapping[str, Any]]:
        return [3 * update.weight for update in updates], {}


def test_the_scale_of_the_weights_does_not_matter() -> None:
    cls = find_target(compose(["method=dynreg"]).cfg.method)
    plain = Federation(toy_task(), cls, rounds=2).run()
    scaled = Federation(toy_task(), cls, plugins=lambda: [Together()], rounds=2).run()
    torch.testing.assert_close(scaled.model, plain.model)


def test_a_run_that_is_killed_goes_on() -> None:
    check_resume("method=dynreg", *FAST, task=toy_task())


def test_a_state_that_no_checkpoint_can_hold_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    dynreg = find_target(compose(["method=dynreg"]).cfg.method)
    merge = dynreg.merge

    def keeps_a_device(*args: Any) -> Merged:
        merged = merge(*args)
        return merged._replace(state={**merged.state, "device": torch.device("cpu")})

    monkeypatch.setattr(dynreg, "merge", keeps_a_device)
    with pytest.raises(AssertionError, match=r"after step 1: .*checkpoints .*\[\]"):
        check_resume("method=dynreg", *FAST, task=toy_task())


def test_its_file_and_its_class_say_the_same() -> None:
    check_choice("method", "dynreg")


@pytest.mark.parametrize(
    "plugin",
    [
        "fedprox",
        pytest.param("fednorm", marks=pytest.mark.slow),
        pytest.param("fedlex", marks=pytest.mark.slow),
    ],
)
def test_it_takes_plugins(plugin: str) -> None:
    lines = ["method=dynreg", f"plugin=[{plugin}]", *FAST]
    lines += ["plugin.fedlex.e_exp=2"] if plugin == "fedlex" else []
    assert sha256_apart(*lines, task=toy_task()) == sha256(*lines, task=toy_task())


def test_folder_summary_and_table_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedhet.runs.record.figures.draw", lambda *args: [])
    run = fedhet.run(["method=dynreg", "method.alpha=.3", *FAST], task=toy_task())
    assert run.dir.name.endswith("-dynreg")
    assert run.summary["method"] == "dynreg"
    assert "dynreg" in capsys.readouterr().out
    assert "alpha: 0.3" in (run.dir / "config.yaml").read_text()


@pytest.mark.slow
def test_workers_and_the_wire_change_no_byte() -> None:
    expected = sha256(*RUN)
    assert sha256(*RUN, "engine.workers=2") == expected
    assert sha256_apart(*RUN) == expected


@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["ray", "flwr"])
def test_flower_changes_no_byte(engine: str) -> None:
    assert sha256(*RUN, f"engine={engine}") == sha256(*RUN)


@pytest.mark.matrix
def test_spawned_workers_find_it() -> None:
    threads = [*RUN, "engine.threads=2"]  # workers with several threads are not forked
    assert sha256(*threads, "engine.workers=2") == sha256(*threads)


@pytest.mark.matrix
@pytest.mark.deployment
def test_three_nodes_change_no_byte(tmp_path: Path) -> None:
    from engines.test_deployment import SECONDS, deployment, run_folder

    home = tmp_path / "home"
    home.mkdir()
    lines = [*RUN, "eval.clients=false"]
    with deployment(home, *lines, "hydra.run.dir=../../run") as process:
        output, log = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, log
    summary = json.loads((run_folder(output) / "summary.json").read_text())
    assert summary["method"] == "dynreg"
    assert summary["weights_sha256"] == sha256(*lines)


# ---- names, options, help
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["method=dinreg"], r"unknown method 'dinreg' .*did you mean dynreg"),
        (
            ["method=dynreg", "method.alhpa=1"],
            r"'method.alhpa' .*did you mean method.alpha\?\).*method .*alpha",
        ),
        (["plugin=[dynreg]"], "'dynreg': .*method"),
    ],
)
def test_wrong_names_get_the_closest_one(lines: list[str], message: str) -> None:
    with pytest.raises(fedhet.ConfigError, match=message):
        compose(lines)


def test_its_options_are_checked() -> None:
    with pytest.raises(fedhet.ConfigError, match=r"method\.alpha=-1 "):
        fedhet.run(["method=dynreg", "method.alpha=-1"])


def test_help_and_list_have_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["--help"]) == 0
    assert "dynreg" in capsys.readouterr().out.split()
    every = catalogue.choices
    few = {"method": ("fedavg", "dynreg"), "plugin": ("fedprox", "moon")}
    monkeypatch.setattr(catalogue, "choices", lambda group: few.get(group) or every(group))
    assert main.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert "DynReg: dynamic regularisation makes" in out
    assert ["dynreg", "+", "+"] in [line.split() for line in out.splitlines()]

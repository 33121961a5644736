"""docs/flower.md is a whole Flower app, whose weights are those of fedhet.run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contracts.test_flower_server import joined
from flwr.server import Server

import fedhet.flower
from fedhet.core import trees
from fedhet.core.errors import ConfigError
from fedhet.data.toy import toy_task
from fedhet.engines.flwr import SUPERLINK, _free_ports
from fedhet.engines.guard import TemporaryFolder
from fedhet.stores import MemoryStore

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "flower.md"
FILES = ("my_app/task.py", "my_app/server_app.py", "my_app/client_app.py", "pyproject.toml")
# What the page's reader does by hand: the weights of the method at the end of the run.
SAVING = """

def write(strategy):
    settle = strategy.settle

    def settling(*replies):
        settle(*replies)
        Path(PLACE).write_text(trees.sha256(strategy.weights))

    strategy.settle = settling
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """The files of the page in a folder."""
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name, content in zip(FILES, blocks, strict=True):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    (tmp_path / "my_app" / "__init__.py").touch()
    return tmp_path


def expected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The digest of the weights of fedhet.run on the page's task."""
    monkeypatch.syspath_prepend(folder)
    from my_app.task import SETTINGS, task  # type: ignore[import-not-found]

    lines = ["method=scaffold", "plugin=[fednorm]", *SETTINGS["overrides"]]
    run = fedhet.run([*lines, f"hydra.run.dir={folder / 'run'}"], task=task())
    return str(run.summary["weights_sha256"])


@pytest.mark.slow
def test_the_page_is_an_app_that_runs(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = app / "weights.txt"
    server = app / "my_app" / "server_app.py"
    saving = SAVING.replace("PLACE", repr(str(place)))
    head = "from pathlib import Path\n\nfrom fedhet.core import trees\n"
    text = server.read_text().replace("    rounds =", "    write(strategy)\n    rounds =")
    server.write_text(head + text.replace("def server_fn", f"{saving}\n\ndef server_fn"))
    whole = expected(app, monkeypatch)
    http, control = _free_ports()
    with TemporaryFolder("fedhet-flwr-") as home:
        (Path(home) / "config.toml").write_text(SUPERLINK)
        environment = {
            **os.environ,
            "FLWR_HOME": home,
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
            "FLWR_LOCAL_CONTROL_API_PORT": str(control),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PYTHONPATH": str(ROOT),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        command = re.search(r"```bash\nflwr (.*)\n```", PAGE.read_text())
        assert command
        flwr = f"{Path(sys.executable).parent / 'flwr'} {command[1]}"
        done = subprocess.run(
            flwr, shell=True, cwd=app, env=environment, capture_output=True, text=True, timeout=300
        )
        subprocess.run(["pkill", "-f", home], check=False)
    assert place.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    assert place.read_text() == whole


@pytest.mark.parametrize(
    ("method", "plugins"),
    [("fedavg", []), ("scaffold", ["fednorm"]), ("fedprox", ["fedlex"])],
    ids=["fedavg", "scaffold+fednorm", "fedprox+fedlex"],
)
def test_the_weights_under_flowers_own_server(
    method: str, plugins: list[str], launch: Callable[..., Any]
) -> None:
    lines = ["rounds=2", "client.lr=0.1", "client.epochs=1"]
    chosen = [f"method={method}", *([f"plugin=[{','.join(plugins)}]"] if plugins else [])]
    run = launch(*chosen, *lines, task=toy_task(4))
    strategy = fedhet.flower.strategy(method, toy_task(4), plugins=plugins, overrides=lines)
    contexts: dict[int, Any] = {}

    def make(properties: dict[str, Any]) -> Any:
        return fedhet.flower._job(method, toy_task(4), plugins, lines).client(
            contexts.setdefault(properties["partition-id"], MemoryStore()), properties
        )

    nodes = joined(make, 4)
    history, _ = Server(client_manager=nodes, strategy=strategy).fit(strategy.num_rounds, None)
    assert trees.sha256(strategy.weights) == run.summary["weights_sha256"]
    assert len(history.losses_centralized) > 1


def test_settings_of_data_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dataset=mnist with a Task"):
        fedhet.flower.strategy("fedavg", toy_task(4), overrides=["dataset=mnist"])

"""docs/flower.md begins with Flower's quickstart and two diffs, which are applied and run."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from app_grid import AppGrid
from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from ports import free_ports

from fedhet.engines.flwr import SUPERLINK
from fedhet.runs.flower_commands import flower_environment
from fedhet.runs.guard import TemporaryFolder

# From an empty folder to what `flwr new @flwrlabs/quickstart-pytorch` makes.
QUICKSTART = Path(__file__).with_name("quickstart.diff").read_text()
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flower.md").read_text()
DIFFS = [text for text in re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL) if "@@" in text]
MOST = 15  # lines that are added or changed; others are removed
APPS = {"fednorm": DIFFS[:1], "scaffold": DIFFS}


# The two classes of flwr-datasets that the quickstart uses; fedhet does not need the package.
FLWR_DATASETS = """
from datasets import load_dataset


class IidPartitioner:
    def __init__(self, num_partitions):
        self.parts = num_partitions


class FederatedDataset:
    def __init__(self, *, dataset, partitioners):
        self.train = load_dataset(dataset, split="train").shuffle(seed=42)
        self.parts = partitioners["train"].parts

    def load_partition(self, number):
        return self.train.shard(self.parts, number, contiguous=True)
"""


def changed(diff: str) -> list[str]:
    return [line for line in re.findall(r"^\+(?!\+\+ )(.*)$", diff, re.MULTILINE) if line.strip()]


def made(folder: Path, app: str) -> Path:
    """The quickstart with the page's lines, and images of ten colours in the place of CIFAR-10."""
    folder.mkdir(exist_ok=True)
    for diff in (QUICKSTART, *APPS[app]):
        subprocess.run(["patch", "-p1", "-F0"], input=diff, text=True, cwd=folder, check=True)
    return folder


def data(folder: Path) -> None:
    stand_in = folder / "packages" / "flwr_datasets"
    stand_in.mkdir(parents=True)
    for name in ("__init__", "partitioner"):
        (stand_in / f"{name}.py").write_text(FLWR_DATASETS)
    datasets, image = importlib.import_module("datasets"), importlib.import_module("PIL.Image")
    draw = np.random.default_rng(0)
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(10)})
    parts = folder / "uoft-cs" / "cifar10" / "data"  # a local folder of that name comes first
    parts.mkdir(parents=True)
    for part, n in (("train", 200), ("test", 50)):
        y = draw.integers(0, 10, n)
        x = draw.normal(20 + 20 * y[:, None, None, None], 20, (n, 32, 32, 3)).clip(0, 255)
        images = [image.fromarray(one) for one in x.astype(np.uint8)]
        table = {"img": images, "label": y.tolist()}
        whole = datasets.Dataset.from_dict(table, features=features)
        whole.to_parquet(parts / f"{part}-00000-of-00001.parquet")


def test_fednorm_takes_few_lines(tmp_path: Path) -> None:
    assert len(changed(DIFFS[0])) <= MOST
    for app in APPS:
        for path in made(tmp_path / app, app).rglob("*.py"):
            compile(path.read_text(), path, "exec")


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The quickstart can be imported from the temporary folder."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path / "states"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield ["client_app", "server_app"]
    made_here = ("pytorchexample", "flwr_datasets")
    for name in [name for name in sys.modules if name.startswith(made_here)]:
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("app", APPS)
def test_the_app_on_nodes_in_this_process(
    app: str, modules: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, app)
    data(tmp_path)
    client, server = (importlib.import_module(f"pytorchexample.{name}") for name in modules)
    config = {"num-server-rounds": 2, "fraction-evaluate": 0.5, "batch-size": 8}
    config |= {"local-epochs": 1, "learning-rate": 0.05}
    grid = AppGrid(client.app, 10)
    for context in grid.contexts.values():
        context.run_config = config
    server.app(grid, Context(1, 1, {}, RecordDict(), config))
    check(tmp_path, importlib.import_module("pytorchexample.task"))


def check(folder: Path, task: ModuleType) -> None:
    """The saved model fits the owner's class."""
    model = task.Net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.load_state_dict(torch.load(folder / "final_model.pt", weights_only=True))
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    assert not any(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("app", APPS)
def test_the_app_in_flowers_simulation(app: str, modules: list[str], tmp_path: Path) -> None:
    made(tmp_path, app)
    data(tmp_path)
    home = TemporaryFolder("fedhet-flwr-")
    (Path(home.name) / "config.toml").write_text(SUPERLINK)
    http, control = free_ports(2)
    environment = {
        **os.environ,
        **home.environment,
        **flower_environment(Path(home.name)),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control),
        "PYTHONPATH": f"{ROOT}:{tmp_path / 'packages'}",
    }
    ((_, command),) = re.findall(r"```(bash)\n(pip install [^`]*?--federation[^`]*?)```", PAGE)
    _, *lines = command.splitlines()
    lines[-1] += " --run-config 'num-server-rounds=2 batch-size=8'"
    try:
        out = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    finally:
        home.end_processes()
        home.cleanup()
    output = out.stdout + out.stderr
    assert (tmp_path / "final_model.pt").exists(), output[-9000:]
    assert "fedhet: train 2" in output
    check(tmp_path, importlib.import_module("pytorchexample.task"))

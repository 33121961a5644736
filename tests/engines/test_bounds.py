"""What would take all memory or all time of a machine is refused in a line, before it does."""

from __future__ import annotations

import io
import json
import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch
from own_sites import RUN, Deployment, Node, write_sites
from torch import nn

from fedhet.core.errors import SUBMITTED, ConfigError, DataError, RunFailed
from fedhet.core.limits import Limits
from fedhet.core.messages import Failure
from fedhet.core.task import ClientData, Samples, Task
from fedhet.data.frames import read_frame
from fedhet.data.images import read_images
from fedhet.data.storage import read_tensors
from fedhet.data.tables import load_arrays
from fedhet.data.toy import toy_task
from fedhet.methods.ditto import Ditto
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.feddisk import FedDiskPlugin
from fedhet.methods.fedgen import FedGen
from fedhet.methods.fedgmm import FedGMMPlugin
from fedhet.methods.fedsgd import FedSGD
from fedhet.models import Logistic
from fedhet.runs import config
from fedhet.runs.job import Job, task_of
from fedhet.runs.model_building import build_model
from fedhet.runs.record.schema import read_config
from fedhet.runs.run_data import RunData


def problem(*lines: str, **node_config: Any) -> str:
    node = Node(Path(), 1, list(lines), partition_id=0, num_partitions=2, **node_config)
    return node.problem


SHARED = ("dataset=digits", "partition.clients=2")


def test_a_run_asks_for_no_more_threads_than_a_node_has_cores() -> None:
    reason = problem(*SHARED, f"engine.threads={(os.cpu_count() or 1) + 1}")
    assert reason.endswith(f"this node has {os.cpu_count()} cores, and no more")


@pytest.mark.parametrize(
    "line",
    [
        "client.epochs=100001",
        "client.steps=1000000001",
        "client.batch_size=1000000001",
        "eval.finetune_epochs=100001",
        "dataset=npz dataset.classes=1000001 dataset.file=x.npz",
    ],
)
def test_numbers_that_no_training_needs(line: str, tmp_path: Path) -> None:
    x, y = np.ones((2, 2)), [0, 1]
    np.savez(tmp_path / "x.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    key, _, value = line.split(" ")[-2 if " " in line else 0].partition("=")
    with pytest.raises(ConfigError, match=rf"^{key}={value} .*<= 1000*(, .*null)?$"):
        settings = config.compose([*line.split(" "), f"data_dir={tmp_path}"])
        RunData.of(settings.cfg)


def test_epochs_of_a_method_that_no_training_needs() -> None:
    assert Ditto(plocal_epochs=100_000).settings["plocal_epochs"] == 100_000
    with pytest.raises(ConfigError, match=r"plocal_epochs=100001 .*<= 100000$"):
        Ditto(plocal_epochs=100_001)


def test_a_model_that_is_too_large_for_a_node_is_not_built() -> None:
    """This one would take 40 TB."""
    began = time.monotonic()
    reason = problem(*SHARED, "model=mlp", "model.hidden=[10000000,1000000]", max_model=100)
    assert "40" in reason and "at most max-model=100 MB" in reason
    assert time.monotonic() - began < 30
    assert not problem(*SHARED, "model=mlp", "model.hidden=[100]", max_model=1)


def test_a_site_has_such_a_limit_by_default(tmp_path: Path) -> None:
    large = "model.hidden=[10000,100000]"
    deployment = Deployment(write_sites(tmp_path), "model=mlp", large)
    settings = config.compose([*RUN, "model=mlp"])
    msg = Job(settings, engine="local", object_task=toy_task()).strategy.plan(1).messages[0]
    node: Any = next(iter(deployment.members.nodes.values()))
    reply = node.serve(msg, deployment.agree().statistics)
    assert isinstance(reply, Failure) and "max-model=1000 MB" in reply.cause


SIZED: dict[str, tuple[Any, dict[str, Any]]] = {  # settings that ask for more than 1 MB
    "client.batch_size=1000": (FedAvg, {"batch_size": 1000}),
    "method.chunk=900": (FedSGD, {"options": {"chunk": 900}}),
    "method.hidden=30000": (FedGen, {"options": {"hidden": 30_000, "server_steps": 0}}),
    "plugin.feddisk.hidden=10000": (FedAvg, {"plugins": lambda: [FedDiskPlugin(hidden=10_000)]}),
    "plugin.feddisk.clf_hidden=9000": (
        FedAvg,
        {"plugins": lambda: [FedDiskPlugin(clf_hidden=9000)]},
    ),
    "plugin.fedgmm.components=2000": (FedAvg, {"plugins": lambda: [FedGMMPlugin(components=2000)]}),
    "plugin.fedgmm.target=10000": (FedAvg, {"plugins": lambda: [FedGMMPlugin(target=10_000)]}),
}


@pytest.mark.parametrize("line", SIZED)
def test_whatever_a_setting_sizes_has_a_ceiling(federation: Callable[..., Any], line: str) -> None:
    """The node refuses it before its memory is taken; a node without the limit does not."""
    x = torch.linspace(0, 1, 300).repeat(1000, 1)
    clients = [ClientData(Samples(x, torch.arange(1000) % 2)) for _ in range(2)]
    task = Task(lambda: Logistic(shape=(300,), classes=2), nn.CrossEntropyLoss(), clients, None, 2)
    cls, how = SIZED[line]
    run = federation(task, cls, rounds=2, workspace={"limits": Limits(max_array=1)}, **how)
    with pytest.raises(RunFailed, match=rf"{line} asks .*array .*max-array=1 MB"):
        run.run()


def test_every_node_has_the_limits_of_sizes_unless_it_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = [(one.max_model, one.max_array) for one in map(Limits.of, ({}, {"site": "a"}))]
    assert sizes == [(1000, 1000)] * 2
    assert Limits.of({"max-array": 0, "max-model": 7}) == Limits(max_model=7)
    monkeypatch.setenv(SUBMITTED, "1")  # by engine=flwr, on this machine
    assert Limits.of({}) == Limits()


def test_the_table_of_classes_by_predictions_has_a_ceiling(tmp_path: Path) -> None:
    x, y = np.ones((2, 2)), [0, 1]
    np.savez(tmp_path / "x.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    lines = [f"dataset.file={tmp_path}/x.npz", "dataset.classes=20000", "partition.clients=1"]
    cfg = config.compose(["dataset=npz", *lines, "partition.split=[1,0,0]", "partition.min_size=1"])
    with pytest.raises(ConfigError, match=r"dataset.classes=20000 asks .*array .*3200 MB"):
        task_of(cfg.cfg, RunData.of(cfg.cfg), Limits(max_array=1000))


def test_images_are_not_resized_beyond_the_machines_memory() -> None:
    with pytest.raises(DataError, match=r"dataset\.size=1000000 .*3000000000000 bytes"):
        read_images([("a.png", Path("a.png"))], size=10**6)


def test_measuring_a_model_draws_no_random_number() -> None:
    data = Job(config.compose(["dataset=digits"]))._data.dataset
    node = config.compose(["model=mlp"]).cfg.model
    models = []
    for most in (0, 100):
        torch.manual_seed(0)
        models.append(build_model(node, data, most).state_dict())  # type: ignore[arg-type]
    assert all(torch.equal(t, models[1][name]) for name, t in models[0].items())


def test_settings_of_a_megabyte_are_not_read() -> None:
    began = time.monotonic()
    reason = problem(*SHARED, f"data_dir={'x' * 2**20}")
    assert "settings have 10" in reason and "at most 1000000" in reason
    assert time.monotonic() - began < 5


# ---- files
def bomb(path: Path) -> None:
    """A small npz file with an array that claims 8 PB."""
    header = io.BytesIO()
    described = {"descr": "<f8", "fortran_order": False, "shape": (10**15,)}
    np.lib.format.write_array_header_1_0(header, described)
    with zipfile.ZipFile(path, "w") as file:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            file.writestr(f"{name}.npy", header.getvalue())


def test_an_npz_file_that_claims_more_than_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb(tmp_path / "bomb.npz")  # its header claims what the file does not have
    with pytest.raises(DataError, match=r"bomb\.npz .*damaged.*: Unable .*allocate 7\.11 PiB"):
        load_arrays(tmp_path / "bomb.npz", {"x_train": "x_train", "y_train": "y_train"})
    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros(10**6))
    monkeypatch.setattr("psutil.virtual_memory", lambda: pandas.Series({"total": 10**6}))
    with pytest.raises(DataError, match=r"8000128 bytes.*machine .*1000000"):
        load_arrays(tmp_path / "zeros.npz", {"x": "x"})


def test_a_parquet_file_that_claims_more_than_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal values take no room: the columns of this file of 10 KB take 16 MB."""
    column = pyarrow.DictionaryArray.from_arrays(np.zeros(10**6, np.int8), ["a"])
    table = pyarrow.table({"x": column, "y": column})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < 10_000
    monkeypatch.setattr("psutil.virtual_memory", lambda: pandas.Series({"total": 10**6}))
    with pytest.raises(DataError, match=r"16000000 bytes.*machine .*1000000"):
        read_frame(tmp_path / "t.parquet")


def many_names() -> bytes:
    """A safetensors file of a million names without values."""
    one = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({str(i): one for i in range(50_000)}).encode()
    return len(header).to_bytes(8, "little") + header


def test_a_safetensors_file_of_many_names(tmp_path: Path) -> None:
    (tmp_path / "t.safetensors").write_bytes(many_names())
    with pytest.raises(DataError, match=r"header .*most 1048576 .*read"):
        read_tensors(tmp_path / "t.safetensors")


LAUGHS = "a: &a0 [x, x]\n" + "".join(
    f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)


@pytest.mark.parametrize("text", [LAUGHS, "a: &a [*a]", "a: &b [1]\nc: *b"])
def test_a_settings_file_with_aliases_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(f"method: fedavg\n{text}\n")
    with pytest.raises(DataError, match=r"config.yaml .*damaged: .*aliases"):
        read_config(tmp_path)
    (tmp_path / "config.yaml").write_text("method: '*'\n")
    assert read_config(tmp_path).method == "*"

"""A real deployment in which each SuperNode has data of its own, beside the same run simulated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from own_sites import CUTS, RUN, write_sites
from real_sites import Sites, rounds, summary
from sklearn.datasets import load_digits

import fedhet

pytestmark = [pytest.mark.matrix, pytest.mark.deployment]


def write(folder: Path) -> dict[str, Path]:
    """Two npz files and, at the site c, a table with other columns first."""
    write_sites(folder)
    x, y = load_digits(return_X_y=True)
    start, end = CUTS["c"]
    table = pandas.DataFrame({f"p{i}": x[start:end, i] for i in reversed(range(64))})
    table.assign(digit=y[start:end]).to_csv(folder / "c.csv", index=False)
    return {"a": folder / "a.npz", "b": folder / "b.npz", "c": folder / "c.csv"}


def test_sites_with_data_of_their_own_give_the_bytes_of_a_simulation(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    files = write(tmp_path)
    columns = ",".join(f"p{i}" for i in range(64))
    declared = [
        *(line for line in RUN if "shape" not in line),
        f"dataset.features=[{columns}]",
        "dataset.label=digit",
        "early_stopping.patience=5",
    ]
    configs = [f'site="{site}" data="{path}" min-test=0' for site, path in files.items()]
    with Sites(home, 3, configs=configs[::-1]) as sites:
        run = sites.submit(*declared, "deliver=true", f"hydra.run.dir={folder}")
        assert sites.wait_end(run) == "finished:completed"
        # a site whose data do not fit: nothing is trained
        arrays = dict(np.load(files["a"]))
        np.savez(files["a"], **arrays | {"y_train": arrays["y_train"] + 1})
        refused = tmp_path / "refused"
        run = sites.submit(*declared, f"hydra.run.dir={refused}")
        assert sites.wait_end(run) == "finished:failed"
        # The reason may name samples' values, so it stays in the node's log.
        log = sites.log(run)
        assert "DataError; the log on that node" in log and "fit the declaration" not in log
        np.savez(files["a"], **arrays)
    assert rounds(refused) == []
    assert summary(folder)["delivery"]["clients"] == [0, 1, 2]
    for pid, site in enumerate(reversed(range(3))):  # the node of each client
        models = home / f"states{site}" / "fedhet-models" / summary(folder)["experiment"]
        assert [each.name for each in models.iterdir()] == [str(pid)]
        model = (models / str(pid) / "model.safetensors").read_bytes()
        assert model == (folder / "model.safetensors").read_bytes()
    command = [sys.executable, "-m", "fedhet", "predict", "--format", "csv"]
    said = [
        subprocess.run([*command, str(run), str(files["c"])], check=True, capture_output=True)
        for run in (models / str(pid), folder)
    ]
    assert said[0].stdout == said[1].stdout and said[0].stdout.count(b"\n") == 51
    simulated = ",".join(f"{site}:'{path}'" for site, path in files.items())
    lines = [*declared, f"dataset.files={{{simulated}}}", f"hydra.run.dir={tmp_path / 'same'}"]
    expected = fedhet.run(lines)
    for key in ("weights_sha256", "acc_clients_mean", "validation", "bytes", "personal_models"):
        assert summary(folder)[key] == expected.summary[key], key
    records = [json.loads((path / "partition.json").read_text()) for path in (folder, expected.dir)]
    told = ("counts", "reported_counts")  # a site tells no label counts unless it is asked to
    same = [{k: v for k, v in each.items() if k not in told} for each in records]
    assert same[0] == same[1]

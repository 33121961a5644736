"""Tables with missing cells at sites that fill and normalise by themselves (dataset=local)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import own_sites
import pytest
import torch
from own_sites import Sites, simulated
from sklearn.datasets import load_digits

import fedhet
from fedhet.handover import predict

SETTINGS = ("dataset.mean=own", "dataset.std=own", "dataset.missing=median", "method=fedavg")


def write_holes(folder: Path) -> Path:
    """A file for each site, of which b has no value at all in two columns."""
    x, y = load_digits(return_X_y=True)
    for site, (start, end) in own_sites.CUTS.items():
        own = x[start:end].copy()
        own[::3, ::5] = np.nan
        if site == "b":
            own[:, [20, 21]] = np.nan
        np.savez(folder / f"{site}.npz", x_train=own, y_train=y[start:end])
    return folder


def test_sites_give_the_bytes_of_a_simulation_and_keep_their_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_sites, "write_sites", write_holes)
    sites = Sites(tmp_path, monkeypatch, *SETTINGS, "deliver=true")
    agreed = sites.deployment.agree()
    assert agreed.statistics == {} and not any(one.moments for one in agreed.descriptions)
    summary = sites.run()
    same = simulated(tmp_path, *SETTINGS)
    assert summary["weights_sha256"] == same.summary["weights_sha256"]
    known = json.loads((same.dir / "partition.json").read_text())["own"]
    server = json.loads((sites.job.run_dir / "partition.json").read_text())
    assert (server["normalised"], server["own"]) == ({"mean": "own", "std": "own"}, {})
    for pid, site in enumerate("abc"):
        home = sites.home(pid)
        own = json.loads((home / "partition.json").read_text())["own"]
        assert own == {str(pid): known[str(pid)]}
        x = torch.tensor(np.load(tmp_path / f"{site}.npz")["x_train"]).float()
        mean, std, median = (torch.tensor(own[str(pid)][key]) for key in ("mean", "std", "median"))
        with torch.no_grad():
            ready = (torch.where(x.isnan(), median, x) - mean) / std
            wanted = fedhet.load(same)(ready).softmax(1)
        capsys.readouterr()
        file = str(tmp_path / f"{site}.npz")
        assert predict.main([str(home), file, "--array", "x_train", "--format", "json"]) == 0
        found = [[*one["probabilities"].values()] for one in json.loads(capsys.readouterr().out)]
        assert torch.allclose(torch.tensor(found), wanted, atol=1e-5)

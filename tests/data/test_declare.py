"""Files that are written for sites: printed declarations, and exported clients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from composing import data_main as main
from data.local_files import SHORT, data_of, write_digits, write_tables

import fedhet
from fedhet.runs import config
from fedhet.runs.local_data import LocalData
from fedhet.runs.run_data import RunData


def declared(
    capsys: pytest.CaptureFixture[str], folder: Path, file: str, *arguments: str
) -> LocalData:
    """The data of a run with the printed experiment, whose site has the file."""
    assert main(["declare", str(folder / file), *arguments]) == 0
    (folder / "conf" / "experiment").mkdir(parents=True)
    text = capsys.readouterr().out
    (folder / "conf" / "experiment" / "own.yaml").write_text(text)
    lines = ["experiment=own", "dataset.sites=[a]", f"data_dir={folder}"]
    # By Hydra, which finds the experiment of this test.
    return LocalData.simulated(config.compose([*lines, f"dataset.files={{a:{file}}}"]).cfg, "local")


def test_a_printed_declaration_is_met_by_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDHET_CONF", str(tmp_path / "conf"))
    write_digits(tmp_path)
    data = declared(capsys, tmp_path, "a.npz")
    assert (data.dataset.shape, data.dataset.x.dtype) == ((1, 8, 8), torch.uint8)
    assert data.dataset.classes == tuple("0123456789") and data.clients.sizes == [80]


@pytest.mark.parametrize("label", ["price", "old"])
def test_a_printed_declaration_of_a_table(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    label: str,
) -> None:
    monkeypatch.setenv("FEDHET_CONF", str(tmp_path / "conf"))
    write_tables(tmp_path)
    data = declared(capsys, tmp_path, "a.csv", "--label", label).dataset
    expected = {"price": ("number", ("price",)), "old": ("class", ("0", "1"))}
    assert (data.target, data.outputs) == expected[label]
    assert data.shape == (3,)


def test_a_printed_declaration_of_chosen_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table with a column that is neither a number nor the inputs needs them named."""
    monkeypatch.setenv("FEDHET_CONF", str(tmp_path / "conf"))
    rows = [f"p{n},{n % 7},{n / 3},{n % 2}" for n in range(20)]
    (tmp_path / "a.csv").write_text("\n".join(["patient,age,height,old", *rows]) + "\n")
    assert main(["declare", str(tmp_path / "a.csv"), "--label", "old"]) == 2
    assert "'p0'; expected finite numbers; " in (error := capsys.readouterr().err)
    assert "--features" in error
    chosen = ("--label", "old", "--features", "height", "--features", "age")
    data = declared(capsys, tmp_path, "a.csv", *chosen)
    assert data.dataset.columns == ("height", "age")


def test_a_printed_declaration_of_missing_cells_and_categories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levels are those of the file, whole numbers as such although the column has a missing one."""
    monkeypatch.setenv("FEDHET_CONF", str(tmp_path / "conf"))
    lines = [f"{n % 19},{n % 3 or ''},{'no' if n % 4 else 'yes'},{n % 2}" for n in range(20)]
    (tmp_path / "a.csv").write_text("\n".join(["age,pain,smoker,ill", *lines]) + "\n")
    chosen = ["--label", "ill", "--category", "pain", "--category", "smoker"]
    assert main(["declare", str(tmp_path / "a.csv"), *chosen]) == 2
    assert "column 'pain': " in capsys.readouterr().err
    data = declared(capsys, tmp_path, "a.csv", *chosen, "--missing", "median")
    assert data.declared.categories == {"pain": [1, 2], "smoker": ["no", "yes"]}
    assert data.declared.missing == "median"
    assert data.dataset.columns == ("age", "pain_2", "smoker_yes")
    assert not data.clients[0].train.x.isnan().any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--category", "nothing"], "has no column 'nothing'"),
        (["--features", "nothing"], "has no column 'nothing'"),
        (["--features", "old"], "dataset.features=['old']"),
        (["--features", "age", "--features", "age"], "the same name; all names: ['age', 'age']"),
    ],
)
def test_columns_that_cannot_be_the_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "a.csv").write_text("age,old\n3,0\n70,1\n")
    assert main(["declare", str(tmp_path / "a.csv"), "--label", "old", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_exported_client_is_a_site(tmp_path: Path) -> None:
    """It has its three parts, and the statistics in its file are not used."""
    lines = ["dataset=digits", "partition=iid", "partition.clients=2"]
    assert main(["export", *lines, "--client", "0", "--client", "1", "--out", str(tmp_path)]) == 0
    data = data_of(
        *("dataset=local", "dataset.sites=[a,b]", "dataset.classes=10", f"data_dir={tmp_path}"),
        *("dataset.shape=[1,8,8]", "dataset.dtype=float32"),
        "dataset.files={a:client-0.npz,b:client-1.npz}",
    )
    original = RunData.of(config.compose([*lines, "dataset.mean=auto", "dataset.std=auto"]).cfg)
    for pid in (0, 1):
        for part in ("train", "val", "test"):
            here, there = (getattr(each.clients[pid], part) for each in (data, original))
            assert torch.equal(here.x, there.x) and torch.equal(here.y, there.y)
    assert data.dataset.mean == pytest.approx(original.dataset.mean, rel=1e-12)


@pytest.mark.matrix
def test_a_run_under_ray_gives_the_same_bytes(tmp_path: Path) -> None:
    lines = [*write_digits(tmp_path), *SHORT]
    one = fedhet.run([*lines, f"hydra.run.dir={tmp_path / 'one'}"])
    ray = fedhet.run([*lines, "engine=ray", f"hydra.run.dir={tmp_path / 'ray'}"])
    assert one.summary["weights_sha256"] == ray.summary["weights_sha256"]

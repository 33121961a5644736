"""`python -m fedhet export`, and run folders that cannot be handed over."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn

import fedhet
from fedhet.__main__ import main
from fedhet.data.toy import toy_task


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "cache"))


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    capsys.readouterr()
    assert main(["export", *map(str, args)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (error,) = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    return error


def predictions(run: fedhet.Run, out: Path, file: Path, *args: str) -> pandas.DataFrame:
    assert main(["predict", str(run.dir), str(file), "--format=csv", f"--out={out}", *args]) == 0
    return pandas.read_csv(out)


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ([], "model.onnx"),
        pytest.param(["--client", "1"], "personal-1.onnx", marks=pytest.mark.slow),
    ],
)
def test_the_file_returns_what_predict_prints(
    onnxruntime: ModuleType,
    capsys: pytest.CaptureFixture[str],
    of_a_table: fedhet.Run,
    tables: Path,
    tmp_path: Path,
    args: list[str],
    name: str,
) -> None:
    """From the columns as they are in the file; of a client's own model, too."""
    x = pandas.read_csv(tables / "test.csv").iloc[:, :3].to_numpy("float32")
    assert main(["export", str(of_a_table.dir), *args]) == 0
    printed = capsys.readouterr().out
    assert f"written: {of_a_table.dir / name} (ONNX, opset " in printed
    assert "radius, texture, area" in printed
    assert "on random inputs: " in printed
    session = onnxruntime.InferenceSession(of_a_table.dir / name)
    (got,) = session.run(None, {"input": x})
    expected = predictions(of_a_table, tmp_path / "p.csv", tables / "test.csv", *args)
    np.testing.assert_allclose(got, expected[["p(benign)", "p(malignant)"]], atol=1e-5)
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["outputs"]) == ["benign", "malignant"]
    assert facts["weights_sha256"] == of_a_table.summary["weights_sha256"]


def test_numbers_are_in_their_own_units(
    onnxruntime: ModuleType, of_numbers: fedhet.Run, tables: Path, tmp_path: Path
) -> None:
    out = tmp_path / "numbers.onnx"
    assert main(["export", str(of_numbers.dir), "--out", str(out)]) == 0
    area = pandas.read_csv(tables / "test.csv")[["area"]].to_numpy("float32")
    (got,) = onnxruntime.InferenceSession(out).run(["numbers"], {"input": area})
    expected = predictions(of_numbers, tmp_path / "p.csv", tables / "test.csv")
    np.testing.assert_allclose(got, expected[["radius", "texture"]], rtol=1e-4)


def test_bytes_and_floats_are_the_same_image(
    of_images: fedhet.Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    x = torch.arange(64 * 3, dtype=torch.uint8).reshape(3, 1, 8, 8)
    got = []
    for pixels, given in (("float", x.float() / 255), ("uint8", x)):
        out = tmp_path / f"{pixels}.pt2"
        args = ["--to", "pt2", "--out", str(out), "--pixels", pixels]
        assert main(["export", str(of_images.dir), *args]) == 0
        got.append(torch.export.load(out).module()(given))
    torch.testing.assert_close(*got)
    assert got[0].shape == (3, 2)
    assert "--pixels uint8: the inputs" not in capsys.readouterr().err


def test_a_program_that_differs_is_not_written(
    of_a_table: fedhet.Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def load(file: object) -> object:
        class Other:
            def module(self) -> Callable[[Tensor], Tensor]:
                return lambda x: torch.full((len(x), 2), 0.5)

        return Other()

    monkeypatch.setattr(torch.export, "load", load)
    out = tmp_path / "m.pt2"
    assert main(["export", str(of_a_table.dir), "--to", "pt2", "--out", str(out)]) == 1
    assert "for 1 inputs" in capsys.readouterr().err
    assert list(tmp_path.glob("*m.pt2*")) == []


def test_a_missing_package_is_named(
    of_a_table: fedhet.Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    error = refused(capsys, of_a_table.dir)
    assert "--to onnx needs onnxruntime," in error and "pip install -e '.[onnx]'" in error


def test_files_that_cannot_be(of_a_table: fedhet.Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert "must end in .onnx" in refused(capsys, of_a_table.dir, "--out", "model.pt2")
    assert "are not images" in refused(capsys, of_a_table.dir, "--pixels", "uint8")


# ---- run folders
def damage_tensors(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def shorten(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-40])


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def without_shape(folder: Path) -> None:
    partition = json.loads((folder / "partition.json").read_text())
    del partition["shape"]
    (folder / "partition.json").write_text(json.dumps(partition))


def wider(folder: Path) -> None:
    file = folder / "config.yaml"
    file.write_text(file.read_text().replace("  - 8\n", "  - 9\n"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_tensors, "weights_sha256 in summary.json"),
        (shorten("model.safetensors"), "model.safetensors is damaged"),
        (shorten("summary.json"), "summary.json is damaged"),
        (shorten("partition.json"), "partition.json is damaged"),
        (without("model.safetensors"), "model.safetensors is missing"),
        (without("config.yaml"), "config.yaml is missing"),
        (without("partition.json"), "partition.json is missing"),
        (without_shape, "partition.json is damaged: 'shape' is missing"),
        (wider, "does not fit the model"),
        (lambda folder: (folder / "config.yaml").write_text("a: [1"), "config.yaml is damaged"),
        (lambda folder: (folder / "config.yaml").write_text("a: 1"), "it names no method"),
        (lambda folder: (folder / "summary.json").write_text("[]"), "and not an object"),
    ],
)
def test_a_damaged_run_folder(
    capsys: pytest.CaptureFixture[str],
    of_a_table: fedhet.Run,
    tmp_path: Path,
    damage: Callable[[Path], object],
    message: str,
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(of_a_table.dir, folder)
    damage(folder)
    assert message in refused(capsys, folder, "--to", "pt2")
    assert not list(folder.glob("*.pt2"))


def test_a_run_without_a_global_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = fedhet.run(
        [
            "method=fedbn",
            "model.norm=batch",
            "model.hidden=[8]",
            "rounds=1",
            "partition.clients=2",
            "figures=false",
            f"hydra.run.dir={tmp_path}/run",
        ]
    )
    error = refused(capsys, run.dir)
    assert "has no global model" in error
    assert "--client N --view personal" in error
    assert main(["export", str(run.dir), "--to", "pt2", "--client", "1"]) == 0
    assert (run.dir / "personal-1.pt2").exists()


def test_a_run_of_objects(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = ["method=fedavg", "rounds=1", "figures=false", f"hydra.run.dir={tmp_path}/run"]
    run = fedhet.run(lines, task=toy_task(2))
    assert "were given as objects" in refused(capsys, run.dir)
    card = (run.dir / "model_card.md").read_text()
    assert "data given as objects" in card
    assert isinstance(run.weights, dict)


def test_a_model_that_torch_cannot_export(
    of_a_table: fedhet.Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unsteady(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :2] if float(x.sum()) > 0 else x[:, 1:]

    monkeypatch.setattr("fedhet.runs.record.outcome.load", lambda *args, **kwargs: Unsteady())
    error = refused(capsys, of_a_table.dir, "--to", "pt2")
    assert "model Unsteady" in error

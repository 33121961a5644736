"""`python -m fedhet predict`: what the run has measured comes out, and nothing else goes in."""

from __future__ import annotations

import json
import logging
from io import StringIO
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from sklearn import metrics

import fedhet
from fedhet.__main__ import main


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "cache"))


def predicted(
    capsys: pytest.CaptureFixture[str], run: fedhet.Run, *args: object
) -> pandas.DataFrame:
    capsys.readouterr()
    assert main(["predict", str(run.dir), *map(str, args), "--format", "csv"]) == 0
    return pandas.read_csv(StringIO(capsys.readouterr().out), dtype={"prediction": str})


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    capsys.readouterr()
    assert main(["predict", *map(str, args)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize("file", ["test.csv", "test.parquet"])
def test_a_table_scores_what_the_run_has_measured(
    capsys: pytest.CaptureFixture[str],
    of_a_table: fedhet.Run,
    tables: Path,
    table_frame: pandas.DataFrame,
    file: str,
) -> None:
    frame = predicted(capsys, of_a_table, tables / file)
    right = (frame["prediction"] == table_frame["kind"]).mean()
    assert right == pytest.approx(of_a_table.summary["accuracy"]["last"], abs=1e-9)
    first = 2 if file == "test.csv" else 0  # as errors count: a csv file's header is row 1
    rows = range(first, first + len(frame))
    assert frame["input"].tolist() == [f"{tables / file}:{row}" for row in rows]
    probabilities = frame[["p(benign)", "p(malignant)"]]
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    assert (probabilities.idxmax(axis=1) == "p(" + frame["prediction"] + ")").all()


def test_an_input_without_a_finite_output_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    of_a_table: fedhet.Run,
    tables: Path,
) -> None:
    def diverged(served: object, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = torch.ones(len(x), 2)
        outputs[2, 1] = torch.nan
        return outputs, outputs.argmax(1)

    monkeypatch.setattr("fedhet.handover.predict.predict", diverged)
    assert f"{tables / 'test.csv'}:4" in refused(capsys, of_a_table.dir, tables / "test.csv")


def test_columns_are_found_by_name(
    capsys: pytest.CaptureFixture[str],
    of_a_table: fedhet.Run,
    tmp_path: Path,
    tables: Path,
    table_frame: pandas.DataFrame,
) -> None:
    expected = predicted(capsys, of_a_table, tables / "test.csv").drop(columns="input")
    shuffled = tmp_path / "shuffled.csv"
    table_frame[["area", "radius", "texture"]].to_csv(shuffled, index=False)
    got = predicted(capsys, of_a_table, shuffled).drop(columns="input")
    pandas.testing.assert_frame_equal(got, expected)
    array = tmp_path / "rows.npz"  # which has no names, so it has the run's order
    np.savez(array, rows=table_frame[["radius", "texture", "area"]].to_numpy())
    got = predicted(capsys, of_a_table, array).drop(columns="input")
    pandas.testing.assert_frame_equal(got, expected)


def test_a_clients_own_model(
    capsys: pytest.CaptureFixture[str], of_a_table: fedhet.Run, tables: Path
) -> None:
    own = [
        predicted(capsys, of_a_table, tables / "test.csv", "--client", client) for client in (0, 1)
    ]
    assert (own[0]["p(benign)"] != own[1]["p(benign)"]).any()
    partition = json.loads((of_a_table.dir / "partition.json").read_text())
    x = torch.tensor(pandas.read_csv(tables / "test.csv").iloc[:, :3].to_numpy("float32"))
    mean, std = (torch.tensor(partition["normalised"][key]) for key in ("mean", "std"))
    with torch.no_grad():
        logits = fedhet.load(of_a_table, "personal", client=1)((x - mean) / std)
    np.testing.assert_allclose(own[1]["p(benign)"], logits.softmax(1)[:, 0], rtol=1e-4)


def test_numbers_have_their_own_units(
    capsys: pytest.CaptureFixture[str],
    of_numbers: fedhet.Run,
    tables: Path,
    table_frame: pandas.DataFrame,
) -> None:
    """The column `kind`, which the run did not choose either, may be in the file."""
    frame = predicted(capsys, of_numbers, tables / "test.csv")
    names = ["radius", "texture"]
    r2 = metrics.r2_score(table_frame[names], frame[names])
    assert r2 == pytest.approx(of_numbers.summary["r2"]["last"], rel=1e-4)
    mae = metrics.mean_absolute_error(table_frame[names], frame[names])
    assert mae == pytest.approx(of_numbers.summary["mae"], rel=1e-4)


def test_images_are_converted_as_in_the_run(
    capsys: pytest.CaptureFixture[str], of_images: fedhet.Run, images: Path, tmp_path: Path
) -> None:
    frame = predicted(capsys, of_images, images / "images" / "test")
    right = [file.split("/")[-2] for file in frame.input] == frame.prediction
    assert len(frame) == 40
    assert np.mean(right) == pytest.approx(of_images.summary["accuracy"]["last"], abs=1e-9)
    out = tmp_path / "out.json"
    one = images / "images" / "test" / "dark" / "03.png"
    args = ["predict", str(of_images.dir), str(one), "--format", "json", "--out", str(out)]
    assert main(args) == 0
    (sample,) = json.loads(out.read_text())
    row = frame[frame.input == str(one)].iloc[0]
    assert sample["prediction"] == row.prediction
    assert sample["probabilities"]["dark"] == pytest.approx(row["p(dark)"], rel=1e-4)


def test_a_folders_images_are_read_as_the_runs(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    of_images: fedhet.Run,
    images: Path,
    tmp_path: Path,
) -> None:
    """Turned by EXIF, on white, of any kind; what is not read is said."""
    exif = Image.Exif()
    exif[0x0112] = 8
    with Image.open(images / "images" / "test" / "dark" / "03.png") as image:
        image.save(tmp_path / "upright.bmp")
        image.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "turned.TIF", exif=exif)
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    clear.save(tmp_path / "clear.webp", lossless=True)
    Image.new("L", (8, 8), 255).save(tmp_path / "white.png")
    for name in ("._0.png", "note.txt"):
        (tmp_path / name).touch()
    frame = predicted(capsys, of_images, tmp_path)
    p = {Path(file).name: p for file, p in zip(frame.input, frame["p(dark)"], strict=True)}
    assert sorted(p) == ["clear.webp", "turned.TIF", "upright.bmp", "white.png"]
    assert p["turned.TIF"] == p["upright.bmp"] != p["white.png"] == p["clear.webp"]
    assert ("fedhet.data", logging.WARNING, f"{tmp_path}: 1 file is not read: note.txt") in (
        caplog.record_tuples
    )


def test_the_table_names_classes(
    capsys: pytest.CaptureFixture[str], of_a_table: fedhet.Run, tables: Path
) -> None:
    assert main(["predict", str(of_a_table.dir), str(tables / "test.csv")]) == 0
    header, first, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["input", "prediction", "probability"]
    assert first.split()[1] in ("benign", "malignant")


# ---- refusals
def test_a_missing_or_a_further_column(
    capsys: pytest.CaptureFixture[str],
    of_a_table: fedhet.Run,
    tmp_path: Path,
    table_frame: pandas.DataFrame,
) -> None:
    file = tmp_path / "one.csv"
    table_frame.drop(columns="area").to_csv(file, index=False)
    assert "has no column 'area'" in refused(capsys, of_a_table.dir, file)
    table_frame.assign(age=7).to_csv(file, index=False)
    assert "has the columns age" in refused(capsys, of_a_table.dir, file)
    table_frame.assign(area="large").to_csv(file, index=False)
    assert "row 2 (the header is row 1), column 'area': 'large'" in refused(
        capsys, of_a_table.dir, file
    )
    table_frame[:0].to_csv(file, index=False)
    assert "contains no rows" in refused(capsys, of_a_table.dir, file)


def test_a_file_of_another_kind_or_shape(
    capsys: pytest.CaptureFixture[str],
    of_a_table: fedhet.Run,
    of_images: fedhet.Run,
    images: Path,
    tables: Path,
    tmp_path: Path,
) -> None:
    image = images / "images" / "test" / "dark" / "00.png"
    assert "of shape (3,)" in refused(capsys, of_a_table.dir, image)
    assert "of shape (1, 8, 8)" in refused(capsys, of_images.dir, tables / "test.csv")
    assert "does not exist" in refused(capsys, of_images.dir, tmp_path / "no.png")
    assert "contains no images" in refused(capsys, of_images.dir, tmp_path)
    (tmp_path / "damaged.png").write_bytes(image.read_bytes()[:40])
    assert "damaged.png " in refused(capsys, of_images.dir, tmp_path / "damaged.png")
    np.savez(tmp_path / "wide.npz", x=np.zeros((2, 5)))
    assert "the shape (5,), the run's have (3,)" in refused(
        capsys, of_a_table.dir, tmp_path / "wide.npz"
    )
    np.savez(tmp_path / "two.npz", a=np.zeros((2, 3)), b=np.zeros((2, 3)))
    assert "--array to one of: a, b" in refused(capsys, of_a_table.dir, tmp_path / "two.npz")
    assert main(["predict", str(of_a_table.dir), str(tmp_path / "two.npz"), "--array", "b"]) == 0


def test_a_model_that_the_run_does_not_have(
    capsys: pytest.CaptureFixture[str], of_a_table: fedhet.Run, of_images: fedhet.Run, tables: Path
) -> None:
    file = tables / "test.csv"
    assert "weights=personal" in refused(capsys, of_a_table.dir, file, "--view", "personal")
    assert "weights=presonal" in refused(
        capsys, of_a_table.dir, file, "--view", "presonal", "--client", 0
    )
    assert "client=7" in refused(capsys, of_a_table.dir, file, "--client", 7)
    assert "global models only" in refused(capsys, of_images.dir, file, "--client", 0)
    assert "not the folder of a run" in refused(capsys, tables, file)

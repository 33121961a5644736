"""What a reader of the first report must not have to ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report.made_runs import Axes, make_experiment, make_run

import fedhet
from fedhet.runs.record.figures import Picture
from fedhet.study.report import overviews, page, plots
from fedhet.study.report.compared import Study
from fedhet.study.report.document import FigureFile, as_markdown


def study_of(folder: Path, scores: dict[float, float]) -> Study:
    """FedAvg at one rate and FedDisk at another, in settings with these scores."""
    axes = {"method": ["FedAvg", "FedDisk"], "partition.alpha": list(scores), "seed": [0, 1, 2]}

    def score(axes: Axes) -> float:
        return scores[axes["partition.alpha"]] + 0.01 * axes["seed"]

    made = make_experiment(folder, axes, score)
    file = made / "experiment.json"
    content = json.loads(file.read_text())
    for cell in content["cells"]:
        rate = {"FedAvg": 0.3, "FedDisk": 0.1}[cell["axes"]["method"]]
        cell["overrides"] = [f"method={cell['axes']['method'].lower()}", f"client.lr={rate}"]
    file.write_text(json.dumps(content))
    return Study(fedhet.results(made))


@pytest.mark.usefixtures("undrawn")
def test_the_rates_are_shown_and_nothing_contradicts_them(tmp_path: Path) -> None:
    study = study_of(tmp_path / "made", {0.05: 0.5, 0.3: 0.7})
    table = overviews.methods_table(study)
    assert table is not None
    assert [[entry.text for entry in row] for row in table.rows] == [
        ["FedAvg", "method=fedavg client.lr=0.3"],
        ["FedDisk", "method=feddisk client.lr=0.1"],
    ]
    document = page.compose(study.results, tmp_path / "figures")
    first = document.sections[0]
    assert not first.folded and all(section.folded for section in document.sections[1:])
    (shown,) = first.tables
    assert {row[0].text: row[1].text for row in shown.rows} == {"FedAvg": "0.3", "FedDisk": "0.1"}
    assert [figure.name for figure in first.figures] == ["differences"]
    text = as_markdown(document)
    assert "no trials" not in text and "Nemenyi" not in text and "Friedman" not in text


@pytest.mark.parametrize(("other", "same"), [(0.22, True), (0.9, False)])
def test_panels_have_one_range_unless_they_are_far_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: float, same: bool
) -> None:
    drawn: list[tuple[Picture, str]] = []

    def store(picture: Picture, folder: Path, name: str, caption: str, alt: str) -> Any:
        drawn.append((picture, caption))
        return FigureFile(name, caption, alt, b"")

    monkeypatch.setattr(plots, "store", store)
    plots.curves(study_of(tmp_path / "made", {0.05: 0.2, 0.3: other}), tmp_path)
    for picture, caption in drawn:
        ranges = {axes.get_ylim() for axes in picture.axes}
        assert (len(ranges) == 1) == same == ("ranges of scores differ" not in caption)


def test_a_curve_that_begins_late_is_told(tmp_path: Path) -> None:
    for method, curve in (("fedavg", [0.5, 0.6]), ("feddisk", [None, None, 0.5, 0.6])):
        make_run(tmp_path / method, curve, method=method)
    points = plots.curve_points(Study(fedhet.results(tmp_path)))
    told = plots._late(points)
    assert told.endswith(": feddisk at round 3.")
    assert plots._late(points[points["method"] == "fedavg"]) == ""

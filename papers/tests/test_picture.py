"""The figure of the levels shows the values of the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from fedhet.study.report import plots
from papers import picture
from papers.paper import DIRECTIONS, LEVELS, Figure, Paper
from papers.table import FIELDS

AXES = {"clients": "20"}
PAPER = Paper(
    name="own/table1",
    title="a table",
    source="A paper, table 1",
    figures=(
        Figure(AXES, "FedAvg", "last", 0.8, 0.02),
        Figure(AXES, "FedAvg", "minutes_per_round", 5.0, None, levels=False),
    ),
    compared={"cpu": LEVELS},
)


def line(method: str, mean: str, paper: str, **other: str) -> dict[str, str]:
    known = {"kind": "figure", "scale": "cpu", "setting": "clients=20", "measure": "last"}
    values = {"method": method, "mean": mean, "spread": "0.01", "paper": paper}
    return dict.fromkeys(FIELDS, "") | known | values | other


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes of all figures that are drawn."""
    found: list[Axes] = []
    original = plots.panels

    def panels(*args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)  # type: ignore[arg-type]
        found.extend(result[1])
        return result

    monkeypatch.setattr(plots, "panels", panels)
    return found


def points(axes: Axes) -> dict[str, list[float]]:
    """Label -> the values of its points, from above."""
    return {str(c.get_label()): list(c.lines[0].get_xdata()) for c in axes.containers}


def labels(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_yticklabels()]


def test_each_setting_has_a_panel(drawn: list[Axes], tmp_path: Path) -> None:
    lines = [
        line("FedAvg", "0.81", "0.8", paper_spread="0.02"),
        line("FedNew", "0.7", "0.9"),
        line("FedAvg", "0.6", "0.5", setting="clients=100"),
        line("FedAvg above FedNew", "0.11", "", kind="claim"),
        line("FedLost", "", "0.9"),
    ]
    (file,) = picture.draw(lines, PAPER, tmp_path)
    first, second = drawn
    assert (first.get_title(), second.get_title()) == ("clients=20", "clients=100")
    assert labels(first) == ["FedAvg", "FedNew"]
    assert points(first) == {"ours": [0.81, 0.7], "the paper's": [0.8, 0.9]}
    assert points(second) == {"ours": [0.6], "the paper's": [0.5]}
    ours, theirs = (container.lines[2][0].get_segments() for container in first.containers)
    assert [(right[0] - left[0]) / 2 for left, right in ours] == pytest.approx([0.01, 0.01])
    assert [(right[0] - left[0]) / 2 for left, right in theirs] == pytest.approx([0.02, 0.0])
    assert first.get_xscale() == "linear"
    assert "FedNew" in (tmp_path / f"{file.name}.svg").read_text(encoding="utf-8")


def test_a_method_in_many_settings_is_one_panel(drawn: list[Axes], tmp_path: Path) -> None:
    lines = [line("FedNew", "0.7", "0.9"), line("FedNew", "0.07", "0.8", setting="clients=100")]
    picture.draw(lines, PAPER, tmp_path)
    picture.draw([one | {"measure": "model_size"} for one in lines], PAPER, tmp_path)
    accuracy, size = drawn
    assert labels(accuracy) == labels(size) == ["clients=20", "clients=100"]
    assert points(accuracy)["ours"] == points(size)["ours"] == [0.7, 0.07]
    assert (accuracy.get_xscale(), size.get_xscale()) == ("linear", "log")


def test_panels_of_several_measures_name_them(drawn: list[Axes], tmp_path: Path) -> None:
    lines = [
        line(method, "0.7", "0.9", measure=measure)
        for measure in ("last", "best_val")
        for method in ("FedAvg", "FedNew")
    ]
    picture.draw(lines, PAPER, tmp_path)
    assert [axes.get_title() for axes in drawn] == ["last", "best val"]  # less what both have
    assert [axes.get_xlabel() for axes in drawn] == ["last", "best val"]


def test_many_settings_take_several_figures(tmp_path: Path) -> None:
    lines = [
        line(method, "0.7", "0.9", setting=f"clients={clients}")
        for clients in range(7)
        for method in ("FedAvg", "FedNew")
    ]
    files = picture.draw(lines, PAPER, tmp_path)
    assert [file.name for file in files] == ["beside-the-paper-1", "beside-the-paper-2"]
    picture.draw(lines[:2], PAPER, tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {"beside-the-paper"}


def test_what_is_not_compared_is_not_drawn(tmp_path: Path) -> None:
    figure = line("FedAvg", "0.81", "0.8")
    assert picture.draw([figure | {"scale": ""}], PAPER, tmp_path)  # the verdicts have levels, too
    assert picture.draw([figure], replace(PAPER, compared={"cpu": DIRECTIONS}), tmp_path) == []
    time = figure | {"measure": "minutes_per_round"}
    assert picture.draw([time], PAPER, tmp_path) == []
    assert list(tmp_path.iterdir()) == []

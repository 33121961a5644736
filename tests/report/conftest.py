"""Reports without pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fedhet.data.storage import write_text
from fedhet.study.report.document import FigureFile


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the files of all figures empty, because to draw them is most of a report's time."""

    def store(picture: Figure, folder: Path, name: str, caption: str, alt: str) -> FigureFile:
        for kind in ("png", "svg", "pdf"):
            write_text(folder / f"{name}.{kind}", "")
        return FigureFile(name, caption, alt, b"")

    monkeypatch.setattr("fedhet.study.report.plots.store", store)

"""What all figures have in common."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure

from fedhet.record.files import written
from fedhet.record.summary import method_name

SETTINGS = ("alpha", "classes", "shards", "sizes")  # of a partition, which its title states


class Picture(Figure):
    """A figure that notebooks show, with or without matplotlib's own backend for them."""

    def png(self) -> bytes:
        """The content of a PNG file."""
        content = io.BytesIO()
        # Not savefig, which draws everything twice.
        FigureCanvasAgg(self).print_png(content, pil_kwargs={"compress_level": 3})
        return content.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


def margins(picture: Picture, left: float, right: float) -> None:
    """Lay out the axes by margins in inches, in half of the time of a layout that measures."""
    width, height = picture.get_size_inches()
    picture.subplots_adjust(
        left=left / width, right=1 - right / width, top=1 - 0.55 / height, bottom=0.5 / height
    )


def title(summary: dict[str, Any] | None, partition: dict[str, Any]) -> str:
    """Method, data and partition in two lines; the partition alone where there is no summary."""
    settings = partition.get("settings", {})
    values = [f"{key} {settings[key]}" for key in SETTINGS if settings.get(key) is not None]
    if settings.get("noise"):
        values.append(f"noise {settings['noise']}")
    kind = ", ".join([partition["name"], *values])
    clients = f"{partition['clients']} client{'' if partition['clients'] == 1 else 's'}"
    if partition.get("hash"):
        clients += f" ({partition['hash']})"
    if summary is None:
        return f"{kind}\n{clients}"
    if not summary["dataset"]:
        return f"{method_name(summary)} on data given as a Task\n{clients}"
    return f"{method_name(summary)} on {summary['dataset']}\n{kind}, {clients}"


def save(picture: Picture, path: Path) -> Path:
    """Save the picture as the PNG file `path`, and as a PDF beside it; return `path`.

    Raises:
        WriteError: one of them cannot be written; it does not exist then.
    """
    with written(path) as part:
        part.write_bytes(picture.png())
    picture.set_layout_engine("none")  # the PDF takes the layout of the PNG
    with written(path.with_suffix(".pdf")) as part:
        FigureCanvasPdf(picture).print_pdf(part)
    return path

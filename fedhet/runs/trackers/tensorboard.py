"""tracker=tensorboard: event files in the run folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from fedhet.runs.trackers.tracker import Tracked, Tracker

WAIT_SECONDS = 0.05  # between two checks of the clock


class TensorBoard(Tracker):
    """Writes events into the folder `tensorboard` of the run folder.

    TensorBoard cannot store files, so a text names the files of the results.
    """

    name = "tensorboard"
    package: ClassVar[str | None] = "tensorboard"

    def begin(self, run: Tracked) -> int:
        from torch.utils.tensorboard import SummaryWriter

        kept = min(run.executed, run.sent_steps)
        folder = run.folder / self.name
        # Readers order the files by name. A name begins with the time in seconds, so a resumed run
        # waits until its file has a later second than all others.
        while list(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(WAIT_SECONDS)
        # Readers drop steps after `kept` in older files.
        self._writer = SummaryWriter(str(folder), purge_step=kept + 1)
        lines = [f"    {key}: {value}" for key, value in run.settings.items()]  # code in Markdown
        self._writer.add_text("settings", "\n".join(lines), kept)
        self._last = kept
        return kept

    def step(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)
        self._last = number
        self._writer.flush()

    def end(self, status: str, files: Sequence[Path]) -> None:
        from matplotlib.image import imread

        for file in files:
            if file.suffix == ".png":
                self._writer.add_image(file.stem, imread(file), self._last, dataformats="HWC")
        names = "\n".join(f"- {file}" for file in files)
        self._writer.add_text("end", f"{status}\n\n{names}", self._last)
        self._writer.close()

"""tracker=wandb: a run of Weights & Biases, offline unless another mode is chosen."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from fedhet.core.check import one_of, optional, text
from fedhet.runs.trackers.tracker import Tracked, Tracker

SECONDS = 60.0  # the longest time for the start, and for the upload of the rest at the end


class WandB(Tracker):
    """Writes the folder `wandb` of the run folder, and uploads it if the mode is online.

    The library reads its key from WANDB_API_KEY, or from the place to which `wandb login` wrote it.

    Args:
        mode: offline or online.
        project: the project.
        entity: the user or team that owns the project; None: the owner of the key.
        group: a name for runs to show together; None: the name of the sweep.

    Raises:
        ConfigError: a setting is out of range.
    """

    name = "wandb"
    package: ClassVar[str | None] = "wandb"

    def __init__(
        self,
        *,
        mode: str = "offline",
        project: str = "fedhet",
        entity: str | None = None,
        group: str | None = None,
    ) -> None:
        self._mode = one_of("tracker.mode", mode, ("offline", "online"))
        self._project = text("tracker.project", project)
        self._entity = optional(text, "tracker.entity", entity)
        self._group = optional(text, "tracker.group", group)

    def begin(self, run: Tracked) -> int:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self.id = run.id or secrets.token_hex(8)
        # A killed run leaves an incomplete folder; a new folder gets all steps.
        for incomplete in run.folder.glob(f"wandb/offline-run-*-{self.id}"):
            shutil.rmtree(incomplete)
        self._run = wandb.init(
            id=self.id,
            resume="allow",
            reinit="create_new",  # a sweep's runs may share a process
            mode=self._mode,
            project=self._project,
            entity=self._entity,
            group=self._group or run.group,
            name=run.folder.name,
            dir=str(run.folder),
            config=dict(run.settings),
            allow_val_change=True,
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                # In some data centres, these measurements would ask a service in the network.
                x_disable_stats=self._mode == "offline",
                x_disable_machine_info=self._mode == "offline",
                init_timeout=SECONDS,
                finish_timeout=SECONDS,
                finish_timeout_raises=True,
            ),
        )
        self._folder = run.folder
        # An online server knows its last step; offline, nothing is resumed.
        return self._run.starting_step - 1 if self._run.resumed else 0

    def step(self, number: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=number, commit=True)

    def end(self, status: str, files: Sequence[Path]) -> None:
        import wandb

        self._run.summary["status"] = status
        results = wandb.Artifact(f"fedhet-{self.id}", type="model")
        for file in files:
            # Immutable, so wandb makes no copy: files of the run folder do not change.
            results.add_file(str(file), str(file.relative_to(self._folder)), policy="immutable")
            if file.suffix == ".png":
                self._run.summary[f"figures/{file.stem}"] = wandb.Image(str(file))
        self._run.log_artifact(results)
        self._run.finish(exit_code=0 if status == "ok" else 1)

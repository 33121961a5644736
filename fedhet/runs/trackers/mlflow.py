"""tracker=mlflow: a run of MLflow, on a server or in a database in the folder of run or sweep."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from filelock import FileLock

from fedhet.core.check import optional, text
from fedhet.core.errors import ConfigError
from fedhet.runs.trackers.tracker import Tracked, Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient

STATES = {"ok": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
MOST_PARAMS = 100  # MLflow accepts no more at once
# With these, a server that does not answer delays the run by a minute instead of an hour, and
# MLflow sends no telemetry. Variables that the user has set are kept.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MLflow(Tracker):
    """Logs to a tracking server, or to a database in the folder of the run or of its sweep.

    Args:
        uri: the address of the server; None: MLFLOW_TRACKING_URI in the environment, or else a
            database in the folder `mlflow` of the sweep, or of the run.
        group: MLflow's experiment; None: the name of the sweep, or else "fedhet".

    Raises:
        ConfigError: a setting is out of range, or `uri` contains a password.
    """

    name = "mlflow"
    package: ClassVar[str | None] = "mlflow"

    def __init__(self, *, uri: str | None = None, group: str | None = None) -> None:
        self._uri = optional(text, "tracker.uri", uri)
        self._group = optional(text, "tracker.group", group)
        if self._uri and "@" in self._uri:
            raise ConfigError(  # the message must not repeat the password
                "tracker.uri contains a user or a password, and the run folder would record it; set"
                " MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment, or"
                " MLFLOW_TRACKING_URI with the whole address"
            )

    def begin(self, run: Tracked) -> int:
        for variable, value in ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        from mlflow import MlflowClient

        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is not None:
            return self._begin(MlflowClient(uri), run, None)
        home = (run.sweep or run.folder) / self.name
        home.mkdir(exist_ok=True)
        for name in ("alembic", "mlflow.store"):  # they log how they create the tables
            logging.getLogger(name).setLevel(logging.WARNING)
        with FileLock(home / ".lock"):  # the runs of a sweep begin at the same time
            client = MlflowClient(f"sqlite:///{home}/mlflow.db?timeout=60")
            return self._begin(client, run, (home / "artifacts").as_uri())

    def _begin(self, client: MlflowClient, run: Tracked, place: str | None) -> int:
        self._client = client
        if run.id is not None:
            self.id = run.id
            client.update_run(run.id, status="RUNNING")
            return int(client.get_run(run.id).data.metrics.get("round", 0))
        from mlflow.entities import Param

        group = self._group or run.group or "fedhet"
        found = client.get_experiment_by_name(group)
        number = found.experiment_id if found else client.create_experiment(group, place)
        created = client.create_run(number, run_name=run.folder.name).info.run_id
        self.id = created
        params = [Param(_name(key), str(value)) for key, value in run.settings.items()]
        for first in range(0, len(params), MOST_PARAMS):
            client.log_batch(created, params=params[first : first + MOST_PARAMS])
        return 0

    def step(self, number: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_name(name), value, now, number) for name, value in values.items()]
        self._client.log_batch(str(self.id), metrics)

    def end(self, status: str, files: Sequence[Path]) -> None:
        for file in files:
            folder = "figures" if file.parent.name == "figures" else None
            self._client.log_artifact(str(self.id), str(file), folder)
        self._client.set_terminated(str(self.id), STATES[status])


def _name(name: str) -> str:
    """Return the name with _ in place of characters that MLflow refuses."""
    return re.sub(r"[^\w\-. /]", "_", name)

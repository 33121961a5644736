"""Runs configurations in one process, with the fedhet of one tree, and reads their results.

    python -P child.py

PYTHONPATH is the tree. The process reads a job as JSON from stdin: `data`, `folder`, and `cases`
(the name of a folder -> overrides). It writes the values that fedhet.results reads from a run into
<folder>/<name>.json, and keeps the run folder <folder>/<name>.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# An editable install of fedhet must not hide the fedhet of the tree.
TREE = os.environ["PYTHONPATH"]
sys.path[:] = [path for path in sys.path if path == TREE or not (Path(path) / "fedhet").is_dir()]

import fedhet  # noqa: E402 -- from TREE

sys.path.append(str(Path(__file__).parent))
from values import read  # noqa: E402


def main(job: dict[str, Any]) -> None:
    """Run the configurations of the job."""
    origin = Path(fedhet.__file__ or "").resolve()
    if not origin.is_relative_to(Path(TREE).resolve()):
        raise RuntimeError(f"fedhet was imported from {origin} instead of {TREE}")
    for name, overrides in job["cases"].items():
        place = Path(job["folder"], name)
        values = outcome(place, prepared(overrides, job["data"], place))
        # A later call may compare with this result, but has its data in another folder.
        content = json.dumps(values).replace(job["data"], "{data}")
        # The file gets its name when its content is complete.
        part = place.with_name(f"{name}.part")
        part.write_text(content)
        part.rename(place.with_name(f"{name}.json"))


def prepared(overrides: Sequence[str], data: str, place: Path) -> list[str]:
    """Fill in the folders {data} and {first}. For {first}, make a run first.

    The run is in this process's own folder, so that the folder has the same name for both trees.
    """
    first = f"first/{place.name}"
    if any("{first}" in override for override in overrides):
        kept = [line for line in overrides if not line.startswith("partition")]
        fedhet.run([*kept, "partition.clients=5", f"hydra.run.dir='{first}'"])
    return [line.replace("{data}", data).replace("{first}", first) for line in overrides]


def outcome(place: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run a configuration; return how it ended, and the values in its folder."""
    try:
        fedhet.run([*overrides, f"hydra.run.dir='{place}'"])
        ended, reason = "ran", ""
    except fedhet.ConfigError as error:
        ended, reason = "refused", str(error)
    except Exception as error:  # noqa: BLE001 -- an error is the result of its configuration
        ended, reason = f"failed: {type(error).__name__}", str(error)
    found = read(place) if (place / "summary.json").exists() else {}
    return {"ended": ended, "reason": reason, "values": found}


if __name__ == "__main__":
    main(json.load(sys.stdin))

"""Runs configurations in one process, with the fedhet of one tree, and reads their results.

    python -P child.py

PYTHONPATH is the tree. Read is a job as JSON: `data`, `folder`, and `cases`, a folder's name and
overrides for each.
What fedhet.results reads of a run becomes <folder>/<name>.json, and the run folder beside it stays.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The fedhet of an editable install is not that of another tree.
TREE = os.environ["PYTHONPATH"]
sys.path[:] = [one for one in sys.path if one == TREE or not (Path(one) / "fedhet").is_dir()]

import fedhet  # noqa: E402 -- from TREE
from fedhet import ConfigError  # noqa: E402

sys.path.append(str(Path(__file__).parent))
from values import read  # noqa: E402


def main(job: dict[str, Any]) -> None:
    """Run the configurations of the job."""
    origin = Path(fedhet.__file__ or "").resolve()
    if not origin.is_relative_to(Path(TREE).resolve()):
        raise RuntimeError(f"fedhet was imported from {origin} in place of {TREE}")
    for name, overrides in job["cases"].items():
        place = Path(job["folder"], name)
        values = outcome(place, prepared(overrides, job["data"], place))
        # A later call has its data elsewhere, and may compare with this result.
        content = json.dumps(values).replace(job["data"], "{data}")
        # The name appears once the content is whole.
        part = place.with_name(f"{name}.part")
        part.write_text(content)
        part.rename(place.with_name(f"{name}.json"))


def prepared(overrides: Sequence[str], data: str, place: Path) -> list[str]:
    """Fill in the folders; {first} is that of a run that is made here, before.

    It is in this process's own folder, so that it has the same name in both trees.
    """
    first = f"first/{place.name}"
    if any("{first}" in override for override in overrides):
        kept = [one for one in overrides if not one.startswith("partition")]
        fedhet.run([*kept, "partition.clients=5", f"hydra.run.dir='{first}'"])
    return [one.replace("{data}", data).replace("{first}", first) for one in overrides]


def outcome(place: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run a configuration; return how it ended, and what its folder has of it."""
    try:
        fedhet.run([*overrides, f"hydra.run.dir='{place}'"])
        ended, reason = "ran", ""
    except ConfigError as error:
        ended, reason = "refused", str(error)
    except Exception as error:  # noqa: BLE001 -- that of one configuration is its result
        ended, reason = f"failed: {type(error).__name__}", str(error)
    found = read(place) if (place / "summary.json").exists() else {}
    return {"ended": ended, "reason": reason, "values": found}


if __name__ == "__main__":
    main(json.load(sys.stdin))

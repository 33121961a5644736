"""tracker=tensorboard: the event files hold what rounds.jsonl holds."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from trackers.following import LINES, Steps, check, killed

import fedhet
from fedhet.testing import check_equal

pytest.importorskip("tensorboard")
FLOAT32 = 1e-7  # TensorBoard's precision


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sizes = {"scalars": 0, "tensors": 0, "images": 0}
    return EventAccumulator(str(folder / "tensorboard"), sizes).Reload()


def scalars(folder: Path) -> Steps:
    found = events(folder)
    steps: Steps = defaultdict(dict)
    for tag in found.Tags()["scalars"]:
        for event in found.Scalars(tag):
            assert tag not in steps[event.step], f"{tag} twice in step {event.step}"
            steps[event.step][tag] = event.value
    return dict(sorted(steps.items()))


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tracked") / "run"
    return fedhet.run([*LINES, "tracker=tensorboard", f"hydra.run.dir={folder}"])


def test_the_whole_run(tracked: Any, plain: Any) -> None:
    run = tracked
    check(scalars(run.dir), run.dir, FLOAT32)
    found = events(run.dir)
    settings = found.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "client.lr: 0.2" in settings
    end = found.Tensors("end/text_summary")[0].tensor_proto.string_val[0].decode()
    assert end.startswith("ok")
    assert "model.safetensors" in end
    for name in ("accuracy", "labels"):
        (image,) = found.Images(name)
        height, width = np.shape(imread(run.dir / "figures" / f"{name}.png"))[:2]
        assert (image.height, image.width) == (height, width)
        assert image.encoded_image_string.startswith(b"\x89PNG")
    for file in [*(run.dir / "tensorboard").iterdir(), run.dir / "tracker.json"]:
        file.unlink()
    check_equal(plain, run, "tracker", ignored=["config.yaml"])


@pytest.mark.slow
def test_a_run_that_was_killed(tmp_path: Path) -> None:
    killed(tmp_path / "run", "tracker=tensorboard")
    assert list(scalars(tmp_path / "run")) == [1, 2, 3]
    run = fedhet.run([f"resume={tmp_path}/run"])
    check(scalars(run.dir), run.dir, FLOAT32)

"""The notebook in examples/ runs as it is stored, and its stored outputs are real."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient is in the extra dev")
nbformat = pytest.importorskip("nbformat", reason="nbformat is in the extra dev")
pytest.importorskip("ipykernel", reason="ipykernel is in the extra dev")

ROOT = Path(__file__).parents[1]
PATH = ROOT / "examples" / "quickstart.ipynb"
Outputs = list[list[Any]]  # of each code cell


def outputs_of(notebook: Any) -> Outputs:
    return [list(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def stored() -> Outputs:
    return outputs_of(nbformat.read(PATH, as_version=4))


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """The outputs of the notebook, executed in an empty folder; a cell that fails is an error."""
    notebook = nbformat.read(PATH, as_version=4)
    place = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=120, resources=place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        client.execute()
    return outputs_of(notebook)


def kinds(outputs: list[Any]) -> list[set[str]]:
    return [set(output.get("data", {output.get("name"): None})) for output in outputs]


def numbers(outputs: list[Any]) -> list[float]:
    """The numbers in the results, without dates and sizes."""
    texts = [o.data["text/plain"] for o in outputs if o.output_type == "execute_result"]
    texts = [re.sub(r"outputs/\S+|size \S+", "", text) for text in texts]
    return [float(number) for text in texts for number in re.findall(r"-?\d+\.?\d*", text)]


@pytest.mark.slow
def test_the_stored_outputs_are_real(stored: Outputs, executed: Outputs) -> None:
    assert [kinds(outputs) for outputs in stored] == [kinds(outputs) for outputs in executed]
    for before, now in zip(stored, executed, strict=True):
        # Other machines round differently, which can change single predictions.
        assert numbers(now) == pytest.approx(numbers(before), abs=0.15)
    assert sum(len(numbers(outputs)) for outputs in stored) > 50


@pytest.mark.slow
def test_progress_is_one_display_without_widgets(executed: Outputs) -> None:
    """It ends at the last step, and nothing is said on stderr."""
    progress = executed[0][0]
    assert progress.output_type == "display_data"
    assert re.match(r"ditto 8/8, [\d.]+ s: train 8, acc_global 0\.", progress.data["text/plain"])
    assert '<progress value="8" max="8">' in progress.data["text/html"]
    assert not [o for outputs in executed for o in outputs if o.get("name") == "stderr"]


@pytest.mark.slow
def test_a_run_shows_its_table_and_its_figures(executed: Outputs) -> None:
    run = executed[0][1]
    assert len(run.data["text/plain"]) < 250 and "outputs/" in run.data["text/plain"]
    page = run.data["text/html"]
    assert page.count("<img") == 2 and page.count("<tr>") > 8
    assert "acc_personal_mean" in page
    assert "image/png" in executed[-1][0].data  # run.plot


def test_the_stored_notebook_names_no_place_of_its_author() -> None:
    content = json.loads(PATH.read_text())
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    for cell in content["cells"]:
        outputs = [
            {**output, "data": {k: v for k, v in output.get("data", {}).items() if "png" not in k}}
            for output in cell.get("outputs", [])
        ]
        text = re.sub(r"base64,[^\"]*", "", str([cell["source"], outputs]))
        assert not re.search(r"(^|[\s'\"(>;])/\w", text), text

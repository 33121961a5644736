"""Several folders are one report only if their runs can be compared."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from made_runs import change, make_experiment, make_run, write

import fedhet
from fedhet.core.errors import ConfigError, DataError
from fedhet.study.report.compared import Study
from fedhet.study.report.overviews import phases, run_frame, tuning_table
from fedhet.study.report.plots import curve_points


def part(folder: Path, method: str, **entries: Any) -> Path:
    return make_experiment(folder, {"method": [method], "seed": [0, 1]}, lambda _: 0.5, **entries)


def test_parts_with_other_settings_are_refused(tmp_path: Path) -> None:
    """The first override that differs is named; where the runs were made does not matter."""
    fixed = ["experiment=made", "rounds=1", "engine=local"]
    first = part(tmp_path / "a", "A", fixed=fixed)
    same = ["experiment=made", "rounds=1", "engine=ray", "engine.workers=2"]
    assert len(fedhet.results([first, part(tmp_path / "b", "B", fixed=same)]).runs) == 4
    longer = part(tmp_path / "c", "C", fixed=["experiment=made", "rounds=3"])
    with pytest.raises(ConfigError, match=r"rounds .*1 .*3 "):
        fedhet.results([first, longer])
    default = part(tmp_path / "d", "D", fixed=["experiment=made"])
    with pytest.raises(ConfigError, match=r"rounds .*1 "):
        fedhet.results([first, default])


def test_parts_of_a_file_that_was_changed_are_refused(tmp_path: Path) -> None:
    first = part(tmp_path / "a", "A", digest="abc")
    with pytest.raises(ConfigError, match=r"digest .*abc .*abd"):
        fedhet.results([first, part(tmp_path / "b", "B", digest="abd")])


def test_two_results_of_one_run_need_equal_settings(tmp_path: Path) -> None:
    first, other = (part(tmp_path / name, "A") for name in "ab")
    assert len(fedhet.results([first, other]).runs) == 2
    cells = json.loads((other / "experiment.json").read_text())["cells"]
    cells[1]["overrides"].append("client.lr=0.3")
    change(other / "experiment.json", cells=cells)
    with pytest.raises(ConfigError, match=r"client\.lr .*0\.3"):
        fedhet.results([first, other])


def test_parts_with_other_axes_are_refused(tmp_path: Path) -> None:
    first = part(tmp_path / "a", "A")
    axes = {"method": ["B"], "partition.alpha": [0.3], "seed": [0, 1]}
    other = make_experiment(tmp_path / "b", axes, lambda _: 0.5)
    with pytest.raises(ConfigError, match=r"axes .*method, seed .*method, part"):
        fedhet.results([first, other])


def tuned_part(folder: Path, method: str, finished: bool = True, **tune: Any) -> Path:
    """A part of an experiment in which only the trials of one of its methods were asked for."""
    methods = ["FedAvg", "SCAFFOLD"]
    axes = {"method": methods, "seed": [0]}
    made = make_experiment(folder, axes, lambda a: 0.5 if a["method"] == method else None)
    content = json.loads((made / "experiment.json").read_text())
    for name, number in product(methods, (0, 1)):
        place = f"cells/trial-{name}-{number}"
        lr = [0.1, 0.01][number]
        entry = {"folder": place, "kind": "trial", "axes": {"method": name, "seed": 1000}}
        content["cells"].append({**entry, "overrides": [], "tuned": {"client.lr": lr}})
        if name == method and (finished or number == 0):
            make_run(made / place, [0.5 - number / 10], seed=1000)
            write(made / place / "cell.json", {"format": 1, "status": "finished"})
    chosen = {"chosen": {"client.lr": 0.1}, "validation": 0.5, "at_the_edge": ["client.lr"]}
    none = {"chosen": None, "validation": None, "at_the_edge": []}
    content["tuned"] = [
        {"axes": {"method": name}, "trials": 2, **(chosen if name == method else none)}
        for name in methods
    ]
    known = {"space": {"client.lr": [0.1, 0.01]}, "own": {}, "budget": None, "seeds": [1000]}
    content["tune"] = {**known, "per": ["method"], **tune}
    change(made / "experiment.json", **content)
    return made


def tuned_rows(*folders: Path) -> list[dict[str, Any]]:
    table = tuning_table(Study(fedhet.results(list(folders))))
    assert table is not None
    return table.data.to_dict("records")


def test_joined_parts_have_each_tuned_value_once(tmp_path: Path) -> None:
    """Part a has the trials of FedAvg, part b those of SCAFFOLD; the same part twice is one."""
    a, b = tuned_part(tmp_path / "a", "FedAvg"), tuned_part(tmp_path / "b", "SCAFFOLD")
    rows = tuned_rows(a, b)
    assert [(row["method"], row["value"]) for row in rows] == [("FedAvg", 0.1), ("SCAFFOLD", 0.1)]
    assert [(row["trials"], row["failed or diverged"], row["not run"]) for row in rows] == [
        (2, 0, 0),
        (2, 0, 0),
    ]
    assert [row["value"] for row in tuned_rows(a, a)] == [0.1, "none: no trial has a score"]


def test_trials_that_were_not_run_have_not_failed(tmp_path: Path) -> None:
    made = tuned_part(tmp_path / "a", "FedAvg", finished=False)
    failed = {"format": 1, "status": "failed", "reason": "it broke"}
    (made / "cells" / "trial-FedAvg-1").mkdir()
    write(made / "cells" / "trial-FedAvg-1" / "cell.json", failed)
    summary = {"format": 1, "status": "failed", "reason": "it broke", "method": "fedavg"}
    whole = json.loads((made / "cells" / "trial-FedAvg-0" / "summary.json").read_text())
    write(made / "cells" / "trial-FedAvg-1" / "summary.json", {**whole, **summary})
    rows = tuned_rows(made)
    assert [(row["failed or diverged"], row["not run"]) for row in rows] == [(1, 0), (0, 2)]


@pytest.mark.parametrize(
    "name, value", [("budget", 1), ("seeds", [1001]), ("space", {"client.lr": [1]}), ("per", [])]
)
def test_parts_that_are_tuned_differently_are_refused(
    tmp_path: Path, name: str, value: Any
) -> None:
    a = tuned_part(tmp_path / "a", "FedAvg")
    b = tuned_part(tmp_path / "b", "SCAFFOLD", **{name: value})
    with pytest.raises(ConfigError, match=rf"tune\.{name} .*second"):
        fedhet.results([a, b])


def test_a_space_of_one_method_has_to_agree(tmp_path: Path) -> None:
    a = tuned_part(tmp_path / "a", "FedAvg", own={"FedAvg": {"mu": [1, 2]}})
    b = tuned_part(tmp_path / "b", "SCAFFOLD", own={"FedAvg": {"mu": [1, 3]}})
    with pytest.raises(ConfigError, match=r"FedAvg .*2.*first .*3"):
        fedhet.results([a, b])


def test_parts_with_other_choices_are_refused(tmp_path: Path) -> None:
    a, b = (tuned_part(tmp_path / name, "FedAvg") for name in "ab")
    entries = json.loads((b / "experiment.json").read_text())["tuned"]
    other = {**entries[0], "chosen": {"client.lr": 0.01}}
    change(b / "experiment.json", tuned=[other, entries[1]])
    with pytest.raises(ConfigError, match=r"FedAvg.* client\.lr .*0\.1 .*0\.01"):
        fedhet.results([a, b])


def test_parts_that_are_reported_by_another_score_are_refused(tmp_path: Path) -> None:
    first = part(tmp_path / "a", "A")
    report = {"compare": "method", "metric": "clients", "reference": None}
    with pytest.raises(ConfigError, match=r"report\.metric .*last .*clients"):
        fedhet.results([first, part(tmp_path / "b", "B", report=report)])


def test_parts_may_have_other_trackers(tmp_path: Path) -> None:
    first = part(tmp_path / "a", "A", fixed=["rounds=1"])
    fixed = ["rounds=1", "tracker=wandb", "tracker.mode=online"]
    assert len(fedhet.results([first, part(tmp_path / "b", "B", fixed=fixed)]).runs) == 4


def sweep(folder: Path, method: str, bytes_of_a_round: int) -> Path:
    for number in range(2):
        place = folder / str(number)
        make_run(place, [0.5], method=method, seed=number, bytes_of_a_round=bytes_of_a_round)
    return folder


def test_runs_of_the_same_name_in_two_folders_keep_their_costs(tmp_path: Path) -> None:
    """FedAvg sends 1 kB a round and SCAFFOLD 2 kB; both have runs 0 and 1."""
    folders = [sweep(tmp_path / n, n, s) for n, s in (("fedavg", 1000), ("scaffold", 2000))]
    assert list(fedhet.results(folders[0]).runs["folder"]) == ["0", "1"]
    found = fedhet.results(folders)
    assert list(found.runs["folder"]) == ["fedavg/0", "fedavg/1", "scaffold/0", "scaffold/1"]
    study = Study(found)
    costs = phases(study, "bytes")
    assert costs is not None
    assert costs.data.set_index("method").filter(like="bytes.").sum(axis=1).to_dict() == {
        "fedavg": 1000,
        "scaffold": 2000,
    }
    points = curve_points(study).set_index("method")
    assert points["megabytes"].to_dict() == {"fedavg": 0.001, "scaffold": 0.002}
    assert (points["seeds"] == 2).all()
    assert list(run_frame(study)["bytes.up.model"]) == [400] * 4


def test_names_have_as_much_of_the_path_as_tells_them_apart(tmp_path: Path) -> None:
    """The folder of a run is named by itself, and a run that is given twice is one."""
    folders = [sweep(tmp_path / n / "runs", n, 1000) for n in ("fedavg", "scaffold")]
    names = list(fedhet.results(folders).runs["folder"])
    assert names == [f"{n}/runs/{i}" for n in ("fedavg", "scaffold") for i in (0, 1)]
    single = [folder / "0" for folder in folders]
    assert list(fedhet.results(single).runs["folder"]) == ["fedavg/runs/0", "scaffold/runs/0"]
    assert len(fedhet.results([tmp_path, folders[0], folders[0] / "0"]).runs) == 4


def test_cells_of_the_same_name_in_two_parts_are_told_apart(tmp_path: Path) -> None:
    """Made experiments have no digest in the names of their cells."""
    found = fedhet.results([part(tmp_path / "a", "A"), part(tmp_path / "b", "B")])
    assert list(found.runs["folder"]) == [f"{p}/cells/cell-00{i}" for p in "ab" for i in (0, 1)]


def test_a_folder_that_an_experiment_names_twice_is_refused(tmp_path: Path) -> None:
    made = part(tmp_path / "a", "A")
    cells = json.loads((made / "experiment.json").read_text())["cells"]
    change(made / "experiment.json", cells=[cells[0], {**cells[1], "folder": cells[0]["folder"]}])
    with pytest.raises(DataError, match=r"two runs .*folder cells/cell-000$"):
        fedhet.results(made)

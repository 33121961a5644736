"""What a report says is what its runs have measured, and nothing in a file can change the page."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_runs import Axes, change, make_experiment, write

import fedhet
from fedhet.study import report
from fedhet.study.report.compared import Study
from fedhet.study.report.comparisons import against_reference, sentences
from fedhet.study.report.overviews import deciding, mixed_code, run_costs, thresholds
from fedhet.study.report.plots import panels
from fedhet.study.report.results import results

HOSTILE = "</script><img src=x onerror=alert(1)> & $x_1$ | \\input{passwd} `**b**`"
SEEDS = list(range(12))
SHIFTS = {"Best": 0.8, "Near": 0.797, HOSTILE: 0.5}


def noise(axes: Axes) -> float:
    place = list(SHIFTS).index(axes["method"])
    number = 1000 * place + 10 * axes["seed"] + int(axes["partition.alpha"] * 10)
    return float(np.random.default_rng(number).normal(0, 0.02))


def score(axes: Axes) -> float | None:
    return SHIFTS[axes["method"]] + noise(axes)


AXES = {"method": list(SHIFTS), "partition.alpha": [0.05, 0.3], "seed": SEEDS}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment that no test changes."""
    return make_experiment(tmp_path_factory.mktemp("whole") / "made", AXES, score)


@pytest.fixture
def experiment(whole: Path, tmp_path: Path) -> Path:
    """One that a test may change."""
    return Path(shutil.copytree(whole, tmp_path / "made"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, report.Written]:
    """An experiment with texts that would change a page, with a report whose figures are drawn."""
    axes = {"method": list(SHIFTS), "partition.alpha": [0.3], "seed": [0, 1, 2]}
    made = make_experiment(tmp_path_factory.mktemp("hostile") / "made", axes, score)
    change(made / "experiment.json", title=HOSTILE, command=["experiment=made", HOSTILE])
    first, second = made / "cells" / "cell-000", made / "cells" / "cell-001"
    change(first / "environment.json", torch=HOSTILE)
    change(first / "summary.json", dataset=HOSTILE)
    (first / "config.yaml").write_text(HOSTILE)
    change(second / "cell.json", status="failed", reason=HOSTILE)
    change(second / "summary.json", status="failed")
    return made, report.write(made)


def summary_of(study: Study) -> list[str]:
    return sentences(study, against_reference(study))


class Tags(HTMLParser):
    """All tags of a page with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_table_of_scores_is_that_of_the_summaries(whole: Path) -> None:
    table = deciding(Study(results(whole)))
    content = json.loads((whole / "experiment.json").read_text())
    rows = []
    for cell in content["cells"]:
        summary = json.loads((whole / cell["folder"] / "summary.json").read_text())
        rows.append({**cell["axes"], "score": summary["accuracy"]["last"]})
    groups = pd.DataFrame(rows).groupby(["method", "partition.alpha"])["score"]
    for row, method in zip(table.rows, SHIFTS, strict=True):
        assert row[0].text == method
        for entry, alpha in zip(row[1:], (0.05, 0.3), strict=True):
            values = groups.get_group((method, alpha))
            assert entry.text == f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"
            assert entry.best == (method == groups.mean()[:, alpha].idxmax())
    written = table.data.set_index(["method", "setting"])
    assert written.loc[("Best", "alpha = 0.3"), "count"] == 12


def test_the_sentences_follow_from_the_tests(whole: Path) -> None:
    told = summary_of(Study(results(whole)))
    assert told[0].startswith("3 methods in 2 settings with 12 seeds, by accuracy")
    assert told[1].startswith(f"Shown to be worse than Best: {HOSTILE} by 0.")
    assert re.fullmatch(
        r"Not shown to differ from Best: Near \([+-]0\.\d{3}, p [01]\.\d{3}(; [a-z].*)?\)\.",
        told[2],
    )


def test_few_seeds_show_nothing_and_the_report_says_so(tmp_path: Path) -> None:
    axes = {"method": ["Best", "Near"], "partition.alpha": [0.05, 0.3], "seed": [0, 1, 2]}
    near = Study(results(make_experiment(tmp_path / "near", axes, lambda a: 0.5 + noise(a))))
    _, nothing = summary_of(near)
    assert nothing.startswith("Not tested, because a table of 1 comparison needs 6 seeds (seed=")


def test_captions_in_latex_are_one_sentence(hostile: tuple[Path, report.Written]) -> None:
    tables = sorted((hostile[0] / "report/tables").glob("*.tex"))
    captions = {t.stem: re.findall(r"\\caption\{(.*)\}", t.read_text())[0] for t in tables}
    assert captions["comparison"].startswith("Comparison: accuracy (last round) as the mean over")
    assert captions and all(re.fullmatch(r"[^;]+[^. ]\.", c) for c in captions.values())
    assert not any(". " in caption for caption in captions.values())


def test_a_report_is_whole_and_needs_nothing_else(hostile: tuple[Path, report.Written]) -> None:
    made, written = hostile
    home = made / "report"
    assert written.page == home / "index.html"
    text = written.page.read_text()
    page = Tags(text)
    assert all(sentence in page.text for sentence in written.sentences)
    links = [a[k] for _, a in page.tags for k in ("src", "href") if k in a]
    assert links and all(str(link).startswith(("data:", "#")) for link in links)
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    figures = sorted((home / "figures").glob("*.png"))
    assert len(images) == len(figures) > 5 and all(image["alt"] for image in images)
    for figure in figures:
        assert figure.with_suffix(".svg").read_bytes().startswith(b"<?xml")
        assert figure.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    names = {path.stem for path in (home / "tables").glob("*.csv")}
    assert names == {path.stem for path in (home / "tables").glob("*.tex")}
    assert {"comparison", "scores", "pairs", "all_scores", "seconds", "bytes", "runs"} <= names
    assert "python -m fedhet experiment=made" in page.text
    scores = pd.read_csv(home / "tables" / "scores.csv")
    assert set(scores["method"]) == set(SHIFTS)


def test_a_second_report_is_equal(hostile: tuple[Path, report.Written], tmp_path: Path) -> None:
    made, written = hostile
    assert report.write(made, tmp_path).page.read_bytes() == written.page.read_bytes()


def test_nothing_in_a_file_can_change_the_page(hostile: tuple[Path, report.Written]) -> None:
    made, written = hostile
    page = Tags(written.page.read_text())
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not [a for _, a in page.tags if "onerror" in a]
    assert page.text.count(HOSTILE) > 10
    markdown = (made / "report" / "report.md").read_text()
    listing = re.compile(r"^    .*$", re.MULTILINE)
    assert "<img" not in listing.sub("", markdown).replace(r"\<img", "")
    assert "**b**" not in listing.sub("", markdown).replace(r"\*\*b", "")
    for path in (made / "report" / "tables").glob("*.tex"):
        assert "\\input" not in path.read_text() and "x_1" not in path.read_text()


def test_divergence_is_a_result(experiment: Path) -> None:
    """A run whose loss is null counts with its score, one that failed by NaN counts as 0."""
    cells = json.loads((experiment / "experiment.json").read_text())["cells"]
    near = [experiment / c["folder"] for c in cells if c["axes"]["method"] == "Near"]
    change(near[0] / "summary.json", loss=None)
    rounds = (near[0] / "rounds.jsonl").read_text().splitlines()
    last = {**json.loads(rounds[-1]), "loss_global": None}
    (near[0] / "rounds.jsonl").write_text("\n".join([*rounds[:-1], json.dumps(last)]) + "\n")
    reason = "client 4 failed in phase 'train', step 1: holds NaN or infinite values"
    none = {"accuracy": {"last": None}, "acc_clients_mean": None, "loss": None}
    change(near[1] / "summary.json", status="failed", reason=reason, **none)
    write(near[1] / "cell.json", {"format": 1, "status": "failed", "reason": reason})
    study = Study(results(experiment))
    (row,) = [row for row in deciding(study).rows if row[0].text == "Near"]
    own = [json.loads((folder / "summary.json").read_text())["accuracy"]["last"] for folder in near]
    values = [value if value is not None else 0.0 for value in own[: len(SEEDS)]]
    assert row[1].text.startswith(f"{np.mean(values):.3f} ± ")
    assert row[1].text.endswith("(2 diverged)")
    assert study.results.missing.empty
    assert any(sentence.endswith(": Near in 2 of 24 runs.") for sentence in summary_of(study))


@pytest.mark.parametrize("metric", ["last", "last_k", "worst"])
def test_a_method_that_always_diverges_is_charged_with_it(tmp_path: Path, metric: str) -> None:
    axes = {"method": ["Good", "Gone"], "seed": [0, 1]}
    chosen = {"compare": "method", "metric": metric, "reference": None}
    made = make_experiment(tmp_path / "made", axes, lambda axes: 0.6, report=chosen)
    none = {"accuracy": None, "acc_clients_mean": None, "acc_clients_worst_decile": None}
    for cell in json.loads((made / "experiment.json").read_text())["cells"]:
        if cell["axes"]["method"] == "Gone":
            reason = "client 4 failed in phase 'train', step 1: holds NaN or infinite values"
            folder = made / cell["folder"]
            change(folder / "summary.json", status="failed", reason=reason, acc_last_k=None, **none)
            write(folder / "cell.json", {"format": 1, "status": "failed", "reason": reason})
    study = Study(results(made))
    means = study.counted.groupby("method")[metric].mean()
    assert means["Gone"] == 0.0 and means["Good"] > 0.0


def test_a_model_without_a_global_loss_has_not_diverged(experiment: Path) -> None:
    """Its runs have no global model, and are compared by the clients' scores."""
    cells = json.loads((experiment / "experiment.json").read_text())["cells"]
    for cell in cells:
        if cell["axes"]["method"] == "Near":
            folder = experiment / cell["folder"]
            change(folder / "summary.json", loss=None, accuracy={"last": None})
            lines = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
            gone = [{**line, "acc_global": None, "loss_global": None} for line in lines]
            text = "".join(json.dumps(line) + "\n" for line in gone)
            (folder / "rounds.jsonl").write_text(text)
    study = Study(results(experiment))
    assert not study.scores["diverged"].any()
    assert study.metric == "clients" and "not defined for Near" in study.notes[0]


def test_methods_without_personal_models_count_with_their_global_one(tmp_path: Path) -> None:
    axes = {"method": ["Own", "Shared"], "seed": [0, 1]}
    chosen = {"compare": "method", "metric": "personal", "reference": "Shared"}
    made = make_experiment(tmp_path / "made", axes, lambda axes: 0.6, report=chosen)
    for number in (0, 1):
        path = made / "cells" / f"cell-{number:03d}" / "summary.json"
        change(path, models=["global", "personal"], personal={"last": 0.9, "best_val": 0.9})
    study = Study(results(made))
    assert study.metric == "personal" and "without such models" in study.notes[0]
    means = study.counted.groupby("method")["personal"].mean()
    assert means.to_dict() == {"Own": pytest.approx(0.9), "Shared": pytest.approx(0.6)}


def test_a_threshold_that_is_never_reached_says_so(experiment: Path) -> None:
    cells = json.loads((experiment / "experiment.json").read_text())["cells"]
    for cell in cells:
        reached = cell["axes"]["method"] == "Best" and cell["axes"]["seed"] < 5
        cost = {"rounds": 3, "bytes": 3000, "seconds": 0.3} if reached else {}
        entry = {"accuracy": 0.8, "rounds": None, "bytes": None, "seconds": None, **cost}
        change(experiment / cell["folder"] / "summary.json", targets=[entry])
    table = thresholds(Study(results(experiment)))
    assert table is not None
    texts = {(row[0].text, row[1].text): [entry.text for entry in row[2:]] for row in table.rows}
    wanted = ["accuracy 0.8", "3.0 ± 0.0", "3 kB", "0.30 ± 0.00", "5 of 12"]
    assert texts["alpha = 0.3", "Best"] == wanted
    never = ["accuracy 0.8", *["never reached"] * 3, "0 of 12"]
    assert texts["alpha = 0.05", "Near"] == never


def test_folders_without_a_peak_of_memory_say_so(whole: Path) -> None:
    assert {row[5].text for row in run_costs(Study(results(whole))).rows} == {"not recorded"}


def test_the_bytes_of_a_run_are_those_of_all_kinds(experiment: Path) -> None:
    cells = json.loads((experiment / "experiment.json").read_text())["cells"]
    for cell in cells:
        sent = {"up": {"model": 5000, "own.extra": 250}, "down": {"model": 7000}}
        change(experiment / cell["folder"] / "summary.json", bytes=sent)
    for row in run_costs(Study(results(experiment))).rows:
        assert [entry.text for entry in row[3:5]] == ["5.25 kB", "7 kB"]


def test_mixed_versions_of_the_code_are_named(experiment: Path) -> None:
    change(experiment / "cells" / "cell-003" / "cell.json", code={"version": "0.2.0"})
    (warning,) = mixed_code(Study(results(experiment)))
    assert "version 0.1.0 in 71; version 0.2.0 in 1" in warning


def test_another_commit_with_the_same_code_is_no_other_version(tmp_path: Path) -> None:
    made = make_experiment(tmp_path / "made", {"method": ["A", "B"]}, lambda _: 0.5)
    for number, commit in enumerate(("aaa", "bbb")):
        code = {"version": "0.1.0", "commit": commit, "digest": "same"}
        change(made / "cells" / f"cell-00{number}" / "cell.json", code=code)
    assert mixed_code(Study(results(made))) == []
    code = {"version": "0.1.0", "commit": "aaa", "digest": "other"}
    change(made / "cells" / "cell-001" / "cell.json", code=code)
    (warning,) = mixed_code(Study(results(made)))
    assert "version 0.1.0 digest same in 1; version 0.1.0 digest other in 1" in warning


@pytest.mark.usefixtures("undrawn")
def test_nothing_of_an_earlier_report_stays(tmp_path: Path) -> None:
    """Without the runs of one of two methods there is a table more, and a figure less."""
    axes = {"method": ["A", "B"], "seed": [0, 1]}
    made = make_experiment(tmp_path / "made", axes, lambda a: 0.5 + a["seed"] / 100)
    home, away = made / "report", [made / "cells" / f"cell-00{number}" for number in (2, 3)]
    report.write(made)
    whole = {path.relative_to(home) for path in home.rglob("*.*")}
    for cell in away:
        cell.rename(tmp_path / cell.name)
    report.write(made)
    assert (home / "tables" / "missing.csv").exists()
    assert (home / "figures" / "differences.svg").exists() < (
        Path("figures/differences.svg") in whole
    )
    for cell in away:
        (tmp_path / cell.name).rename(cell)
    report.write(made)
    assert {path.relative_to(home) for path in home.rglob("*.*")} == whole


def test_the_package_offers_both() -> None:
    assert fedhet.results is results and fedhet.report is report


def test_titles_of_panels_tell_the_settings_apart() -> None:
    long = "plugin.fedlex.c_exp=1.0"
    settings = [f"dataset=mnist, client.lr={lr}, {long}" for lr in (0.1, 0.2)]
    _, axes = panels([*settings, "dataset=mnist, client.lr=0.2"])
    titles = ["client.lr=0.1, " + long, "client.lr=0.2, " + long, "client.lr=0.2"]
    assert [one.get_title() for one in axes] == titles
    _, (single,) = panels([settings[0]])
    assert re.fullmatch(r"dataset=mnist, client\S*….*fedlex\.c_exp=1\.0", single.get_title())
    assert [one.get_title() for one in panels(["a=1", "a=1"])[1]] == ["a=1", "a=1"]

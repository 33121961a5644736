"""The files of the reproductions: each is read, composes at every scale, and fits its runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedhet.core.errors import ConfigError
from fedhet.runs.config import catalogue, composition
from fedhet.study import cells, definition, tuning
from fedhet.study.definition import Experiment
from papers import measures
from papers import paper as papers
from papers.command import command_lines, list_text, main
from papers.paper import Paper

SLOW = pytest.mark.slow
EVERY = {paper.name: paper for paper in papers.every()}
# The tables and figures of the five papers that show results.
WANTED = {
    "fednorm": "table1 table2 table3 figure1 figure2",
    "fedlex": "table1 table2 table3 table4 figure2 figure3 figure4 figure5",
    "fedgmm": "figure1 figure2 figure3 figure4 figure5 figure6",
    "fedsa": "table1 table2 table3 table4 table5 figure1 figure2 figure5 figure6 figure7 figure8",
    "feddisk": "table1 table2 figure3 figure4 figure5 figure6 figure7",
}


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the only reproduction, own/table1; the test writes the file."""
    monkeypatch.setattr(catalogue, "CONF", tmp_path / "conf")
    file = tmp_path / "conf" / "experiment" / "own" / "table1.yaml"
    file.parent.mkdir(parents=True)
    return file


def experiment(paper: Paper, scale: str) -> Experiment:
    found = definition.read(command_lines(paper, [f"scale={scale}"]))
    assert found is not None
    return found


def test_every_table_and_figure_has_its_runs() -> None:
    leading = {name for paper in EVERY.values() for name in (*paper.also, paper.name)}
    wanted = [f"{paper}/{place}" for paper, words in WANTED.items() for place in words.split()]
    assert not [name for name in wanted if name not in leading]


def test_every_file_says_what_is_compared_and_what_was_chosen() -> None:
    unsaid, twice = [], []
    for name, paper in EVERY.items():
        complete = {"paper", "cpu", "smoke"} <= set(paper.data)
        complete &= set(paper.compared) == {"paper", "cpu", "smoke"} | set(paper.data)
        if not (complete and paper.choices and (paper.figures or paper.claims)):
            unsaid.append(name)
        for measure in paper.measures:
            measures.check(measure)
        places = [(str(sorted(f.axes.items())), f.method, f.measure) for f in paper.figures]
        if len(set(places)) < len(places):
            twice.append(name)
    assert not unsaid and not twice


def compose_a_run(name: str, scale: str) -> None:
    paper = EVERY[name]
    found = experiment(paper, scale)
    labels = papers.as_text(found.labels)
    papers.refuse_open_axes(paper, str(found.report["compare"]), labels)
    last = cells.runs(found)[-1]  # of the paper's method
    cfg = composition.compose(last.overrides).cfg
    assert cfg.privacy.min_count == 0  # the literal method
    if scale == "smoke":
        assert cfg.dataset.name in ("digits", "heart_disease")  # parts of the package
        assert cfg.rounds <= 2


@pytest.mark.parametrize(
    ("name", "scale"),
    [("fedgmm/figure6", "smoke"), ("peers/fedbench", "paper"), ("fedlex/figure4", "tuned")],
)
def test_a_reproduction_composes(name: str, scale: str) -> None:
    compose_a_run(name, scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_a_reproduction_composes_at_every_scale(name: str) -> None:
    for scale in EVERY[name].data:
        compose_a_run(name, scale)


@pytest.mark.matrix
@pytest.mark.parametrize("name", EVERY)
def test_all_runs_of_a_reproduction_fit_together(name: str) -> None:
    for scale in EVERY[name].data:
        cells.check(cells.covering(experiment(EVERY[name], scale)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("fedgmm/figure6", "fedlex/table4") else SLOW)
        for name in EVERY
    ],
)
def test_figures_and_claims_name_what_is_run_at_the_papers_scale(name: str) -> None:
    """The comparison would leave out labels of another scale without a message."""
    paper = EVERY[name]
    found = experiment(paper, "paper")
    axis = str(found.report["compare"])
    labels = papers.as_text(found.labels)
    places = [{**figure.axes, axis: figure.method} for figure in paper.figures]
    places += [claim.where for claim in paper.claims]
    places += [place for claim in paper.claims for place in (claim.greater, *claim.than)]
    for place in places:
        for key, label in place.items():
            assert label in labels.get(key, ()), f"{name}: {key}={label}"
    for method, host in paper.hosts.items():
        assert {method, host} <= set(labels[axis]), f"{name}: {method}: {host}"


@pytest.mark.parametrize(
    "names", [["fedlex/table4"], pytest.param([*EVERY], marks=SLOW, id="every")]
)
def test_every_method_has_as_many_trials_as_its_host(names: list[str]) -> None:
    tuned = 0
    for name in names:
        found = experiment(EVERY[name], "cpu")
        if found.tuning is None:
            continue
        tuned += 1
        methods = found.axes[str(found.report["compare"])]
        spaces = [found.tuning.space_of([value.label]) for value in methods]
        assert len({len(tuning.points(s, found.tuning.budget)) for s in spaces}) == 1, name
    assert tuned


def test_the_list_needs_no_large_package(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; from fedhet.__main__ import main; main(['reproduce', '--list']);"
        "sys.exit(bool({'torch', 'pandas', 'flwr', 'hydra'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in EVERY)
    assert main(["--list", "fedgmm"]) == 0
    assert "fedgmm/figure6" in capsys.readouterr().out
    assert "fedlex" not in list_text(["fedgmm"])


def test_no_configuration_names_a_function_of_papers() -> None:
    """Packages in the clone next to fedhet are found, but not trusted."""
    with pytest.raises(ConfigError, match=r"papers\.tables\.replace .*trusted"):
        composition.compose(["plugin=[fednorm]", "plugin.fednorm._target_=papers.tables.replace"])


def test_a_figure_that_other_runs_show_leads_to_them() -> None:
    assert papers.find("fedgmm/figure4") == papers.find("fedgmm/figure6")


def test_a_wrong_name_is_told() -> None:
    with pytest.raises(ConfigError, match=r"'fedlex/table9' .*mean fedlex/table"):
        main(["fedlex/table9"])
    with pytest.raises(ConfigError, match=r"name one reproduction, .*2"):
        main(["fedlex/table1", "fedlex/table2"])
    with pytest.raises(ConfigError, match="scale=cpu "):
        main(["--verdicts", "folder", "scale=cpu"])
    with pytest.raises(ConfigError, match=r"not .*client\.lr, "):
        main(["fedgmm/figure6", "scale=smoke", "client.lr=0.1,0.2"])
    with pytest.raises(ConfigError, match=r"--list nonsense: "):
        main(["--list", "nonsense"])
    with pytest.raises(ConfigError, match=r"scale=cpuu .*mean cpu"):
        main(["fedlex/table1", "scale=cpuu"])


FILE = """\
# @package _global_
# a paper of one's own
axes:
  method: [fedavg, fedprox]
  clients: {5: partition.clients=5, 20: partition.clients=20}
  partition.alpha: 1
  seed: range(0,3)
paper:
  source: A paper, table 1
"""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("  figurs: []", "paper=figurs "),
        ("  unit: permille", "paper.unit=permille "),
        ("  compared: {cpu: all}", "paper.compared.cpu=all "),
        ("  figures: [{method: fedavg}]", "`values`"),
        ("  figures: [{values: {fedavg: [1, 2, 3]}}]", "figure"),
        ("  claims: [{says: x, greater: {method: fedavg}}]", "`than`"),
        ("  claims: [{says: x, wher: {seed: 0}}]", "paper.claims=wher "),
        ("  figures: [{client: 5, values: {fedavg: 1}}]", "paper=client "),
        ("  figures: [{clients: 6, values: {fedavg: 1}}]", "paper: clients=6 "),
        ("  figures: [{values: {fedavgg: 1}}]", "paper: method=fedavgg "),
        ("  hosts: {fedprox: fedavgg}", "paper: method=fedavgg "),
        ("  reasons: {FedAvg: none}", "paper: method=FedAvg "),
        (
            "  claims: [{says: x, greater: {clients: 20}, than: {clients: 6}}]",
            "paper: clients=6 ",
        ),
    ],
)
def test_a_wrong_file_is_told(own_file: Path, lines: str, message: str) -> None:
    own_file.write_text(FILE + lines + "\n")
    with pytest.raises(ConfigError, match=message):
        papers.every()


def test_a_paper_of_ones_own(own_file: Path) -> None:
    own_file.write_text(
        FILE
        + "  unit: percent\n  figures:\n"
        + "    - {clients: 5, partition.alpha: 1, values: {fedavg: [50, 2], fedprox: 60}}\n"
    )
    figures = papers.find("own/table1").figures
    assert {tuple(f.axes.items()) for f in figures} == {
        (("clients", "5"), ("partition.alpha", "1"))
    }
    assert [(f.value, f.spread) for f in figures] == [(0.5, 0.02), (0.6, None)]


def test_an_unknown_measure_is_told_before_the_runs(own_file: Path) -> None:
    own_file.write_text(FILE + "  measure: lastt\n  figures: [{values: {fedavg: 1}}]\n")
    with pytest.raises(ConfigError, match=r"measure 'lastt' .*none .*last"):
        main(["own/table1", "clients=5"])

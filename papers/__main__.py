"""Make the papers' pages, with their pictures, from the kept results.

python -m papers              write the pages into pages/, and the tables into docs/reproduction.md
                              and docs/tuning.md
python -m papers FOLDER...    first keep the results of these folders: reproductions, and the
                              experiments leaderboard, leaderboard_personal, hospitals,
                              helps/search, helps/confirm, helps/compute, design and
                              design_hospitals
python -m papers --check      write nothing; exit code 1 if tables of docs/ are out of date

papers/results/ has a csv file for each table. All reproductions share times.csv (durations) and
curves.csv (accuracies by round).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from fedhet.core.errors import ConfigError
from fedhet.runs.cli.exits import report_error
from fedhet.study.estimate import in_words
from fedhet.study.report.compared import Study
from fedhet.study.report.document import escaped
from fedhet.study.report.plots import curve_points
from fedhet.study.report.results import results
from papers import design, helps, leaderboard, paper, picture, table
from papers.judge import judge
from papers.tables import HOME, RESULTS, TIMES, check_experiment, kept, markdown, note_time, replace

DOCS = [HOME.parent / "docs" / name for name in ("reproduction.md", "tuning.md")]
PAGES = HOME.parent / "pages"
BLOCK = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end table -->)", re.DOTALL)
CURVES = ["reproduction", "scale", "setting", "method", "round", "mean", "std"]
MOST_POINTS = 25  # of a kept curve
# Measures that curves of the accuracy do not explain.
WITHOUT_CURVES = {
    *("rank", "made_size", "minutes_per_round", "classes_per_client"),
    *("change_variance", "dispersion", "similarity", "peak_distance"),
}


# ---- from folders to the results
def take_over(folder: Path, home: Path = RESULTS) -> None:
    """Write the results of an experiment's folder to papers/results.

    Raises:
        ConfigError: no results are kept of this experiment, or the runs have other settings.
    """
    read = results(folder)
    name = str(read.source.experiment.get("experiment"))
    if name in (*leaderboard.BOARDS, *design.EXPERIMENTS) or name.startswith("helps/"):
        check_experiment(read)
    ended = [cell for cell in read.source.cells if cell.counts]
    trials = sum(cell.trial for cell in ended)
    seconds = round(sum(cell.summary["seconds"]["total"] for cell in ended))
    scale = ""
    if name in leaderboard.BOARDS:
        leaderboard.take_over(read, home / f"{name}.csv")
    elif name in design.EXPERIMENTS:
        design.keep(read, home / design.POOL.name)
    elif name.startswith("helps/"):
        stage = name.removeprefix("helps/")
        helps.keep(read, stage, home / f"helps-{stage}.csv")
    else:
        lines = table.records(judge(folder))
        scale = lines[0]["scale"]
        replace(home / _file(name), pd.DataFrame(lines, columns=table.FIELDS), ["scale"])
        if lines[0]["measure"].partition("@")[0] not in WITHOUT_CURVES:
            points = curve_points(Study(read)).assign(reproduction=name, scale=scale)
            groups = points.groupby(["setting", "method"])["round"]
            every = np.ceil(groups.transform("size") / MOST_POINTS)
            few = points.loc[groups.cumcount(ascending=False) % every == 0, CURVES].round(3)
            few = few.astype(str).replace("nan", "")
            replace(home / "curves.csv", few, ["reproduction", "scale"])
    note_time(home / "times.csv", name, scale, len(ended) - trials, trials, seconds)


def _file(reproduction: str) -> str:
    return f"{reproduction.replace('/', '-')}.csv"


# ---- from the results to the pages
def filled(text: str) -> str:
    """Fill each table of a page in between its two comments."""
    return BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def listed() -> str:
    """Make the table of all reproductions with results: their time and their verdicts."""
    times = kept(RESULTS / "times.csv", TIMES).set_index(["reproduction", "scale"])["seconds"]
    rows = []
    for one in paper.every():
        if tallies := [
            f"{scale}: {table.tally(lines).partition(': ')[2]}" for scale, lines in _results(one)
        ]:
            seconds = times.get((one.name, "cpu"))
            rows.append(
                {
                    "reproduction": f"`{one.name}`",
                    "time at cpu": in_words(seconds) if seconds else "not measured",
                    "results": "; ".join(tallies),
                }
            )
    return markdown(rows)


def _results(one: paper.Paper) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield each scale of a reproduction with results, and the lines of these."""
    path = RESULTS / _file(one.name)
    lines = table.read_csv(path, one) if path.exists() else []
    for scale in dict.fromkeys(line["scale"] for line in lines):
        yield scale, [line for line in lines if line["scale"] == scale]


def reproductions(folder: Path) -> Iterator[str]:
    """Yield the parts of the page of all results; draw its pictures in the folder."""
    curves = pd.read_csv(RESULTS / "curves.csv")
    yield "# The papers' tables: results"
    yield "[The papers' tables](../docs/reproduction.md) explains how to read these tables."
    for one in paper.every():
        for scale, lines in _results(one):
            first = lines[0]
            yield f"## {escaped(first['source'])}, scale {scale}"
            changed = f" Changed: `{first['changed']}`." if first["changed"] else ""
            yield f"{table.tally(lines).capitalize()}. fedhet {first['code']}.{changed}"
            yield f"Data: {escaped(one.data.get(scale, one.data['cpu']))}."
            yield table.as_markdown(lines).rstrip()
            name = f"{one.name.replace('/', '-')}-{scale}"
            own = curves[(curves["reproduction"] == one.name) & (curves["scale"] == scale)]
            drawn = picture.draw(lines, one, folder, f"{name}-{picture.NAME}")
            for file in [*drawn, *picture.curves(own, name, folder)]:
                yield f"![{file.alt}]({folder.name}/{file.name}.svg)"


def _board(name: str) -> str:
    every, folder = pd.read_csv(RESULTS / f"{name}.csv"), PAGES / name
    drawn = leaderboard.picture(every[every["kind"] == "run"], leaderboard.BOARDS[name], folder)
    pictures = (f"![{one.alt}]({folder.name}/{one.name}.svg)\n\n{one.caption}" for one in drawn)
    return "\n\n".join([*pictures, *leaderboard.tables(name, every)])


def _overall(name: str) -> str:
    every, board = pd.read_csv(RESULTS / f"{name}.csv"), leaderboard.BOARDS[name]
    runs = every[every["kind"] == "run"]
    return "\n\n".join(leaderboard.overall(runs, board.score, pooled=board.pooled))


def _equal_steps() -> str:
    runs = pd.read_csv(RESULTS / "leaderboard.csv").query("kind == 'run'")
    return "\n\n".join([*leaderboard.at_equal_steps(runs)][1:])  # without the heading


def _helps(stage: str) -> pd.DataFrame:
    return pd.read_csv(RESULTS / f"helps-{stage}.csv")


TABLES: dict[str, Callable[[], str]] = {
    "reproductions": listed,
    **{f"{name}, all settings": partial(_overall, name) for name in leaderboard.BOARDS},
    **{name: partial(_board, name) for name in leaderboard.BOARDS},
    "leaderboard, equal steps": _equal_steps,
    "searched": lambda: helps.searched(_helps("search")),
    "confirmed": lambda: helps.confirmed(_helps("search"), _helps("confirm")),
    "computed": lambda: helps.computed(_helps("compute")),
    "design, noise": lambda: design.noise(pd.read_csv(design.POOL)),
    "design, errors": lambda: design.errors(pd.read_csv(design.POOL)),
}


def main(argv: Sequence[str]) -> int:
    """Run the command with these arguments, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m papers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    try:
        for folder in options.folders:
            take_over(folder)
    except ConfigError as error:
        return report_error(error)
    pages = {path: path.read_text(encoding="utf-8") for path in DOCS}
    made = {path: filled(text) for path, text in pages.items()}
    if options.check:
        for path in (others := [path for path in DOCS if made[path] != pages[path]]):
            print(
                f"docs/{path.name} has other tables than papers/results; run python -m papers to"
                " update it"
            )
        return int(bool(others))
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    PAGES.mkdir(exist_ok=True)
    for name in ("leaderboard.md", "where_it_helps.md"):
        page = filled((HOME / name).read_text(encoding="utf-8"))
        (PAGES / name).write_text(page, encoding="utf-8")
    text = "\n\n".join(reproductions(PAGES / "reproduction")) + "\n"
    (PAGES / "reproduction.md").write_text(text, encoding="utf-8")
    print(f"the pages are in {PAGES}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

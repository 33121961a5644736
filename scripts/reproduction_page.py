"""Write the generated parts of docs/reproduction.md, from conf/ and from docs/reproduction/*.csv.

python scripts/reproduction_page.py FOLDER...  publish the results of these reproductions first
python scripts/reproduction_page.py            write them
python scripts/reproduction_page.py --check    say whether they are up to date

A result is published by copying the report/reproduction.csv of its folder, and figures beside it,
to docs/reproduction/<paper>-<table>-<scale>.csv and .svg. times.csv gets the seconds of its runs;
before that it may have those of `reproduce --estimate --times docs/reproduction/times.csv`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # this checkout, wherever it is started

from pages import filled, finished, head, write_or_check  # noqa: E402

from fedhet.report.exports import escaped  # noqa: E402
from fedhet.reproduce import paper as papers  # noqa: E402
from fedhet.reproduce import picture, table, times  # noqa: E402
from fedhet.reproduce.estimate import in_words  # noqa: E402

PAGE = "docs/reproduction.md"
FOLDER = "docs/reproduction"
TIMES = "times.csv"
LEVELS = (picture.NAME, "Our figures beside the paper's")
# The other figure of the report that is shown, by what the first line of the table measures.
FIGURES: dict[str, tuple[str, str] | None] = {
    "rank": ("critical-distance", "Mean ranks, and the distance that is critical"),
    # No figure: measures of single rounds, and others of which curves of the accuracy say nothing.
    **dict.fromkeys(("made_size", "minutes_per_round", "classes_per_client")),
    **dict.fromkeys(("change_variance", "dispersion", "similarity", "peak_distance")),
}
CURVES = ("curves-by-round", "Accuracy by round")


def publish(folder: Path, root: Path) -> None:
    """Copy what is shown of a reproduction from its folder to docs/."""
    source = folder / "report" / "reproduction.csv"
    first = table.read_csv(source)[0]
    name = _file_name(first["reproduction"], first["scale"])
    shutil.copyfile(source, root / FOLDER / f"{name}.csv")
    for earlier in _drawn(root, name):
        earlier.unlink()
    figures = folder / "report" / "figures"
    if figure := FIGURES.get(first["measure"].partition("@")[0], CURVES):
        for drawn in figures.glob(f"{figure[0]}*.svg"):  # one or several
            part = drawn.stem.removeprefix(figure[0])
            shutil.copyfile(drawn, root / FOLDER / f"{name}{part}.svg")
    for drawn in (folder / "report").glob(f"{LEVELS[0]}*.svg"):
        shutil.copyfile(drawn, root / FOLDER / f"{name}-{drawn.name}")
    _note_time(root / FOLDER / TIMES, (first["reproduction"], first["scale"]), folder)


def _file_name(reproduction: str, scale: str) -> str:
    return f"{reproduction.replace('/', '-')}-{scale}"


def _drawn(root: Path, name: str) -> list[Path]:
    """The published figures of a reproduction: levels, and others that may be numbered."""
    found = (root / FOLDER).glob(f"{name}*.svg")
    return sorted(found, key=lambda path: (LEVELS[0] not in path.name, len(path.name), path.name))


def _note_time(path: Path, name: tuple[str, str], folder: Path) -> None:
    """Write the seconds of a folder's runs to times.csv, in the place of an estimate."""
    record = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    ended = list(finished(folder, record))
    trials = sum(one.cell["kind"] == "trial" for one in ended)
    seconds = round(sum(one.summary["seconds"]["total"] for one in ended))
    times.note(path, times.Time(*name, len(ended) - trials, trials, seconds))


def written(root: Path) -> str:
    """The page as it should be."""
    text = (root / PAGE).read_text(encoding="utf-8")
    for name, lines in (("list", _list(root)), ("results", _results(root))):
        start = f"<!-- reproductions: {name} -->"
        text = filled(text, start, "\n".join(lines), "<!-- end reproductions -->")
    return text


def _list(root: Path) -> Iterator[str]:
    known = {time[:2]: time.seconds for time in times.read(root / FOLDER / TIMES)}
    heads = ["reproduction", "what", "at scale paper", "at scale cpu", "time at cpu"]
    yield head([*heads, "results"])
    for paper in papers.every():
        seconds = known.get((paper.name, "cpu"))
        title = paper.title.partition("; also")[0]  # the source names these too
        cells = [
            escaped(f"{paper.source}: {title}"),
            *(escaped(paper.data.get(scale, "")) for scale in ("paper", "cpu")),
            in_words(seconds) if seconds else "not measured",
            _verdicts(root, paper),
        ]
        yield f"| `{paper.name}` | {' | '.join(cells)} |"


def _verdicts(root: Path, paper: papers.Paper) -> str:
    """How many comparisons have which verdict, at each scale that has been published."""
    published = {s: root / FOLDER / f"{_file_name(paper.name, s)}.csv" for s in paper.data}
    found = {s: table.tally(table.read_csv(p)) for s, p in published.items() if p.exists()}
    return "; ".join(f"{scale}, {tally}" for scale, tally in found.items()) or "not published"


def _results(root: Path) -> Iterator[str]:
    found = [path for path in sorted((root / FOLDER).glob("*.csv")) if path.name != TIMES]
    if not found:
        yield "No results have been published yet."
    for path in found:
        lines = table.read_csv(path)
        first = lines[0]
        yield f"### {escaped(first['source'])}, scale {first['scale']}"
        yield ""
        changed = f" Changed: `{first['changed']}`." if first["changed"] else ""
        yield f"{table.tally(lines).capitalize()}. fedhet {first['code']}.{changed}"
        yield ""
        yield table.as_markdown(lines)
        for drawn in _drawn(root, path.stem):
            _, what = FIGURES.get(first["measure"]) or CURVES
            what = LEVELS[1] if LEVELS[0] in drawn.name else what
            yield f"![{what}]({Path(FOLDER).name}/{drawn.name})"
            yield ""


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """Write the page, or compare it with --check; return 1 if it is not up to date."""
    for folder in (Path(word) for word in argv if word != "--check"):
        publish(folder, root)
    check = "--check" in argv
    return write_or_check(root, PAGE, written(root), "reproduction_page.py", check=check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m fedhet reproduce`: run a paper's table or figure, and compare it with the paper.

python -m fedhet reproduce --list [WORD]               list reproductions (with WORD in the name)
python -m fedhet reproduce fedlex/table1 scale=cpu     run it, and print the verdicts
python -m fedhet reproduce fedlex/table1 --estimate    estimate the time on this machine
python -m fedhet reproduce --verdicts FOLDER           compare finished runs with the paper

Further overrides change all runs, or an axis: seed=0,1 method=FedProx. The scale is paper (the
paper's settings and data), cpu (small data and models; the default) or smoke (two rounds on the
built-in digits).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet.core.errors import ConfigError
from fedhet.runs.cli.help import columns
from fedhet.runs.config.lines import by_key, value_of
from papers import paper as papers
from papers.paper import Paper

if TYPE_CHECKING:
    from fedhet.study.definition import Experiment

FOLDER = "reproductions"
SCALE = "cpu"


def main(argv: Sequence[str]) -> int:
    """Run the command with these arguments, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m fedhet reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="NAME | setting=value")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--list", action="store_true", help="list the reproductions")
    group.add_argument("--estimate", action="store_true", help="measure a few rounds only")
    group.add_argument(
        "--verdicts", type=Path, metavar="FOLDER", help="the folder of finished runs"
    )
    args = parser.parse_intermixed_args(argv)
    if args.list:
        print(list_text(args.words))
        return 0
    if args.verdicts:
        if args.words:
            raise ConfigError(
                f"reproduce --verdicts compares the runs in the folder, so"
                f" {' '.join(args.words)} has no effect; leave it out"
            )
        return verdicts(args.verdicts)
    names = [word for word in args.words if "=" not in word]
    overrides = [word for word in args.words if "=" in word]
    if len(names) != 1:
        raise ConfigError(
            f"reproduce: name one reproduction, not {len(names)};"
            " python -m fedhet reproduce --list shows all"
        )
    paper = papers.find(names[0])
    experiment = _experiment(paper, overrides)
    if args.estimate:
        from fedhet.study.estimate import estimate

        found = estimate(experiment)
        print(columns(found.rows()))
        print(found)
        return 0
    labels = papers.as_text(experiment.labels)
    papers.refuse_open_axes(paper, str(experiment.report["compare"]), labels)
    from fedhet.study import launch

    code, folder = launch.run_experiment(experiment)
    verdicts(folder)
    return code


def list_text(words: Sequence[str] = ()) -> str:
    """Return the names and titles of all reproductions, or of those with all words in the name."""
    rows = [
        (paper.name, paper.title)
        for paper in papers.every()
        if all(word in " ".join((paper.name, *paper.also)) for word in words)
    ]
    if not rows:
        raise ConfigError(
            f"reproduce --list {' '.join(words)}: no name has these words; python -m fedhet"
            " reproduce --list shows all"
        )
    return columns(rows)


def command_lines(paper: Paper, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a reproduction's experiment."""
    given = {key: value_of(line) for key, line in by_key(overrides).items()}
    if "experiment" in given:
        raise ConfigError(
            f"reproduce: {paper.name} is already an experiment; leave out"
            f" experiment={given['experiment']}"
        )
    scale = given.get("scale", SCALE)
    lines = [f"experiment={paper.name}", *overrides]
    if "scale" not in given:
        lines.insert(1, f"scale={scale}")
    if "hydra.sweep.dir" not in given:
        lines.append(f"hydra.sweep.dir={FOLDER}/{paper.name}/{scale}")
    return lines


def _experiment(paper: Paper, overrides: Sequence[str]) -> Experiment:
    """Return the experiment of a reproduction; first refuse measures that do not exist."""
    from fedhet.study import definition  # it loads hydra, which a list does not need
    from papers import measures

    for measure in sorted(paper.measures):
        measures.check(measure)
    experiment = definition.read(command_lines(paper, overrides))
    assert experiment is not None  # every reproduction has axes
    return experiment


def verdicts(folder: Path) -> int:
    """Compare the runs of a folder with the paper, write the comparison, and print it."""
    from papers import picture, table
    from papers.judge import judge

    comparison = judge(folder)
    report = folder / "report"
    page = table.write(comparison, report)
    picture.draw(table.records(comparison), comparison.paper, report)
    print(page.read_text(encoding="utf-8"), end="")
    print(f"comparison: {page}")
    return 0

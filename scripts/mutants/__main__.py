"""Whether the tests notice small mistakes.

    python scripts/mutants 0 60                       # 60 mutants of seed 0 against `make test`
    python scripts/mutants 0 60 --marks "not matrix" --tests-of a6e620b
    python scripts/mutants 0 60 --list

It first runs the selection once, with a probe before the statement of every mutant, and so learns
which tests reach it. Then each mutant is written into a copy of the repository, and the tests that
reach it run there, the cheapest first, until one fails. A mutant of what runs at import is tried
with the tests that reach its module. What is known is kept in the folder, so that a second call
goes on; of other mutants, tests or code nothing is taken from there. Two mutants are tried at a
time; with 60 of them it takes about as long as ten runs of the selection.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory

from draw import Mutant, draw, mutants

ROOT = Path(__file__).resolve().parents[2]
FAST = "not slow and not matrix"
LIMIT = 900  # seconds for the tests of one mutant; a mutant may run forever


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("seed", type=int)
    parser.add_argument("n", type=int)
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    parser.add_argument("--marks", default=FAST, help=f"pytest's -m: {FAST!r} unless given")
    parser.add_argument("--tests-of", default="", help="a commit whose tests/ is used")
    parser.add_argument("--only", default="", help="numbers of mutants, such as 3,17")
    parser.add_argument("--folder", type=Path, default=Path("mutants"))
    args = parser.parse_args()
    drawn = dict(enumerate(draw(ROOT, args.seed, args.n)))
    if args.list:
        for number, mutant in drawn.items():
            print(f"{number:3} {mutant}")
        return 0
    tree = _tree(args.tests_of)
    asked = "\n".join([*map(str, drawn.values()), args.marks, tree])
    folder = args.folder.resolve() / hashlib.sha256(asked.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    tests = _tests(folder, drawn, args.marks, tree)
    only = [int(one) for one in args.only.split(",") if one] or [*drawn]
    survivors = _tried(folder, {k: drawn[k] for k in only}, tests, tree)
    print(f"{len(only) - len(survivors)} of {len(only)} mutants are killed; these survive:")
    for number in survivors:
        print(f"{number:3} {drawn[number]}  ({len(tests[number])} tests reach it)")
    return 0


def _git(*words: str, index: str | None = None, text: bytes = b"") -> bytes:
    """Run git with a text to read, perhaps with another index than the repository's."""
    own = {"GIT_INDEX_FILE": index} if index else {}
    command = ["git", "-C", str(ROOT), *words]
    environment = {**os.environ, **own}
    return subprocess.run(
        command, env=environment, input=text, stdout=subprocess.PIPE, check=True
    ).stdout


def _tree(tests_of: str) -> str:
    """The git tree of the working tree, with the tests of another commit if one is named."""
    with TemporaryDirectory() as folder:
        index = f"{folder}/index"
        _git("add", "--all", index=index)
        if tests_of:
            _git("rm", "-r", "--cached", "--quiet", "tests", index=index)
            theirs = _git("ls-tree", "-r", tests_of, "tests", "pyproject.toml")
            _git("update-index", "--add", "--index-info", index=index, text=theirs)
        return _git("write-tree", index=index).decode().strip()


def _copied(place: Path, tree: str) -> None:
    """Write the tree's files to a place, as a repository of their own."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", place], input=_git("archive", tree), check=True)
    if (shared := ROOT.parent / "shared").exists() and not (place.parent / "shared").exists():
        (place.parent / "shared").symlink_to(shared)  # where the tests look for data sets
    subprocess.run(["git", "init", "--quiet", place], check=True)  # some tests list its files
    subprocess.run(["git", "add", "--all"], cwd=place, check=True)


def _pytest(place: Path, *options: str, limit: float | None = None) -> tuple[int, str]:
    """The exit code of pytest in the copy at `place`, and what it printed."""
    path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    printed = place.parent / "printed.txt"
    with printed.open("w") as out:
        child = subprocess.Popen(
            command,
            cwd=place,
            env={**os.environ, "PYTHONPATH": path},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = 124
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # what its tests left behind, too
        child.wait()
    text = printed.read_text(errors="replace")
    if code not in (0, 1, 2, 124):  # neither a failed test, an interruption nor the limit
        raise RuntimeError(f"pytest ended with {code}:\n{text[-2000:]}")
    return code, text


def _tests(folder: Path, drawn: dict[int, Mutant], marks: str, tree: str) -> dict[int, list[str]]:
    """For each mutant the tests that reach it, the cheapest first."""
    kept = folder / "tests.json"
    if not kept.exists():
        place = folder / "probed" / "repository"
        _copied(place, tree)
        shutil.copy(Path(__file__).with_name("reached.py"), place)
        for path in {mutant.path for mutant in drawn.values()}:
            _probe(place / path, path, drawn)
        spread = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
        _pytest(place, *spread, "-m", marks, "-p", "reached")
        reached, seconds = _reached(place / "reached.tsv")
        found = {k: sorted(reached[k] & {*seconds}, key=seconds.__getitem__) for k in drawn}
        kept.write_text(json.dumps(found, indent=1))
    return {int(k): v for k, v in json.loads(kept.read_text()).items()}


def _probe(file: Path, path: str, drawn: dict[int, Mutant]) -> None:
    """Write the probes of a file's mutants into it, the last one first."""
    source = file.read_text()
    entries = {mutant.statement for mutant in mutants(source, path)} - {None}
    probes: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for number, mutant in drawn.items():
        if mutant.path == path:
            for place in [mutant.statement] if mutant.statement else entries:
                probes[place].append(number)  # type: ignore[index]
    lines = source.splitlines(keepends=True)
    for (line, column), numbers in sorted(probes.items(), reverse=True):
        notes = "; ".join(f"__import__('reached').note({number})" for number in numbers)
        lines.insert(line - 1, " " * column + notes + "\n")
    file.write_text("".join(lines))


def _reached(file: Path) -> tuple[dict[int, set[str]], dict[str, float]]:
    """The tests that reach each mutant, and the seconds of those that pass without one."""
    tests: defaultdict[int, set[str]] = defaultdict(set)
    users: defaultdict[str, set[str]] = defaultdict(set)
    seconds: dict[str, float] = {}
    notes = []
    for line in file.read_text().splitlines():
        first, *rest = line.split("\t")
        if first == "passed":
            seconds[rest[0]] = float(rest[1])
        elif first.startswith("uses "):
            for fixture in rest:
                users[fixture].add(first.removeprefix("uses "))
        else:
            notes.append((int(first), rest[0]))
    for number, place in notes:
        tests[number] |= users.get(place, {place})
    return tests, seconds


def _tried(
    folder: Path, drawn: dict[int, Mutant], tests: dict[int, list[str]], tree: str
) -> list[int]:
    """Try the mutants, two at a time; return the numbers of those that survive."""
    kept = folder / "outcomes.json"
    outcomes: dict[str, str] = json.loads(kept.read_text()) if kept.exists() else {}
    places: Queue[Path] = Queue()
    for worker in "ab":
        places.put(folder / f"worker-{worker}" / "repository")

    def judge(number: int) -> None:
        place = places.get()
        try:
            outcomes[str(number)] = _outcome(place, drawn[number], tests[number], tree)
        finally:
            places.put(place)
        kept.write_text(json.dumps(outcomes, indent=1))
        print(f"{number:3} {drawn[number]}\n      {outcomes[str(number)]}", flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(judge, [number for number in drawn if str(number) not in outcomes]))
    return [number for number in drawn if outcomes[str(number)].startswith("survives")]


def _outcome(place: Path, mutant: Mutant, tests: Sequence[str], tree: str) -> str:
    """Whether the tests notice the mutant, and which one does."""
    if not tests:
        return "survives: no test reaches it"
    _copied(place, tree)
    mutant.apply(place)
    # The cheapest tests first, in a process of their own: most mutants die there.
    for some in filter(None, (tests[:40], tests[40:])):
        listed = place / "tests.txt"
        listed.write_text("\n".join(some))
        code, printed = _pytest(place, "-x", "--timeout", "120", f"@{listed}", limit=LIMIT)
        if code:
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
            return f"killed by {failed[1] if failed else printed[-200:].strip()}"
    return "survives"


if __name__ == "__main__":
    raise SystemExit(main())

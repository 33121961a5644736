"""Check that a change of the code leaves every result unchanged, to the last bit.

    python scripts/invariant HEAD~3                 # the working tree against a commit
    python scripts/invariant main --only 'scaffold|merge=' --keep /tmp/invariant
    python scripts/invariant --hashes               # writes tests/invariant/hashes.json

The script runs every configuration of cases.py from a worktree of the commit BASE and from the
working tree, in this environment. The values that fedhet.results reads from both must be the same:
hashes of the weights, cohorts, scores of the global model and of every client, privacy. Costs and
the places of files may differ. Exit code 1: something differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import files
from cases import cases, fast, names_in, slug
from compare import difference
from machine import kind
from values import digest

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("child.py")
HASHES = ROOT / "tests" / "invariant" / "hashes.json"

Cases = dict[str, list[str]]
Result = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """One of the two trees that are compared.

    Attributes:
        tree: the folder with fedhet/ and conf/.
        folder: the folder with the results.
    """

    tree: Path
    folder: Path

    def file(self, name: str) -> Path:
        """Return the file with the result of a configuration."""
        return self.folder / f"{slug(name)}.json"

    def results(self, chosen: Cases) -> dict[str, Result]:
        """Return the results by the names of their configurations."""
        return {name: json.loads(self.file(name).read_text()) for name in chosen}


def git(*words: str) -> str:
    """Run git in the repository and return its output."""
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(sides: Sequence[Side], chosen: Cases, scratch: Path, workers: int) -> None:
    """Run the configurations that have no result yet, many of them in each process.

    Args:
        sides: the trees.
        chosen: the configurations.
        scratch: a folder for temporary files and for the data that both trees share.
        workers: how many processes run at a time; each tree is divided into as many jobs.

    Raises:
        RuntimeError: a process has ended before it had run all of its configurations.
    """
    jobs = []
    for side in sides:
        side.folder.mkdir(parents=True, exist_ok=True)
        todo = [(slug(name), chosen[name]) for name in chosen if not side.file(name).exists()]
        jobs += [(side, dict(todo[part::workers])) for part in range(workers) if todo[part:]]
    places = [scratch / f"job-{number}" for number in range(len(jobs))]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(_child, *zip(*jobs, strict=True), places))


def _child(side: Side, todo: Cases, place: Path) -> None:
    """Run a job in a process that can import fedhet only from its tree."""
    place.mkdir()
    for name in todo:  # an interrupted call may have left it
        shutil.rmtree(side.folder / name, ignore_errors=True)
    job = {"folder": str(side.folder), "data": f"{place.parent}/data", "cases": todo}
    inherited = {name: value for name, value in os.environ.items() if name[:7] != "FEDHET_"}
    # A cache of its own: otherwise one tree would read the arrays that the other has decoded.
    own = {"FEDHET_CACHE": f"{place}/cache", "PYTHONPATH": str(side.tree), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-P", str(CHILD)],
        input=json.dumps(job),
        cwd=place,
        env={**inherited, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(f"{len(todo)} runs of {side.tree.name} have ended", file=sys.stderr, flush=True)
    if process.returncode:
        raise RuntimeError(
            f"a process of {side.tree} ended with exit code {process.returncode}:\n"
            f"{process.stdout[-2000:]}"
        )


def against(base: str, only: str, keep: Path, scratch: Path, workers: int) -> int:
    """Run the configurations from both trees; print the differences, and return their number.

    Raises:
        SystemExit: no configuration of BASE has a name that `only` matches.
    """
    # The name of BASE's folder has all that its results depend on, so that no old result is reused.
    sources = [CHILD.with_name(name).read_bytes() for name in ("child.py", "files.py", "cases.py")]
    known = hashlib.sha256(b"".join([kind().encode(), *sources])).hexdigest()[:12]
    sides = Side(scratch / "base", keep / f"{base}-{known}"), Side(ROOT, keep / "tree")
    shutil.rmtree(sides[1].folder, ignore_errors=True)
    git("worktree", "add", "--detach", str(sides[0].tree), base)
    try:
        every = cases(*names_in(sides[0].tree / "conf"))
        chosen = {name: lines for name, lines in every.items() if re.search(only, name)}
        if not chosen:
            sys.exit(
                f"--only {only}: no configuration has such a name; the names are {', '.join(every)}"
            )
        run(sides, chosen, scratch, workers)
    finally:
        git("worktree", "remove", "--force", str(sides[0].tree))
    old, new = (side.results(chosen) for side in sides)
    differing = 0
    for name in chosen:
        if found := difference(old[name], new[name]):
            differing += 1
            print(f"DIFFERS  {name}: {found}")
        elif old[name]["ended"] != "ran":
            print(f"{old[name]['ended']}  {name}")
    endings = Counter(result["ended"].partition(":")[0] for result in old.values())
    print(f"{len(chosen)} configurations, {differing} differ; at the base: {dict(endings)}")
    return differing


def keep_hashes(scratch: Path, workers: int) -> None:
    """Write this machine's hashes of the configurations that tests/invariant runs."""
    chosen = fast(*names_in(ROOT / "conf"))
    side = Side(ROOT, scratch / "tree")
    run([side], chosen, scratch, workers)
    results = side.results(chosen)
    if wrong := [
        f"{name} {result['ended']}" for name, result in results.items() if result["ended"] != "ran"
    ]:
        raise RuntimeError(f"no hashes are written: {', '.join(wrong)}")
    known = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    known[kind()] = {name: digest(result["values"]) for name, result in results.items()}
    HASHES.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    print(f"{len(chosen)} hashes for {kind()} in {HASHES.relative_to(ROOT)}")


def main() -> int:
    """Execute the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python scripts/invariant",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "base", nargs="?", default="HEAD", metavar="BASE", help="a commit; default: HEAD"
    )
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="run only configurations with such names"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes at a time; default: 2")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the run folders here, and reuse BASE's"
    )
    parser.add_argument("--hashes", action="store_true", help="write this machine's hashes and end")
    options = parser.parse_args()
    try:
        base = git("rev-parse", "--verify", f"{options.base}^{{commit}}")
    except subprocess.CalledProcessError as error:
        parser.error(f"{options.base}: {error.stderr.strip()}")
    with TemporaryDirectory(prefix="invariant-") as folder:
        scratch = Path(folder).resolve()
        files.make(scratch / "data")
        if options.hashes:
            keep_hashes(scratch, options.workers)
            return 0
        keep = (options.keep or scratch / "runs").resolve()
        return int(against(base, options.only, keep, scratch, options.workers) > 0)


if __name__ == "__main__":
    sys.exit(main())

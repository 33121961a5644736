"""Write docs/where_it_helps.md: a setting in which each of the papers' methods beats tuned FedAvg.

python scripts/where_it_helps.py search FOLDER     keep the runs of experiment=helps/search, and
                                                   write conf/experiment/helps/confirm.yaml
python scripts/where_it_helps.py confirm FOLDER    keep the runs of experiment=helps/confirm
python scripts/where_it_helps.py                   write the page from the runs that are kept
python scripts/where_it_helps.py --check           say whether the page is up to date
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # this checkout, wherever it is started

from pages import AsWritten, check_experiment, filled, finished, head, write_or_check  # noqa: E402

from fedhet.config.lines import key_of  # noqa: E402
from fedhet.experiment.code import Code  # noqa: E402
from fedhet.report import statistics  # noqa: E402

PAGE = "docs/where_it_helps.md"
KEPT = "docs/where_it_helps"
CONF = "conf/experiment/helps"
HOST = "FedAvg"
BESIDE = f"{HOST} beside "  # the label of the host's runs in a method's setting
AT_RATE = f"{HOST} at the rate of "  # those with the learning rate of the method's trials
SEEDS = "range(100,110)"  # none of them is a seed of the search or of its tuning
HEAD = """\
# @package _global_
# Each method in the setting in which it gained most in helps/search, beside FedAvg, on other seeds
# scripts/where_it_helps.py writes this file.
"""


# ---- from a folder to a CSV file
def keep(folder: Path, stage: str, path: Path) -> None:
    """Write the runs of an experiment's folder to a CSV file.

    Raises:
        SystemExit: a run is missing, or they are not those of the experiment's file.
    """
    record = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    check_experiment(folder, record, f"helps/{stage}")
    runs = [cell for cell in record["cells"] if cell["kind"] == "run"]
    there = list(finished(folder, {"cells": runs}))
    if len(there) < len(runs):
        raise SystemExit(f"{folder}: {len(there)} of {len(runs)} runs are there; run the others")
    rows = []
    for cell, _, code, summary in there:
        # A run that has diverged has no score; the method is charged with a score of 0.
        score = (summary.get("accuracy") or {}).get("last") if summary["status"] == "ok" else None
        rows.append(
            {
                **cell["axes"],
                "overrides": own_overrides(cell["overrides"], record["fixed"]),
                "tuned": json.dumps(cell["tuned"], sort_keys=True),
                "diverged": score is None,
                "accuracy": round(score or 0.0, 6),
                "sha256": str(summary.get("weights_sha256"))[:16],
                "code": Code.text(code),
            }
        )
    path.parent.mkdir(exist_ok=True)
    pd.DataFrame(rows).to_csv(path, index=False)


def own_overrides(lines: Sequence[str], fixed: Sequence[str]) -> str:
    """The overrides of a run without those of all runs and its seed."""
    return " ".join(line for line in lines if line not in fixed and key_of(line) != "seed")


# ---- from the search to the settings that are confirmed
def gains(search: pd.DataFrame) -> pd.DataFrame:
    """How much better than the host's each run is; the host's run has the same setting and seed."""
    blocks = search.pivot(index=["setting", "seed"], columns="method", values="accuracy")
    return blocks.drop(columns=HOST).sub(blocks[HOST], axis=0)


def chosen(search: pd.DataFrame) -> dict[str, str]:
    """Method -> the setting with its largest mean gain; of equal ones the first."""
    order = list(dict.fromkeys(search["setting"]))
    means = gains(search).groupby("setting").mean().reindex(order)
    return {method: str(means[method].idxmax()) for method in methods(search)}


def methods(search: pd.DataFrame) -> list[str]:
    """The methods that are compared with the host, in the order of the search."""
    return [str(name) for name in dict.fromkeys(search["method"]) if name != HOST]


def confirmation(search: pd.DataFrame, definition: str) -> str:
    """The text of confirm.yaml: what search.yaml fixes, and three labels for each method."""
    known = yaml.safe_load(definition)
    fixed = {name: known[name] for name in known if name not in ("axes", "tune", "report")}
    tuned = search.groupby(["setting", "method"])["tuned"].first()
    cases = {}
    for method, setting in chosen(search).items():
        own, host = (json.loads(tuned[setting, name]) for name in (method, HOST))
        rate = {"client.lr": own["client.lr"]}
        for label, name, values in (
            (method, method, own),
            (BESIDE + method, HOST, host),
            (AT_RATE + method, HOST, host | rate),
        ):
            cases[label] = [
                *_words(known["axes"]["setting"][setting]),
                *_words(known["axes"]["method"][name]),
                *(f"{key}={value}" for key, value in values.items()),
            ]
    notes = ["docs/where_it_helps.md has the tests; this page compares each case with each other."]
    rest = {"axes": {"case": cases, "seed": SEEDS}, "report": {"notes": notes}}
    return HEAD + yaml.safe_dump({**fixed, **rest}, sort_keys=False, width=100)


def _words(overrides: str | Sequence[str]) -> list[str]:
    return overrides.split() if isinstance(overrides, str) else list(overrides)


# ---- from the CSV files to the page
def page(root: Path) -> str:
    """The page as it should be."""
    search = pd.read_csv(root / KEPT / "search.csv")
    path = root / KEPT / "confirm.csv"
    runs = pd.read_csv(path) if path.exists() else None
    if runs is not None and not are_of(search, runs):
        runs = None  # of an earlier search, whose settings were others
    text = (root / PAGE).read_text(encoding="utf-8")
    for name, lines in (("search", _searched(search)), ("confirmed", _confirmed(search, runs))):
        text = filled(text, f"<!-- {name} -->", "\n".join(lines), f"<!-- end {name} -->")
    return text


def are_of(search: pd.DataFrame, runs: pd.DataFrame) -> bool:
    """Whether the runs of the confirmation have the settings that the search has found."""
    definition = (ROOT / CONF / "search.yaml").read_text(encoding="utf-8")
    cases = yaml.safe_load(confirmation(search, definition))["axes"]["case"]
    expected = runs["case"].map({label: " ".join(lines) for label, lines in cases.items()})
    return bool((runs["overrides"] == expected).all())


def _searched(search: pd.DataFrame) -> Iterator[str]:
    names, best = methods(search), chosen(search)
    means = gains(search).groupby("setting").mean()
    host = search[search["method"] == HOST].groupby("setting")["accuracy"].mean()
    yield head(["setting", HOST, *names])
    for setting in dict.fromkeys(search["setting"]):
        entries = []
        for method in names:
            text = f"{100 * means.loc[setting, method]:+.1f}"
            entries.append(f"**{text}**" if best[method] == setting else text)
        yield f"| {setting} | {host[setting]:.3f} | {' | '.join(entries)} |"
    yield ""
    yield f"{len(search)} runs; {' and '.join(sorted(set(search['code'])))}."


def _confirmed(search: pd.DataFrame, runs: pd.DataFrame | None) -> Iterator[str]:
    if runs is None:
        yield "Not run yet."
        return
    table = results(runs)
    heads = ["method", "setting", f"{HOST}'s trials chose", "the method's chose"]
    heads += [f"{HOST}'s accuracy", "the method's", "gain", "95 %", "wins", "p"]
    heads += ["gain at the same rate", "p", "verdict"]
    yield head(heads)
    settings = chosen(search)
    tuned = search.groupby(["setting", "method"])["tuned"].first()
    for method, setting in settings.items():
        row = table.loc[method]
        told = [_told(tuned[setting, name]) for name in (HOST, method)]
        verdict = "not shown"
        if row["p"] < statistics.LEVEL:
            by_rate = row["gain_at_rate"] <= 0 or row["p_at_rate"] >= statistics.LEVEL
            verdict = "by its learning rate" if by_rate else "**better**"
            verdict = verdict if row["gain"] > 0 else "worse"
        yield (
            f"| {method} | {setting} | {told[0]} | {told[1]}"
            f" | {row['host']:.3f} ± {row['host_std']:.3f}"
            f" | {row['mean']:.3f} ± {row['std']:.3f} | {100 * row['gain']:+.1f}"
            f" | {100 * row['low']:+.1f} to {100 * row['high']:+.1f}"
            f" | {row['wins']:.0f} of {row['pairs']:.0f} | {row['p']:.3f}"
            f" | {100 * row['gain_at_rate']:+.1f} | {row['p_at_rate']:.3f} | {verdict} |"
        )
    yield ""
    yield f"{len(runs)} runs; {' and '.join(sorted(set(runs['code'])))}."


def _told(tuned: str) -> str:
    return ", ".join(f"`{key}={value}`" for key, value in json.loads(tuned).items())


def results(runs: pd.DataFrame) -> pd.DataFrame:
    """Method -> its paired comparison with the host, which is tuned, or has the method's rate.

    Each `p` is after Holm's correction over the methods.

    Args:
        runs: `case` (a method, "FedAvg beside <method>", or "FedAvg at the rate of <method>"),
            `seed`, and `accuracy` in [0, 1].
    """
    blocks = runs.pivot(index="seed", columns="case", values="accuracy")
    rows = {}
    for method in (str(case) for case in blocks if not str(case).startswith(f"{HOST} ")):
        own, host = blocks[method], blocks[BESIDE + method]
        differences = (own - host).to_numpy()
        at_rate = (own - blocks[AT_RATE + method]).to_numpy()
        low, high = statistics.interval(differences)
        if np.isnan(low):  # differences that do not vary
            low = high = differences.mean()
        rows[method] = {
            "host": host.mean(),
            "host_std": host.std(),
            "mean": own.mean(),
            "std": own.std(),
            "gain": differences.mean(),
            "gain_at_rate": at_rate.mean(),
            "p_at_rate": statistics.wilcoxon(at_rate),
            "low": low,
            "high": high,
            "wins": int((differences > 0).sum()),
            "pairs": len(differences),
            "p": statistics.wilcoxon(differences),
        }
    table = pd.DataFrame.from_dict(rows, orient="index")
    for p in ("p", "p_at_rate"):
        table[p] = statistics.holm(table[p].to_numpy(float))
    return table


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """Write the page, or compare it with --check; return 1 if it is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=AsWritten)
    parser.add_argument("stage", nargs="?", choices=("search", "confirm"))
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    if (options.stage is None) != (options.folder is None):
        parser.error("search and confirm take the folder of their runs")
    if options.stage:
        keep(options.folder, options.stage, root / KEPT / f"{options.stage}.csv")
        if options.stage == "search":
            definition = (root / CONF / "search.yaml").read_text(encoding="utf-8")
            text = confirmation(pd.read_csv(root / KEPT / "search.csv"), definition)
            (root / CONF / "confirm.yaml").write_text(text, encoding="utf-8")
    return write_or_check(root, PAGE, page(root), "where_it_helps.py", check=options.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

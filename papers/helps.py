"""Where each method helps: settings in which each of the papers' methods beats tuned FedAvg."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from fedhet.core.errors import ConfigError
from fedhet.runs.config.lines import key_of
from fedhet.study.code import Code
from fedhet.study.report import statistics
from fedhet.study.report.compared import FEWEST_TUNING_SEEDS
from fedhet.study.report.results import Results
from papers.tables import HOME, markdown

CONF = HOME / "conf" / "experiment" / "helps"
HOST = "FedAvg"
BESIDE = f"{HOST} beside "  # label of FedAvg's runs in a method's setting
AT_RATE = f"{HOST} at the rate of "  # label of FedAvg's runs with the method's learning rate
# The comparisons of helps/compute: a form of FedGMM with a form of FedAvg.
COMPUTE = {
    "as published": ("FedGMM", HOST),
    "FedAvg with FedGMM's steps in each round": ("FedGMM", f"{HOST}, FedGMM's steps"),
    "both with FedAvg's steps in each round": ("FedGMM, FedAvg's steps", f"{HOST}, its steps"),
    "FedAvg with as many steps, in more rounds": ("FedGMM", f"{HOST}, more rounds"),
}
TUNING_SEEDS = 1  # in the search
SEEDS = "range(100,110)"  # neither the search nor its tuning has used them
HEAD = """\
# @package _global_
# Each method in the setting of its largest gain in helps/search, against FedAvg, on other seeds
# Internal: `python -m papers FOLDER`, with the folder of the search, writes this file.

"""


# ---- from a folder to a csv file
def keep(read: Results, stage: str, path: Path) -> None:
    """Write the runs of a stage (search, confirm, compute) to a csv file.

    Raises:
        ConfigError: a run is missing.
    """
    if len(read.missing):
        raise ConfigError(
            f"{read.source.folders[0]}: {len(read.missing)} runs are missing; run them first"
        )
    record = read.source.experiment
    overrides = {cell["folder"]: cell["overrides"] for cell in record["cells"]}
    rows = []
    for cell in read.cells:
        sound = cell.summary["status"] == "ok"
        # A run that has diverged has no score; the method is charged with a score of 0.
        score = (cell.summary.get("accuracy") or {}).get("last") if sound else None
        rows.append(
            {
                **cell.axes,
                "overrides": own_overrides(overrides[cell.name], record["fixed"]),
                "tuned": json.dumps(cell.tuned, sort_keys=True),
                "diverged": score is None,
                "accuracy": round(score or 0.0, 6),
                "steps": cell.summary.get("steps"),
                "sha256": str(cell.summary.get("weights_sha256"))[:16],
                "code": Code.text(cell.code),
                "cpu": read.environment(cell).get("cpu"),
            }
        )
    found = pd.DataFrame(rows)
    found.to_csv(path, index=False)
    if stage == "search":
        text = confirmation(found, (CONF / "search.yaml").read_text(encoding="utf-8"))
        (CONF / "confirm.yaml").write_text(text, encoding="utf-8")


def own_overrides(lines: Sequence[str], fixed: Sequence[str]) -> str:
    """Return the overrides of a run, without its seed and without overrides of all runs."""
    return " ".join(line for line in lines if line not in fixed and key_of(line) != "seed")


# ---- from the search to the settings for the confirmation
def gains(search: pd.DataFrame) -> pd.DataFrame:
    """Return each method's mean gain over FedAvg by setting; pairs share the setting and seed."""
    blocks = search.pivot(index=["setting", "seed"], columns="method", values="accuracy")
    own = blocks[[str(name) for name in dict.fromkeys(search["method"]) if name != HOST]]
    means = own.sub(blocks[HOST], axis=0).groupby("setting").mean()
    return means.reindex(list(dict.fromkeys(search["setting"])))


def chosen(search: pd.DataFrame) -> dict[str, str]:
    """Return method -> the setting with its largest mean gain; the first of equal settings."""
    return {str(method): str(name) for method, name in gains(search).idxmax().items()}


def confirmation(search: pd.DataFrame, definition: str) -> str:
    """Return the text of confirm.yaml: search.yaml's settings, and three labels per method."""
    known = yaml.safe_load(definition)
    fixed = {name: known[name] for name in known if name not in ("axes", "tune", "report")}
    tuned = search.groupby(["setting", "method"])["tuned"].first()
    cases = {}
    for method, setting in chosen(search).items():
        own, host = (json.loads(tuned[setting, name]) for name in (method, HOST))
        for label, name, values in (
            (method, method, own),
            (BESIDE + method, HOST, host),
            (AT_RATE + method, HOST, host | {"client.lr": own["client.lr"]}),
        ):
            cases[label] = [
                *_words(known["axes"]["setting"][setting]),
                *_words(known["axes"]["method"][name]),
                *(f"{key}={value}" for key, value in values.items()),
            ]
    notes = [
        "papers/where_it_helps.md has the tests; this report compares all cases with the first one."
    ]
    rest = {"axes": {"case": cases, "seed": SEEDS}, "report": {"notes": notes}}
    return HEAD + yaml.safe_dump({**fixed, **rest}, sort_keys=False, width=100)


def _words(overrides: str | Sequence[str]) -> list[str]:
    return overrides.split() if isinstance(overrides, str) else list(overrides)


# ---- from the csv files to the tables
def searched(search: pd.DataFrame) -> str:
    """Make the table of mean gains by setting and method; each method's largest gain is bold."""
    means, best = gains(search), chosen(search)
    host = search[search["method"] == HOST].groupby("setting")["accuracy"].mean()
    rows = []
    for name, row in means.iterrows():
        texts = {method: f"{100 * gain:+.1f}" for method, gain in row.items()}
        texts |= {m: f"**{text}**" for m, text in texts.items() if best[str(m)] == name}
        rows.append({"setting": str(name), HOST: f"{host[name]:.3f}", **texts})
    return f"{markdown(rows)}\n\n{_source(search)}"


def confirmed(search: pd.DataFrame, runs: pd.DataFrame) -> str:
    """Make the table of the paired comparison of each method in its setting, on new seeds.

    Args:
        search: the runs of the search.
        runs: the runs of the confirmation.
    """
    table = compared(runs)
    tuned = search.groupby(["setting", "method"])["tuned"].first()
    rows = []
    for method, setting in chosen(search).items():
        row = table.loc[method]
        host, own = (
            ", ".join(f"`{key}={value}`" for key, value in json.loads(tuned[setting, name]).items())
            for name in (HOST, method)
        )
        rows.append(
            {
                "method": method,
                "setting": setting,
                f"{HOST}'s trials chose": host,
                "the method's chose": own,
                **_shown(row),
                "difference at the same rate": f"{100 * row['gain_at_rate']:+.1f}",
                "p at the same rate": _p(row["p_at_rate"]),
                "verdict": verdict(row),
            }
        )
    return f"{markdown(rows)}\n\n{_source(runs)}"


def _shown(row: pd.Series) -> dict[str, str]:
    """Format the values of a result of `_paired`."""
    return {
        f"{HOST}'s accuracy": f"{row['host']:.3f} ± {row['host_std']:.3f}",
        "the method's": f"{row['mean']:.3f} ± {row['std']:.3f}",
        "difference": f"{100 * row['gain']:+.1f}",
        "95 %": f"{100 * row['low']:+.1f} to {100 * row['high']:+.1f}",
        "wins": f"{row['wins']:.0f} of {row['pairs']:.0f}",
        "p": _p(row["p"]),
    }


def _p(value: float) -> str:
    return statistics.NOT_TESTED if np.isnan(value) else f"{value:.3f}"


def verdict(row: pd.Series) -> str:
    """Return the verdict on a row of `compared`."""
    if not row["p"] < statistics.LEVEL:
        return statistics.NOT_TESTED if np.isnan(row["p"]) else statistics.NOT_SHOWN
    if row["gain"] <= 0:
        return "worse"
    by_rate = row["gain_at_rate"] <= 0 or row["p_at_rate"] >= statistics.LEVEL
    return "by its learning rate" if by_rate else "**better**"


def _source(runs: pd.DataFrame) -> str:
    return f"{len(runs)} runs; {' and '.join(sorted(set(runs['code'])))}."


def compared(runs: pd.DataFrame) -> pd.DataFrame:
    """Return method -> its paired comparisons with tuned FedAvg, and with FedAvg at its rate.

    The p-values of both comparisons of all methods are one family. A p-value of NaN means not
    tested. Comparisons with tuned FedAvg are not tested if the search tuned on too few seeds.

    Args:
        runs: columns `case` (a method, "FedAvg beside <method>" for tuned FedAvg, or "FedAvg at the
            rate of <method>"), `seed`, and `accuracy` in [0, 1].
    """
    blocks = runs.pivot(index="seed", columns="case", values="accuracy")
    rows = {}
    for method in (str(case) for case in blocks if not str(case).startswith(f"{HOST} ")):
        own, host = blocks[method], blocks[BESIDE + method]
        at_rate = (own - blocks[AT_RATE + method]).to_numpy()
        rows[method] = {
            **_paired(own, host),
            "gain_at_rate": at_rate.mean(),
            "p_at_rate": statistics.wilcoxon(at_rate),
        }
    table = pd.DataFrame.from_dict(rows, orient="index")
    columns = ["p", "p_at_rate"]
    family = pd.concat([table[["pairs"]].assign(a=name, p=table[name]) for name in columns])
    decided = statistics.decide(
        family, untested=columns[:1] if TUNING_SEEDS < FEWEST_TUNING_SEEDS else ()
    )
    table[columns] = decided["p"].to_numpy().reshape(2, -1).T
    return table


def _paired(own: pd.Series, host: pd.Series) -> dict[str, float]:
    """Return statistics of the differences between two methods, one difference per seed."""
    found = statistics.differences(pd.DataFrame({"own": own, "host": host}), "host").iloc[0]
    return {
        **found[["pairs", "wins", "p"]],
        "host": host.mean(),
        "host_std": host.std(),
        "mean": own.mean(),
        "std": own.std(),
        "gain": found["difference"],
        **found[["low", "high"]].fillna(found["difference"]),  # differences that do not vary
    }


def computed(runs: pd.DataFrame) -> str:
    """Make the table of FedGMM and FedAvg with equal steps; all rows are one family of tests.

    Args:
        runs: the runs of helps/compute, with columns `case` ("<setting>: <form of a method>"),
            `seed`, `accuracy`, `steps` and `code`.
    """
    blocks = runs.pivot(index="seed", columns="case", values="accuracy")
    steps = runs.groupby("case")["steps"].sum()
    settings = dict.fromkeys(case.partition(": ")[0] for case in runs["case"])
    places = {
        (setting, pair): (f"{setting}: {own}", f"{setting}: {host}")
        for setting in settings
        for pair, (own, host) in COMPUTE.items()
    }
    found = [_paired(blocks[own], blocks[host]) for own, host in places.values()]
    table = statistics.decide(pd.DataFrame(found, index=pd.MultiIndex.from_tuples(places)))
    rows = [
        {
            "setting": setting,
            "compared": pair,
            "steps": f"{steps[places[setting, pair][0]] / steps[places[setting, pair][1]]:.1f}",
            **_shown(row),
        }
        for (setting, pair), row in table.iterrows()  # type: ignore[misc]
    ]
    ahead = (table["gain"] > 0) & (table["verdict"] == statistics.SHOWN)
    counts = ahead.groupby(level=1).sum()
    shown = "; ".join(f"{pair}, in {counts[pair]} of {len(settings)} settings" for pair in COMPUTE)
    return f"{markdown(rows)}\n\nFedGMM is shown to be better: {shown}. {_source(runs)}"

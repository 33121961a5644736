"""The comparison of a report: methods, conditions, seeds, and the scores of each run."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import pandas as pd

from fedhet.core.check import one_of
from fedhet.core.errors import ConfigError
from fedhet.core.kinds import KINDS, Kind, OfClasses, OfLoss
from fedhet.runs.record.scores import (
    OWN_MODELS,
    method_name,
    own_models,
    own_score,
    validation_score,
)
from fedhet.study.report import statistics
from fedhet.study.report.document import extent
from fedhet.study.report.results import DIVERGED, FoundRun, Results, Values, configured

SEED = "seed"
# Score -> its title, in the order of the tables.
SCORES = {
    "last": "last round",
    "best_val": "best by validation",
    "last_k": "mean of the last evaluations",
    "clients": "clients' mean",
    "worst": "worst 10 % of clients",
    "personal": "personal models, last round",
    "personal_best_val": "personal models, best by validation",
    "finetuned": "fine-tuned models, last round",
}
FINETUNED = " their fine-tuned models if the run has them, else with"
ALL = "all settings"
NO_METHOD = "–"
FEWEST_TUNING_SEEDS = 5  # with fewer, a chosen value is too uncertain for a test (docs/tuning.md)


class Study:
    """A comparison of the values of one axis.

    The other axes, without the seed, make up the conditions.

    Attributes:
        results: the frames.
        compare: the compared axis.
        methods: its values as text. "Method" means a value of the compared axis everywhere here.
        conditions: the name of each condition -> its axes.
        metric: the score that decides, a key of SCORES.
        reference: the method with which all others are compared: `report.reference`, else FedAvg,
            else the first method.
        notes: sentences for the reader on the choice of the score.
    """

    def __init__(self, results: Results) -> None:
        self.results = results
        report: Values = results.source.experiment.get("report") or {}
        axes = {axis: values for axis, values in results.axes.items() if axis != SEED}
        if report.get("compare") == SEED:  # experiments without other axes may have recorded it
            report = {**report, "compare": None, "reference": None}
        default = next((axis for axis in axes if len(axes[axis]) > 1), next(iter(axes), "method"))
        self.compare = str(report.get("compare") or default)
        if axes:
            one_of("report.compare", self.compare, axes)
        self.methods = [str(value) for value in axes.get(self.compare, [])]
        if not axes:  # only seeds differ
            counted = [cell for cell in results.cells if cell.counts]
            self.methods = list(dict.fromkeys(map(self._method, counted)))
        self.metric = str(report.get("metric") or "last")
        one_of("report.metric", self.metric, SCORES)
        if report.get("reference") is not None:
            one_of("report.reference", report["reference"], self.methods)
        plain = [name for name in self.methods if name.lower() == "fedavg"]
        self.reference = str(report.get("reference") or [*plain, *self.methods, NO_METHOD][0])
        self._others = [axis for axis in axes if axis != self.compare]
        short = [axis.rpartition(".")[2] for axis in self._others]
        self._names = {
            axis: name if short.count(name) == 1 else axis
            for axis, name in zip(self._others, short, strict=True)
        }
        self.conditions: dict[str, Values] = {}
        for cell in results.cells:
            if cell.axes:
                self.conditions.setdefault(self.condition_of(cell.axes), self._part(cell.axes))
        self.notes: list[str] = []
        if not any(cell.counts for cell in results.cells):
            raise ConfigError(
                f"{results.source.folders[0]}: none of its {len(results.cells)} runs has a result;"
                f" the first is {results.cells[0].name}: {results.cells[0].reason}"
                if results.cells
                else f"{results.source.folders[0]} has trials only, and no runs"
            )
        self._choose_metric()

    def condition_of(self, axes: Values) -> str:
        """Return the name of the condition of a run, such as "alpha = 0.05"."""
        part = self._part(axes)
        return ", ".join(f"{self._names[axis]} = {value}" for axis, value in part.items()) or ALL

    def _part(self, axes: Values) -> Values:
        return {axis: axes[axis] for axis in self._others if axis in axes}

    @cached_property
    def target(self) -> type[Kind]:
        """The kind of target that the runs learn; if they differ, the kind of the first run."""
        names = [cell.summary.get("target") for cell in self.results.cells if cell.summary]
        return KINDS.get(next((name for name in names if name), OfClasses.name), OfClasses)

    @property
    def comparable_seconds(self) -> bool:
        """Whether seconds can be compared, because no run has shared a process with others."""
        return not any(cell.summary.get("seconds_shared") for cell in self.cells)

    @property
    def title(self) -> str:
        """The score in a word, such as "accuracy"."""
        kinds = {cell.summary.get("target", OfClasses.name) for cell in self.cells}
        if len(kinds) > 1:
            return "score"
        return self.target.title or "negative loss"

    @property
    def cells(self) -> list[FoundRun]:
        """The runs with a result: the last one of each method, condition and seed."""
        return list({self.place(cell): cell for cell in self.results.cells if cell.counts}.values())

    def known(self, frame: pd.DataFrame) -> list[str]:
        """Return the conditions that have rows in a frame with the column `setting`."""
        return [name for name in self.conditions if (frame["setting"] == name).any()]

    def place(self, cell: FoundRun) -> tuple[str, str, int]:
        """Return method, condition and seed of a run."""
        seed: int = cell.axes.get(SEED) or cell.summary.get(SEED) or 0
        return self._method(cell), self.condition_of(cell.axes), seed

    def _method(self, cell: FoundRun) -> str:
        if self.compare in cell.axes or not cell.summary:
            return str(cell.axes.get(self.compare, NO_METHOD))
        return method_name(cell.summary)

    @cached_property
    def scores(self) -> pd.DataFrame:
        """A row per run: method, condition, seed, diverged, folder, and every score."""
        own = [self.metric] if self.metric in OWN_MODELS else []
        rows = [
            {
                **dict(zip(("method", "setting", "seed"), self.place(cell), strict=True)),
                "diverged": cell.status == DIVERGED,
                "folder": cell.name,
                **dict.fromkeys(SCORES, math.nan),
                **scores_of(cell.summary),
                **{name: _number(own_score(cell.summary, name)) for name in own},
            }
            for cell in self.cells
        ]
        return pd.DataFrame(rows)

    @cached_property
    def counted(self) -> pd.DataFrame:
        """As `scores`, but a diverged run without a finite score gets a bad score.

        The bad score is 0, or the lowest score of the condition if it is below 0.
        """
        frame = self.scores.copy()
        always = ("last", "best_val", "clients", self.metric)
        for score in SCORES:
            if not frame[score].notna().any():
                continue
            lowest = frame.groupby("setting")[score].transform("min").fillna(0.0).clip(upper=0.0)
            # Methods that never have this score (no personal models) get no bad score either.
            having = frame["method"].isin(frame.loc[frame[score].notna(), "method"])
            bad = frame["diverged"] & frame[score].isna() & (having | (score in always))
            frame[score] = frame[score].mask(bad, lowest)
        return frame

    def blocks(self, score: str, condition: str | None = None) -> pd.DataFrame:
        """Return scores with a row per seed (or condition and seed), and a column per method."""
        frame = self.counted if condition is None else self.counted.query("setting == @condition")
        index = ["setting", "seed"] if condition is None else ["seed"]
        table = frame.pivot(index=index, columns="method", values=score)
        return table.reindex(columns=[m for m in self.methods if m in table.columns])

    def means(self, score: str) -> pd.DataFrame:
        """Return the means over seeds, with a row per condition and a column per method.

        A seed counts only if all methods of the condition have it, so that means can be compared.
        """
        complete = paired(self.blocks(score))
        return complete.groupby(level="setting", sort=False).mean()

    def gains(self) -> pd.DataFrame:
        """Return the gain of each method over the reference: a row per seed, a column per method.

        A gain is the mean over the settings in which both methods share a seed. Only seeds that
        both have in all of these settings count. Settings are no pairs of their own, because runs
        with the same seed share data and weights. Empty if the reference has no result.
        """
        scores = self.blocks(self.metric)
        if self.reference not in scores:
            return pd.DataFrame()
        gaps = scores.sub(scores[self.reference], axis=0)
        own = {m: gaps[m].dropna().unstack("setting").dropna().mean(axis=1) for m in gaps}
        return pd.DataFrame(own)

    @cached_property
    def differences(self) -> dict[str, pd.DataFrame]:
        """Condition -> the differences from the reference, by `statistics.differences`.

        The frame is empty if the reference has no result in the condition.
        """
        blocks = {name: self.blocks(self.metric, name) for name in self.conditions}
        return {
            name: statistics.differences(
                own if self.reference in own else pd.DataFrame(), self.reference
            )
            for name, own in blocks.items()
        }

    @cached_property
    def tuned_on_few(self) -> list[str]:
        """Methods with other tuned values than the reference; empty if enough seeds chose them."""
        experiment = self.results.source.experiment
        if len((experiment.get("tune") or {}).get("seeds", ())) >= FEWEST_TUNING_SEEDS:
            return []
        chosen: dict[str, dict[str, Values]] = {}
        for entry in experiment.get("tuned") or []:
            place, own = self.condition_of(entry["axes"]), str(entry["axes"].get(self.compare))
            chosen.setdefault(own, {})[place] = entry["chosen"]
        return [name for name in self.methods if chosen.get(name) != chosen.get(self.reference)]

    @cached_property
    def steps(self) -> dict[str, float]:
        """Method -> its local steps, as a multiple of the reference's steps."""
        return self._multiples(lambda summary: summary.get("steps") or math.nan)

    @cached_property
    def sent(self) -> dict[str, float]:
        """Method -> its bytes in both directions, as a multiple of the reference's bytes."""
        return self._multiples(
            lambda summary: (
                sum(sum(kinds.values()) for kinds in summary.get("bytes", {}).values()) or math.nan
            )
        )

    def _multiples(self, cost: Callable[[Values], float]) -> dict[str, float]:
        """Return method -> cost relative to the reference, over runs that both methods have."""
        costs = {self.place(cell): cost(cell.summary) for cell in self.cells}
        frame = pd.Series(costs, dtype=float).unstack(0)
        if self.reference not in frame:
            return {}
        both = {name: frame[[self.reference, name]].dropna().sum() for name in frame}
        ratios = {name: own.iloc[1] / own.iloc[0] for name, own in both.items() if own.iloc[0]}
        return {str(name): float(ratio) for name, ratio in ratios.items()}

    @cached_property
    def rates(self) -> dict[str, str]:
        """Method -> its learning rates, as a text."""
        found: dict[str, set[float]] = {}
        for cell in self.cells:
            own = found.setdefault(self.place(cell)[0], set())
            rate = cell.overrides.get("client.lr")
            if rate is None and not own:
                rate = configured(cell, "client.lr")
            if isinstance(rate, int | float):
                own.add(float(rate))
        return {method: extent(own) for method, own in found.items() if own}

    @cached_property
    def own_models(self) -> dict[str, str]:
        """Folder of a run -> the kind of clients' own models that the metric scores, if any."""
        kinds = {cell.name: own_models(cell.summary, self.metric) for cell in self.cells}
        return {folder: kind for folder, kind in kinds.items() if kind}

    def validation(self, cell: FoundRun) -> float:
        """Return the validation score by which a trial can be chosen; NaN if it has none."""
        if not cell.counts or cell.status == DIVERGED:
            return math.nan
        score = validation_score(cell.summary, self.results.steps(cell), self.metric)
        return math.nan if score is None else score

    def _choose_metric(self) -> None:
        """Use the clients' mean if a method lacks the metric, and add notes for the reader."""
        if self.metric in OWN_MODELS:
            self.notes.append(
                f"The score is “{SCORES[self.metric]}”. Methods without such models are scored with"
                f"{FINETUNED if self.metric != 'finetuned' else ''} the mean of their global model"
                " over the clients' test data."
            )
        frame = self.scores[~self.scores["diverged"]]
        lacking = sorted(set(frame.loc[frame[self.metric].isna(), "method"]))
        if lacking and frame["clients"].notna().all() and len(frame):
            self.notes.append(
                f"The score “{SCORES[self.metric]}” is not defined for {', '.join(lacking)}."
                " Therefore all methods are compared by the mean over the clients' test data."
            )
            self.metric = "clients"


def paired(blocks: pd.DataFrame) -> pd.DataFrame:
    """Keep the rows in which all columns have a value; columns without any value are dropped."""
    return blocks.dropna(axis=1, how="all").dropna()


def scores_of(summary: Values) -> dict[str, float]:
    """Return the scores of a run by their names in SCORES; NaN for missing scores."""
    target = KINDS.get(summary.get("target", OfClasses.name), OfClasses)
    if target is OfLoss or not target.score():
        loss = summary.get("loss")
        return {"last": -float(loss) if loss is not None else math.nan}
    main, personal, finetuned, last_k = (
        summary.get(key) or {}
        for key in (target.score(), "personal", "finetuned", target.key("last_k"))
    )
    return {
        "last": _number(main.get("last")),
        "best_val": _number(main.get("best_val")),
        "last_k": _number(last_k.get("mean")),
        "clients": _number(summary.get(target.clients_key())),
        "worst": _number(summary.get(target.key("clients_worst_decile"))),
        "personal": _number(personal.get("last")),
        "personal_best_val": _number(personal.get("best_val")),
        "finetuned": _number(finetuned.get("last")),
    }


def _number(value: float | None) -> float:
    return math.nan if value is None or not math.isfinite(value) else float(value)

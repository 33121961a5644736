"""The summary of a report: which method is best where, and what can be relied on."""

from __future__ import annotations

from collections.abc import Iterator

from fedhet.core.check import counted
from fedhet.report.document import joined, mean_std
from fedhet.report.scores import against_best
from fedhet.report.statistics import (
    FEWEST_CONDITIONS,
    IF_NORMAL,
    LEVEL,
    NOT_SHOWN,
    REAL,
    Ranking,
    couples,
    enough,
    fewest_pairs,
    pairs_needed,
)
from fedhet.report.study import ALL, SCORES, Study, paired

ALL_OTHERS = "all others"
RULE = (
    "This summary is computed by one rule. In each setting the best method is that with the highest"
    " mean over the seeds that all methods have there. A difference from it is called real if"
    " Wilcoxon's signed-rank test over the seeds has p < .05 after Holm's correction over all pairs"
    " of methods. If there are too few"
    " seeds for that, it is called real if differences are normal where the paired t-test has"
    " p < .05 after the same correction. All other differences are not shown: the methods may be"
    " equal, or the seeds too few."
)


def sentences(study: Study, ranking: Ranking | None) -> list[str]:
    """The summary, a sentence or a few for each subject."""
    found = [_score(study)]
    undecided = _undecided(study)
    found += [
        _winner(study, condition, told=condition in undecided) for condition in study.conditions
    ]
    if undecided:
        found.append(_too_few(study, undecided))
    of_seeds = len(study.means(study.metric)) < FEWEST_CONDITIONS
    if ranking is not None and len(study.conditions) > 1 and not (undecided and of_seeds):
        found.append(_ranks(ranking, of_seeds))
    return [*found, *_gaps(study)]


def _score(study: Study) -> str:
    methods, conditions = len(study.methods), len(study.conditions)
    what = counted(methods, "method")
    if study.compare != "method":
        what = f"{counted(methods, 'value')} of {study.compare}"
    where = "one setting" if conditions == 1 else f"{conditions} settings"
    seeds = counted(study.scores["seed"].nunique(), "seed")
    return f"{what} in {where} with {seeds}, by {study.title} ({SCORES[study.metric]})."


def _undecided(study: Study) -> dict[str, int]:
    """The conditions with too few seeds to show any difference from the best -> seeds needed."""
    needed = {}
    for condition in study.conditions:
        blocks = study.blocks(study.metric, condition).dropna(axis=1, how="all")
        family = couples(blocks)
        too_few = family and not enough(min(family.values()), len(family))
        means = paired(blocks).mean()
        if too_few and means.notna().all():
            verdicts = against_best(blocks, str(means.idxmax()))
            if set(verdicts.values()) == {NOT_SHOWN}:
                needed[condition] = pairs_needed(len(family))
    return needed


def _too_few(study: Study, needed: dict[str, int]) -> str:
    """One sentence for all of these conditions."""
    seeds = [fewest_pairs(study.blocks(study.metric, condition)) for condition in needed]
    few = " to ".join(str(n) for n in dict.fromkeys((min(seeds), max(seeds))))
    where = "" if len(needed) == len(study.conditions) else f" in {joined(list(needed))}"
    most = max(needed.values())
    what = "method" if study.compare == "method" else f"value of {study.compare}"
    return (
        f"{few} seed{'' if few == '1' else 's'} cannot decide which {what} is best{where}:"
        f" that takes at least {most} (seed=range(0,{most}))."
    )


def _winner(study: Study, condition: str, *, told: bool) -> str:
    """The best method; `told`: that nothing is shown about the others stands elsewhere."""
    blocks = study.blocks(study.metric, condition).dropna(axis=1, how="all")
    where = "" if condition == ALL else f"{condition}: "
    if blocks.empty:
        return f"{where}no run has a result."
    if len(blocks.columns) == 1:
        score = mean_std(blocks[blocks.columns[0]]).text
        return f"{where}{blocks.columns[0]} has {score}; there is nothing to compare it with."
    common = paired(blocks)
    if common.empty:
        return f"{where}no seed has a result of every method, so that none is named the best."
    means = common.mean()
    best = str(means.idxmax())
    score = mean_std(common[best]).text
    if len(common) < len(blocks):
        score += f" (over the {len(common)} of {len(blocks)} seeds that all methods have)"
    tied = [str(name) for name in means.index if means[name] == means[best]]
    first = "is best with" if len(tied) == 1 else "are best with the same mean,"
    opening = f"{where}{joined(tied)} {first} {score}."
    if told:
        return opening
    verdicts = {name: v for name, v in against_best(blocks, best).items() if name not in tied}
    others = list(map(str, means.sort_values(ascending=False).index))
    groups = {
        kind: [name for name in others if verdicts.get(name) == kind]
        for kind in (REAL, IF_NORMAL, NOT_SHOWN)
    }
    others = [name for names in groups.values() for name in names]
    seeds = counted(fewest_pairs(blocks), "seed")
    if fewest_pairs(blocks) < len(blocks):
        seeds = f"the {seeds} of the pair with the fewest common seeds"
    named = {kind: _named(names, others) for kind, names in groups.items() if names}
    sentences = {
        REAL: "The difference from {} is real.",
        IF_NORMAL: "The difference from {} is real if differences are normal, which"
        f" {seeds} cannot show.",
        NOT_SHOWN: "No difference from {} is shown.",
    }
    if NOT_SHOWN in named:
        named[NOT_SHOWN] = named[NOT_SHOWN].replace(ALL_OTHERS, "any other")
    return " ".join([opening, *(sentences[kind].format(names) for kind, names in named.items())])


def _named(names: list[str], others: list[str]) -> str:
    """The names in the shortest form: all others, all others but a few, or each of them."""
    rest = [name for name in others if name not in names]
    if len(names) > 1 and not rest:
        return ALL_OTHERS
    if len(names) > 3 and len(rest) < 3:
        return f"{ALL_OTHERS} but {joined(rest)}"
    return joined(names)


def _ranks(ranking: Ranking, of_seeds: bool) -> str:
    order = ranking.ranks.sort_values()
    first = str(order.index[0])
    leading = [str(name) for name in order.index if order[name] == order.iloc[0]]
    have = "have" if len(leading) > 1 else "has"
    blocks = ", with seeds as blocks, so of these settings only," if of_seeds else ""
    opening = f"Over all settings{blocks} {joined(leading)} {have} the best mean rank,"
    opening += f" {order.iloc[0]:.2f}"
    if not ranking.p < LEVEL:
        return f"{opening}, but Friedman's test does not show that ranks differ at all."
    worse = [
        str(name)
        for name in order.index[len(leading) :]
        if ranking.nemenyi.loc[first, name] < LEVEL
    ]
    if not worse:
        return f"{opening}; Nemenyi's test does not tell {first} from any other single method."
    others = [str(name) for name in order.index if str(name) != first]
    return f"{opening}; Nemenyi's test tells {first} from {_named(worse, others)}."


def _gaps(study: Study) -> Iterator[str]:
    """What else a reader must know: runs that diverged, that are missing, and ends of grids."""
    counts = study.scores[study.scores["diverged"]].groupby("method", sort=False).size()
    runs = study.scores.groupby("method").size()
    if told := [f"{method} in {count} of {runs[method]} runs" for method, count in counts.items()]:
        yield f"Training diverged, or the loss was infinite at the end: {joined(told)}."
    missing = [cell.trial for cell in study.results.source.cells if not cell.counts]
    words = ("run", "runs"), ("trial of the tuning", "trials of the tuning")
    for trial, (word, plural) in enumerate(words):
        if count := missing.count(bool(trial)):
            are = "is" if count == 1 else "are"
            missed = counted(count, word, plural)
            yield f"{missed} without a result {are} listed below with the reason."
    edges = [
        str(entry.get("axes", {}).get(study.compare))
        for entry in study.results.source.experiment.get("tuned") or []
        if entry.get("at_the_edge")
    ]
    if edges:
        yield (
            "A tuned value lies at the edge of its grid, so that a better one may lie beyond it,"
            f" for {joined(list(dict.fromkeys(edges)))}."
        )

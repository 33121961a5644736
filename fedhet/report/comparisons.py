"""Which method is best where: the tables of tests, what each assumes, and the summary."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from fedhet.core.check import counted
from fedhet.report import statistics
from fedhet.report.document import (
    Columns,
    Section,
    Table,
    TableEntry,
    joined,
    mean_std,
    number,
    p_value,
    plain,
)
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
    smallest_p,
)
from fedhet.report.study import ALL, SCORES, Study, paired
from fedhet.report.tables import against_best

SAID = {
    REAL: "real",
    IF_NORMAL: "real only if differences are normal",
    NOT_SHOWN: "not shown",
}
ASSUMPTIONS = [
    "Within a setting a pair is a seed: both methods have the same partition, the same initial"
    " model and the same order of data. What is found holds for that setting, its data set and its"
    " test data, not for others.",
    "Over settings and seeds a pair is a seed in a setting. That takes runs of one seed in several"
    " settings for independent, although they share their initial weights, and it holds for these"
    " settings only: seeds of one setting are repetitions of it, and no further settings.",
    "Over settings a pair is a setting, with the mean over its seeds. This is the only one of the"
    " three that speaks of settings which were not run, as far as those that were run are a random"
    " sample of them.",
    "Wilcoxon's signed-rank test assumes independent pairs whose differences are distributed"
    " symmetrically around their median; zeros are split. With n pairs its smallest possible"
    " two-sided p-value is 2/2ⁿ, so that it is made only where that can be below .05 after the"
    " correction.",
    "The paired t-test also assumes normal differences, which few pairs cannot show. It is printed"
    " everywhere, and it decides only where Wilcoxon's test cannot be made.",
    "Each setting, and each of the two blocks over settings, has one test for all its pairs: the"
    " pair of methods with the fewest common seeds decides whether it is Wilcoxon's.",
    "Holm's correction keeps the probability of any false finding among all pairs of a table's"
    " block below .05; it assumes nothing. Each setting is a family of its own.",
    "The interval of the mean difference is a 95 % bootstrap interval (BCa, 2000 resamples). It"
    " assumes independent pairs, and of fewer than about ten it is too narrow. The effect size is"
    " Cohen's d for pairs: the mean difference in units of the standard deviation of the"
    " differences.",
]


def statistics_section(study: Study) -> tuple[Section, Ranking | None]:
    """The section without its figures, and the ranking for the diagram."""
    ranking, about = overall(study)
    section = Section(
        "Which differences are real",
        [few_pairs(study), *about],
        [pairs_table(study), *([rank_table(study, ranking)] if ranking else [])],
        notes=[*ASSUMPTIONS],
    )
    return section, ranking


def families(study: Study) -> dict[str, tuple[str, pd.DataFrame]]:
    """The blocks that are compared: name -> the unit of a pair, and the scores."""
    score = study.metric
    found = {name: ("seed", study.blocks(score, name)) for name in study.conditions}
    if len(study.conditions) > 1:
        found["all settings and seeds"] = ("seed in a setting", study.blocks(score))
        found["all settings"] = ("setting", study.means(score))
    return {
        name: (unit, blocks.dropna(axis=1, how="all"))
        for name, (unit, blocks) in found.items()
        if not blocks.empty
    }


def pairs_table(study: Study) -> Table:
    """The pairs of methods in every family of comparisons; with a reference, only its own."""
    frames = []
    for name, (unit, blocks) in families(study).items():
        frame = statistics.compare(blocks)
        if study.reference is not None:
            frame = frame[(frame[["a", "b"]] == study.reference).any(axis=1)]
        frame.insert(0, "over", name)
        frame.insert(1, "unit", unit)
        frames.append(frame)
    names = ["over", "unit", *statistics.COLUMNS, "verdict"]
    data = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=names)
    columns: Columns = [
        ("over", "over"),
        ("a pair is a", "unit"),
        ("better", "a"),
        ("worse", "b"),
        (
            "wins–losses–ties",
            lambda r: TableEntry(f"{r['wins']}–{r['losses']}–{r['ties']}", r["wins"] - r["losses"]),
        ),
        ("mean difference", lambda r: number(r["difference"])),
        (
            "95 % interval",
            lambda r: plain(None if pd.isna(r["low"]) else f"{r['low']:.3f} to {r['high']:.3f}"),
        ),
        ("effect size", lambda r: number(r["effect"], ".2f")),
        ("p, Wilcoxon", lambda r: p_value(r["wilcoxon"])),
        ("p, t-test", lambda r: p_value(r["t_test"])),
        ("difference", lambda r: TableEntry(SAID[r["verdict"]])),
    ]
    others = "of methods" if study.reference is None else f"with {study.reference}"
    caption = (
        f"All pairs {others} by {study.title}. P-values are after Holm's correction over all pairs"
        " of methods, whichever are shown; a dash: there are too few pairs for the test, or their"
        " differences do not vary. A difference is real if Wilcoxon's corrected p is below"
        " .05."
    )
    return Table.of("pairs", "Paired tests", caption, data, columns, folded=len(data) > 30)


def few_pairs(study: Study) -> str:
    """Whether there are enough seeds for Wilcoxon's test within each condition."""
    if len(study.methods) < 2:
        return "There is only one method, so that nothing is compared."
    blocks = {name: study.blocks(study.metric, name).dropna(how="all") for name in study.conditions}
    # Condition -> the fewest seeds that two methods share, and the number of comparisons.
    found = {
        name: (min(family.values()), len(family))
        for name, table in blocks.items()
        if (family := couples(table))
    }
    if not found:
        return "No two methods have a result with the same seed, so that nothing is compared."
    counts = [pairs for pairs, _ in found.values()]
    fewest, most = min(counts), max(counts)
    seeds = f"{most} seed{'' if most == 1 else 's'}"
    if fewest != most:
        seeds = f"{fewest} to {most} seeds"
    which = "each setting"
    if len(found) < len(blocks):
        which += " in which two methods share a seed"
    opening = f"{which.capitalize()} has {seeds}"
    if any(pairs < len(blocks[name]) for name, (pairs, _) in found.items()):
        opening = f"In {which} the pair of methods with the fewest common seeds has {seeds}"
    lacking = {name: family for name, family in found.items() if not enough(*family)}
    if not lacking:
        return f"{opening}, which are enough for Wilcoxon's test."
    least = min(pairs for pairs, _ in lacking.values())
    comparisons = max(count for _, count in lacking.values())
    where = "within a setting" if len(lacking) == len(found) else f"in {joined(list(lacking))}"
    return (
        f"{opening}. That is too few for Wilcoxon's test {where}: with"
        f" {least} its smallest possible p-value is {smallest_p(least):.3g}, and with {comparisons}"
        f" comparison{'s' if comparisons > 1 else ''} it takes {pairs_needed(comparisons)} seeds to"
        f" get below {LEVEL:g} after Holm's correction."
    )


def overall(study: Study) -> tuple[Ranking | None, list[str]]:
    """Friedman's test over all conditions, and what is said about it."""
    blocks = study.means(study.metric)
    unit = "settings, with the mean over seeds"
    limits = "It speaks of settings like these."
    if len(blocks) < FEWEST_CONDITIONS:
        blocks = paired(study.blocks(study.metric))
        unit = "seeds in a setting"
        limits = (
            f"With fewer than {FEWEST_CONDITIONS} settings the blocks are single runs, so that it"
            " speaks of these settings only."
        )
    ranking = statistics.rank(blocks)
    if ranking is None:
        return None, [
            "Friedman's test needs at least three methods with results in at least two common"
            f" blocks; here are {blocks.shape[1]} methods and {len(blocks)} blocks."
        ]
    significant, p = ranking.p < LEVEL, p_value(ranking.p).text
    text = (
        f"Friedman's test over {ranking.blocks} blocks ({unit}): χ² = {ranking.statistic:.2f},"
        f" p {p if p.startswith('<') else f'= {p}'}, so that the methods' ranks"
        f" {'differ' if significant else 'are not shown to differ'}. It assumes that blocks are"
        f" independent, and that scores can be compared within a block. {limits}"
    )
    nemenyi = (
        f"Nemenyi's test, which corrects for all pairs, tells two methods apart whose mean ranks"
        f" differ by more than {ranking.critical:.2f}, the critical distance at the level .05."
    )
    if not significant:
        nemenyi += " It says nothing where Friedman's test finds no difference."
    return ranking, [text, nemenyi]


def rank_table(study: Study, ranking: Ranking) -> Table:
    """Mean ranks, and Nemenyi's p-values of all pairs."""
    order = ranking.ranks.sort_values()
    nemenyi = ranking.nemenyi.loc[order.index, order.index].reset_index(drop=True)
    data = pd.DataFrame({"method": order.index, "mean_rank": order.to_numpy()}).join(nemenyi)
    columns: Columns = [
        (study.compare, "method"),
        ("mean rank", lambda r: number(r["mean_rank"], ".2f")),
        *(
            (str(other), lambda r, o=other: plain(None) if r["method"] == o else p_value(r[o]))
            for other in order.index
        ),
    ]
    caption = f"Mean ranks over {ranking.blocks} blocks (1 is best), and Nemenyi's p-values."
    return Table.of("ranks", "Mean ranks", caption, data, columns)


# ---- the summary: which method is best where, and what can be relied on
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
    undecided = _undecided(study)
    of_seeds = len(study.means(study.metric)) < FEWEST_CONDITIONS
    ranked = ranking and len(study.conditions) > 1 and not (undecided and of_seeds)
    return [
        _score(study),
        *(_winner(study, name, told=name in undecided) for name in study.conditions),
        *([_too_few(study, undecided)] if undecided else []),
        *([_ranks(ranking, of_seeds)] if ranking and ranked else []),
        *_gaps(study),
    ]


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

"""The measures of a run that papers print, from the run's folder.

A measure may have a target behind an @, as in `rounds@.55`. NaN means that the run has no such
value. If a run does not reach the target, it counts with one round more than planned, so a run does
not gain by an early end, such as divergence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean, pstdev

import numpy as np

from fedhet.core.errors import ConfigError
from fedhet.study.report.compared import scores_of
from papers.runs import TRAIN, Point, ReproducedRun

FLOAT = 4  # bytes of a sent number
MADE = "feddisk.density"  # the phase of the global MADE
PEAK_GRID = 200  # points between the smallest and the largest value of the clients
# Batch norm's statistics, which are not parameters.
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def _score(name: str) -> Callable[[ReproducedRun, float], float]:
    return lambda run, target: scores_of(run.cell.summary)[name]


def _until(run: ReproducedRun, curve: Sequence[Point], target: float) -> float:
    """Return the number of training rounds until the score has reached the target."""
    return float(next((number for number, score in curve if score >= target), run.planned + 1))


def _early(run: ReproducedRun, target: float) -> float:
    """Return the score at the last evaluation within the first `target` training rounds."""
    early = [score for number, score in run.curve if number <= target]
    return early[-1] if early else math.nan


def _weighted(key: str, *, last_k: bool = False) -> Callable[[ReproducedRun, float], float]:
    """Measure the last score over all clients' samples, or the mean of `eval.last_k` scores."""

    def read(run: ReproducedRun, target: float) -> float:
        known = run.cell.summary.get("acc_last_k") or {}
        count = int(known.get("evaluations") or 1) if last_k else 1
        scores = [score for _, score in run.recorded(key)][-count:]
        return mean(scores) if scores else math.nan

    return read


def _loss(*keys: str) -> Callable[[ReproducedRun, float], float]:
    """Measure a loss of rounds.jsonl, at the end or after `target` training rounds.

    It is NaN if the run had diverged by then, because its last finite loss is an earlier one.
    """

    def read(run: ReproducedRun, target: float) -> float:
        if run.diverged and run.rounds_of(TRAIN) < (target or math.inf):
            return math.nan
        found = [loss for step, loss in run.recorded(*keys) if not target or step <= target]
        return found[-1] if found else math.nan

    return read


def _minutes(run: ReproducedRun, target: float) -> float:
    """Return the minutes of a training round without evaluation.

    In the first round processes start and libraries are loaded. It counts only if there is no
    other round.
    """
    seconds = [
        sum(value for name, value in step["seconds"].items() if name != "evaluate")
        for step in run.steps
        if step["phase"] == TRAIN
    ]
    return mean(seconds[1:] or seconds) / 60 if seconds else math.nan


def _sent(run: ReproducedRun, phase: str) -> float:
    """Return how many numbers a client sends up in the first round of a phase."""
    for step in run.steps:
        if step["phase"] == phase and step["accepted"]:
            sent = step["bytes"]["up"]
            size = sent["density"] if phase == MADE else sum(sent.values())
            return float(size) / FLOAT / int(step["accepted"])
    return math.nan


def _parameters(run: ReproducedRun) -> int:
    """Return the number of parameters of the model."""
    from safetensors import safe_open

    with safe_open(run.cell.folder / "model.safetensors", framework="np") as file:
        names = list(file.keys())  # the file is not a mapping
        return sum(
            math.prod(file.get_slice(name).get_shape())
            for name in names
            if not name.endswith(BUFFERS)
        )


def _exchanged(run: ReproducedRun, target: float) -> float:
    """Return the numbers that a client exchanges in a training round, in sizes of the model."""
    last = next((step for step in reversed(run.steps) if step["phase"] == TRAIN), None)
    if not (last and last["cohort"]):
        return math.nan
    moved = sum(sum(last["bytes"][way].values()) for way in ("up", "down"))
    return moved / FLOAT / len(last["cohort"]) / _parameters(run)


def _client_spread(run: ReproducedRun, target: float) -> float:
    """Return the standard deviation of the clients' test accuracies at the last evaluation.

    The accuracies belong to the first kind of models that the run has: the global model, or else
    the shared weights with each client's own batch norm statistics, or the personal models.
    """
    view = run.cell.summary["models"][0]  # noqa: F841 -- the query reads it
    frame = run.results.last_clients.query(
        "folder == @run.cell.name and split == 'test' and metric == 'accuracy' and model == @view"
    )
    return float(pstdev(frame["value"])) if len(frame) else math.nan


def _rank(run: ReproducedRun, target: float) -> float:
    """Return the rank of the run's mean accuracy on the clients' test data; 1 is best.

    Its peers are ranked with it. A run that diverged without a score has the score 0. The rank is
    NaN if a peer has no result.
    """
    own = value("clients", run)
    scores = [value("clients", rival) for rival in run.rivals]
    if math.isnan(own) or not scores:
        return math.nan
    return 1 + sum(score > own for score in scores) + scores.count(own) / 2


def _gain(name: str) -> Callable[[ReproducedRun, float], float]:
    """Measure the gain in score over the base method's run."""

    def read(run: ReproducedRun, target: float) -> float:
        host = run.peers.get(run.host or "")
        return value(name, run) - value(name, host) if host else math.nan

    return read


def _classes(run: ReproducedRun, target: float) -> float:
    """Return the mean number of classes in the clients' training samples."""
    counts = run.results.partition(run.cell).get("counts") or []
    return mean(sum(n > 0 for n in client) for client in counts) if counts else math.nan


def _effective(run: ReproducedRun, target: float) -> float:
    """Return the effective rounds of FedDisk's table 1.

    A method counts its training rounds until its own highest accuracy. FedDisk counts its training
    rounds until the highest accuracy that another method ever reaches, and its rounds of the global
    MADE. Accuracy is the mean over the clients' own test data, as in the paper. This holds even if
    there is a global test set, because methods without a global model have no score on it. A method
    that has diverged counts as never reaching its target. If a peer has no result, FedDisk's number
    is NaN.
    """
    return run.rounds_of(MADE) + _classifier_rounds(run, target)


def _classifier_rounds(run: ReproducedRun, target: float) -> float:
    """As `effective`, without the rounds of the global MADE."""
    if not run.rounds_of(MADE):
        own = max((score for _, score in run.clients_curve), default=math.inf)
        return _until(run, run.clients_curve, math.inf if run.diverged else own)
    others = [rival for rival in run.rivals if not rival.rounds_of(MADE)]
    scores = [score for rival in others for _, score in rival.clients_curve]
    return _until(run, run.clients_curve, max(scores)) if scores else math.nan


def _cost(run: ReproducedRun, target: float) -> float:
    """Return the numbers that a client exchanges in its effective rounds (FedDisk, eq. 18, 19)."""
    made = run.rounds_of(MADE)
    density = 2 * made * _sent(run, MADE) if made else 0.0
    return density + 2 * _classifier_rounds(run, target) * _sent(run, TRAIN)


def _drift(name: str) -> Callable[[ReproducedRun, float], float]:
    """Measure the mean of a number of plugin=[drift] over the rounds of training."""

    def read(run: ReproducedRun, target: float) -> float:
        values = [step[name] for step in run.steps if step.get(name) is not None]
        return mean(values) if values else math.nan

    return read


def _similarity(run: ReproducedRun, client: float) -> float:
    """Return the cosine similarity of a client's model and the merged model in the last round.

    It is NaN if the client did not take part in this round.
    """
    arrays = run.arrays("drift")
    clients = arrays["pids"].tolist() if arrays else []
    return (
        float(arrays["similarity"][clients.index(int(client))]) if client in clients else math.nan
    )


def _peak_distance(run: ReproducedRun, target: float) -> float:
    """Return how far merged parameters lie from the clients' peaks in the last round.

    A peak is the maximum of a Gaussian kernel density estimate over the clients (scipy's, with its
    default bandwidth). Distances are in standard deviations of the clients. The mean is over the
    parameters that plugin.drift.sample has recorded and that differ between clients.
    """
    from scipy.stats import gaussian_kde

    arrays = run.arrays("drift")
    if "clients" not in arrays:
        return math.nan
    clients, merged = arrays["clients"].double().numpy(), arrays["merged"].double().numpy()
    distances = []
    for values, ours in zip(clients.T, merged, strict=True):
        if spread := float(values.std()):
            grid = np.linspace(values.min(), values.max(), PEAK_GRID)
            peak = grid[gaussian_kde(values)(grid).argmax()]
            distances.append(abs(ours - peak) / spread)
    return float(mean(distances)) if distances else math.nan


Measures = dict[str, Callable[[ReproducedRun, float], float]]
SHARES: Measures = {
    **{name: _score(name) for name in ("last", "best_val", "last_k", "clients", "personal")},
    "finetuned": _score("finetuned"),
    "last_k_weighted": _weighted("acc_clients_weighted", last_k=True),
    "personal_weighted": _weighted("acc_personal_weighted"),
    "score": _early,
    "client_spread": _client_spread,
}
MEASURES: Measures = {
    **SHARES,
    "rounds": lambda run, target: _until(run, run.curve, target),
    "loss": _loss("loss_global", "loss_clients_mean"),
    "train_loss": _loss("loss_train_weighted"),
    "minutes_per_round": _minutes,
    "models_per_round": _exchanged,
    "rank": _rank,
    "gain_last": _gain("last"),
    "gain_clients": _gain("clients"),
    "classes_per_client": _classes,
    "effective_rounds": _effective,
    "classifier_rounds": _classifier_rounds,
    "made_rounds": lambda run, _: float(run.rounds_of(MADE) or math.nan),
    "made_size": lambda run, _: _sent(run, MADE),
    "model_size": lambda run, _: float(_parameters(run)),
    "cost": _cost,
    "dispersion": _drift("drift.dispersion"),
    "change_variance": _drift("drift.change_variance"),
    "similarity": _similarity,
    "peak_distance": _peak_distance,
}


# Counts that do not depend on the seed.
EXACT = ("made_size", "model_size", "models_per_round")


def is_share(name: str) -> bool:
    """Whether a measure is printed as a share, with three decimals."""
    return name.partition("@")[0] in (*SHARES, "gain_last", "gain_clients")


def in_words(name: str) -> str:
    """Return the name of a measure as tables and figures print it."""
    return name.replace("_", " ")


def check(name: str) -> None:
    """Refuse the name of a measure that does not exist.

    Raises:
        ConfigError: there is no such measure.
    """
    if name.partition("@")[0] not in MEASURES:
        raise ConfigError(f"paper: measure {name!r} is none of {', '.join(MEASURES)}")


def value(name: str, run: ReproducedRun) -> float:
    """Return the value of a measure; a share is 0 if the run diverged without a score."""
    check(name)
    kind, _, target = name.partition("@")
    measured = MEASURES[kind](run, float(target or 0))
    lost = math.isnan(measured) and run.diverged and kind in SHARES
    return 0.0 if lost else measured

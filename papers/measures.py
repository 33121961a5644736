"""What a figure of a paper measures of a run, read from the run's folder.

A measure with a target, such as `rounds@.55`, has it behind the @. NaN stands for a run that has no
such value. Where a target is not reached, the run counts with one round more than were planned, so
that a run that ends early, as by divergence, gains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean, pstdev

import numpy as np

from fedhet.core.errors import ConfigError
from fedhet.study.report.compared import scores_of
from papers.runs import TRAIN, Point, ReproducedRun

FLOAT = 4  # bytes of a number that is sent
MADE = "feddisk.density"  # the phase of the global MADE
PEAK_GRID = 200  # points between the smallest and the largest of the clients' values
# Batch norm's statistics, which are no parameters.
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def _score(name: str) -> Callable[[ReproducedRun, float], float]:
    return lambda run, target: scores_of(run.cell.summary)[name]


def _rounds(run: ReproducedRun, target: float) -> float:
    """Training rounds until the score has reached the target."""
    return _until(run, run.curve, target)


def _until(run: ReproducedRun, curve: Sequence[Point], target: float) -> float:
    reached = (number for number, score in curve if score >= target)
    return float(next(reached, run.planned + 1))


def _early(run: ReproducedRun, target: float) -> float:
    """The score at the last evaluation in the first so many training rounds."""
    early = [score for number, score in run.curve if number <= target]
    return early[-1] if early else math.nan


def _weighted(key: str, *, last_k: bool = False) -> Callable[[ReproducedRun, float], float]:
    """The last score over all clients' test samples, or the mean of the last `eval.last_k`."""

    def read(run: ReproducedRun, target: float) -> float:
        known = run.cell.summary.get("acc_last_k") or {}
        count = int(known.get("evaluations") or 1) if last_k else 1
        scores = [score for _, score in run.recorded(key)][-count:]
        return mean(scores) if scores else math.nan

    return read


def _loss(*keys: str) -> Callable[[ReproducedRun, float], float]:
    """A loss of rounds.jsonl, at the end or after so many training rounds.

    NaN for a run that had diverged by then: the loss before it did is not the one that is meant.
    """

    def read(run: ReproducedRun, target: float) -> float:
        if run.diverged and run.rounds_of(TRAIN) < (target or math.inf):
            return math.nan
        found = [loss for step, loss in run.recorded(*keys) if not target or step <= target]
        return found[-1] if found else math.nan

    return read


def _minutes(run: ReproducedRun, target: float) -> float:
    """Minutes of a training round, evaluation excepted.

    The first round, in which processes start and libraries are loaded, counts only where there is
    no other.
    """
    seconds = [
        sum(value for name, value in step["seconds"].items() if name != "evaluate")
        for step in run.steps
        if step["phase"] == TRAIN
    ]
    return mean(seconds[1:] or seconds) / 60 if seconds else math.nan


def _sent(run: ReproducedRun, phase: str) -> float:
    """Numbers of the model that a client sends up in the first round of a phase."""
    for step in run.steps:
        if step["phase"] == phase and step["accepted"]:
            sent = step["bytes"]["up"]
            size = sent["density"] if phase == MADE else sum(sent.values())
            return float(size) / FLOAT / int(step["accepted"])
    return math.nan


def _parameters(run: ReproducedRun) -> int:
    """How many parameters the model has."""
    from safetensors import safe_open

    with safe_open(run.cell.folder / "model.safetensors", framework="np") as file:
        names = list(file.keys())  # the file is no mapping
        kept = [name for name in names if not name.endswith(BUFFERS)]
        return sum(math.prod(file.get_slice(name).get_shape()) for name in kept)


def _exchanged(run: ReproducedRun, target: float) -> float:
    """Numbers that a client sends and receives in a training round, in parameters of the model."""
    size = _parameters(run)
    last = [step for step in run.steps if step["phase"] == TRAIN][-1:]
    moved = [sum(s["bytes"][way].values()) for s in last for way in ("up", "down")]
    clients = [len(step["cohort"]) for step in last]
    return sum(moved) / FLOAT / clients[0] / size if last and clients[0] else math.nan


def _client_spread(run: ReproducedRun, target: float) -> float:
    """Standard deviation of the clients' test accuracies at the last evaluation.

    They are those of the first view: the global model, or else the shared weights with each
    client's own batch norm statistics, or its personal model.
    """
    view = run.cell.summary["models"][0]  # noqa: F841 -- the query reads it
    frame = run.results.last_clients.query(
        "folder == @run.cell.name and split == 'test' and metric == 'accuracy' and model == @view"
    )
    return float(pstdev(frame["value"])) if len(frame) else math.nan


def _rank(run: ReproducedRun, target: float) -> float:
    """The rank of its mean accuracy on the clients' test data among its peers; 1 is the best.

    A run that has diverged without a score has the score 0. There is no rank where a peer has no
    result.
    """
    own = value("clients", run)
    scores = [value("clients", rival) for rival in run.rivals]
    if math.isnan(own) or not scores:
        return math.nan
    return 1 + sum(score > own for score in scores) + scores.count(own) / 2


def _gain(name: str) -> Callable[[ReproducedRun, float], float]:
    """The score of a run less that of its host."""

    def read(run: ReproducedRun, target: float) -> float:
        host = run.peers.get(run.host or "")
        return value(name, run) - value(name, host) if host else math.nan

    return read


def _classes(run: ReproducedRun, target: float) -> float:
    """Mean number of classes of which a client has training samples."""
    counts = run.results.partition(run.cell).get("counts") or []
    return mean(sum(n > 0 for n in client) for client in counts) if counts else math.nan


def _effective(run: ReproducedRun, target: float) -> float:
    """Effective rounds of FedDisk's table 1.

    A method needs the training rounds until its own highest accuracy, and FedDisk those until the
    highest that another method ever reaches; its rounds of the global MADE are added. Accuracy is
    the mean over the clients' own test data, as in the paper, also where there is a global test
    set: methods without a global model could not be compared on that. A method that has diverged
    counts as one that never arrives. FedDisk has no such number where a peer has no result.
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
    """FedDisk's equations 18 and 19: numbers that a client exchanges in its effective rounds."""
    made = run.rounds_of(MADE)
    density = 2 * made * _sent(run, MADE) if made else 0.0
    return density + 2 * _classifier_rounds(run, target) * _sent(run, TRAIN)


def _drift(name: str) -> Callable[[ReproducedRun, float], float]:
    """A number of plugin=[drift], as its mean over the rounds of training."""

    def read(run: ReproducedRun, target: float) -> float:
        values = [step[name] for step in run.steps if step.get(name) is not None]
        return mean(values) if values else math.nan

    return read


def _similarity(run: ReproducedRun, client: float) -> float:
    """Cosine similarity of a client's model and the merged one in the last round.

    NaN if the client did not take part in it.
    """
    arrays = run.arrays("drift")
    clients = arrays["pids"].tolist() if arrays else []
    return (
        float(arrays["similarity"][clients.index(int(client))]) if client in clients else math.nan
    )


def _peak_distance(run: ReproducedRun, target: float) -> float:
    """How far the merged parameters lie from the peaks of the clients' own, in the last round.

    The peak is that of a Gaussian kernel density estimate over the clients (scipy's, with its own
    bandwidth), the distance is in standard deviations of the clients, and the mean is over the
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
    "rounds": _rounds,
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


# Counts that no seed changes.
EXACT = ("made_size", "model_size", "models_per_round")


def is_share(name: str) -> bool:
    """Whether a measure is printed as a share, with three decimals."""
    return name.partition("@")[0] in (*SHARES, "gain_last", "gain_clients")


def in_words(name: str) -> str:
    """The name of a measure as tables and figures print it."""
    return name.replace("_", " ")


def check(name: str) -> None:
    """Refuse the name of a measure that does not exist.

    Raises:
        ConfigError: there is none of this name.
    """
    if name.partition("@")[0] not in MEASURES:
        raise ConfigError(f"paper: measure {name!r} is none of {', '.join(MEASURES)}")


def value(name: str, run: ReproducedRun) -> float:
    """The measure of a run; a run that has diverged without a score has the share 0."""
    check(name)
    kind, _, target = name.partition("@")
    measured = MEASURES[kind](run, float(target or 0))
    lost = math.isnan(measured) and run.diverged and kind in SHARES
    return 0.0 if lost else measured

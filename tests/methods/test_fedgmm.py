"""FedGMM: the phases and a few rounds in numpy from the paper's text, uploads that are refused, and
what it leaves alone."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from fedhet import messages
from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError, RunFailed
from fedhet.messages import Broadcast, Failure
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedbabu import FedBABU
from fedhet.methods.fedgmm import FedGMM, FedGMMPlugin
from fedhet.methods.fedgmm.client import COUNTS, GENERATED, GLOBAL_MAX, KEPT
from fedhet.methods.fedgmm.mixtures import MIXTURES
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fednova import FedNova
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.methods.fedsa import FedSA
from fedhet.methods.fedsgd import FedSGD
from fedhet.methods.scaffold import Scaffold
from fedhet.methods.sgdm import SGDM
from fedhet.plugin import Plugin
from fedhet.task import ClientData, Samples, Task

Launch = Callable[..., Any]
CLASSES, SHAPE, LR, PSI, REG = 4, (1, 2, 2), 0.5, 0.1, 1e-4
# n_ic: the last class is nobody's; client 0 has one sample of class 2, too few to share. Larger
# clients have larger ids, so the order of a cohort (largest first) is that of ids turned round.
COUNTS_BY_CLIENT = np.array([[3, 0, 1, 0], [2, 5, 0, 0], [0, 6, 4, 0]])
RNG = np.random.default_rng(5)
DATA = [
    (RNG.uniform(0.1, 0.9, (n.sum(), *SHAPE)), RNG.permutation(np.repeat(np.arange(CLASSES), n)))
    for n in COUNTS_BY_CLIENT
]


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, CLASSES, dtype=torch.float64)

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def criterion(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none")


def normalise(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return (x - 0.4) / 0.3


def task(**change: Any) -> Task:
    """`change` replaces the data of a client: c0=(x, y)."""
    data = [change.get(f"c{i}", pair) for i, pair in enumerate(DATA)]
    return Task(
        Linear,
        criterion,
        [ClientData((torch.as_tensor(x), torch.as_tensor(y))) for x, y in data],  # type: ignore[arg-type]
        None,
        CLASSES,
        normalise,
    )


@pytest.fixture
def fedgmm(federation: Launch) -> Launch:
    def make(
        given: Task | None = None,
        cls: type = FedGMM,
        others: tuple[Callable[[], Plugin], ...] = (),
        options: Any = None,
        **how: Any,
    ) -> Any:
        settings = {"components": 1, "reg_covar": REG, "psi": PSI} | (options or {})
        return federation(
            given or task(),
            cls,
            plugins=lambda: [FedGMMPlugin(**settings), *(other() for other in others)],
            **{"lr": LR, "rounds": 3, "batch_size": 1000, **how},
        )

    return make


def kept(run: Any, pid: int) -> dict[str, Tensor]:
    state = run.store.load(pid, run.strategy.versions[pid])
    return {name: state[f"{KEPT}/{name}"] for name in ("x", "y")}


def pixels(pid: int, c: int) -> np.ndarray:
    x, y = DATA[pid]
    return x[y == c].reshape(-1, 4)


# ---- by hand


def test_what_is_shared(fedgmm: Launch) -> None:
    """Section 4.1 with one component, whose EM has a closed form; concatenated in the order of ids
    with weights n_ic / sum n_ic."""
    run = fedgmm()
    assert [msg.pid for msg in run.step()] == [2, 1, 0]
    shared = run.step()[0].extras[MIXTURES]
    behind = {0: [0, 1], 1: [1, 2], 2: [2]}  # class -> the clients with at least two samples
    rows = [(c, i) for c, pids in behind.items() for i in pids]
    assert shared["label"].tolist() == [c for c, _ in rows]
    np.testing.assert_allclose(
        shared["pi"],
        [len(pixels(i, c)) / sum(len(pixels(j, c)) for j in behind[c]) for c, i in rows],
        rtol=1e-6,
    )
    np.testing.assert_allclose(shared["mu"], [pixels(i, c).mean(0) for c, i in rows], rtol=1e-6)
    np.testing.assert_allclose(
        shared["var"], [pixels(i, c).var(0) + REG for c, i in rows], rtol=1e-6
    )


@pytest.mark.parametrize("most", [5, 1])
def test_five_components_have_the_pooled_moments(fedgmm: Launch, most: int) -> None:
    """On the wire, in float32."""
    rng = np.random.default_rng(0)
    data = {
        f"c{i}": (rng.uniform(0, 1, (n, *SHAPE)), np.zeros(n, dtype=int))
        for i, n in enumerate((30, 9, 14))
    }
    run = fedgmm(
        task(**data), options={"components": 5, "max_components": None if most == 5 else most}
    )
    run.step()
    shared = run.step()[0].extras[MIXTURES]
    pi, mu, var = (shared[name].double().numpy() for name in ("pi", "mu", "var"))
    assert len(pi) == (14 if most == 5 else 1)
    pooled = np.concatenate([x.reshape(-1, 4) for x, _ in data.values()])
    np.testing.assert_allclose(pi @ mu, pooled.mean(0), rtol=1e-6)
    np.testing.assert_allclose(pi @ (var + mu**2) - (pi @ mu) ** 2, pooled.var(0) + REG, rtol=1e-5)


@pytest.mark.parametrize(
    ("target", "goals"),
    [("client_max", [3, 5, 6]), ("global_max", [6, 6, 6]), (2, [2, 2, 2]), (9, [9, 9, 9])],
)
def test_every_class_is_filled_up(fedgmm: Launch, target: str | int, goals: list[int]) -> None:
    """To the client's largest class, to anyone's, or to a number; class 3 has no mixture; nothing
    real is discarded."""
    run = fedgmm(options={"target": target})
    run.step()
    plan = run.step()
    assert (GLOBAL_MAX in plan[0].extras) == (target == "global_max")
    for pid, goal in enumerate(goals):
        expected = np.maximum(goal - COUNTS_BY_CLIENT[pid], 0) * [1, 1, 1, 0]
        assert kept(run, pid)["y"].bincount(minlength=CLASSES).tolist() == expected.tolist()
    assert run.strategy.reports()["fedgmm"]["generated"] == sum(
        len(kept(run, pid)["y"]) for pid in run.strategy.versions
    )


def gradient(
    w: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of mean_b weights_b CE_b."""
    logits = x @ w.T + b
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p *= weights[:, None] / len(y)
    return p.T @ x, p.sum(0)


@pytest.mark.parametrize(
    "options",
    [{}, {"agg_count": "augmented"}, {"gen_weight": 0.25}, {"target": 9, "agg_count": "augmented"}],
    ids=str,
)
def test_rounds_on_real_and_generated_samples(fedgmm: Launch, options: dict[str, Any]) -> None:
    """Algorithm 1, lines 4 to 9: p_i = N_i / sum N, eta <- (1 - psi) eta, generated samples
    normalised as real ones."""
    epochs = 2
    run = fedgmm(options=options, epochs=epochs)
    run.step()
    run.step()
    sets = []
    for pid, (x, y) in enumerate(DATA):
        more = kept(run, pid)
        xs = (
            np.concatenate([x.astype(np.float64), more["x"].numpy() / 255]).reshape(-1, 4) - 0.4
        ) / 0.3
        weights = np.repeat([1.0, options.get("gen_weight", 1.0)], [len(y), len(more["y"])])
        sets.append((xs, np.concatenate([y, more["y"].numpy()]), weights))
    sizes = [
        len(s[1]) if options.get("agg_count") else len(d[1])
        for s, d in zip(sets, DATA, strict=True)
    ]
    w, b = (run.model[f"head.{name}"].numpy().copy() for name in ("weight", "bias"))
    for t in range(3):
        plan = run.step()
        assert {msg.local.lr for msg in plan} == {LR * (1 - PSI) ** t}
        ends = []
        for own in sets:
            wi, bi = w, b
            for _ in range(epochs):
                gw, gb = gradient(wi, bi, *own)
                wi, bi = wi - LR * (1 - PSI) ** t * gw, bi - LR * (1 - PSI) ** t * gb
            ends.append((wi, bi))
        w, b = (
            sum(n * end[i] for n, end in zip(sizes, ends, strict=True)) / sum(sizes) for i in (0, 1)
        )
        np.testing.assert_allclose(run.model["head.weight"], w, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(run.model["head.bias"], b, rtol=1e-9, atol=1e-12)


# ---- streams, state


def test_draws_follow_the_seed_and_the_client(fedgmm: Launch) -> None:
    """Not the number of local epochs, the rounds or the cohort."""
    same = task(c0=DATA[1], c2=DATA[1])
    settings = (0, 1, 1.0), (0, 3, 0.5), (1, 1, 1.0)
    runs = [
        fedgmm(same, seed=seed, epochs=epochs, fraction=fraction).run()
        for seed, epochs, fraction in settings
    ]
    first, again, other = ([kept(run, pid)["x"] for pid in range(3)] for run in runs)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])


def test_the_generated_samples_stay_as_they_are(fedgmm: Launch) -> None:
    """Also where the host changes the client's state in every round."""
    run = fedgmm(cls=Scaffold, fraction=0.7, options={"psi": 0.0})
    run.step()
    run.step()
    before = [kept(run, pid) for pid in range(3)]
    for _ in range(3):
        run.step()
    assert max(run.strategy.versions.values()) > 2
    assert all(
        torch.equal(old[name], kept(run, pid)[name])
        for pid, old in enumerate(before)
        for name in old
    )


def test_num_examples_are_the_real_ones(fedgmm: Launch) -> None:
    seen: list[int] = []

    def note(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        seen.extend(reply.num_examples for reply in replies)
        return replies

    fedgmm(rounds=1).run(alter=note)
    assert seen == [10, 7, 4] * 3


# ---- reductions


def test_without_generated_samples_it_is_the_host(federation: Launch) -> None:
    """target 0 and psi 0, bit for bit, with all cohorts and batches."""
    how = {"rounds": 3, "fraction": 0.5, "epochs": 2}
    for cls in (FedAvg, Scaffold):
        gmm = federation(
            toy_task(), cls, plugins=lambda: [FedGMMPlugin(target=0, psi=0)], **how
        ).run()
        assert gmm.sha256 == federation(toy_task(), cls, **how).run().sha256
    assert (
        federation(toy_task(), FedAvg, plugins=lambda: [FedGMMPlugin(target=0, psi=0.1)], **how)
        .run()
        .sha256
        != gmm.sha256
    )


def test_psi_is_the_clients_decay(federation: Launch) -> None:
    psi = federation(
        toy_task(), FedAvg, plugins=lambda: [FedGMMPlugin(target=0, psi=0.25)], rounds=3
    ).run()
    assert psi.sha256 == federation(toy_task(), FedAvg, lr_decay=0.75, rounds=3).run().sha256


SHORT = ["rounds=2", "client.epochs=1", "eval.every=2", "eval.clients=false", "partition.clients=4"]


def test_method_and_plugin_are_one(launch: Launch) -> None:
    runs = [
        launch(*SHORT, *lines, task=toy_task())
        for lines in (["method=fedgmm"], ["method=fedavg", "plugin=[fedgmm]"])
    ]
    assert runs[0].summary["weights_sha256"] == runs[1].summary["weights_sha256"]


def test_two_workers_give_the_same_bytes(launch: Launch) -> None:
    """EM, the state on disk and the uploads through the wire; digits, five components."""
    one, two = (
        launch(
            *SHORT,
            "method=fedgmm",
            "plugin=[fednorm]",
            "plugin.fedgmm.agg_count=augmented",
            f"engine.workers={n}",
        ).summary
        for n in (1, 2)
    )
    assert one["weights_sha256"] == two["weights_sha256"]
    assert one["bytes"] == two["bytes"]
    assert not multiprocessing.active_children()


class Accelerated(Tensor):
    """As a tensor of an accelerator, it refuses numpy and CPU tensors other than scalars; results
    stay there until `cpu`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cpu:
            return args[0].as_subclass(Tensor)
        mixing = func is not Tensor.__getitem__ and any(
            type(t) is Tensor and t.ndim for t in pytree.tree_leaves((args, kwargs))
        )
        if func is Tensor.numpy or mixing:
            raise RuntimeError(f"{func.__name__}: expected all tensors to be on the same device")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_what_arrives_on_an_accelerator_gives_the_same(
    fedgmm: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extras are on the device where they arrive; EM, merging and drawing are the CPU's."""
    plain = fedgmm(options={"max_components": 1}).run().sha256
    monkeypatch.setattr(
        messages,
        "on_device",
        lambda value, device: pytree.tree_map_only(
            Tensor, lambda t: t.as_subclass(Accelerated), value
        ),
    )
    assert fedgmm(options={"max_components": 1}).run().sha256 == plain


# ---- composition


@pytest.mark.parametrize(
    ("cls", "others", "agg_count"),
    [
        (FedAvg, (FedProxPlugin,), "original"),
        (FedAvg, (FedProxPlugin,), "augmented"),
        (FedAvg, (FedNormPlugin,), "original"),
        (FedAvg, (FedNormPlugin,), "augmented"),
        (Scaffold, (), "original"),
        (Scaffold, (FedNormPlugin, FedProxPlugin), "original"),
    ],
)
def test_composition(federation: Launch, cls: type, others: Any, agg_count: str) -> None:
    """It runs, and each piece counts: neither FedGMM alone nor the others alone end there."""
    gmm: tuple[Callable[[], Plugin], ...] = (
        lambda: FedGMMPlugin(components=1, reg_covar=REG, psi=PSI, agg_count=agg_count),
    )
    how = {"lr": LR, "rounds": 3, "batch_size": 4, "epochs": 2}
    found, alone, without = (
        federation(task(), c, plugins=lambda made=made: [make() for make in made], **how).run()
        for c, made in ((cls, gmm + others), (FedAvg, gmm), (cls, others))
    )
    assert all(torch.isfinite(t).all() for t in found.model.values())
    assert len({found.sha256, alone.sha256, without.sha256}) == 3
    turned = federation(task(), cls, plugins=lambda: [make() for make in others + gmm], **how).run()
    # the order of plug-ins does not matter here, but for the rounding of weights
    for name, value in found.model.items():
        torch.testing.assert_close(turned.model[name], value, rtol=1e-9, atol=1e-12)


def test_augmented_counts_need_a_host_that_weighs_by_samples(federation: Launch) -> None:
    def build(cls: type, **options: Any) -> None:
        federation(
            toy_task(), cls, plugins=lambda: [FedGMMPlugin(agg_count="augmented")], options=options
        )

    for cls in (Scaffold, FedSA):  # both weigh their participants equally
        with pytest.raises(
            ConfigError,
            match=(
                rf"refuses method={cls.name} with"
                r" plugin.fedgmm.agg_count=augmented.*agg_count=original"
            ),
        ):
            build(cls)
    for cls, options in (
        (FedSA, {"client_weighting": "samples"}),
        (FedNova, {}),
        (SGDM, {}),
        (FedBABU, {}),
        (FedSGD, {}),
    ):
        build(cls, **options)


def test_fednorm_reads_real_samples_only(fedgmm: Launch) -> None:
    """Latents of Linear are its inputs: each client's normalised mean pixel, whatever was
    generated."""
    found = {}

    def note(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        found.update({reply.pid: reply.extras.get("fednorm.z") for reply in replies})
        return replies

    fedgmm(others=(FedNormPlugin,), rounds=1).run(alter=note)
    for pid, (x, _) in enumerate(DATA):
        np.testing.assert_allclose(
            found[pid], (x.reshape(-1, 4).mean(0) - 0.4) / 0.3, rtol=1e-5, atol=1e-6
        )


def test_fednorm_sees_the_weights_that_agg_count_asks_for(fedgmm: Launch) -> None:
    """w ~ Lambda N_i: the ratio of the weights with and without generated samples is that of the
    sizes."""
    weights = {}
    for agg_count in ("original", "augmented"):
        run = fedgmm(
            others=(lambda: FedNormPlugin(temperature=5.0),),
            options={"agg_count": agg_count, "target": 9},
            rounds=1,
        )
        real_merge = run.strategy.merge
        seen: dict[int, float] = {}

        def merge(
            updates: Any, old: Any, seen: dict[int, float] = seen, real_merge: Any = real_merge
        ) -> Any:
            updates = list(updates)
            seen.update({u.pid: u.weight for u in updates})
            return real_merge(iter(updates), old)

        entry = run.strategy.timetable[-1]
        run.strategy.timetable[-1] = replace(entry, phase=replace(entry.phase, merge=merge))
        run.run()
        assert sum(seen.values()) == pytest.approx(1)
        weights[agg_count] = seen
    ratios = [weights["augmented"][pid] / weights["original"][pid] for pid in range(3)]
    expected = 27 / COUNTS_BY_CLIENT.sum(1)  # three classes of nine samples, of n
    np.testing.assert_allclose(np.array(ratios) / ratios[0], expected / expected[0], rtol=1e-9)


class Half(Plugin):
    """Weighs every sample by a half."""

    name = "half"

    def sample_weights(self, data: Samples) -> Tensor:
        return torch.full((len(data),), 0.5, dtype=torch.float64)


def test_sample_weights_of_two_plugins_multiply_in_either_order(federation: Launch) -> None:
    """Also where FedGMM has none: then half the weight is half the rate."""

    def run(*plugins: Callable[[], Plugin], lr: float = LR) -> str:
        found: str = (
            federation(
                task(),
                FedAvg,
                plugins=lambda: [make() for make in plugins],
                rounds=2,
                lr=lr,
                batch_size=1000,
            )
            .run()
            .sha256
        )
        return found

    def none() -> Plugin:
        return FedGMMPlugin(psi=0.0)

    def quarter() -> Plugin:
        return FedGMMPlugin(psi=0.0, gen_weight=0.25)

    assert run(none, Half) == run(Half, none) == run(none, lr=LR / 2)
    assert run(quarter, Half) == run(Half, quarter) == run(quarter, lr=LR / 2) != run(none, Half)


# ---- warnings and refusals


def test_what_is_told(fedgmm: Launch, caplog: pytest.LogCaptureFixture) -> None:
    """Once each: classes of which nobody has a mixture, and mixtures of few samples."""
    with caplog.at_level(logging.WARNING, logger="fedhet"):
        run = fedgmm()
        run.step()
        report = run.strategy.reports()["fedgmm"]
        run.run()
    said = [record.getMessage() for record in caplog.records]
    assert sum("mixture of the classes [3]" in line for line in said) == 1
    assert (
        sum(
            "privacy: 5 of the 5 mixtures are fitted to fewer than 10 samples" in line
            for line in said
        )
        == 1
    )
    assert report["thin"] == report["components"] == 5 and report["absent"] == 1
    assert report["counts"].tolist() == COUNTS_BY_CLIENT.tolist() and report["pids"].tolist() == [
        0,
        1,
        2,
    ]


def test_em_that_has_not_converged_is_told_and_used(
    fedgmm: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sklearn.mixture.GaussianMixture", partial(GaussianMixture, max_iter=1))
    run = fedgmm(options={"components": 2})
    run.step()
    assert "client 2, class 1: EM has not converged" in caplog.text
    assert run.strategy.current.metrics["fedgmm.not_converged"] > 0
    run.run()


def test_min_class_samples(fedgmm: Launch) -> None:
    """1: also the single sample of client 0 is shared, and is its own mean. 5: classes 0 and 2 have
    no mixture."""
    run = fedgmm(options={"min_class_samples": 1})
    run.step()
    shared = run.step()[0].extras[MIXTURES]
    assert shared["label"].tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(shared["mu"][4], pixels(0, 2)[0], rtol=1e-6)
    np.testing.assert_allclose(shared["var"][4], REG, rtol=1e-6)
    run = fedgmm(options={"min_class_samples": 5})
    run.step()
    assert run.step()[0].extras[MIXTURES]["label"].tolist() == [1, 1]
    assert kept(run, 0)["y"].tolist() == [1, 1, 1]


def test_nobody_has_enough_of_any_class(fedgmm: Launch) -> None:
    run = fedgmm(options={"min_class_samples": 50, "psi": 0.0}).run()
    assert [tuple(kept(run, pid)["x"].shape) for pid in range(3)] == [(0, *SHAPE)] * 3
    assert run.sha256 == fedgmm(options={"target": 0, "psi": 0.0}).run().sha256


def test_one_client_balances_itself(fedgmm: Launch) -> None:
    run = fedgmm(
        Task(
            Linear,
            criterion,
            [ClientData((torch.from_numpy(DATA[1][0]), torch.from_numpy(DATA[1][1])))],  # type: ignore[arg-type]
            None,
            CLASSES,
            normalise,
        )
    ).run()
    assert kept(run, 0)["y"].tolist() == [0, 0, 0]


def alter(pid: int, change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    def with_change(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        change(next(reply for reply in replies if reply.pid == pid).extras)
        return replies

    return with_change


def in_mixtures(name: str, at: Any, value: float) -> Callable[[dict[str, Any]], None]:
    def change(extras: dict[str, Any]) -> None:
        extras[MIXTURES][name][at] = value

    return change


def narrower(extras: dict[str, Any]) -> None:
    extras[MIXTURES] |= {name: extras[MIXTURES][name][:, :3] for name in ("mu", "var")}


def more(extras: dict[str, Any]) -> None:
    found = {name: t[[0, 0, *range(1, len(t))]] for name, t in extras[MIXTURES].items()}
    found["pi"][:2] = 0.5
    extras[MIXTURES] = found


def drop(extras: dict[str, Any]) -> None:
    extras[MIXTURES] = {name: t[1:] for name, t in extras[MIXTURES].items()}


BAD = {
    "variance": (in_mixtures("var", (1, 2), 0.0), "class 1: the smallest variance is 0.0"),
    "negative": (in_mixtures("var", (0, 0), -1.0), "class 0: the smallest variance is -1.0"),
    "weights": (in_mixtures("pi", 0, 0.9), "class 0: the weights .* sum to 1"),
    "nan": (in_mixtures("mu", (1, 1), float("nan")), "class 1: mu holds NaN"),
    "dimension": (narrower, "class 0: the components have 3 dimensions; 4 are expected"),
    "label": (in_mixtures("label", 0, 7), "class 7; classes go from 0 to 3"),
    "more": (more, "class 0: 2 components of 2 samples; at most 1 are expected"),
    "lacking": (drop, "class 0: 2 samples and no mixture"),
    "lengths": (lambda extras: extras[MIXTURES].update(pi=torch.ones(9)), r"pi \(K,\)"),
    "shapes": (lambda extras: extras[MIXTURES].update(pi=torch.tensor(1.0)), r"pi \(K,\)"),
    "no label": (lambda extras: extras[MIXTURES].update(label=torch.zeros(2)), "integer label"),
    "keys": (lambda extras: extras[MIXTURES].pop("var"), r"var \(K, d\) are expected"),
    "missing": (lambda extras: extras.pop(MIXTURES), "'fedgmm.mixtures' is missing"),
    "counts": (
        lambda extras: extras.update({COUNTS: torch.tensor([2, 6, 0, 0])}),
        "with the sum 7 are expected",
    ),
    "negative counts": (
        lambda extras: extras.update({COUNTS: torch.tensor([-2, 9, 0, 0])}),
        "whole numbers >= 0",
    ),
    "no counts": (lambda extras: extras.pop(COUNTS), "'fedgmm.counts' is missing"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_upload_is_that_clients_failure(fedgmm: Launch, how: str) -> None:
    change, said = BAD[how]
    with pytest.raises(
        RunFailed, match=rf"client 1 failed in phase 'fedgmm.fit', step 1: .*{said}"
    ):
        fedgmm(options={"components": 5}).step(alter=alter(1, change))


def test_a_skipped_upload_is_left_out_of_the_mixtures(fedgmm: Launch) -> None:
    run = fedgmm(on_failure="skip")
    run.step(alter=alter(1, BAD["nan"][0]))
    shared = run.step()[0].extras[MIXTURES]
    assert shared["label"].tolist() == [0, 1, 2] and shared["pi"].tolist() == [1, 1, 1]
    run.run()
    assert kept(run, 1)["y"].bincount(minlength=CLASSES).tolist() == [
        3,
        0,
        5,
        0,
    ]  # it generates all the same


def test_a_client_that_missed_share_does_not_train(fedgmm: Launch) -> None:
    def away(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        return [
            (
                Failure(1, msg.phase, msg.step, "away")
                if msg.pid == 1 and msg.phase == "fedgmm.share"
                else reply
            )
            for msg, reply in zip(plan, replies, strict=True)
        ]

    run = fedgmm(on_failure="skip", rounds=2).run(alter=away)
    assert [(f.pid, f.phase, f.step) for f in run.strategy.current.failures] == [(1, "train", 2)]
    assert (
        "no generated samples: phase 'fedgmm.share' has not reached it"
        in run.strategy.current.failures[0].cause
    )


@pytest.mark.parametrize("number", [-1, 3.7])
def test_a_bad_number_of_generated_samples_is_refused(fedgmm: Launch, number: float) -> None:
    run = fedgmm()
    run.step()
    with pytest.raises(
        RunFailed,
        match=rf"client 0 failed in phase 'fedgmm.share', step 1: .*'fedgmm.generated' is {number}",
    ):
        run.step(alter=alter(0, lambda extras: extras.update({GENERATED: number})))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"c1": (DATA[1][0] * 3, DATA[1][1])},
            r"pixels in \[0, 1\].* client 1 lie in \[0\.\d+, 2\.\d+\]",
        ),
        ({"c1": (DATA[1][0] * np.nan, DATA[1][1])}, r"client 1 lie in \[nan, nan\]"),
        ({"c1": (DATA[1][0], DATA[1][1] + 3)}, "labels 0 to 3; client 1 has .* from 3 to 4"),
        ({"c1": (DATA[1][0], DATA[1][1] - 1)}, "labels 0 to 3; client 1 has .* from -1 to 0"),
        ({"c1": (DATA[1][0], DATA[1][1] + 0.5)}, "labels 0 to 3; client 1 has a torch.float64"),
    ],
    ids=["high", "nan", "label", "negative label", "no label"],
)
def test_bad_samples_are_named(fedgmm: Launch, data: dict[str, Any], said: str) -> None:
    with pytest.raises(
        RunFailed, match=rf"client 1 failed in phase 'fedgmm.fit', step 1: .*{said}"
    ):
        fedgmm(task(**data)).step()


def test_too_large_mixtures_are_refused(fedgmm: Launch) -> None:
    """A client's own: 2 components of 8 + 4 (2 * 4 + 1) bytes; those of all: 5."""
    with pytest.raises(
        RunFailed,
        match=(
            r"client 2 .*mixtures of this client are 2 components of 4 pixels.*max_payload_mb=8e-05"
        ),
    ):
        fedgmm(options={"max_payload_mb": 80e-6}).step()
    with pytest.raises(
        RunFailed,
        match=r"mixtures of all clients are 5 components of 4 pixels.*max_payload_mb=0.0002",
    ):
        fedgmm(options={"max_payload_mb": 200e-6}).step()
    run = fedgmm(options={"max_payload_mb": 220e-6})
    run.step()
    assert (
        run.strategy.current.bytes["up"][MIXTURES]
        == 220
        == 1e6 * run.strategy.reports()["fedgmm"]["megabytes"]
    )


def test_too_large_mixtures_of_a_client_are_left_out_or_those_of_all_stop_the_run(
    fedgmm: Launch,
) -> None:
    run = fedgmm(options={"max_payload_mb": 80e-6}, on_failure="skip")
    run.step()
    assert [f.pid for f in run.strategy.current.failures] == [2, 1]
    assert run.step()[0].extras[MIXTURES]["label"].tolist() == [0]  # client 0's
    with pytest.raises(RunFailed, match="mixtures of all clients"):
        fedgmm(options={"max_payload_mb": 200e-6}, on_failure="skip").step()


def test_a_task_without_classes_is_refused(fedgmm: Launch) -> None:
    without = task()
    without.classes = 0
    with pytest.raises(ConfigError, match=r"fedgmm.*classes"):
        fedgmm(without)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("components", 0),
        ("reg_covar", 0.0),
        ("psi", 1.0),
        ("psi", -0.1),
        ("target", "max"),
        ("target", -1),
        ("target", 2.5),
        ("min_class_samples", 0),
        ("max_components", 0),
        ("agg_count", "real"),
        ("gen_weight", -1.0),
        ("max_payload_mb", 0),
    ],
)
def test_bad_options_are_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"plugin\.fedgmm\.{key}="):
        FedGMMPlugin(**{key: value})  # type: ignore[arg-type]

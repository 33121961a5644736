"""FedGMM together with other methods and plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from methods.fedgmm_task import COUNTS_BY_CLIENT, DATA, LR, PSI, REG, task
from torch import Tensor

from fedhet.core.client.context import ClientContext
from fedhet.core.errors import ConfigError
from fedhet.core.kernel import Merged, Message, Plugin, State, Step, Term, Update
from fedhet.core.messages import Broadcast
from fedhet.core.trees import Tree
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedbabu import FedBABU
from fedhet.methods.fedgmm import FedGMM, FedGMMPlugin
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fednova import FedNova
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.methods.fedsa import FedSA
from fedhet.methods.fedsgd import FedSGD
from fedhet.methods.scaffold import Scaffold
from fedhet.methods.sgdm import SGDM

Launch = Callable[..., Any]
MakePlugin = Callable[[], Plugin]


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
def test_composition(
    federation: Launch, cls: type, others: tuple[MakePlugin, ...], agg_count: str
) -> None:
    """It runs, and each piece counts: neither FedGMM alone nor the others alone end there."""

    def gmm() -> Plugin:
        return FedGMMPlugin(components=1, reg_covar=REG, psi=PSI, agg_count=agg_count)

    def run(cls: type, makers: Sequence[MakePlugin]) -> Any:
        def plugins() -> list[Plugin]:
            return [make() for make in makers]

        return federation(
            task(), cls, plugins=plugins, lr=LR, rounds=3, batch_size=4, epochs=2
        ).run()

    composed = run(cls, (gmm, *others))
    alone = run(FedAvg, (gmm,))
    without = run(cls, others)
    assert all(torch.isfinite(t).all() for t in composed.model.values())
    assert len({composed.sha256, alone.sha256, without.sha256}) == 3
    reordered = run(cls, (*others, gmm))
    # The order of these plug-ins does not matter, but for the rounding of weights.
    for name, value in composed.model.items():
        torch.testing.assert_close(reordered.model[name], value, rtol=1e-9, atol=1e-12)


def test_steps_run_over_real_and_generated_samples(federation: Launch) -> None:
    """client.steps in place of epochs: steps over all 18 samples, 6 of each of three classes."""
    goal = int(COUNTS_BY_CLIENT.max())
    batches = -(-3 * goal // 5)

    def sha256(epochs: int, steps: int | None) -> str:
        run = federation(
            task(),
            FedAvg,
            plugins=lambda: [FedGMMPlugin(components=1, reg_covar=REG, target=goal)],
            lr=LR,
            rounds=2,
            batch_size=5,
            epochs=epochs,
            local={"steps": steps},
        )
        return run.run().sha256

    expected = sha256(epochs=2, steps=None)
    assert sha256(epochs=1, steps=2 * batches) == expected
    assert sha256(epochs=2, steps=2 * batches - 1) != expected


def test_augmented_counts_need_a_host_that_weighs_by_samples(federation: Launch) -> None:
    def build(cls: type, **options: Any) -> None:
        federation(
            toy_task(), cls, plugins=lambda: [FedGMMPlugin(agg_count="augmented")], options=options
        )

    refusal = r"method=scaffold .*'fedgmm'.* n_k, .*plugin.fedgmm.agg_count=original"
    with pytest.raises(ConfigError, match=refusal):
        build(Scaffold)  # it weighs its participants equally
    with pytest.raises(ConfigError, match=r"method=fedsa .*'fedgmm'.*=samples"):
        build(FedSA)  # its merge ignores the weights
    build(FedSA, client_weighting="samples")
    for cls in (FedNova, SGDM, FedBABU, FedSGD):
        build(cls)


def test_fednorm_reads_real_samples_only(fedgmm: Launch) -> None:
    """Linear's latents are its inputs, so z is each client's normalised mean pixel.

    It is the same whatever was generated.
    """
    latents: dict[int, Tensor] = {}

    def note(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        latents.update({reply.pid: reply.extras.get("fednorm.z") for reply in replies})
        return replies

    fedgmm(others=(FedNormPlugin,), rounds=1).run(alter=note)
    for pid, (x, _) in enumerate(DATA):
        expected = (x.reshape(-1, 4).mean(0) - 0.4) / 0.3
        np.testing.assert_allclose(latents[pid], expected, rtol=1e-5, atol=1e-6)


def merged_weights(fedgmm: Launch, **how: Any) -> dict[int, float]:
    """The weight with which each client enters the last merge."""
    weights: dict[int, float] = {}

    @dataclass(frozen=True, kw_only=True)
    class Noting(FedGMM):
        breaks = {}

        def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
            taken = list(updates)
            weights.update({update.pid: update.weight for update in taken})
            return super().merge(step, state, old, iter(taken))

    fedgmm(cls=Noting, **how).run()
    return weights


def test_fednorm_sees_the_weights_that_agg_count_asks_for(fedgmm: Launch) -> None:
    """w ~ Lambda N_i: with and without generated samples, the weights differ as the sizes do."""

    def weights(agg_count: str) -> dict[int, float]:
        options = {"agg_count": agg_count, "target": 9}
        others = (lambda: FedNormPlugin(temperature=5.0),)
        return merged_weights(fedgmm, others=others, options=options, rounds=1)

    original = weights("original")
    augmented = weights("augmented")
    assert sum(original.values()) == pytest.approx(1)
    assert sum(augmented.values()) == pytest.approx(1)
    ratios = np.array([augmented[pid] / original[pid] for pid in range(3)])
    expected = 27 / COUNTS_BY_CLIENT.sum(1)  # three classes of nine samples, of n
    np.testing.assert_allclose(ratios / ratios[0], expected / expected[0], rtol=1e-9)


@dataclass(frozen=True)
class Half(Plugin):
    """Weighs every sample by a half."""

    name = "half"

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        w = torch.full((len(ctx.data),), 0.5, dtype=torch.float64)
        return [Term("weight", lambda params, batch, own: own["w"], {"w": w})]


def test_sample_weights_of_two_plugins_multiply_in_either_order(federation: Launch) -> None:
    """Also where FedGMM has none: then half the weight is half the rate."""

    def run(*makers: MakePlugin, lr: float = LR) -> str:
        def plugins() -> list[Plugin]:
            return [make() for make in makers]

        done = federation(task(), FedAvg, plugins=plugins, rounds=2, lr=lr, batch_size=1000).run()
        return str(done.sha256)

    def none() -> Plugin:
        return FedGMMPlugin(psi=0.0)

    def quarter() -> Plugin:
        return FedGMMPlugin(psi=0.0, gen_weight=0.25)

    assert run(none, Half) == run(Half, none) == run(none, lr=LR / 2)
    assert run(quarter, Half) == run(Half, quarter) == run(quarter, lr=LR / 2) != run(none, Half)

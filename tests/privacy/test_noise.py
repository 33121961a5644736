"""privacy.noise against closed forms: how far replies are clipped, and how much noise they get."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedhet.core import trees
from fedhet.core.client.context import ClientContext, Fitted
from fedhet.core.groups import Noise
from fedhet.core.kernel import Client, Expected, Message, Result, State, Step, serves
from fedhet.core.messages import EVALUATE, Failure
from fedhet.core.noise import mechanism, seeded, unpredictable
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fedsgd import FedSGD
from fedhet.methods.sgdm import SGDM

Federation = Callable[..., Any]


def faint(clip: float) -> Noise:
    """Noise that no float32 can hold, which a configuration may not have."""
    noise = Noise(1.0, clip=clip)
    object.__setattr__(noise, "multiplier", 1e-100)
    return noise


NOTHING = faint(1e6)  # a norm that no update has
COUNTER = "body.1.num_batches_tracked"
DRAWS = {"seeded": seeded(0, "train", 1, 2), "unpredictable": unpredictable}


def silent(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.float64)


@pytest.mark.parametrize("name", DRAWS)
def test_the_noise_is_normal_with_the_stated_deviation(name: str) -> None:
    """Moments and tails of a million draws, within five standard errors."""
    n, std = 10**6, 0.7
    (noise,) = mechanism({"w": torch.zeros(n)}, 1.0, std, DRAWS[name]).values()
    assert abs(float(noise.mean())) < 5 * std / math.sqrt(n)
    assert float(noise.std()) == pytest.approx(std, rel=5 / math.sqrt(2 * n))
    for deviations, share in ((1, 0.317311), (2, 0.045500), (3, 0.002700)):
        beyond = float((noise.abs() > deviations * std).double().mean())
        assert abs(beyond - share) < 5 * math.sqrt(share / n)
    lag = float((noise[1:] * noise[:-1]).mean()) / std**2
    assert abs(lag) < 5 / math.sqrt(n)


def test_a_stream_repeats_itself_and_the_entropy_does_not() -> None:
    again = seeded(0, "train", 1, 2)(5)
    assert torch.equal(again, seeded(0, "train", 1, 2)(5))
    for other in ((1, "train", 1, 2), (0, "fit", 1, 2), (0, "train", 2, 2), (0, "train", 1, 3)):
        assert not torch.equal(again, seeded(*other)(5))
    assert not torch.equal(unpredictable(5), unpredictable(5))


@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_no_draw_is_infinite(monkeypatch: pytest.MonkeyPatch, byte: bytes) -> None:
    monkeypatch.setattr("secrets.token_bytes", lambda n: byte * n)
    assert 8 < float(unpredictable(1).abs()) < 9


def test_the_norm_of_all_tensors_together_is_clipped() -> None:
    tree = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}  # of norm 5
    clipped = mechanism(tree, 2.0, 1.0, silent)
    assert trees.norm(clipped) == pytest.approx(2)
    assert torch.allclose(clipped["b"], torch.tensor([[1.6]], dtype=torch.float64))
    for clip in (5.0, 9.0):
        kept = mechanism(tree, clip, 1.0, silent)
        assert all(torch.equal(kept[name].float(), tree[name]) for name in tree)
    assert trees.norm(mechanism({"a": torch.zeros(3)}, 1.0, 1.0, silent)) == 0
    with pytest.raises(ValueError, match=r"finite values .*clipped"):
        mechanism({"a": torch.tensor([1.0, math.nan])}, 1.0, 1.0, silent)


@pytest.mark.parametrize(
    ("cls", "plugins"),
    [(FedAvg, list), (FedAvg, lambda: [FedNormPlugin()]), (SGDM, list), (FedSGD, list)],
    ids=["fedavg", "fednorm", "sgdm", "fedsgd"],
)
def test_without_clipping_and_noise_it_is_the_method(
    federation: Federation, cls: Any, plugins: Callable[[], Any]
) -> None:
    """Bit for bit, with batch norm too, but for its counter, which goes back as it came."""

    def run(**noise: Noise) -> Any:
        return federation(toy_task(norm=True), cls, plugins=plugins, rounds=3, **noise).run()

    literal, same, noised = run(), run(noise=NOTHING), run(noise=Noise(0.01))
    assert int(literal.model.pop(COUNTER)) > 0 == int(same.model.pop(COUNTER))
    assert all(torch.equal(t, same.model[name]) for name, t in literal.model.items())
    assert not all(torch.equal(t, noised.model[name]) for name, t in literal.model.items())


def replies(run: Any) -> list[Any]:
    plan = run.plan()
    return [(msg, run.client().handle(msg)) for msg in plan]


def test_a_reply_is_what_it_was_but_for_the_noise(federation: Federation) -> None:
    """The noise of weights and latents has the deviation of noise times clip, at every client."""
    how = {"plugins": lambda: [FedNormPlugin()]}
    noise = Noise(0.5, clip=4.0)
    literal = replies(federation(toy_task(), FedAvg, **how))
    noised = replies(federation(toy_task(), FedAvg, noise=noise, **how))
    differences = []
    for (_, before), (_, after) in zip(literal, noised, strict=True):
        for name, value in before.weights.items():
            differences.append((after.weights[name] - value).flatten())
        differences.append(after.extras["fednorm.z"] - before.extras["fednorm.z"])
    spread = torch.cat(differences)
    assert len(spread) == 4 * (4 * 3 + 3 + 3 * 2 + 2 + 3)
    assert float(spread.std()) == pytest.approx(2.0, rel=0.2)
    assert max(abs(a - b) for a, b in zip(spread[:26], spread[26:52], strict=True)) > 0.1


def test_each_kind_of_value_is_clipped_by_itself(federation: Federation) -> None:
    how = {"plugins": lambda: [FedNormPlugin()], "noise": faint(0.01)}
    for msg, update in replies(federation(toy_task(), FedAvg, **how)):
        change = {name: t.double() - msg.weights[name] for name, t in update.weights.items()}
        assert trees.norm(change) == pytest.approx(0.01, rel=1e-4)
        assert trees.norm({"z": update.extras["fednorm.z"]}) == pytest.approx(0.01, rel=1e-4)


def test_variances_of_batch_norm_stay_variances(federation: Federation) -> None:
    run = federation(toy_task(norm=True), FedAvg, noise=Noise(10.0), rounds=2).run()
    variances = [t for name, t in run.model.items() if name.endswith("running_var")]
    assert variances
    assert all(float(t.min()) >= 0 for t in variances)


def test_real_clients_draw_noise_that_the_seed_does_not_tell(federation: Federation) -> None:
    def digest(simulated: bool) -> str:
        run = federation(toy_task(), FedAvg, noise=Noise(0.1))
        run.workspace.simulated = simulated
        return str(run.run().sha256)

    assert digest(True) == digest(True)
    assert digest(False) != digest(False)


def test_no_metric_leaves_a_client_but_seconds_and_the_count(federation: Federation) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Talks(FedNormPlugin):
        def finish(
            self, msg: Message, state: State, ctx: ClientContext, fitted: Fitted
        ) -> tuple[Result, State]:
            result, state = super().finish(msg, state, ctx, fitted)
            return replace(result, metrics={"loss": 0.5}), state

    for _, update in replies(
        federation(toy_task(), FedAvg, plugins=lambda: [Talks()], noise=Noise(1.0))
    ):
        assert set(update.metrics) == {"privacy.spent", "seconds.train", "seconds.extras"}
        assert update.metrics["privacy.spent"] == 2


def test_clients_evaluate_nothing(federation: Federation) -> None:
    run = federation(toy_task(), FedAvg, noise=Noise(1.0))
    (msg, *_) = run.plan()
    msg.phase = EVALUATE
    reply = run.client().handle(msg)
    assert isinstance(reply, Failure)
    assert "set eval.clients=false" in reply.cause


def told(
    federation: Federation,
    extra: Any,
    expected: Mapping[str, Expected],
    weights: Callable[[Any], Any] = dict,
) -> Any:
    """The reply of a client that sends one extra, x, to a server that expects this."""

    class Speaking(Client):
        @serves
        def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
            return Result(weights(ctx.fit(msg.weights).params), {"x": extra}), state

    @dataclass(frozen=True, kw_only=True)
    class Speaks(FedAvg):
        name = "own"
        client = Speaking

        def expects(self, step: Step) -> Mapping[str, Expected]:
            return expected

    return replies(federation(toy_task(), Speaks, noise=Noise(1.0)))[0][1]


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (3, r"'own\.x' .*an? int.*noise .*cover; nothing .*sent"),
        ("many", r"'own\.x' .*noise .*cover"),
        (True, r"'own\.x' .*noise .*cover"),
        (torch.arange(3), r"'own\.x' .*noise .*cover"),
        ({"n": torch.arange(3)}, r"'own\.x\.n' .*noise .*cover"),
        (0.5, "2 releases, .*1: `expects` .*name "),
        (torch.zeros(2), "2 releases, .*1: `expects` .*name "),
    ],
    ids=str,
)
@pytest.mark.parametrize("expected", [{}, {"x": Expected(whole=True)}], ids=["nothing", "whole"])
def test_what_no_noise_covers_or_no_one_counts_is_not_sent(
    federation: Federation, extra: Any, problem: str, expected: dict[str, Expected]
) -> None:
    reply = told(federation, extra, expected)
    assert isinstance(reply, Failure)
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(reply.cause)


def test_what_is_public_or_counted_is_sent(federation: Federation) -> None:
    public = {"x": Expected(whole=True, public=True)}
    assert told(federation, 3, public).extras["own.x"] == 3
    number = told(federation, 0.5, {"x": Expected()}).extras["own.x"]
    assert isinstance(number, float)
    assert number != 0.5
    parts = {"x": Expected(like={"n": torch.tensor(0), "t": torch.zeros(2)}, public=("n",))}
    tree = {"n": torch.tensor(7), "t": torch.zeros(2)}
    sent = told(federation, tree, parts).extras["own.x"]
    assert int(sent["n"]) == 7 and not sent["t"].eq(0).any()

    def infinite(params: Any) -> Any:
        return {**params, "head.bias": params["head.bias"] + math.inf}

    reply = told(federation, 0.5, {"x": Expected()}, infinite)
    assert "weights cannot be sent: its norm is inf" in reply.cause


def test_what_noise_has_spoilt_is_repaired_or_refused(federation: Federation) -> None:
    """By the limits that `expects` states, from the noised value alone; then by `repair`."""
    noise = {"x": Expected(shape=(64,), low=0.0, high=0.25, repair=lambda x, _: x.ceil())}
    value = told(federation, torch.zeros(64), noise).extras["own.x"]
    assert set(value.tolist()) == {0.0, 1.0}
    number = {"x": Expected(low=0.5, high=0.5)}
    assert told(federation, 3.0, number).extras["own.x"] == 0.5
    public = {"x": Expected(low=0.0, high=1.0, public=True)}
    assert (
        told(federation, 3.0, public).extras["own.x"] == 3.0
    )  # as it is, for the server to refuse

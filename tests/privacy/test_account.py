"""What privacy.noise costs: epsilon against closed forms, and budgets, which no client exceeds."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.common import RecordDict
from opacus.accountants import RDPAccountant
from scipy.stats import norm

import fedhet
from fedhet.core import noise as noises
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.groups import Noise
from fedhet.core.messages import Failure
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.runs.privacy.account import SPENT, epsilon, spent_by, write_spent
from fedhet.runs.record.outcome import Run
from fedhet.runs.stores import ContextStore, DiskStore, MemoryStore
from fedhet.testing import check_resume

Federation = Callable[..., Any]
Launch = Callable[..., Run]
DELTA = 1e-5
LINES = ["eval.clients=false", "client.epochs=1", "client.batch_size=5", "client.lr=.1"]


def exact_delta(multiplier: float, eps: float) -> float:
    """Of one Gaussian mechanism (Balle and Wang 2018, theorem 8)."""
    half, shift = 1 / (2 * multiplier), eps * multiplier
    return float(norm.cdf(half - shift) - math.exp(eps) * norm.cdf(-half - shift))


def by_renyi(multiplier: float, releases: int) -> float:
    """The smallest bound over the orders (Canonne, Kamath and Steinke 2020, proposition 12)."""
    orders = [1 + x / 1000 for x in range(1, 200_000)]
    return min(
        releases * a / (2 * multiplier**2)
        + math.log1p(-1 / a)
        - (math.log(DELTA) + math.log(a)) / (a - 1)
        for a in orders
    )


@pytest.mark.parametrize("releases", [1, 20])
@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0])
def test_epsilon(multiplier: float, releases: int) -> None:
    """It is opacus', that of the closed form, and no less than the exact one."""
    accountant = RDPAccountant()
    for _ in range(releases):
        accountant.step(noise_multiplier=multiplier, sample_rate=1.0)
    eps = epsilon(multiplier, DELTA, releases)
    assert eps == pytest.approx(accountant.get_epsilon(DELTA))
    assert eps == pytest.approx(by_renyi(multiplier, releases), rel=0.01)
    together = multiplier / math.sqrt(releases)  # n releases are one with 1/sqrt(n) of the noise
    assert exact_delta(together, eps) <= DELTA < exact_delta(together, 0.8 * eps)


def test_no_release_costs_nothing() -> None:
    assert epsilon(1.0, DELTA, 0) == 0


def test_the_record_has_the_most_that_a_client_has_released(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every line, in the summary, the card, the terminal; two releases a round with FedNorm."""
    run = launch(
        "method=fednorm", "privacy.noise=2", "rounds=4", "fraction=.5", *LINES, task=toy_task()
    )
    taken: Counter[int] = Counter()
    for line in (run.dir / "rounds.jsonl").read_text().splitlines():
        row = json.loads(line)
        taken.update(row["cohort"])
        most = 2 * max(taken.values())
        spent = {"epsilon": epsilon(2.0, DELTA, most), "delta": DELTA, "releases": most}
        spent["epsilon_replaced"] = epsilon(1.0, DELTA, most)  # that of half the noise
        assert row["privacy"] == spent
    assert run.summary["privacy"] == spent
    assert most > 2
    said = f"epsilon {spent['epsilon_replaced']:.4g} if a client's data are replaced,"
    said += f" {spent['epsilon']:.4g} if a client's data are left out"
    said += f", at delta 1e-05 ({most} releases)"
    assert said in capsys.readouterr().out
    assert said in (run.dir / "model_card.md").read_text()


def test_without_noise_nothing_is_recorded(launch: Launch) -> None:
    run = launch("method=fedavg", "rounds=1", *LINES, task=toy_task())
    assert "privacy" not in run.summary
    assert "privacy" not in (run.dir / "rounds.jsonl").read_text()


# ---- the budget
def test_a_run_beyond_the_budget_does_not_begin(launch: Launch, tmp_path: Path) -> None:
    lines = ["method=fedavg", "privacy.noise=1", *LINES]
    budget = f"privacy.budget={epsilon(1.0, DELTA, 3)}"
    with pytest.raises(ConfigError, match=r"spent after 3 .*run's 5 rounds"):
        launch(*lines, budget, "rounds=5", task=toy_task())
    assert not list(tmp_path.iterdir())
    run = launch(*lines, budget, "rounds=3", task=toy_task())
    assert run.summary["privacy"]["epsilon"] == epsilon(1.0, DELTA, 3)
    # A client that is not drawn spends nothing.
    assert (
        launch(*lines, budget, "rounds=5", "fraction=.25", task=toy_task()).summary["rounds"] == 5
    )


def limited(federation: Federation, releases: int) -> Any:
    noise = Noise(1.0, budget=epsilon(1.0, DELTA, releases))
    return federation(toy_task(), FedAvg, noise=noise, rounds=9, on_failure="skip")


def test_a_client_sends_nothing_beyond_its_budget(federation: Federation) -> None:
    """Whatever the server asks for: nothing is drawn, and the reply has no weights."""
    run = limited(federation, 3)
    for _ in range(3):
        run.step()
    for msg in run.plan():
        reply = run.client().handle(msg)
        assert isinstance(reply, Failure)
        assert "privacy.budget=" in reply.cause
        assert "nothing was sent" in reply.cause
    with pytest.raises(RunFailed, match=r"privacy\.budget="):
        run.step()


def test_a_server_that_repeats_its_messages_gets_no_more(federation: Federation) -> None:
    """Not even one that says that the client has released nothing, or names an older state."""
    run = limited(federation, 3)
    (msg, *_) = run.plan()
    replies = [run.client().handle(msg) for _ in range(5)]
    assert [isinstance(reply, Failure) for reply in replies] == [False] * 3 + [True] * 2


def test_a_client_that_has_lost_its_count_goes_by_the_server(federation: Federation) -> None:
    run = limited(federation, 3)
    for _ in range(3):
        run.step()
    run.store = MemoryStore()
    (msg, *_) = run.plan()
    assert isinstance(run.client().handle(msg), Failure)


def test_a_server_that_knows_less_takes_over_the_clients_count(federation: Federation) -> None:
    """As one that goes on from a checkpoint before rounds that the clients have served."""
    run = limited(federation, 9)
    run.step()
    run.account.releases.clear()
    run.step()
    assert set(run.account.releases.values()) == {2}


@pytest.mark.parametrize(("said", "believed"), [(1e15, 9), (float("nan"), 2), (0, 2), (5, 5)])
def test_no_client_is_believed_beyond_the_whole_run(
    federation: Federation, said: float, believed: int
) -> None:
    """Its word would otherwise be the epsilon of the run's record."""

    def lies(plan: list[Any], replies: list[Any]) -> list[Any]:
        next(reply for reply in replies if reply.pid == 0).metrics[SPENT] = said
        return replies

    run = federation(toy_task(), FedAvg, noise=Noise(1.0), rounds=9, on_failure="skip")
    run.step()
    run.step(lies)
    first, *others = sorted(run.account.releases.items())
    assert first[1] == believed and {count for _, count in others} == {2}


def test_nothing_is_drawn_before_the_count_is_kept(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that dies in between has spent more than it sent, never less."""

    def dies(*args: object) -> None:
        raise KeyboardInterrupt

    run = limited(federation, 3)
    (msg, *_) = run.plan()
    monkeypatch.setattr(noises, "mechanism", dies)
    with pytest.raises(KeyboardInterrupt):
        run.client().handle(msg)
    assert spent_by(run.store, msg.pid) == 1


@pytest.mark.parametrize("kind", ["memory", "disk", "context"])
def test_the_count_is_beside_the_states_and_never_goes_back(kind: str, tmp_path: Path) -> None:
    stores = {
        "memory": MemoryStore,
        "disk": lambda: DiskStore(tmp_path),
        "context": lambda: ContextStore(RecordDict()),
    }
    store: Any = stores[kind]()
    store.save(3, 7, {"x": torch.zeros(2)}, ())
    write_spent(store, 3, 5)
    write_spent(store, 3, 4)
    store.save(3, 8, {"x": torch.ones(2)}, ())
    assert spent_by(store, 3) == 5
    assert spent_by(store, 4) == 0
    assert torch.equal(store.load(3, 8)["x"], torch.ones(2))


# ---- runs
@pytest.mark.slow
@pytest.mark.parametrize("line", ["method=fednorm", "method=fedgmm"])
def test_a_run_that_was_killed_has_the_same_epsilon(line: str) -> None:
    given = [*LINES, "rounds=2", "fraction=.5", "privacy.noise=1", "privacy.budget=100"]
    check_resume(line, *given, task=toy_task())


def test_equal_bytes_with_any_number_of_workers(launch: Launch) -> None:
    lines = ["method=fednorm", "privacy.noise=.5", "rounds=2", *LINES]
    one, two = (launch(*lines, f"engine.workers={n}", task=toy_task()) for n in (1, 2))
    assert one.summary["weights_sha256"] == two.summary["weights_sha256"]
    assert one.summary["privacy"] == two.summary["privacy"]


@pytest.mark.matrix
def test_equal_bytes_under_ray(launch: Launch) -> None:
    lines = ["method=fednorm", "privacy.noise=.5", "privacy.budget=1000", "rounds=2", *LINES]
    here, there = (launch(*lines, f"engine={name}") for name in ("local", "ray"))
    assert here.summary["weights_sha256"] == there.summary["weights_sha256"]
    assert here.summary["privacy"] == there.summary["privacy"]


@pytest.mark.matrix
def test_real_nodes_draw_their_own_noise(launch: Launch) -> None:
    """Under engine=flwr, the count is that of the simulation, the noise is not."""
    lines = ["method=fednorm", "privacy.noise=.5", "privacy.budget=1000", "rounds=2", *LINES]
    here, there = (launch(*lines, f"engine={name}") for name in ("local", "flwr"))
    assert here.summary["weights_sha256"] != there.summary["weights_sha256"]
    assert here.summary["privacy"] == there.summary["privacy"]


# ---- a budget that is spent exactly
def test_a_run_that_was_killed_may_spend_its_budget_exactly() -> None:
    """Going on counts no release twice, so that the last step is still within the budget."""
    budget = f"privacy.budget={epsilon(1.0, DELTA, 3)}"
    check_resume("method=fedavg", *LINES, "rounds=3", "privacy.noise=1", budget, task=toy_task())


def test_a_run_that_has_spent_its_budget_takes_no_more_rounds(launch: Launch) -> None:
    budget = f"privacy.budget={epsilon(1.0, DELTA, 2)}"
    lines = ["method=fedavg", *LINES, "privacy.noise=1", budget, "checkpoint.every=0"]
    run = launch(*lines, "rounds=2", task=toy_task())
    before = {path: path.read_bytes() for path in run.dir.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"spent after 2 .*run's 3 rounds"):
        fedhet.run([f"resume={run.dir}", "rounds=3"], task=toy_task())
    assert before == {path: path.read_bytes() for path in run.dir.rglob("*") if path.is_file()}


def test_real_clients_of_a_server_that_was_killed_stay_within_the_budget(
    federation: Federation, tmp_path: Path
) -> None:
    """They have served a step that its checkpoint does not have, and serve it again."""
    first = limited(federation, 3)
    first.workspace.simulated = False
    first.store = DiskStore(tmp_path)
    first.step()
    second = limited(federation, 3)  # it goes on from before that step
    second.workspace.simulated = False
    second.store = DiskStore(tmp_path)
    second.step()
    second.step()
    assert set(second.account.releases.values()) == {3}
    with pytest.raises(RunFailed, match=r"privacy\.budget=.*nothing .*sent"):
        second.step()
    assert {spent_by(second.store, pid) for pid in range(4)} == {3}

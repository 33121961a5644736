"""What `fedhet.load(run, "personal", client=...)` returns is what that client evaluated.

The oracle is the record: the scores of every client in clients/*.parquet.
"""

from __future__ import annotations

import filecmp
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as parquet
import pytest
import torch
from composing import composed
from contracts.runs import validated
from contracts.short import slow, slow_unless
from contracts.test_jumps import attack, deeper
from safetensors.torch import load_file
from torch import Tensor, nn

import fedhet
from fedhet.core import trees
from fedhet.core.client.client import KEEP, FedClient
from fedhet.core.client.context import ClientContext
from fedhet.core.errors import ConfigError
from fedhet.core.kernel import Client, Message, State
from fedhet.core.messages import Broadcast, Failure
from fedhet.core.metrics import assess
from fedhet.core.server.evaluation import evaluation_messages
from fedhet.core.server.loop import Loop
from fedhet.data import storage
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.runs.job import Job
from fedhet.runs.record.personal import SHARED, PersonalModels
from fedhet.runs.stores import MemoryStore

Launch = Callable[..., Any]

DIGITS = [
    "partition.clients=5",
    "partition.split=[.5,.25,.25]",
    "rounds=5",
    "fraction=0.6",
    "client.epochs=1",
    "model.hidden=[12]",
    "model.norm=batch",
]
RUNS = {
    "ditto": [],
    "fedala": [],
    "fedbn": [],
    "fedbn, averaging": ["method.server_bn=average"],
    "fedrod": ["eval.finetune_epochs=1"],
    "fedpcl": [],
    "fedpcl, unseen": ["method.unseen=global"],
    "fedproto": [],
    "fedrep": ["method.head_epochs=1"],
    "fedrep, fedper": ["method.joint=true"],
    "fedbabu": ["method.finetune_epochs=1"],
    "fedavg, local statistics": ["buffers=local"],
    "fedavg, fine-tuned": ["eval.finetune_epochs=1"],
    "scaffold, stopped": ["eval.finetune_epochs=1", "early_stopping.patience=2", "rounds=9"],
}

FAST = ["ditto", "fedpcl", "scaffold, stopped"]


def overrides(name: str) -> list[str]:
    return [f"method={name.partition(',')[0]}", *DIGITS, *RUNS[name]]


def recorded(run: Any, round: int, view: str, pid: int) -> dict[str, float]:
    """The client's scores on its test data in the run folder."""
    table = parquet.dataset(run.dir / "clients").to_table().to_pandas()
    at = (table["round"] == round) & (table.client == pid) & (table.split == "test")
    rows = table[at & (table.model == view)]
    return dict(zip(rows.metric, rows.value, strict=True))


@pytest.fixture
def second_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation finds the second evaluation the best, whatever the models are like."""
    from fedhet.core.server.evaluation import client_means

    count = itertools.count()

    def means(updates: Any, views: Any, target: Any) -> dict[str, float]:
        scores = client_means(updates, views, target)
        found = [name for name in scores if name.startswith("acc_") and "_val_" in name]
        return scores | dict.fromkeys(found, 1 / (2 + abs(1 - next(count) % 5)))

    monkeypatch.setattr("fedhet.core.server.loop.client_means", means)


@pytest.mark.usefixtures("second_is_best")
@pytest.mark.parametrize("name", slow_unless(FAST, RUNS))
def test_the_loaded_model_is_the_one_that_the_client_evaluated(launch: Launch, name: str) -> None:
    run = launch(*overrides(name))
    again = Job(composed("partition=saved", f"partition.name={run.dir}"))
    views = [view for view in run.summary["models"] if view != "global"]
    kept = run.summary["personal_models"]["kept"]
    assert set(kept) == set(views) and run.summary["personal_models"]["not_kept"] == {}
    rounds = sorted(parquet.dataset(run.dir / "clients").to_table()["round"].unique().to_pylist())
    for view in views:
        assert kept[view] == {"best_val": rounds[1], "last": rounds[-1]}
        for weights, which in ((view, "last"), (f"{view}_best_val", "best_val")):
            accuracies = []
            for pid, client in enumerate(again.task.clients):
                model = fedhet.load(run, weights, client=pid)
                assert client.test is not None and not model.training
                scores = assess(model, [again.workspace.prepared(client.test)], again.task)[0][0]
                assert scores == recorded(run, kept[view][which], view, pid)
                accuracies.append(scores["accuracy"])
            mean = sum(accuracies) / len(accuracies)
            assert mean == pytest.approx(run.summary[view][which], abs=1e-12)
    first = fedhet.load(run, "best_val", client=0).state_dict()
    best = fedhet.load(run, f"{views[0]}_best_val", client=0).state_dict()
    assert all(torch.equal(first[key], best[key]) for key in best)


def contents(run: Any) -> Path:
    return Path(run.dir / "personal")


def assert_equal_folders(left: Path, right: Path) -> None:
    names = sorted(str(path.relative_to(left)) for path in left.rglob("*.safetensors"))
    assert names == sorted(str(path.relative_to(right)) for path in right.rglob("*.safetensors"))
    assert len(names) > 5
    assert filecmp.cmpfiles(left, right, names, shallow=False)[0] == names


@pytest.mark.parametrize(
    "engine", ["engine.workers=2", pytest.param("engine=ray", marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize("name", ["fedpcl", *slow("ditto")])
@pytest.mark.usefixtures("second_is_best")
def test_every_engine_keeps_the_same_bytes(launch: Launch, name: str, engine: str) -> None:
    here, there = launch(*overrides(name)), launch(*overrides(name), engine)
    assert_equal_folders(contents(here), contents(there))
    kept = here.summary["personal_models"]
    assert there.summary["personal_models"] == kept


def test_only_what_differs_is_stored(launch: Launch) -> None:
    """FedBN's clients differ in the batch norm alone, so their models take a fraction of Ditto's,
    and fit where those do not."""
    fits = "eval.personal_mb=0.01"
    small = launch(*overrides("fedbn"), fits)
    path = contents(small) / "round-000005" / "personal" / "0.safetensors"
    names = set(fedhet.load(small, "personal", client=0).state_dict())
    own = set(load_file(path))
    assert own == {name for name in names if name.startswith("body.2.")}  # the batch norm
    large = launch(*overrides("ditto"), fits)
    assert set(large.summary["personal_models"]["not_kept"]) == {
        "personal.last",
        "personal.best_val",
    }


def test_a_limit_is_reported_before_the_work(
    launch: Launch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for the last models only, and with room for none."""
    model = sum(t.nbytes for t in toy_task().model().state_dict().values())
    lines = ["method=ditto", "rounds=2", "client.epochs=1"]
    before: list[str] = []
    receive = FedClient.receive

    def receiving(client: FedClient, msg: Broadcast) -> None:
        before.append(caplog.text)
        receive(client, msg)

    monkeypatch.setattr(FedClient, "receive", receiving)
    one = launch(*lines, f"eval.personal_mb={5 * model / 1e6}", task=validated())
    assert "(best_val) are not kept" in before[0]
    assert one.summary["personal_models"]["kept"] == {"personal": {"last": 2}}
    fedhet.load(one, "personal", client=1, model=toy_task().model())
    reason = r"\(best_val\) .* eval\.personal_mb"
    with pytest.raises(ConfigError, match=reason):
        fedhet.load(one, "best_val", client=1, model=toy_task().model())
    caplog.clear()
    none = launch(*lines, "eval.personal_mb=0", task=validated())
    assert not (none.dir / "personal").exists() and "personal models" not in caplog.text
    with pytest.raises(ConfigError, match=r"eval\.personal_mb=0"):
        fedhet.load(none, "personal", client=1, model=toy_task().model())
    everything = launch(*lines, "eval.personal_mb=null", task=validated())
    assert set(everything.summary["personal_models"]["kept"]["personal"]) == {"last", "best_val"}


def test_personal_models_never_leave_a_real_site(launch: Launch) -> None:
    """The server asks for none where clients may be real ones, and such a client sends none."""
    job = Job(composed("method=ditto", "rounds=1"), toy_task(), engine="flwr")
    loop = Loop(job.strategy)
    PersonalModels(job.strategy, Path("nowhere")).begun(loop)
    noted = loop.notes["personal_models"]
    assert noted["kept"] == {}
    assert "stay at their clients' sites" in noted["not_kept"]["personal.last"]
    msg = evaluation_messages(job.strategy)[0]
    msg.extras[KEEP] = "personal"
    reply = job.client(MemoryStore()).handle(msg)
    assert isinstance(reply, Failure) and "never leave their site" in reply.cause


class Tempered(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) / self.temperature  # type: ignore[no-any-return]


class TemperedClient(Client):
    """Its personal view is a module around the model, of which fedhet.load cannot know."""

    def views(
        self, msg: Message, state: State, ctx: ClientContext
    ) -> dict[str, Callable[[], nn.Module]]:
        plain = super().views(msg, state, ctx)["global"]
        return {"global": plain, "personal": lambda: Tempered(plain())}


def test_a_view_that_cannot_be_loaded_is_reported(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends well all the same. With `personal_module` it is kept."""
    monkeypatch.setattr(FedAvg, "client", TemperedClient)
    monkeypatch.setattr(
        FedAvg, "evaluates", lambda self, workspace: {"global": (), "personal": None}
    )
    lines = ["method=fedavg", "rounds=2", "client.epochs=1"]
    run = launch(*lines, task=validated())
    reason = r"client 0: .*personal_module.*'temperature'"
    with pytest.raises(ConfigError, match=reason):
        fedhet.load(run, "personal", client=0, model=toy_task().model())
    assert not list(contents(run).rglob("personal/*.safetensors"))
    monkeypatch.setattr(TemperedClient, "personal_module", staticmethod(Tempered))
    run = launch(*lines, task=validated())
    model = fedhet.load(run, "personal", client=0, model=toy_task().model())
    assert isinstance(model, Tempered)
    test = validated().clients[0].test
    assert test is not None
    assert assess(model, [test], validated())[0][0] == recorded(run, 2, "personal", 0)


def test_the_models_after_an_undone_last_step_are_those_of_the_weights_kept(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were stored with the spoilt weights first; the clients' losses undo the step of two."""
    task = deeper(validated(2))
    task.test = None
    attack(monkeypatch, {2}, trees.LARGEST, pid=1)
    lines = ["method=ditto", "client.lr=.01", "on_failure=skip", "replies.max_lost=1"]
    before, undone = (launch(*lines, f"rounds={rounds}", task=task) for rounds in (1, 2))
    assert [f["pid"] for f in undone.summary["failures"]] == [1]
    assert undone.summary["personal_models"]["kept"]["personal"]["last"] == 2
    for pid, client in enumerate(task.clients):
        models = [
            fedhet.load(run, "personal", client=pid, model=task.model()) for run in (before, undone)
        ]
        states = [model.state_dict() for model in models]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert client.test is not None
        assert assess(models[1], [client.test], task)[0][0] == recorded(undone, 2, "personal", pid)
    shared = [contents(run) / f"round-00000{n}" / SHARED for n, run in ((1, before), (2, undone))]
    assert filecmp.cmp(*shared, shallow=False)


def test_a_full_disk_costs_only_the_models(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, tree: Any) -> None:
        raise storage.unwritable(path, OSError(28, "No space left on device"))

    monkeypatch.setattr("fedhet.runs.record.personal.save_tensors", full)
    run = launch("method=ditto", "rounds=1", "client.epochs=1", task=toy_task())
    assert run.summary["status"] == "ok"
    with pytest.raises(ConfigError, match="No space left on device"):
        fedhet.load(run, "personal", client=0, model=toy_task().model())


def test_models_that_are_not_there(launch: Launch) -> None:
    lines = ["rounds=1", "client.epochs=1"]
    ditto = launch("method=ditto", *lines, "on_failure=skip", task=toy_task())
    model = toy_task().model()
    for weights, client, reason in [
        ("personal", None, "weights=personal .*client="),
        ("model", 0, "weights=model .*personal, personal_best_val"),
        ("personal", 99, r"client=99: .*99\.safetensors .* 0 to 3"),
        ("personal", -1, "client=-1 .*>= 0"),
        ("finetuned", 0, "method=ditto .*global, personal"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            fedhet.load(ditto, weights, client=client, model=model)
    with pytest.raises(ConfigError, match=r"object.*model="):
        fedhet.load(ditto, "personal", client=0)
    unseen = launch("method=ditto", *lines, "eval.clients=false", task=toy_task())
    with pytest.raises(ConfigError, match=r" kept.*eval\.clients=false"):
        fedhet.load(unseen, "personal", client=0, model=model)
    unvalidated = launch("method=ditto", *lines, task=validated(val=0))
    with pytest.raises(ConfigError, match=r"no client .*validation"):
        fedhet.load(unvalidated, "best_val", client=0, model=model)

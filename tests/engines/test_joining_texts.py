"""Texts at the sites (dataset=local), whose tokenizer the run declares by its digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from composing import composed, data_main
from own_sites import Joined, Node
from targets.test_texts import reviews, save_tokenizer

import fedhet
from fedhet.__main__ import main
from fedhet.core.errors import ConfigError, DataError, RunFailed
from fedhet.core.groups import ReplyLimits
from fedhet.core.trees import sha256
from fedhet.flower.sites import SiteNodes
from fedhet.runs import config
from fedhet.runs.job import Job
from fedhet.runs.local_data import LocalData, declaration

pytest.importorskip("tokenizers", reason="texts need the package tokenizers")
SIZES = {"a": (0, 60), "b": (60, 100)}
VOCABULARY = len(["[UNK]", "[PAD]"]) + 7 + 3 + 3


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def lines(tmp_path: Path) -> list[str]:
    """The declaration of two sites, each with a folder of its own: a csv and a Parquet table."""
    data = reviews(100)
    for site, (start, end) in SIZES.items():
        save_tokenizer(tmp_path / site)
        own = data[start:end]
        own.to_csv(tmp_path / site / "t.csv", index=False)
        own.to_parquet(tmp_path / site / "t.parquet", index=False)
    digest = hashlib.sha256((tmp_path / "a" / "tokenizer.json").read_bytes()).hexdigest()
    return [
        *("dataset=local", "dataset.sites=[a,b]", "dataset.classes=[sad,glad]"),
        *("dataset.text=sentence", "dataset.label=mood", f"dataset.tokenizer={digest}"),
        *("dataset.shape=[6]", "dataset.dtype=int64", f"dataset.vocabulary={VOCABULARY}"),
        *("dataset.padding=1", "model=text", "method=fedavg", "rounds=3", "client.lr=.5"),
        "figures=false",
        f"data_dir={tmp_path}",
    ]


FILES = "dataset.files={a:a/t.csv,b:b/t.parquet}"


class Joining:
    """The nodes of both sites."""

    def __init__(self, folder: Path, lines: list[str], **second: Any) -> None:
        self.settings = composed(*lines)
        self.members = Joined()
        limits = ReplyLimits(join=0.0)
        self.nodes = SiteNodes(limits, declaration(self.settings.cfg)[0])
        own = [{"data": folder / "a" / "t.csv"}, {"data": folder / "b" / "t.parquet", **second}]
        for number, (site, given) in enumerate(zip("ab", own, strict=True), 1):
            named = {key: str(path) for key, path in given.items()}
            node = Node(folder, number, lines, site=site, **named)
            self.members.nodes[node.cid] = node

    def weights(self) -> str:
        """The digest of the weights after three rounds of messages to the nodes."""
        self.nodes.join(self.members)
        data = LocalData.agreed_on(self.settings.cfg, self.nodes.agreed_on)
        job = Job(self.settings, engine="flwr", local=data)
        for number in (1, 2, 3):
            replies = []
            step = job.strategy.plan(number)
            for msg in step.messages:
                node = self.members.nodes[str(self.nodes.hosts([msg.pid], self.members)[msg.pid])]
                replies.append(node.serve(msg, self.nodes.agreed))
            job.strategy.finish_step(step, replies)
        return sha256(job.strategy.weights)

    def refusal(self) -> str:
        with pytest.raises(RunFailed) as refused:
            self.nodes.join(self.members)
        return refused.value.reason


def tokens_by_hand(folder: Path, rows: slice) -> np.ndarray:
    made = save_tokenizer(folder)
    texts = [made.encode(text).ids[:6] for text in reviews(100)["sentence"][rows]]
    return np.array([ids + [1] * (6 - len(ids)) for ids in texts])


def test_texts_at_sites_are_the_tokens_of_the_declared_tokenizer(
    tmp_path: Path, lines: list[str]
) -> None:
    """Whatever the longest text of a site is, and in a deployment as in a simulation."""
    data = LocalData.simulated(config.compose([*lines, FILES]).cfg, "local")
    for pid, (start, end) in enumerate(SIZES.values()):
        client = data.clients[pid]
        got = np.concatenate([part.x.numpy() for part in (client.train, client.val, client.test)])
        expected = tokens_by_hand(tmp_path / "made", slice(start, end))
        assert (got[np.lexsort(got.T)] == expected[np.lexsort(expected.T)]).all()
    run = fedhet.run([*lines, FILES, f"hydra.run.dir={tmp_path / 'run'}"])
    assert run.summary["acc_clients_mean"] > 0.6
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "b" / "tokenizer.json").rename(elsewhere.with_suffix(".json"))
    (tmp_path / "b" / "tokenizer_config.json").rename(tmp_path / "tokenizer_config.json")
    joining = Joining(tmp_path, lines, tokenizer=elsewhere.with_suffix(".json"))
    assert joining.weights() == run.summary["weights_sha256"]
    assert "site 'b' cannot serve this run: DataError" in Joining(tmp_path, lines).refusal()


def test_predictions_find_the_tokenizer_beside_the_file(
    tmp_path: Path, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = fedhet.run([*lines, FILES, f"hydra.run.dir={tmp_path / 'run'}"])
    out = tmp_path / "out.csv"
    arguments = ["predict", str(run.dir), str(tmp_path / "b" / "t.csv"), "--format=csv"]
    assert main([*arguments, f"--out={out}"]) == 0
    guess = pandas.read_csv(out)["prediction"]
    assert np.mean(guess.to_numpy() == reviews(100)["mood"][60:].to_numpy()) > 0.6
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    assert main(arguments) == 2
    assert "tokenizer" in capsys.readouterr().err
    named = str(tmp_path / "a" / "tokenizer.json")
    assert main([*arguments, f"--out={out}", "--tokenizer", named]) == 0


def test_another_tokenizer_is_refused_when_the_site_joins(
    tmp_path: Path, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    made = save_tokenizer(tmp_path / "b")
    made.add_tokens(["new"])
    made.save(str(tmp_path / "b" / "tokenizer.json"))
    reason = Joining(tmp_path, lines).refusal()
    assert "site 'b' cannot serve this run: DataError" in reason and str(tmp_path) not in reason
    assert "tokenizer.json " in caplog.text
    with pytest.raises(DataError, match=r"site 'b' .*tokenizer .*run"):
        LocalData.simulated(config.compose([*lines, FILES]).cfg, "local")


@pytest.mark.parametrize(("key", "value"), [("vocabulary", 16), ("padding", 0)])
def test_what_the_tokenizer_says_must_be_what_is_declared(
    tmp_path: Path, lines: list[str], key: str, value: int, caplog: pytest.LogCaptureFixture
) -> None:
    changed = [line for line in lines if f".{key}=" not in line] + [f"dataset.{key}={value}"]
    assert "cannot serve this run: DataError" in Joining(tmp_path, changed).refusal()
    assert f"its {key} is" in caplog.text and f"the run declares {value}" in caplog.text


def test_no_text_of_a_site_is_told(tmp_path: Path, lines: list[str]) -> None:
    frame = reviews(100)[60:].astype(object)
    frame.iloc[3, 0] = None
    frame.to_parquet(tmp_path / "b" / "t.parquet", index=False)
    reason = Joining(tmp_path, lines).refusal()
    assert "DataError; the log on that node has the details" in reason and "row" not in reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dataset.tokenizer=null", "SHA-256"),
        ("dataset.tokenizer=tokenizer.json", "SHA-256"),
        ("dataset.text=null", "SHA-256"),
        ("dataset.padding=null", "dataset.padding"),
        ("dataset.dtype=float32", "dataset.dtype=int64"),
    ],
)
def test_a_declaration_that_lacks_something(lines: list[str], change: str, message: str) -> None:
    key = change.partition("=")[0]
    changed = [line for line in lines if not line.startswith(f"{key}=")] + [change]
    with pytest.raises(ConfigError, match=message):
        declaration(composed(*changed).cfg)


def test_a_printed_declaration_is_met_by_its_file(
    tmp_path: Path, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "a" / "t.csv")
    options = ["--label", "mood", "--text", "sentence", "--max-length", "6"]
    assert data_main(["declare", file, *options]) == 0
    import yaml

    printed = yaml.safe_load(capsys.readouterr().out)["dataset"]
    declared = config.compose(lines).cfg.dataset
    keys = ("text", "tokenizer", "shape", "dtype", "vocabulary", "padding", "label")
    assert {key: printed[key] for key in keys} == json.loads(
        json.dumps({key: declared[key] for key in keys}, default=list)
    )
    assert sorted(printed["classes"]) == ["glad", "sad"]

"""Texts by a tokenizer that is saved beside them: tokens, padding, the model, and whole runs."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from composing import data_main as main
from data.own_data import load
from data.schemes import run_data

import fedhet
from fedhet.core.errors import ConfigError, DataError
from fedhet.data.hf import hf
from fedhet.models import TextMLP

tokenizers = pytest.importorskip("tokenizers", reason="texts need the package tokenizers")

GOOD, BAD = ["good", "fine", "bright"], ["bad", "dull", "weak"]
OTHERS = ["the", "film", "is", "and", "with", "a", "plot"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "cache"))


def reviews(n: int) -> pandas.DataFrame:
    """Sentences of 3 to 9 words, one of which says what the mood is."""
    draw = random.Random(0)
    rows = []
    for i in range(n):
        words = [*draw.choices(OTHERS, k=draw.randint(2, 8)), draw.choice((BAD, GOOD)[i % 2])]
        draw.shuffle(words)
        rows.append((" ".join(words), ("sad", "glad")[i % 2], i % 2 + 0.05 * (i % 7)))
    return pandas.DataFrame(rows, columns=["sentence", "mood", "stars"])


def save_tokenizer(folder: Path, padding: str = "config") -> Any:
    """A tokenizer of words, with its padding token 1 in one of the places where it may be named."""
    words = ["[UNK]", "[PAD]", *OTHERS, *GOOD, *BAD]
    model = tokenizers.models.WordLevel({word: k for k, word in enumerate(words)}, "[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(exist_ok=True, parents=True)
    if padding == "tokenizer":
        made.enable_padding(pad_id=1, pad_token="[PAD]")
    if padding in ("config", "properties"):
        token = "[PAD]" if padding == "config" else {"content": "[PAD]"}
        (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": token}))
    made.save(str(folder / "tokenizer.json"))
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = reviews(100)
    data[:80].to_parquet(tmp_path / "train.parquet")
    data[80:].to_parquet(tmp_path / "test.parquet")
    save_tokenizer(tmp_path)
    return tmp_path


TEXT = {"text": "sentence", "label": "mood", "test": "test.parquet"}
LINES = ["dataset=parquet", "dataset.text=sentence", "dataset.test=test.parquet", "model=text"]


# ---- tokens
@pytest.mark.parametrize("padding", ["config", "properties", "tokenizer", "nowhere"])
def test_tokens_are_those_of_the_tokenizer_with_padding(folder: Path, padding: str) -> None:
    (folder / "tokenizer_config.json").unlink()
    tokenizer = save_tokenizer(folder, padding)
    if padding == "config":  # as in Hugging Face's cache
        (folder / "tokenizer_config.json").rename(folder / "blob")
        (folder / "tokenizer_config.json").symlink_to("blob")
    tokenizer.no_padding()
    data = load("parquet", folder, **TEXT)
    pad = len(GOOD + BAD + OTHERS) + 2 if padding == "nowhere" else 1
    assert data.padding == pad
    assert data.vocabulary == tokenizer.get_vocab_size() + (padding == "nowhere")
    assert (data.text, data.target, data.classes) == (True, "class", ("glad", "sad"))
    frame = reviews(100)
    assert data.x.dtype == torch.int64 and data.test is not None
    assert data.shape == (max(len(sentence.split()) for sentence in frame.sentence),)
    rows = torch.cat([data.x, data.test.x])
    for sentence, row in zip(frame.sentence, rows.tolist(), strict=True):
        ids = tokenizer.encode(sentence).ids
        assert row == ids + [pad] * (len(row) - len(ids))
    assert data.y.tolist() == [int(mood == "sad") for mood in frame.mood[:80]]


def test_long_texts_are_cut(folder: Path) -> None:
    whole = load("parquet", folder, **TEXT).x
    assert torch.equal(load("parquet", folder, **TEXT, max_length=4).x, whole[:, :4])


@pytest.mark.parametrize("form", ["csv", "hf"])
def test_texts_in_other_formats(folder: Path, form: str) -> None:
    expected = load("parquet", folder, **TEXT)
    if form == "csv":
        for part in ("train", "test"):
            table = pandas.read_parquet(folder / f"{part}.parquet")
            table.to_csv(folder / f"{part}.csv", index=False)
        data = load("csv", folder, **{**TEXT, "test": "test.csv"})
    else:
        import yaml

        conf = Path(__file__).parents[2] / "conf" / "dataset" / "hf.yaml"
        settings = yaml.safe_load(conf.read_text())
        del settings["_target_"]
        # The data sets' own files must be the only ones that `datasets` takes for data.
        data = hf(**{**settings, **TEXT, "test": "test", "path": str(folder)}, data_dir="")
    assert torch.equal(data.x, expected.x) and torch.equal(data.y, expected.y)


@pytest.mark.parametrize("place", ["tokenizer", "other", "other/tokenizer.json", "absolute"])
def test_where_the_tokenizer_may_be(folder: Path, place: str) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(DataError, match=r"tokenizer; looked .*tokenizer\.json"):
        load("parquet", folder, **TEXT)
    save_tokenizer(folder / ("tokenizer" if place == "tokenizer" else "other"))
    setting = {"tokenizer": None, "absolute": str(folder / "other")}.get(place, place)
    assert load("parquet", folder, **TEXT, tokenizer=setting).padding == 1


def test_another_tokenizer_is_not_mistaken_for_the_cached_one(folder: Path) -> None:
    before = load("parquet", folder, **TEXT).x
    words = tokenizers.models.WordLevel({"[UNK]": 0, "good": 1}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    assert not torch.equal(load("parquet", folder, **TEXT).x, before)


def test_wrong_texts_and_settings_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, message in (
        ({"text": "words"}, "column 'words'"),
        ({"text": "stars"}, r"row 0, column 'stars': 0\.0; .*text"),
        (
            {"text": "sentence", "features": ["stars"]},
            "dataset.text=sentence .*stars.*either .*text.*columns .*numbers",
        ),
        ({"max_length": 0}, r"dataset\.max_length=0"),
        ({"text": None, "tokenizer": "."}, r"dataset\.text .*name .*column .*texts"),
        ({"text": None, "features": None, "label": "stars"}, "dataset.text .*texts"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            load("parquet", folder, **{**TEXT, **changes})
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer_config\.json .*damaged"):
        load("parquet", folder, **TEXT)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json .*damaged, .*tokenizer"):
        load("parquet", folder, **TEXT)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"dataset\.text .*tokenizers, .*'\.\[text\]'"):
        load("parquet", folder, **TEXT)


# ---- the model
def text_model(length: int = 6, padding: int | None = 0) -> TextMLP:
    torch.manual_seed(0)
    return TextMLP(
        shape=(length,), classes=3, vocabulary=9, padding=padding, embedding=5, hidden=[4]
    )


def test_padding_changes_no_output() -> None:
    """Nor a gradient; a text without tokens is finite."""
    x = torch.randint(1, 9, (7, 6))
    model = text_model()
    longer = torch.cat([x, torch.zeros(7, 4, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(model(longer), model(x))
    assert not torch.allclose(text_model(padding=None)(longer), model(x))
    model(longer).sum().backward()
    assert model.embedding.weight.grad is not None
    assert not model.embedding.weight.grad[0].any()
    assert model(torch.zeros(2, 6, dtype=torch.int64)).isfinite().all()
    alone = torch.stack([model(row[None])[0] for row in longer])
    torch.testing.assert_close(alone, model(x))


def test_the_features_are_the_mean_of_the_tokens() -> None:
    torch.manual_seed(0)
    model = TextMLP(shape=(4,), classes=2, vocabulary=9, padding=0, embedding=5, hidden=[])
    x = torch.tensor([[3, 5, 0, 0], [1, 2, 3, 4]])
    weight = model.embedding.weight
    expected = torch.stack([weight[[3, 5]].mean(0), weight[1:5].mean(0)])
    torch.testing.assert_close(model.features(x), expected)
    assert torch.equal(model(x), model.head(model.features(x)))


# ---- runs
@pytest.mark.parametrize(
    "lines",
    [
        ["method=fednorm"],
        pytest.param(["method=scaffold", "client.lr=.2", "rounds=20"], marks=pytest.mark.slow),
        pytest.param(["method=fedpcl"], marks=pytest.mark.slow),
        pytest.param(["method=fedavg", "engine.fused=2"], marks=pytest.mark.slow),
        ["method=fedavg", "dataset.label=stars", "partition=iid", "client.lr=.1"],
    ],
    ids=" ".join,
)
def test_it_learns(folder: Path, launch: Callable[..., Any], lines: list[str]) -> None:
    common = [f"data_dir={folder}", "partition.clients=3", "client.lr=1", "rounds=8"]
    run = launch(*LINES, "dataset.label=mood", *common, "client.batch_size=8", *lines)
    score = run.summary[run.summary["score"]]["last"]
    if score is None:  # no global model
        score = run.summary["personal"]["last"]
    assert score > 0.7
    if "method=fednorm" in lines:
        model = fedhet.load(run.dir)
        data = run_data(*LINES, "dataset.label=mood", *common).dataset
        assert data.test is not None
        with torch.no_grad():
            right = model(data.test.x).argmax(1) == data.test.y
        assert score == pytest.approx(float(right.double().mean()))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["method=fedgmm"], "plugin 'fedgmm' models .*density .*token numbers"),
        (["plugin=[feddisk]"], "plugin 'feddisk' models .*density .*token numbers"),
        (["model=mlp"], r"MLP reads .*numbers; .*parquet .*\(9,\).* model=text"),
        (["model=char_lstm"], "CharLSTM predicts .*next .*; model=text .*texts"),
    ],
)
def test_what_reads_no_texts_refuses(
    folder: Path, launch: Callable[..., Any], lines: list[str], message: str
) -> None:
    common = [f"data_dir={folder}", "dataset.label=mood", "method=fedavg"]
    chosen = [line for line in common if line.partition("=")[0] not in lines[0]]
    with pytest.raises(ConfigError, match=message):
        launch(*LINES[:3], *(["model=text"] if "model" not in lines[0] else []), *chosen, *lines)


def test_the_model_of_texts_refuses_numbers(launch: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"TextMLP .*texts, \(T,\) token numbers"):
        launch("model=text", "method=fedavg")


def test_what_a_client_exports_can_be_read_again(folder: Path) -> None:
    lines = [*LINES, f"data_dir={folder}", "dataset.label=mood", "partition.clients=2"]
    assert main(["export", *lines, "--client", "1", "--out", str(folder)]) == 0
    data = run_data(*lines)
    file = ["dataset=npz", f"dataset.file={folder}/client-1.npz", "dataset.text=true"]
    own = run_data(*file, "partition=iid", "partition.clients=1", "partition.split=[1,0,0]")
    rows = data.clients[1].train
    assert sorted(own.clients[0].train.x.tolist()) == sorted(rows.x.tolist())
    for key in ("target", "classes", "vocabulary", "padding"):
        assert getattr(own.dataset, key) == getattr(data.dataset, key), key


def test_token_numbers_in_an_npz_file(tmp_path: Path) -> None:
    """A class of a whole text, where the default is the next token."""
    x = np.array([[1, 2, 7], [3, 0, 0]])
    arrays = {"x_train": x, "y_train": np.array([0, 1]), "x_test": x, "y_test": np.array([0, 1])}
    np.savez(tmp_path / "data.npz", **arrays)
    data = load("npz", tmp_path, text=True, target="class")
    assert (data.classes, data.vocabulary, data.padding) == (("0", "1"), 8, None)
    data = load("npz", tmp_path, text=True, target="class", vocabulary=20, padding=0)
    assert (data.target, data.vocabulary, data.padding) == ("class", 20, 0)
    with pytest.raises(DataError, match=r"token 7; tokens .*numbers, 0 .*4"):
        load("npz", tmp_path, text=True, target="class", vocabulary=5)
    assert load("npz", tmp_path, text=True, classes=8).target == "next_char"

"""LEAF's JSON: the real subsets' counts, users as owners, and wrong files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from data.leaf_files import Users, windows, write_leaf

from fedhet.core.errors import DataError
from fedhet.data import leaf
from fedhet.data.dataset import Dataset

CONF = Path(__file__).parents[2] / "conf" / "dataset"


def load(name: str, data_dir: Path | str) -> Dataset:
    conf = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    conf.pop("defaults", None)  # the model that fits the data
    loader = getattr(leaf, conf.pop("_target_").split(".")[-1])
    return loader(**conf, data_dir=str(data_dir))


def published(real: str, title: str, label: str) -> list[str]:
    """The entries in the subsets' README, below `title`, of the line that begins with `label`."""
    readme = (Path(real) / "README.md").read_text()
    section = readme.split(f"\n## {title}")[1].split("\n## ")[0]
    (line,) = [line for line in section.splitlines() if line.startswith(f"- {label}")]
    return line.split(": ", 1)[1].split(" (")[0].replace(", ", "\n").splitlines()


@pytest.mark.parametrize(
    ("name", "title", "users"),
    [
        ("femnist", "FEMNIST", "Samples per writer"),
        ("shakespeare", "Shakespeare", "Windows per speaker"),
    ],
)
def test_real_users_have_the_counts_of_their_readme(
    real: str, name: str, title: str, users: str
) -> None:
    data = load(name, real)
    assert data.owners is not None
    held = dict(zip(data.owner_names, np.bincount(data.owners).tolist(), strict=True))
    entries = [entry.rsplit(" ", 1) for entry in published(real, title, users)]
    assert held == {user: int(counts.split("/")[0]) for user, counts in entries}
    assert len(data.test) == sum(int(counts.split("/")[1]) for _, counts in entries)


def test_real_femnist(real: str) -> None:
    data = load("femnist", real)
    assert (data.shape, len(data.classes)) == ((1, 28, 28), 62)
    assert data.x.dtype == data.test.x.dtype == torch.uint8
    for part, y in (("Train per class", data.y), ("Test per class", data.test.y)):
        entries = published(real, "FEMNIST", part)[0].split()
        counts = [int(entry.split(":")[1]) for entry in entries]
        assert torch.bincount(y, minlength=62).tolist() == counts
    pixels = data.x.float().div(255)
    assert float(pixels.mean()) == pytest.approx(data.mean[0], abs=0.005)
    assert float(pixels.std()) == pytest.approx(data.std[0], abs=0.005)
    content = json.loads(next(Path(real, "femnist", "train").iterdir()).read_text())
    user = content["users"][3]
    own = data.x[torch.from_numpy(data.owners == data.owner_names.index(user))]
    # in the file's order
    expected = np.array(content["user_data"][user]["x"])
    assert own.flatten(1).div(255).numpy() == pytest.approx(expected, abs=5e-5)


def test_real_shakespeare(real: str) -> None:
    data = load("shakespeare", real)
    assert (data.text, data.shape, data.x.dtype) == (True, (80,), torch.int16)
    assert len(data.classes) == 80
    content = json.loads(next(Path(real, "shakespeare", "train").iterdir()).read_text())
    whole = [
        row
        for user in content["users"]
        for row in zip(*content["user_data"][user].values(), strict=True)
    ]
    for i in (0, 937, 938, len(whole) - 1):
        window = "".join(data.classes[token] for token in data.x[i])
        assert (window, data.classes[data.y[i]]) == whole[i]


def image(level: int) -> list[float]:
    return [round(level / 255, 4)] * 784


def small() -> dict[str, tuple[Users, Users]]:
    """dataset -> (train, test)."""
    speak = {"HAMLET": windows("To be, or not to be: ", 3), "Ghost": windows("Mark me.\n", 2)}
    draw = {"w2": ([image(0), image(255)], [61, 0]), "w1": ([image(7)], [9])}
    return {
        "femnist": (draw, {"w1": ([image(9)], [1])}),
        "shakespeare": (speak, {"Ghost": windows("List!", 1)}),
    }


def test_several_files_are_one_dataset(tmp_path: Path) -> None:
    train, test = small()["femnist"]
    folder = tmp_path / "femnist"
    write_leaf(folder, train, test, "b.json")
    write_leaf(folder, {"w0": ([image(3)], [5])}, {"new": ([image(4)], [6])}, "a.json")
    for part in ("train", "test"):  # data that the user names may be elsewhere
        path = folder / part / "b.json"
        path.rename(tmp_path / f"{part}.json")
        path.symlink_to(tmp_path / f"{part}.json")
    data = load("femnist", tmp_path)
    assert data.x[:, 0, 5, 5].tolist() == [3, 0, 255, 7] and data.y.tolist() == [5, 61, 0, 9]
    assert data.owner_names == ("w0", "w1", "w2")
    assert data.owners is not None and data.owners.tolist() == [0, 2, 2, 1]
    # the union of all users' test samples
    assert data.test.x[:, 0, 0, 0].tolist() == [4, 9] and data.test.y.tolist() == [6, 1]
    write_leaf(folder, {"w2": ([image(3)], [5])}, {}, "c.json")
    message = r"c\.json: .*user 'w2' occurs twice, .*another file"
    with pytest.raises(DataError, match=message):
        load("femnist", tmp_path)


def set_x(value: Any) -> Any:
    return lambda content, user: content["user_data"][user]["x"].__setitem__(-1, value)


def set_y(value: Any) -> Any:
    return lambda content, user: content["user_data"][user]["y"].__setitem__(-1, value)


WRONG = [
    (
        "femnist",
        set_x(image(0)[1:]),
        r"user 'w2', row 1: .*784 pixels, .*\[0.0",
    ),
    ("femnist", set_x("a" * 784), r"row 1: .*784 pixels, .*'aaa"),
    ("femnist", set_x([*image(0)[1:], 0.5]), r"row 1: pixel 783 .*0.5; .*one .*0, 1/255"),
    ("femnist", set_x([*image(0)[1:], float("nan")]), r"row 1: pixel 783 .*nan"),
    ("femnist", set_x([*image(0)[1:], 256 / 255]), r"row 1: pixel 783 .*1\.00"),
    ("femnist", set_x([*image(0)[1:], None]), r"row 1: pixel 783 .*None"),
    ("femnist", set_x([*image(0)[1:], [0]]), r"user 'w2': .*pixels"),
    ("femnist", set_y(62), r"user 'w2', row 1: label 62; .*whole number .*0 .*61"),
    ("femnist", set_y("a"), r"row 1: label 'a'"),
    (
        "shakespeare",
        set_x("a" * 79),
        r"user 'HAMLET', row 2: .*80 characters .*next one, .*'aaa",
    ),
    (
        "shakespeare",
        set_x("a" * 79 + "$"),
        r"user 'HAMLET', row 2: .*character '\$' .*among LEAF's 80",
    ),
    ("shakespeare", set_x("a" * 79 + "\u00e9"), r"row 2: .*character 'é'"),
    (
        "shakespeare",
        set_y(""),
        r"row 2: .*80 characters .*''",
    ),
    ("shakespeare", set_y("@"), r"row 2: .*character '@'"),
    ("shakespeare", set_y(3), r"row 2: .*3"),
    (
        "femnist",
        lambda content, user: content["user_data"][user]["x"].pop(),
        r"^[^(]*user 'w2': 1 x .*2 y, .*num_samples .*2",
    ),
    (
        "femnist",
        lambda content, user: content["user_data"].pop(user),
        r"user 'w2': 0 x .*0 y, .*num_samples .*2",
    ),
    ("femnist", lambda content, user: content["num_samples"].pop(), r"damaged: .*num_samples"),
    ("femnist", lambda content, user: content.pop("users"), r"damaged: users .*missing"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), WRONG)
def test_wrong_files_are_named(tmp_path: Path, name: str, spoil: Any, message: str) -> None:
    path = write_leaf(tmp_path / name, *small()[name])
    content = json.loads(path.read_text())
    spoil(content, content["users"][0])
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=message) as caught:
        load(name, tmp_path)
    assert str(path) in str(caught.value)


def test_users_without_samples_and_broken_files(tmp_path: Path) -> None:
    train, test = small()["femnist"]
    path = write_leaf(tmp_path / "femnist", {**train, "idle": ([], [])}, test)
    with pytest.raises(
        DataError, match=r"^[^(]*all_data_0.json, user 'idle': 0 x .*0 y, .*, .*least 1"
    ):
        load("femnist", tmp_path)
    path.write_text(json.dumps({"users": [], "num_samples": [], "user_data": {}}))
    with pytest.raises(DataError, match=f"{path}: .*users"):
        load("femnist", tmp_path)
    for content in (b"{", b"", b"\xff\xfe", path.read_bytes()[:-9]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{path} .*damaged: "):
            load("femnist", tmp_path)
    path.write_text("[]")
    with pytest.raises(DataError, match=f"{path} .*damaged: "):
        load("femnist", tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"femnist .*train/\*\.json, test/\*\.json"):
        load("femnist", tmp_path)
    with pytest.raises(DataError, match=r"(?s)not .*shakespeare .*train/"):
        load("shakespeare", tmp_path)

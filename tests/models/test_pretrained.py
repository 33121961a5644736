"""Pretrained weights from a file: which are read, and which are refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torchvision
from maths.cases import named_case
from models.small_nets import cut, net
from torch import nn

import fedhet
from fedhet.core.errors import ConfigError


def saved(tensors: dict[str, torch.Tensor], path: Path) -> str:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return str(path)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("by_fedhet", [False, True])
def test_pretrained_weights_round_trip(tmp_path: Path, suffix: str, by_fedhet: bool) -> None:
    trained = net(3)
    nn.init.uniform_(trained[2].running_mean)
    tensors = {name: t.clone() for name, t in trained.state_dict().items()}
    content = dict(cut(trained).state_dict()) if by_fedhet else tensors
    model = cut(net(3), weights=saved(content, tmp_path / f"w.{suffix}"))
    values = model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(tensors.values(), values, strict=True))


@pytest.mark.parametrize(
    ("classes", "missing"), [(10, ()), (3, ("5.bias",)), (3, ("5.weight", "5.bias"))]
)
def test_a_head_of_another_size_is_left_out_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, classes: int, missing: tuple[str, ...]
) -> None:
    source = net(classes)
    content = {name: t for name, t in source.state_dict().items() if name not in missing}
    file = saved(content, tmp_path / "w.pth")
    whole = net(3)
    head = whole[5].weight.detach().clone()
    with caplog.at_level(logging.INFO, "fedhet"):
        model = cut(whole, weights=file)
    assert torch.equal(model.body[1].weight, source[1].weight)
    assert torch.equal(model.head.weight, head)
    assert "head '5' of 3 classes" in caplog.text


def test_files_without_num_batches_tracked_are_read(tmp_path: Path) -> None:
    source = net(3)
    content = {name: t for name, t in source.state_dict().items() if "num_batches" not in name}
    model = cut(net(3), weights=saved(content, tmp_path / "w.pth"))
    assert torch.equal(model.body[1].weight, source[1].weight)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    cases = [
        (
            lambda: net(3, width=5).state_dict(),
            r"does not fit .*1\.weight: .*\[5, 48\]\) .*\[4, 48\]",
        ),
        (
            lambda: {"1.weight": torch.zeros(4, 48), "extra.weight": torch.zeros(1)},
            r'does not fit .*Missing .*"1\.bias", "2\.weight", .*Unexpected .*"extra\.weight"',
        ),
        (lambda: {}, "holds a dict of"),
        (
            lambda: {"state_dict": net(3).state_dict(), "epoch": 3},
            r"holds a dict of \['state_dict', 'epoch'\]; expected",
        ),
        (lambda: [torch.zeros(1)], "holds a list"),
    ]
    for content, message in cases:
        with named_case(content, message):
            file = saved(content(), tmp_path / "w.pth")
            with pytest.raises(
                ConfigError, match=rf"^model\.weights={re.escape(file)} .*{message}"
            ):
                cut(net(3), weights=file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for suffix in ["safetensors", "pth"]:
        with named_case(suffix):
            path = tmp_path / f"w.{suffix}"
            with pytest.raises(ConfigError, match=rf"weights={path}: .*file"):
                cut(net(3), weights=str(path))
            for content in (b"", b"no weights", b"\x80\x04\x95" + bytes(40)):
                path.write_bytes(content)
                with pytest.raises(ConfigError, match=rf"^model\.weights={path} .*readable"):
                    cut(net(3), weights=str(path))
            with pytest.raises(ConfigError, match=r"^model\.weights=3 "):
                cut(net(3), weights=3)  # type: ignore[arg-type]


class _Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("harmed"),))


def test_a_pth_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": _Harmful()}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match=r"model\.weights=w\.pth .*readable: "):
        cut(net(3), weights="w.pth")
    assert not Path("harmed").exists()


def write_images(data: Path) -> None:
    """Two classes, with eight training images and one test image each."""
    from PIL import Image

    for part, images in (("train", 8), ("test", 1)):
        for label in ("a", "b"):
            folder = data / part / label
            folder.mkdir(parents=True)
            for i in range(images):
                image = Image.new("RGB", (32, 32), (40 * i, 0, 200 * (label == "a")))
                image.save(folder / f"{i}.png")


def test_a_run_can_be_loaded_after_its_pretrained_weights_were_deleted(
    tmp_path: Path, launch: Callable[..., Any]
) -> None:
    name = "shufflenet_v2_x0_5"
    write_images(tmp_path / "data")
    torch.manual_seed(0)
    file = tmp_path / "w.safetensors"
    safetensors.torch.save_file(torchvision.models.get_model(name).state_dict(), file)
    run = launch(
        f"model=torchvision/{name}",
        f"model.weights={file}",
        "dataset=image_folder",
        f"dataset.folder={tmp_path / 'data'}",
        "method=fedavg",
        "partition=iid",
        "partition.clients=2",
        "rounds=1",
    )
    assert (run.summary["status"], run.summary["model"]) == ("ok", f"torchvision/{name}")
    file.unlink()
    model = fedhet.load(run.dir)
    assert all(torch.equal(run.weights[key], t) for key, t in model.state_dict().items())

"""Models of torchvision and timm by name: where they are cut, what they refuse, and pretrained
weights from a file."""

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
from torch import nn

import fedhet
from fedhet.config import check_overrides, compose
from fedhet.errors import ConfigError
from fedhet.models import Timm, Torchvision
from fedhet.models.library import LibraryModel

SMALL = "shufflenet_v2_x0_5"


def net(classes: int, width: int = 4) -> nn.Sequential:
    """A library's module, in small: batch norm, dropout, and two linear layers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(48, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(width, classes),
    )


def cut(
    whole: nn.Module,
    classes: int = 3,
    weights: str | None = None,
    shape: tuple[int, ...] = (3, 4, 4),
) -> LibraryModel:
    return LibraryModel(whole, name="lib/net", shape=shape, classes=classes, weights=weights)


def test_the_last_linear_layer_is_the_head() -> None:
    torch.manual_seed(0)
    whole = net(3)
    before = {name: t.clone() for name, t in whole.state_dict().items()}
    draws = torch.get_rng_state()
    model = cut(whole)
    assert torch.equal(torch.get_rng_state(), draws)  # trying it uses up no random number
    assert list(model.state_dict()) == [f"body.{name}" for name in before if name[0] != "5"] + [
        "head.weight",
        "head.bias",
    ]
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )  # the running means, too
    x = torch.randn(5, 3, 4, 4)
    fresh = net(3)
    fresh.load_state_dict(before)
    assert torch.equal(model.eval()(x), fresh.eval()(x)) and torch.equal(
        model(x), model.head(model.features(x))
    )
    assert model.features(x).shape == (5, 4)


class _Scaled(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class _Two(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return (super().forward(x), x) if self.training else super().forward(x)


def small(sides: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(2 * (sides - 2) ** 2, 3))


NOT_CUT = "is not features and then a linear layer of 3 outputs"


@pytest.mark.parametrize(
    ("whole", "shape", "said"),
    [
        (
            lambda: nn.Sequential(nn.Conv2d(3, 3, 4), nn.Flatten()),
            (3, 4, 4),
            "has no linear layer, so it has no head",
        ),
        (lambda: _Scaled(*net(3)), (3, 4, 4), NOT_CUT),
        (lambda: _Two(*net(3)), (3, 4, 4), NOT_CUT),
        (lambda: net(4), (3, 4, 4), NOT_CUT),
        (lambda: nn.Sequential(*net(3), nn.Softmax(1)), (3, 4, 4), NOT_CUT),
        (
            lambda: nn.Sequential(
                *net(3), nn.Unflatten(1, (3, 1)), nn.Flatten(), nn.BatchNorm1d(3)
            ),
            (3, 4, 4),
            f"{NOT_CUT}.*: .*size",
        ),
        (
            small,
            (1, 4, 4),
            (
                r"does not take images \(C, H, W\) = \(1, 4, 4\): .*\[2, 3, 3, 3\].*to have 3"
                r" channels, but got 1"
            ),
        ),
        (small, (3, 2, 4), r"does not take images \(C, H, W\) = \(3, 2, 4\): "),
        (lambda: net(3), (80,), r"takes images \(C, H, W\).*\(80,\)"),
    ],
)
def test_what_is_refused(whole: Callable[[], nn.Module], shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^model: .*lib/net {said}"):
        cut(whole(), shape=shape)


def test_torchvision_by_name() -> None:
    torch.manual_seed(0)
    model = Torchvision(shape=(3, 32, 32), classes=7, name=SMALL)
    published = 1_366_792  # torchvision's table
    assert sum(p.numel() for p in model.parameters()) == published - 1025 * (1000 - 7)
    torch.manual_seed(0)
    whole = torchvision.models.get_model(SMALL, num_classes=7)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.eval()(x), whole.eval()(x))
    with pytest.raises(
        ConfigError,
        match=(
            rf"^model: torchvision/{SMALL} does not take images \(C, H, W\) = \(1, 28, 28\): .*3"
            r" channels"
        ),
    ):
        Torchvision(shape=(1, 28, 28), classes=7, name=SMALL)
    with pytest.raises(
        ConfigError, match=r"^model\.name=resnet17 is not allowed \(did you mean resnet1"
    ):
        Torchvision(shape=(3, 32, 32), classes=7, name="resnet17")


def test_timm_by_name() -> None:
    pytest.importorskip("timm", reason="timm is no dependency of fedhet")
    model = Timm(shape=(1, 32, 32), classes=7, name="mobilenetv3_small_050").eval()
    x = torch.randn(2, 1, 32, 32)
    assert torch.equal(model(x), model.head(model.features(x))) and model(x).shape == (2, 7)
    with pytest.raises(
        ConfigError,
        match=r"timm/vit_tiny_patch16_224 does not take images \(C, H, W\) = \(3, 32, 32\): .*224",
    ):
        Timm(shape=(3, 32, 32), classes=7, name="vit_tiny_patch16_224")
    for name in (
        "hf-hub:timm/resnet18",
        "resnet17",
    ):  # the first would be fetched from the internet
        with pytest.raises(ConfigError, match=rf"^model\.name={name}: timm knows no such model"):
            Timm(shape=(3, 32, 32), classes=7, name=name)


def test_timm_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ConfigError, match="pip install timm"):
        Timm(shape=(3, 32, 32), classes=7, name="resnet18")


# ---- pretrained weights


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
    file = saved(
        dict(cut(trained).state_dict()) if by_fedhet else tensors, tmp_path / f"w.{suffix}"
    )
    model = cut(net(3), weights=file)
    assert all(
        torch.equal(a, b)
        for a, b in zip(tensors.values(), model.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    ("classes", "lacks"), [(10, ()), (3, ("5.bias",)), (3, ("5.weight", "5.bias"))]
)
def test_a_head_of_another_size_is_left_out_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, classes: int, lacks: tuple[str, ...]
) -> None:
    source = net(classes)
    file = saved(
        {name: t for name, t in source.state_dict().items() if name not in lacks},
        tmp_path / "w.pth",
    )
    whole = net(3)
    head = whole[5].weight.detach().clone()
    with caplog.at_level(logging.INFO, "fedhet"):
        model = cut(whole, weights=file)
    assert torch.equal(model.body[1].weight, source[1].weight) and torch.equal(
        model.head.weight, head
    )
    assert "the head '5' of 3 classes is not in it and starts untrained" in caplog.text


def test_files_without_counted_batches_are_read(tmp_path: Path) -> None:
    source = net(3)
    file = saved(
        {name: t for name, t in source.state_dict().items() if "num_batches" not in name},
        tmp_path / "w.pth",
    )
    assert torch.equal(cut(net(3), weights=file).body[1].weight, source[1].weight)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            lambda: net(3, width=5).state_dict(),
            (
                r"other shapes: 1\.weight \(5, 48\) in the file, \(4, 48\) in the model, 1\.bias"
                r" .*\.\.\.$"
            ),
        ),
        (
            lambda: {"1.weight": torch.zeros(4, 48), "extra.weight": torch.zeros(1)},
            r"not in the file: 1\.bias, 2\.weight, 2\.bias \.\.\.; "
            r"not in the model: extra\.weight$",
        ),
        (lambda: {}, "holds a dictionary of"),
        (
            lambda: {"state_dict": net(3).state_dict(), "epoch": 3},
            r"holds a dictionary of \['state_dict', 'epoch'\]; expected",
        ),
        (lambda: [torch.zeros(1)], "holds a list"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, content: Callable[[], Any], said: str) -> None:
    file = saved(content(), tmp_path / "w.pth")
    with pytest.raises(ConfigError, match=rf"^model\.weights={re.escape(file)} .*{said}"):
        cut(net(3), weights=file)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_files_that_cannot_be_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"w.{suffix}"
    with pytest.raises(ConfigError, match=rf"there is no file {path}; nothing is downloaded"):
        cut(net(3), weights=str(path))
    for content in (b"", b"no weights", b"\x80\x04\x95" + bytes(40)):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"^model\.weights={path} is not readable"):
            cut(net(3), weights=str(path))
    with pytest.raises(ConfigError, match=r"^model\.weights=3 is not allowed"):
        cut(net(3), weights=3)  # type: ignore[arg-type]


class _Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("harmed"),))


def test_a_pth_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": _Harmful()}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match="is not readable: Weights only load failed"):
        cut(net(3), weights="w.pth")
    assert not Path("harmed").exists()


# ---- on the command line


def test_both_spellings_are_the_same_settings() -> None:
    short, long = (
        compose([f"model=torchvision/{SMALL}"]),
        compose(["model=torchvision", f"model.name={SMALL}"]),
    )
    assert short.cfg == long.cfg and short.cfg.model.name == SMALL
    assert (short.choices["model"], long.choices["model"]) == (
        f"torchvision/{SMALL}",
        "torchvision",
    )
    assert compose(["model=timm/vit.a_tag", "model.weights=/a.pth"]).cfg.model == {
        "_target_": "fedhet.models.Timm",
        "name": "vit.a_tag",
        "weights": "/a.pth",
    }
    sweep = ["model=torchvision/resnet18,mlp,timm/resnet18", "seed=0,1"]
    assert check_overrides(sweep, sweep=True) == sweep


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model=torchvision", "^model.name has no default; write model.name=<value>"),
        (
            "model=torchvison/resnet18",
            r"unknown model 'torchvison/resnet18' \(did you mean torchvision",
        ),
        ("model=mlp/resnet18", "unknown model 'mlp/resnet18'"),
        ("model=timm/", "unknown model|cannot read"),
        ("model=torchvision/a/b", "unknown model 'torchvision/a/b'"),
        ("dataset=torchvision/a", "unknown dataset"),
    ],
)
def test_wrong_spellings(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose([override])


def test_a_run_can_be_loaded_after_its_pretrained_weights_are_gone(
    tmp_path: Path, launch: Callable[..., Any]
) -> None:
    from PIL import Image

    for part, images in (("train", 8), ("test", 1)):
        for label in ("a", "b"):
            folder = tmp_path / "data" / part / label
            folder.mkdir(parents=True)
            for i in range(images):
                Image.new("RGB", (32, 32), (40 * i, 0, 200 * (label == "a"))).save(
                    folder / f"{i}.png"
                )
    torch.manual_seed(0)
    file = tmp_path / "w.safetensors"
    safetensors.torch.save_file(torchvision.models.get_model(SMALL).state_dict(), file)
    run = launch(
        f"model=torchvision/{SMALL}",
        f"model.weights={file}",
        "dataset=image_folder",
        f"dataset.folder={tmp_path / 'data'}",
        "method=fedavg",
        "partition=iid",
        "partition.clients=2",
        "rounds=1",
    )
    assert (run.summary["status"], run.summary["model"]) == ("ok", f"torchvision/{SMALL}")
    file.unlink()
    model = fedhet.load(run.dir)
    assert all(torch.equal(run.weights[name], t) for name, t in model.state_dict().items())

"""Every built-in model as ONNX: the file alone, in onnxruntime, returns what torch returns."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from composing import composed
from torch import Tensor, nn

from fedhet.handover.export import export
from fedhet.handover.served import Described, Served
from fedhet.runs.config import compose
from fedhet.runs.model_building import model_of

IMAGES = {"shape": [1, 16, 16], "normalised": {"mean": [0.3], "std": [0.4]}}
COLOURS = {"shape": [3, 32, 32], "normalised": {"mean": [0.3, 0.4, 0.5], "std": [0.4, 0.3, 0.2]}}
TABLE = {"shape": [3], "normalised": {"mean": [70.0, 0.0, -3.0], "std": [12.0, 1.0, 0.01]}}
TEXT = {"shape": [9], "normalised": None, "vocabulary": 4}
slow, matrix = pytest.mark.slow, pytest.mark.matrix
FAMILIES = [
    pytest.param("logistic", TABLE, marks=slow),
    pytest.param("mlp", TABLE, marks=slow),
    ("mlp", IMAGES),
    pytest.param("cnn", IMAGES, marks=slow),
    pytest.param("femnist_cnn", IMAGES, marks=slow),
    pytest.param("fedlex_cnn", COLOURS, marks=slow),
    pytest.param("feddisk_cnn", COLOURS, marks=slow),
    pytest.param("resnet18", COLOURS, marks=slow),
    ("text", {**TEXT, "vocabulary": 30, "padding": 0}),
    pytest.param("char_lstm", TEXT, marks=slow),
    pytest.param("vgg16", COLOURS, marks=matrix),
    pytest.param("resnet34", COLOURS, marks=matrix),
    pytest.param("mobilenet_v2", COLOURS, marks=matrix),
    pytest.param("torchvision/efficientnet_b0", COLOURS, marks=matrix),
    pytest.param("timm/convnext_atto", COLOURS, marks=matrix),
]


def described(folder: Path, kind: dict[str, object], **more: object) -> Described:
    partition = {
        "target": "class",
        "classes": ["cat", "dog", "owl", "yak"],
        "numbers": [],
        "target_scale": None,
        "vocabulary": 0,
        "padding": None,
        **kind,
        **more,
    }
    return Described(folder, {"method": "fedavg"}, partition, composed("dataset=csv").cfg)


def trained(model: nn.Module) -> nn.Module:
    """The model with statistics, biases and a head that no initialisation gives it."""
    rng = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and (tensor.ndim == 1 or name.startswith("head")):
            tensor.add_(0.2 * torch.rand(tensor.shape, generator=rng))
    return model.eval()


def inputs(about: Described, n: int) -> Tensor:
    rng = torch.Generator().manual_seed(n)
    if about.text:
        return torch.randint(about.partition["vocabulary"], (n, *about.shape), generator=rng)
    return torch.rand((n, *about.shape), generator=rng)


@pytest.mark.parametrize(("choice", "kind"), FAMILIES)
def test_onnxruntime_returns_what_torch_returns(
    onnxruntime: ModuleType, tmp_path: Path, choice: str, kind: dict[str, object]
) -> None:
    about = described(tmp_path, kind)
    if "timm" in choice:
        pytest.importorskip("timm", reason="timm is not installed")
    model = trained(model_of(compose([f"model={choice}"]).cfg.model, about.partition))
    export(about, Served(model, about).eval(), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for n in (1, 5):
        x = inputs(about, n)
        (got,) = session.run(["probabilities"], {"input": x.numpy()})
        if (moments := about.partition["normalised"]) is not None:
            ones = (1,) * (len(about.shape) - 1)
            mean, std = (torch.tensor(moments[key]).view(-1, *ones) for key in ("mean", "std"))
            x = (x - mean) / std
        with torch.no_grad():
            expected = model(x).softmax(1)
        torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-3, atol=1e-5)
        assert expected.std() > 1e-3  # probabilities that say something

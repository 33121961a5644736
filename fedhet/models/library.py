"""Classifiers of torchvision and timm by name, untrained or with weights from a local file.

Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from fedhet.core import check
from fedhet.core.errors import ConfigError, MachineError, clean, log
from fedhet.data.files import permitted
from fedhet.data.storage import read_tensors
from fedhet.models.base import Classifier, image_shape, trial_output


class LibraryModel(Classifier):
    """A library's module, cut before its last linear layer. This layer becomes the head.

    Args:
        whole: the untrained module, (B, *shape) -> (B, classes).
        name: the name used in messages, such as "torchvision/resnet18".
        shape: (C, H, W) of an input.
        classes: the number of outputs: of classes, labels or numbers.
        weights: the path of a file with pretrained weights (see `load_pretrained`), or None.

    Raises:
        ConfigError: the module does not take such images; or in training mode it is not a features
            part followed by a linear layer.
    """

    def __init__(
        self,
        whole: nn.Module,
        *,
        name: str,
        shape: tuple[int, ...],
        classes: int,
        weights: str | None,
    ) -> None:
        image_shape(name, shape)
        super().__init__()
        linear = [path for path, module in whole.named_modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise ConfigError(f"model: {name} has no linear layer, so it has no head")
        if weights is not None:
            load_pretrained(whole, linear[-1], check.text("model.weights", weights))
        x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
        logits = trial_output(whole, x, f"model: {name} does not take images (C, H, W) = {shape}")
        head = whole.get_submodule(linear[-1])
        assert isinstance(head, nn.Linear)
        whole.set_submodule(linear[-1], nn.Identity())
        self.body = whole
        self.head = head
        mismatch = (
            f"model: {name} is not, as training requires, features followed by a linear layer"
            f" with {classes} outputs"
        )
        fits = isinstance(logits, Tensor) and logits.shape == (2, classes)
        if not fits or not torch.equal(trial_output(self, x, mismatch), logits):
            raise ConfigError(mismatch)


class Torchvision(LibraryModel):
    """torchvision's classifier `name`, one of torchvision.models.list_models().

    Most of them take colour images only.

    Args:
        shape: (C, H, W) of an input.
        classes: the number of outputs: of classes, labels or numbers.
        name: such as "efficientnet_b0".
        weights: the path of a .safetensors or .pth file with pretrained weights, or None.
    """

    def __init__(
        self, *, shape: tuple[int, ...], classes: int, name: str, weights: str | None = None
    ) -> None:
        from torchvision import models

        check.one_of("model.name", name, models.list_models(module=models))
        whole = models.get_model(name, num_classes=classes)
        full_name = f"torchvision/{name}"
        super().__init__(whole, name=full_name, shape=shape, classes=classes, weights=weights)


class Timm(LibraryModel):
    """timm's classifier `name`, one of timm.list_models(), for images of any number of channels.

    Args:
        shape: (C, H, W) of an input.
        classes: the number of outputs: of classes, labels or numbers.
        name: such as "convnext_atto".
        weights: the path of a .safetensors or .pth file with pretrained weights, or None.
    """

    def __init__(
        self, *, shape: tuple[int, ...], classes: int, name: str, weights: str | None = None
    ) -> None:
        check.installed("model=timm", "timm", extra="timm")
        import timm

        # timm would look up unknown names on the internet.
        if not timm.is_model(check.text("model.name", name)):
            hint = check.did_you_mean(name, timm.list_models())
            raise ConfigError(f"model.name={name}: timm has no such model{hint}")
        full_name = f"timm/{name}"
        channels, _, _ = image_shape(full_name, shape)
        whole = timm.create_model(name, pretrained=False, in_chans=channels, num_classes=classes)
        super().__init__(whole, name=full_name, shape=shape, classes=classes, weights=weights)


def load_pretrained(whole: nn.Module, head: str, file: str) -> None:
    """Load pretrained weights into a library's module.

    If the head in the file has another size, it is left out and the module's head stays untrained.

    Args:
        whole: the module.
        head: the dotted name of its last linear layer.
        file: a .safetensors file, or a file by torch.save with tensors by name. It uses the
            module's own names, or the names in the model.safetensors of an earlier run.

    Raises:
        ConfigError: the file is missing or unreadable, or its names or shapes do not fit.
    """
    tensors = _read(file)
    if all(name.startswith(("body.", "head.")) for name in tensors):  # written by fedhet
        places = {"body": "", "head": f"{head}."}
        named = ((name.partition("."), t) for name, t in tensors.items())
        tensors = {places[part] + name: t for (part, _, name), t in named}
    own = {name: t for name, t in whole.state_dict().items() if name.startswith(f"{head}.")}
    if any(name not in tensors or tensors[name].shape != t.shape for name, t in own.items()):
        log.info(
            "model.weights=%s does not hold the head %r of %s, which starts untrained",
            file,
            head,
            check.counted(len(own[f"{head}.weight"]), "class", "classes"),
        )
        tensors = tensors | own
    try:
        whole.load_state_dict(tensors)  # torch < 0.4.1 wrote no num_batches_tracked: also accepted
    except RuntimeError as error:
        problem = clean(" ".join(str(error).split()), 300)
        raise ConfigError(f"model.weights={file} does not fit the model: {problem}") from error


def _read(file: str) -> dict[str, Tensor]:
    path = permitted(Path(file).expanduser().absolute())
    if not path.is_file():
        raise ConfigError(f"model.weights={file}: there is no such file; nothing is downloaded")
    try:
        if path.suffix == ".safetensors":
            return read_tensors(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise MachineError(
            f"model.weights={file} is not readable: {str(error).partition(chr(10))[0]}"
        ) from error
    found = content.values() if isinstance(content, dict) else ()
    if not found or not all(isinstance(t, Tensor) for t in found):
        raise ConfigError(
            f"model.weights={file} holds a {type(content).__name__} of {list(content)[:3]!s:.200};"
            " expected tensors by name, as in a saved state_dict()"
        )
    return content

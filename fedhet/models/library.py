"""Any classifier of torchvision or timm by its name, untrained or with weights from a local file;
nothing is downloaded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedhet import check
from fedhet.errors import ConfigError
from fedhet.models.base import Classifier, image_shape

log = logging.getLogger("fedhet")


class LibraryModel(Classifier):
    """A library's module, cut before its last linear layer, which becomes the head.

    Args:
        whole: the untrained module, (B, *shape) -> (B, classes).
        name: for messages, `torchvision/resnet18`.
        weights: path of a file of pretrained weights, or None (see `load`).

    Raises: ConfigError: the module does not take such images, or, in training mode, is not features
        and then a linear layer.
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
            load(whole, linear[-1], check.text("model.weights", weights))
        logits = _tried(whole, shape, f"model: {name} does not take images (C, H, W) = {shape}")
        head = whole.get_submodule(linear[-1])
        assert isinstance(head, nn.Linear)
        whole.set_submodule(linear[-1], nn.Identity())
        self.body, self.head = whole, head
        other = (
            f"model: {name} is not features and then a linear layer of {classes} outputs, as"
            " training needs it"
        )
        if (
            not isinstance(logits, Tensor)
            or logits.shape != (2, classes)
            or not torch.equal(_tried(self, shape, other), logits)
        ):
            raise ConfigError(other)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)


class Torchvision(LibraryModel):
    """torchvision's classifier `name`, as torchvision.models.list_models() knows it; most take
    colour images only.

    Args:
        shape: (C, H, W) of an input.
        classes: number of classes.
        name: such as "efficientnet_b0".
        weights: path of a .safetensors or .pth file with its pretrained weights; None for none.
    """

    def __init__(
        self, *, shape: tuple[int, ...], classes: int, name: str, weights: str | None = None
    ) -> None:
        from torchvision import models

        check.one_of("model.name", name, models.list_models(module=models))
        whole = models.get_model(name, num_classes=classes)
        super().__init__(
            whole, name=f"torchvision/{name}", shape=shape, classes=classes, weights=weights
        )


class Timm(LibraryModel):
    """timm's classifier `name`, as timm.list_models() knows it, for images of any number of
    channels.

    Args:
        as for Torchvision.
    """

    def __init__(
        self, *, shape: tuple[int, ...], classes: int, name: str, weights: str | None = None
    ) -> None:
        try:
            import timm
        except ModuleNotFoundError as error:
            raise ConfigError(
                "model=timm needs timm, which is not installed: pip install timm"
            ) from error
        if not timm.is_model(
            check.text("model.name", name)
        ):  # timm would look for other names on the internet
            raise ConfigError(
                f"model.name={name}: timm knows no such"
                f" model{check.did_you_mean(name, timm.list_models())}"
            )
        channels, _, _ = image_shape(f"timm/{name}", shape)
        whole = timm.create_model(name, pretrained=False, in_chans=channels, num_classes=classes)
        super().__init__(whole, name=f"timm/{name}", shape=shape, classes=classes, weights=weights)


def _tried(model: nn.Module, shape: tuple[int, ...], wrong: str) -> Any:
    """What the model in training mode gives for two fixed images; it stays as it is, and no random
    draw is used up.

    Raises:
        ConfigError: `wrong`, and what the model raised.
    """
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    buffers = {key: t.clone() for key, t in model.named_buffers()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)  # the same dropout each time
        try:
            return functional_call(model, buffers, (x,))
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"{wrong}: {_first_line(error)}") from error


def load(whole: nn.Module, head: str, file: str) -> None:
    """Read pretrained weights into a library's module: all but a head of another size, which stays
    untrained.

    Args: head: the dotted name of the module's last linear layer. file: a .safetensors file, or one
        by torch.save that holds tensors by name, with the module's own names or with those of an
        earlier run's model.safetensors.

    Raises:
        ConfigError: the file is missing or unreadable, or its names or shapes are not the module's.
    """
    found = _read(file)
    if all(name.startswith(("body.", "head.")) for name in found):  # by fedhet
        found = {
            (
                name.removeprefix("body.")
                if name.startswith("body.")
                else f"{head}.{name.removeprefix('head.')}"
            ): t
            for name, t in found.items()
        }
    own = whole.state_dict()
    top = {name for name in own if name.startswith(f"{head}.")}
    if any(name not in found or found[name].shape != own[name].shape for name in top):
        log.info(
            "model.weights=%s: the head %r of %d classes is not in it and starts untrained",
            file,
            head,
            len(own[f"{head}.weight"]),
        )
        found = {name: t for name, t in found.items() if name not in top}
        own = {name: t for name, t in own.items() if name not in top}
    shapes = [
        f"{name} {tuple(found[name].shape)} in the file, {tuple(t.shape)} in the model"
        for name, t in own.items()
        if name in found and found[name].shape != t.shape
    ]
    # Files older than torch 0.4.1 do not count batches.
    missing = [
        name for name in own if name not in found and not name.endswith("num_batches_tracked")
    ]
    unknown = [name for name in found if name not in own]
    parts = {"other shapes": shapes, "not in the file": missing, "not in the model": unknown}
    if said := [
        f"{what}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for what, names in parts.items()
        if names
    ]:
        raise ConfigError(f"model.weights={file} does not fit the model; {'; '.join(said)}")
    whole.load_state_dict(found, strict=False)


def _read(file: str) -> dict[str, Tensor]:
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"model.weights={file}: there is no file {path}; nothing is downloaded")
    try:
        if path.suffix == ".safetensors":
            import safetensors.torch

            return safetensors.torch.load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"model.weights={file} is not readable: {_first_line(error)}") from error
    if (
        not isinstance(found, dict)
        or not found
        or not all(isinstance(t, Tensor) for t in found.values())
    ):
        held = (
            f"a dictionary of {list(found)[:3]}"
            if isinstance(found, dict)
            else f"a {type(found).__name__}"
        )
        raise ConfigError(
            f"model.weights={file} holds {held}; expected tensors by name, as in a saved"
            " state_dict()"
        )
    return found


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

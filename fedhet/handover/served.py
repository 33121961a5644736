"""A model of a run for users: it turns raw inputs into probabilities or numbers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from fedhet.core import trees
from fedhet.core.errors import ConfigError, DataError, clean
from fedhet.core.kinds import KINDS
from fedhet.core.objects import are_pixels
from fedhet.data.dataset import MEDIAN, OWN
from fedhet.data.storage import read_tensors
from fedhet.runs.record import outcome
from fedhet.runs.record.schema import read_config


class Described:
    """A run folder's description of the inputs and outputs of its models.

    Attributes:
        folder: the run folder.
        summary: the content of summary.json.
        partition: the content of partition.json.
        config: the content of config.yaml, the settings of the run.
        shape: the shape of one sample: (C, H, W), (F,) or (T,).
        images: whether the inputs are images.
        text: whether the inputs are token numbers.
        target: what is predicted: class, number, labels or next_char.
        outputs: the names of the outputs: classes, labels or numbers.
        output: the kind of output: "numbers" in their original units, or "probabilities".
        median: whether missing values of a table are filled.
    """

    def __init__(
        self,
        folder: Path,
        summary: dict[str, Any],
        partition: dict[str, Any],
        config: DictConfig,
    ) -> None:
        self.folder, self.summary, self.partition, self.config = folder, summary, partition, config
        self.shape: tuple[int, ...] = tuple(partition["shape"])
        self.images = len(self.shape) == 3
        self.text = partition["normalised"] is None
        self.target = str(partition["target"])
        self.outputs: list[str] = list(partition["numbers"] or partition["classes"])
        self.output = "numbers" if self.target == "number" else "probabilities"
        self.median = partition.get("missing") == MEDIAN

    @classmethod
    def read(cls, folder: Path) -> Described:
        """Read the description.

        Raises:
            ConfigError: the folder is not a run folder, or the run's data and model were given as
                objects, which leave no description.
            DataError: a file in it is damaged.
        """
        summary, partition = (
            outcome.read_json(folder, name) for name in ("summary.json", "partition.json")
        )
        config = read_config(folder)
        if "task" in config:
            raise ConfigError(
                f"{folder}: the data and the model of this run were given as objects; use"
                " fedhet.load(run, model=...) from Python, which returns a torch module"
            )
        file = folder / "partition.json"
        if "shape" not in partition:
            raise DataError(f"{file} is damaged: 'shape' is missing")
        if (target := partition["target"]) not in KINDS:
            raise DataError(f"{file} is damaged: target is {clean(repr(target), 60)}")
        return cls(folder, summary, partition, config)

    def made_ready(self, client: int | None) -> dict[str, list[float]]:
        """Return the statistics that prepare inputs: mean and std, and the median if `median`.

        Args:
            client: the client to which the inputs belong; None: unknown.

        Raises:
            ConfigError: each client uses its own statistics, and this client's are unknown here.
        """
        common = dict(self.partition["normalised"] or {})
        own = self.partition.get("own", {})
        if str(client) in own:
            return common | own[str(client)]
        if common.get("mean") == OWN or (own and client is not None):
            known = (
                f"only the clients {', '.join(own)} have theirs" if own else "no client has its own"
            )
            raise ConfigError(
                f"{self.folder}: each client prepares its inputs by statistics of its own training"
                f" part, and {known} in this folder; name the client, --inputs-of N (with"
                " deliver=true, each site's folder has the site's own statistics)"
            )
        return common | ({"median": common["mean"]} if self.median else {})


class Served(nn.Module):
    """A model with normalisation of its inputs, and readable outputs.

    Inputs are images (B, C, H, W) with pixels in [0, 1], or as uint8 in 0 .. 255; rows of a table
    (B, F) in the columns' own units; or token numbers (B, T). Outputs (B, K) are the probabilities
    of the classes, which add up to 1; the probability of each label; or the numbers in their own
    units.

    Args:
        model: a trained model.
        described: the description of its run.
        client: the client to which the inputs belong, see `Described.made_ready`.
    """

    x_median: Tensor | None
    x_mean: Tensor | None
    x_std: Tensor | None
    y_mean: Tensor | None
    y_std: Tensor | None

    def __init__(self, model: nn.Module, described: Described, client: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.target = described.target
        inputs, scale = described.made_ready(client), described.partition["target_scale"] or {}
        ones = (1,) * (len(described.shape) - 1)
        for prefix, values, shape in (("x", inputs, (-1, *ones)), ("y", scale, (-1,))):
            for key in ("mean", "std", "median"):
                # Tables are normalised in float64, as in training.
                exact = torch.float64 if prefix == "x" and not described.images else None
                value = None
                if key in values:
                    value = torch.tensor(values[key], dtype=exact).view(shape)
                self.register_buffer(f"{prefix}_{key}", value, persistent=False)

    def raw(self, x: Tensor) -> Tensor:
        """Return the model's own outputs for raw inputs: logits, or standardised numbers."""
        if are_pixels(x):
            x = x.float() / 255
        if self.x_median is not None:
            x = torch.where(x.isnan(), self.x_median, x)
        if self.x_mean is not None and self.x_std is not None:
            x = ((x - self.x_mean) / self.x_std).float()
        return self.model(x)

    def readable(self, output: Tensor) -> Tensor:
        """Return probabilities, or numbers in their own units."""
        if self.target == "number":
            if self.y_mean is None or self.y_std is None:
                return output
            return output * self.y_std + self.y_mean
        return output.sigmoid() if self.target == "labels" else output.softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.readable(self.raw(x))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that choose a model of a run."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    parser.add_argument("--client", type=int, metavar="N", help="use this client's own model")
    parser.add_argument(
        "--view",
        metavar="VIEW",
        help=f"the weights: {', '.join(outcome.GLOBAL)} (of the global model), or with --client:"
        f" {', '.join(outcome.OWN)}; default: model, or with --client: personal",
    )
    parser.add_argument(
        "--inputs-of",
        type=int,
        metavar="N",
        help="prepare inputs with the statistics of this client's training part, if each client"
        " uses its own (dataset.mean=own, dataset.missing=median); default: --client",
    )


def opened(
    folder: Path, view: str | None, client: int | None, inputs_of: int | None = None
) -> tuple[Described, Served]:
    """Open a model of a run.

    Args:
        folder: the run folder.
        view: see `weights` of `fedhet.load`; None: "model", or with a client "personal".
        client: the client of a client's own model; None: the global model.
        inputs_of: the client to which the inputs belong; None: `client`, or the client to which
            the model was delivered.

    Raises:
        ConfigError: there is no such model, or the statistics of that client are unknown.
        DataError: a file in the folder is damaged.
    """
    described = Described.read(folder)
    views = described.summary.get("models") or ["global"]
    delivered = described.summary.get("delivered")
    if inputs_of is None:
        inputs_of = delivered["client"] if delivered and client is None else client
    if client is None and delivered and ("global" not in views or view == "personal"):
        client = delivered["client"]  # the folder has only this client's own model
    if client is None and "global" not in views:
        raise ConfigError(
            f"{folder}: method={described.summary.get('method')} has no global model; choose a"
            f" client's {views[0] if views else 'personal'} model: --client N"
            f" --view {views[0] if views else 'personal'}"
        )
    if view is None:
        view = "model" if client is None else "personal"
    model = outcome.load(folder, view, client=client)
    if client is None and view == "model":
        _check_weights(described)
    return described, Served(model, described, inputs_of).eval()


def _check_weights(described: Described) -> None:
    """Refuse final weights if their digest differs from the one in summary.json."""
    files = [
        file for file in described.folder.glob("*.safetensors") if file.stem not in outcome.OWN
    ]
    digest = trees.sha256({file.stem: read_tensors(file) for file in files})
    if digest != described.summary.get("weights_sha256"):
        raise DataError(
            f"{described.folder}: the weights in {', '.join(sorted(file.name for file in files))}"
            f" have changed since the run: their digest is {digest}, but weights_sha256 in"
            f" summary.json is {described.summary.get('weights_sha256')}"
        )

"""The model card: what whoever gets the model should know about it, in one Markdown page."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from fedhet.core.errors import clean
from fedhet.core.targets import TARGETS
from fedhet.record.files import write_text
from fedhet.record.summary import method_name, privacy_spent

if TYPE_CHECKING:
    from pandas import DataFrame

log = logging.getLogger("fedhet")
FILE = "model_card.md"
_MOST_NAMES = 100  # of classes or columns; partition.json has them all
_PACKAGES = ("python", "fedhet", "torch", "torchvision", "flwr", "numpy")
_DECLARED = ("dataset", "partition", "model", "method", "plugin", "server_opt", "merge", "client")


def write_card(folder: Path, summary: dict[str, Any], partition: dict[str, Any]) -> None:
    """Write the card of a run that has ended well; if that fails, the log says so.

    Args:
        folder: the run folder, which is complete but for the card.
        summary: the content of its summary.json.
        partition: the content of its partition.json.
    """
    try:
        write_text(folder / FILE, card(folder, summary, partition))
    except (OSError, ValueError, KeyError) as error:
        # It repeats what other files have, and must not fail a run that has ended well.
        log.warning("no %s: %s", FILE, error)


def card(folder: Path, summary: dict[str, Any], partition: dict[str, Any]) -> str:
    """The card as Markdown.

    Args:
        folder: the run folder.
        summary: the content of its summary.json.
        partition: the content of its partition.json.
    """
    environment = json.loads((folder / "environment.json").read_text())
    config: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    data = summary["dataset"] or "data given as objects"
    parts = [
        f"# {_cell(method_name(summary))} on {_cell(data)}",
        "A model that was trained by federated learning with"
        " [Flower](https://flower.ai) and fedhet. This card was written at the end of the run.",
        "## The model",
        _table(("", ""), _model_rows(folder, summary, config)),
        "## Inputs and outputs",
        _table(("", ""), _data_rows(partition, config)),
        "## How good it is",
        _scores(folder, summary),
        "## How it was trained",
        _table(("", ""), _training_rows(summary, partition, config, environment)),
        "## Settings",
        _settings(config),
        "## Use it",
        _use(summary),
    ]
    return "\n\n".join(parts) + "\n"


def _cell(value: object) -> str:
    """A value in one line of a table, in which Markdown sees no mark-up."""
    text = clean(str(value))
    return "".join(f"\\{c}" if c in "\\|`*_[]<>#" else c for c in text)


def _table(header: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [header, ("---",) * len(header), *(tuple(map(_cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _names(names: list[str]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _numbers(values: list[float]) -> str:
    return _names([f"{value:.6g}" for value in values])


# ---- the parts of the card
def _model_rows(
    folder: Path, summary: dict[str, Any], config: dict[str, Any]
) -> list[tuple[object, ...]]:
    file = folder / "model.safetensors"
    rows: list[tuple[object, ...]] = [
        ("architecture", summary["model"]),
        ("method", method_name(summary)),
        ("file", file.name),
        ("SHA-256 of the file", _sha256(file)),
        ("digest of the weights (weights_sha256)", summary["weights_sha256"]),
    ]
    if "global" not in summary["models"]:
        views = ", ".join(summary["models"])
        rows.append(
            ("note", f"there is no global model: the file has what clients share ({views} models)")
        )
    return rows


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _data_rows(partition: dict[str, Any], config: dict[str, Any]) -> list[tuple[object, ...]]:
    if "shape" not in partition:
        given = config.get("task", {})
        about = (("target", "target"), ("number of outputs", "classes"), ("transform", "transform"))
        return [(name, given.get(key)) for name, key in about]
    normalised, scale = partition["normalised"], partition["target_scale"]
    rows: list[tuple[object, ...]] = [
        ("shape of an input", tuple(partition["shape"])),
        ("what is predicted", partition["target"]),
    ]
    if partition["columns"]:
        rows.append(("columns", _names(partition["columns"])))
    if partition["numbers"]:
        rows.append(("numbers", _names(partition["numbers"])))
    else:
        names = partition["classes"]
        rows.append((f"{len(names)} classes", _names(names)))
    if normalised:
        rows += [(f"normalised by {key}", _numbers(normalised[key])) for key in ("mean", "std")]
    else:
        rows.append(("tokens", partition["vocabulary"]))
    if scale:
        rows += [(f"{key} of the numbers", _numbers(scale[key])) for key in ("mean", "std")]
    return rows


def _scores(folder: Path, summary: dict[str, Any]) -> str:
    """The score of the global test set, and those of the clients with their range."""
    target = TARGETS[summary["target"]]
    if not target.score():
        return f"The last loss on the global test set is {_score(summary['loss'])}."
    last = (summary.get(target.score()) or {}).get("last")
    name = f"{target.title} of the final model"
    rows: list[tuple[object, ...]] = [(name, "global test set", "", _score(last), "", "")]
    frame = _last_clients(folder, target.score())
    if frame is not None:
        for (view, split), values in frame.groupby(["model", "split"])["value"]:
            who = f"{target.title} of the {view} models"
            scores = (_score(each) for each in (values.mean(), values.min(), values.max()))
            rows.append((who, f"clients, {split}", len(values), *scores))
    header = ("score", "samples", "clients", "mean", "lowest", "highest")
    note = (
        "A client's own samples are few, so single values scatter. The range over the clients"
        " shows for whom the model works less well."
    )
    return f"{_table(header, rows)}\n\n{note}"


def _score(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def _last_clients(folder: Path, metric: str) -> DataFrame | None:
    """The clients' values of a score at the last evaluation."""
    files = sorted((folder / "clients").glob("*.parquet"))
    if not files:
        return None
    import pandas

    frame = pandas.read_parquet(files[-1])
    frame = frame[frame["metric"] == metric]
    return frame if len(frame) else None


def _training_rows(
    summary: dict[str, Any],
    partition: dict[str, Any],
    config: dict[str, Any],
    environment: dict[str, Any],
) -> list[tuple[object, ...]]:
    sizes = partition["train_sizes"]
    phases = ", ".join(f"{phase['rounds']} of {phase['name']}" for phase in summary["phases"])
    versions = [f"{name} {environment[name]}" for name in _PACKAGES if environment.get(name)]
    return [
        ("data", summary["dataset"] or "given as objects"),
        ("clients", f"{partition['clients']}, partition {partition['name']}"),
        ("training samples", f"{sum(sizes)}: {min(sizes)} to {max(sizes)} per client"),
        ("rounds", phases),
        ("share of the clients in a round", config["fraction"]),
        ("seed", summary["seed"]),
        ("failed replies", len(summary["failures"])),
        ("seconds", f"{summary['seconds']['total']:.1f}"),
        ("engine and device", f"{environment['engine']}, {environment['device']}"),
        ("bit exact", "yes" if environment.get("bit_exact") else "no"),
        *privacy_spent(summary),
        ("versions", ", ".join(versions)),
    ]


def _settings(config: dict[str, Any]) -> str:
    chosen = {key: config[key] for key in ("task", *_DECLARED) if key in config}
    text = OmegaConf.to_yaml(chosen).replace("```", "'''")  # which would end the block
    return f"```yaml\n{text}```"


def _use(summary: dict[str, Any]) -> str:
    if summary["dataset"] is None:
        return (
            "`fedhet.load(RUN, model=Net())` returns the torch module, where RUN is the folder of"
            " this card and Net the class of the model."
        )
    own = "" if "global" in summary["models"] else f" --client 0 --view {summary['models'][0]}"
    return (
        f"```bash\npython -m fedhet predict RUN FILE...{own}\n"
        f"python -m fedhet export RUN --to onnx{own}\n```\n\n"
        "RUN is the folder of this card. Both commands normalise the inputs themselves; from"
        " Python, `fedhet.load(RUN)` returns the torch module, which takes normalised inputs."
    )

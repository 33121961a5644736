"""Apply a model of a run to images, tables, arrays or texts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedhet.core.errors import DataError, clean
from fedhet.handover.inputs import read_inputs
from fedhet.handover.served import Described, Served, add_arguments, opened
from fedhet.record.files import as_json, write_text

if TYPE_CHECKING:
    import pandas

FORMATS = ("table", "csv", "json")
_BATCH = 256
_NEXT = 2  # classes after the first that the table shows


def main(argv: Sequence[str]) -> int:
    """Print or write a prediction for each sample.

    Args:
        argv: the arguments after `predict`.
    """
    parser = argparse.ArgumentParser(prog="python -m fedhet predict", description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="png or jpg images, folders of them, csv or Parquet tables, npz arrays",
    )
    parser.add_argument("--format", choices=FORMATS, default="table", help="default: table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to a file, not to stdout")
    parser.add_argument(
        "--array", metavar="NAME", help="the array in npz files; default: the only one, or x_test"
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="for texts; default: the one that the run names"
    )
    args = parser.parse_args(argv)
    about, served = opened(args.run, args.view, args.client)
    inputs = read_inputs(about, args.files, args.array, args.tokenizer)
    outputs, chosen = predict(served, inputs.x)
    if not outputs.isfinite().all():
        row = int((~outputs.isfinite().all(1)).nonzero()[0])
        raise DataError(f"{inputs.names[row]}: the model returns no finite numbers for it")
    text = _FORMATTED[args.format](about, inputs.names, outputs, chosen)
    if args.out is None:
        print(text, end="")
    else:
        write_text(args.out, text)
        print(f"written: {args.out}")
    return 0


def predict(served: Served, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the readable outputs for raw inputs, and what is predicted.

    Args:
        served: the model.
        x: (n, ...), its inputs.

    Returns:
        (n, K) probabilities or numbers; and (n, K) booleans: the outputs that are predicted, one
        class, or any number of labels. All numbers are.
    """
    with torch.inference_mode():
        # Classes are chosen as an evaluation chooses them, among outputs before the softmax, of
        # which two may be different and the probabilities equal.
        raw = torch.cat([served.raw(part) for part in x.split(_BATCH)])
        outputs = served.readable(raw)
        if served.target == "number":
            return outputs, torch.ones_like(outputs, dtype=torch.bool)
        if served.target == "labels":
            return outputs, raw > 0
        return outputs, torch.zeros_like(raw, dtype=torch.bool).scatter_(
            1, raw.argmax(1, keepdim=True), True
        )


def _predictions(about: Described, chosen: Tensor) -> list[str]:
    names = about.outputs
    return ["; ".join(names[i] for i in row.nonzero()[:, 0].tolist()) for row in chosen]


def _frame(about: Described, names: list[str], outputs: Tensor, chosen: Tensor) -> pandas.DataFrame:
    """A row for each sample: its name, the prediction, and all outputs."""
    import pandas

    values = pandas.DataFrame(outputs.numpy())
    if about.target == "number":
        values.columns = pandas.Index(about.outputs)
    else:
        values.columns = pandas.Index([f"p({name})" for name in about.outputs])
        values.insert(0, "prediction", _predictions(about, chosen), allow_duplicates=True)
    values.insert(0, "input", names, allow_duplicates=True)
    return values


def _json(about: Described, names: list[str], outputs: Tensor, chosen: Tensor) -> str:
    samples: list[dict[str, Any]] = []
    for name, row, which in zip(names, outputs.tolist(), chosen, strict=True):
        sample: dict[str, Any] = {"input": name}
        if about.target == "labels":
            sample["prediction"] = [about.outputs[i] for i in which.nonzero()[:, 0].tolist()]
        elif about.target != "number":
            sample["prediction"] = about.outputs[int(which.nonzero())]
        samples.append(sample | {about.output: dict(zip(about.outputs, row, strict=True))})
    return as_json(samples, indent=1)


def _table(about: Described, names: list[str], outputs: Tensor, chosen: Tensor) -> str:
    """The table for a terminal; of many classes it has the most probable ones only."""
    import pandas

    if about.target in ("number", "labels"):
        frame = _frame(about, names, outputs, chosen)
    else:
        p, order = outputs.topk(min(1 + _NEXT, outputs.shape[1]))
        first = _predictions(about, chosen)
        others = [
            ", ".join(
                f"{about.outputs[i]} {value:.3f}"
                for value, i in zip(values, numbers, strict=True)
                if about.outputs[i] != own
            )
            for values, numbers, own in zip(p.tolist(), order.tolist(), first, strict=True)
        ]
        columns = {"input": names, "prediction": first, "probability": p[:, 0], "then": others}
        frame = pandas.DataFrame(columns)
    for column in frame.select_dtypes("str"):
        frame[column] = [clean(value) for value in frame[column]]
    frame.columns = pandas.Index([clean(str(column)) for column in frame.columns])
    return frame.to_string(index=False, float_format=lambda value: f"{value:.4g}") + "\n"


_FORMATTED = {
    "table": _table,
    "csv": lambda *given: _frame(*given).to_csv(index=False, lineterminator="\n"),
    "json": _json,
}

"""Write a model of a run to one file that needs neither fedhet nor its settings."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedhet.core import streams
from fedhet.core.check import installed
from fedhet.core.errors import ConfigError, DataError
from fedhet.data.storage import written
from fedhet.handover.served import Described, Served, add_arguments, opened

FORMATS = ("onnx", "pt2")
_BATCHES = (1, 2, 7)  # sizes of the batches on which the file and torch are compared
_TOLERANCE = 1e-3  # of outputs; relative to the largest output if that exceeds 1


def main(argv: Sequence[str]) -> int:
    """Write the file, compare it with torch, and print its input and output.

    Args:
        argv: the arguments after `export`.
    """
    parser = argparse.ArgumentParser(prog="python -m fedhet export", description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--to",
        choices=FORMATS,
        default="onnx",
        help="onnx (default), or pt2: a program that torch.export.load reads",
    )
    parser.add_argument(
        "--pixels",
        choices=("float", "uint8"),
        default="float",
        help="images have pixels in [0, 1] (float, the default) or 0 to 255 (uint8)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: in the run folder, named by the view"
    )
    args = parser.parse_args(argv)
    described, served = opened(args.run, args.view, args.client, args.inputs_of)
    shared = args.client is None and (args.run / "model.safetensors").exists()
    default = args.view or ("model" if shared else "personal")
    if args.client is not None:
        default += f"-{args.client}"
    out = args.out or args.run / f"{default}.{args.to}"
    program, difference = export(described, served, out, args.to, pixels=args.pixels)
    print(f"written: {out} ({program})")
    print(f"input:   {_input_text(described, args.pixels)}")
    outputs = described.outputs
    names = ", ".join(outputs[:10]) + (f", ... ({len(outputs)})" if len(outputs) > 10 else "")
    print(f"output:  {described.output}, float32 (batch, {len(outputs)}): {names}")
    print(f"largest difference to torch on random inputs: {difference:.2g}")
    return 0


def export(
    described: Described, served: Served, out: Path, to: str = "onnx", *, pixels: str = "float"
) -> tuple[str, float]:
    """Write a model as a program, if the program returns the same outputs as torch.

    Args:
        described: the description of the run.
        served: the model.
        out: the file; its ending must be `to`.
        to: the format, one of FORMATS.
        pixels: "float" or "uint8", the dtype of images.

    Returns:
        The kind of program, such as "ONNX, opset 20", and the largest difference to torch.

    Raises:
        ConfigError: the file has another ending, a package is missing, or torch cannot export the
            model.
        DataError: the model returns NaN or infinity.
        RuntimeError: the program's outputs differ from torch's; no file is written.
        WriteError: the file cannot be written.
    """
    if out.suffix != f".{to}":
        raise ConfigError(f"--out {out}: with --to {to} the file must end in .{to}")
    if pixels == "uint8" and not described.images:
        raise ConfigError(f"--pixels uint8: the inputs of {described.folder} are not images")
    if to == "onnx":
        installed("--to onnx", "onnx", "onnxscript", "onnxruntime", extra="onnx")
    x = _random_inputs(described, served, 2, pixels)
    try:
        with torch.no_grad():
            batch = {0: torch.export.Dim("batch", min=1)}
            program = torch.export.export(served, (x,), dynamic_shapes=(batch,))
    except Exception as error:  # tracing may raise any error of the model's own code
        raise ConfigError(
            f"torch.export cannot export the model {type(served.model).__name__}:"
            f" {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
    with written(out) as part:
        if to == "onnx":
            run, what = _write_onnx(program, part, described, pixels)
        else:
            run, what = _write_pt2(program, part, described)
        difference = max(
            _difference(served, run, _random_inputs(described, served, n, pixels), out)
            for n in _BATCHES
        )
    return what, difference


def _write_onnx(
    program: torch.export.ExportedProgram, file: Path, described: Described, pixels: str
) -> tuple[Callable[[Tensor], Tensor], str]:
    """Write the program as ONNX, and return a function that runs the file."""
    import onnx
    import onnxruntime

    for name in ("torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    converted: Any = torch.onnx.export(
        program,
        dynamo=True,
        input_names=["input"],
        output_names=[described.output],
        verbose=False,
    )
    model = converted.model_proto
    facts = {**_facts(described), "input": _input_text(described, pixels)}
    onnx.helper.set_model_props(model, {k: str(v) for k, v in facts.items()})
    onnx.save(model, file)
    onnx.checker.check_model(file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def run(x: Tensor) -> Tensor:
        (output,) = session.run(None, {"input": x.numpy()})
        return torch.from_numpy(output)

    (opset,) = (entry.version for entry in model.opset_import if entry.domain == "")
    return run, f"ONNX, opset {opset}"


def _write_pt2(
    program: torch.export.ExportedProgram, file: Path, described: Described
) -> tuple[Callable[[Tensor], Tensor], str]:
    """Write the program as torch does, and return a function that runs the file."""
    buffer = BytesIO()  # torch wants a name that ends in .pt2
    torch.export.save(program, buffer, extra_files={"about.json": json.dumps(_facts(described))})
    file.write_bytes(buffer.getvalue())
    loaded = torch.export.load(BytesIO(file.read_bytes())).module()
    return loaded, f"a program of torch {torch.__version__}"


def _facts(described: Described) -> dict[str, str]:
    """Return the facts that the file states described itself."""
    return {
        "outputs": json.dumps(described.outputs, ensure_ascii=False),
        "target": described.target,
        "columns": json.dumps(described.partition.get("columns", []), ensure_ascii=False),
        "method": str(described.summary.get("method")),
        "weights_sha256": str(described.summary.get("weights_sha256")),
    }


def _input_text(described: Described, pixels: str) -> str:
    shape = f"(batch, {', '.join(map(str, described.shape))})"
    if described.images:
        kind = "uint8" if pixels == "uint8" else "float32"
        return f"images, {kind} {shape}, pixels {'0 to 255' if kind == 'uint8' else 'in [0, 1]'}"
    if described.text:
        return f"token numbers, int64 {shape}"
    columns = ", ".join(described.partition.get("columns", [])) or "without names"
    missing = ", missing values are NaN" if described.median else ""
    return f"rows of a table, float32 {shape}, not normalised{missing}: {columns}"


# ---- the comparison
def _difference(served: Served, run: Callable[[Tensor], Tensor], x: Tensor, out: Path) -> float:
    """Return the largest absolute difference between torch and the program.

    Raises:
        DataError: the model returns NaN or infinity, for example because it has diverged.
        RuntimeError: the difference exceeds rounding errors.
    """
    with torch.no_grad():
        expected, got = served(x), run(x)
    if not expected.isfinite().all():
        raise DataError(f"{out} is not written: the model itself returns NaN or infinity")
    scale = max(1.0, float(expected.abs().max()))
    difference = float((expected - got).abs().max())
    if expected.shape != got.shape or not difference <= _TOLERANCE * scale:
        raise RuntimeError(
            f"{out} is not written: for {len(x)} inputs its program returns {tuple(got.shape)} and"
            f" torch {tuple(expected.shape)}, and they differ by up to {difference:.2g}; allowed is"
            f" {_TOLERANCE * scale:.2g}"
        )
    return difference


def _random_inputs(described: Described, served: Served, n: int, pixels: str) -> Tensor:
    """Return n inputs: uniform pixels or tokens, or normal values with each column's mean and std.

    A tenth of the values is missing if the model accepts missing values.
    """
    rng = torch.Generator().manual_seed(streams.integer(0, "export", pid=n))
    shape = (n, *described.shape)
    if described.images:
        if pixels == "uint8":
            return torch.randint(256, shape, generator=rng).to(torch.uint8)
        return torch.rand(shape, generator=rng)
    if described.text:
        return torch.randint(described.partition["vocabulary"], shape, generator=rng)
    assert served.x_mean is not None and served.x_std is not None
    x = torch.randn(shape, generator=rng) * served.x_std + served.x_mean
    if described.median:
        x[torch.rand(shape, generator=rng) < 0.1] = torch.nan
    return x.float()

"""Imported once, by the process from which those of the runs are forked (multiprocessing).

A run's process begins with all of this, at no cost, and shares the memory. None of it starts CUDA,
which a fork would lose.
"""

from __future__ import annotations

import gc
import importlib
import os

from fedhet.runs import process
from fedhet.runs.config import catalogue

NAMES = (
    "fedhet.data.partition",
    "fedhet.engines.in_process",
    "fedhet.engines.dispatch",
    "fedhet.study.executors",
    "fedhet.runs.record.figures",
    "pandas",
    "pyarrow.csv",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "sklearn.datasets",
    "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.PpmImagePlugin",
    "PIL.PngImagePlugin",
)

# torch.cuda.is_available() must not start CUDA here.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
process.end_with_parent(os.getppid())
gc.disable()
targets = catalogue.targets()  # what files name, which each run must know
methods = {name.rpartition(".")[0] for name in targets if name.startswith("fedhet.methods.")}
# multiprocessing would say nothing of one that cannot be imported, and leave the rest out.
for name in (*NAMES, *sorted(methods)):
    importlib.import_module(name)
importlib.import_module("fedhet.engines.fused.traces").get_ready()
process.pin_threads(1)
gc.freeze()
gc.enable()

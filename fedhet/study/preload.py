"""The imports of multiprocessing's fork server, which forks the processes of the runs.

The process of a run begins with all these modules loaded, and shares their memory. None of them
may start CUDA, because a forked process cannot use it.
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
targets = catalogue.targets()  # the classes that the files in conf/ name; each run needs this list
methods = {name.rpartition(".")[0] for name in targets if name.startswith("fedhet.methods.")}
# If a module cannot be imported, multiprocessing skips the rest of this file without a message.
for name in (*NAMES, *sorted(methods), "fedhet.engines.fused.clients"):
    importlib.import_module(name)
process.pin_threads(1)
gc.freeze()
gc.enable()

"""How many functions of fedhet are entered, as the first thing that a process does."""

import inspect
import os
import sys
import threading
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType

RUN = "python -m fedhet"
MEASURED = ("FedAvg step", "SCAFFOLD step", "FedAvg + FedNorm step", RUN)


def entered(what: str, package: Path) -> dict[str, int]:
    """Do one of MEASURED; return how many functions of the package it enters, in how many files."""
    call = _default_run if what == RUN else _step(what)
    seen: dict[int, CodeType] = {}  # by identity: equal functions of two files have equal codes

    def note(frame: FrameType, *_: object) -> None:
        seen[id(frame.f_code)] = frame.f_code

    threading.setprofile(note)
    sys.setprofile(note)
    call()
    sys.setprofile(None)
    files = [
        code.co_filename
        for code in seen.values()
        if code.co_filename.startswith(f"{package}{os.sep}")
        and code.co_flags & inspect.CO_OPTIMIZED  # not the body of a module or a class
        and not code.co_name.startswith("<")  # lambdas and comprehensions are parts of functions
    ]
    return {"files": len({*files}), "functions": len(files)}


def _step(what: str) -> Callable[[], object]:
    from fedhet.methods.fedavg import FedAvg
    from fedhet.methods.fednorm import FedNormPlugin
    from fedhet.methods.scaffold import Scaffold
    from fedhet.testing import Federation, toy_task

    cls = Scaffold if "SCAFFOLD" in what else FedAvg
    plugins = [FedNormPlugin] if "FedNorm" in what else []
    return Federation(toy_task(), cls, plugins=lambda: [make() for make in plugins], rounds=1).step


def _default_run() -> None:
    """Make the default run, with an empty cache, in a folder that does not outlive it."""
    from fedhet.__main__ import main

    out = StringIO()
    with TemporaryDirectory() as folder, chdir(folder), redirect_stdout(out), redirect_stderr(out):
        os.environ["FEDHET_CACHE"] = f"{folder}/cache"
        if main([]):
            raise RuntimeError(f"{RUN} failed:\n{out.getvalue()}")

"""The measurements that need a GPU: all methods against the CPU, and the speed of local training.

Use scripts/gpu.sh. No part begins after --seconds. Arithmetic is float32 without TF32; lines with
bf16 use torch.autocast. The data are random: only their shapes matter.

    methods   each method on a GPU against the CPU, digits-like images, three rounds: the norm of
              the difference of all weights, relative to the norm of the CPU's weights, for clients
              one after another and in one batch (fused); it must be at most 1e-4
    G1        CIFAR shapes, 1,000 clients of 50 images, 50 in each round, two convolutions, batches
              of 10, one epoch: seconds of a round
    G2        CIFAR shapes, 100 clients by Dirichlet(.1), ten in each round, ResNet-18 with group
              norm, momentum .9, batches of 64, one epoch: seconds of a round
    CNN       McMahan's CNN on CIFAR shapes, 100 clients of 500 images, all in each round, batches
              of 50, five epochs: client steps per second, and the goal

G1 and G2 compare with a plain loop that does only the local steps ("floor").
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

CLASSES = 10
CLOSE = 1e-4
Line = dict[str, Any]


# Empty classes in place of those that fedhet imports from Flower; none of them is used here.
for flower_module, classes in {
    "flwr": [],
    "flwr.client": ["NumPyClient"],
    "flwr.server": [],
    "flwr.server.strategy": ["Strategy"],
    "flwr.common": ["Array", "ArrayRecord", "RecordDict"],
}.items():
    sys.modules[flower_module] = module = ModuleType(flower_module)
    module.__path__ = []
    vars(module).update({each: type(each, (), {}) for each in classes})
import runs  # noqa: E402 -- fedhet imports Flower

from fedhet.core.errors import RunFailed  # noqa: E402
from fedhet.core.messages import LocalSettings  # noqa: E402
from fedhet.core.targets import cross_entropy  # noqa: E402
from fedhet.core.task import ClientData, Samples, Task  # noqa: E402
from fedhet.core.trees import Tree  # noqa: E402
from fedhet.models import CNN, MLP, ResNet18  # noqa: E402


def images(
    sizes: Sequence[int],
    model: Callable[[], nn.Module],
    *,
    shape: tuple[int, ...] = (3, 32, 32),
    labels: Sequence[np.ndarray] | None = None,
    test: int = 0,
) -> Task:
    """Return random images with a bright spot at a place that depends on the class.

    Args:
        sizes: the numbers of the clients' images, if `labels` is None.
        model: builds the model.
        shape: the shape of an image.
        labels: the labels of each client; None: random.
        test: the number of each client's test images.
    """
    draw = np.random.default_rng(0)

    def samples(y: np.ndarray) -> Samples:
        x = draw.integers(0, 200, (len(y), *shape), dtype=np.uint8)
        x.reshape(len(y), -1)[np.arange(len(y)), 7 * y] = 255
        return Samples(torch.from_numpy(x), torch.from_numpy(y))

    labels = labels or [draw.integers(0, CLASSES, n) for n in sizes]
    held_out = [samples(draw.integers(0, CLASSES, test)) if test else None for _ in labels]
    clients = [ClientData(samples(y), h, h) for y, h in zip(labels, held_out, strict=True)]
    return Task(model, cross_entropy, clients, held_out[0], CLASSES)


class Bench:
    """The parts of the measurement.

    Args:
        device: the GPU, or the pretended accelerator.
        tiny: whether to use tiny sizes.
        seconds: no part begins after so many seconds.
    """

    def __init__(self, device: torch.device, seconds: float, *, tiny: bool) -> None:
        self.device = device
        self.tiny = tiny
        self._end = time.perf_counter() + seconds
        self.modes = [False] if tiny else [False, True]  # the pretended device has no autocast

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def lines(self) -> Iterator[Line]:
        """Yield the measurements, line by line."""
        parts = [("methods", self.methods())]
        for amp in self.modes:
            parts += [("CNN", self.cnn(amp)), ("G2", self.g2(amp)), ("G1", self.g1(amp))]
        for name, part in parts:  # a part is a generator: it begins with its first line
            if time.perf_counter() > self._end:
                yield {"part": name, "skipped": "no time is left"}
                continue
            try:
                yield from part
            except (RuntimeError, ValueError) as error:  # such as too little memory
                yield {"part": name, "failed": str(error).partition("\n")[0]}

    def methods(self) -> Iterator[Line]:
        """Compare each method on the device with the CPU."""
        sizes, local = (25, 41, 32), LocalSettings(0.1, epochs=1, batch_size=10)
        for name, components in runs.methods():
            norm = "batch" if name == "fedbn" else "none"
            model = partial(MLP, shape=(1, 8, 8), classes=CLASSES, hidden=[16], norm=norm)
            task = images(sizes, model, shape=(1, 8, 8), test=15)
            go = partial(
                runs.run, task, local=local, components=components, rounds=3, evaluates=True
            )
            line = {"part": "methods", "method": name}
            try:
                expected = go(torch.device("cpu"))
                line["alone"] = _apart(expected, go(self.device))
                line["fused"] = _apart(expected, go(self.device, fused=len(sizes)))
            except RunFailed as error:  # FedGMM needs scikit-learn, for example
                yield {**line, "failed": str(error)}
            else:
                yield {**line, "ok": max(line["alone"], line["fused"]) <= CLOSE}

    def _compared(
        self, part: str, task: Task, local: LocalSettings, cohort: int, *, amp: bool, rounds: int
    ) -> Line:
        """Measure a round by the plain loop, with clients one after another, and fused."""
        go = partial(
            runs.run,
            task,
            self.device,
            local,
            runs.Components(),
            rounds=rounds + 1,
            amp=amp,
            fraction=cohort / len(task.clients),
            most_seconds=self.size(15, 5),
        )
        floors = [runs.floor(task, self.device, local, range(cohort), amp=amp) for _ in range(3)]
        found = {"floor": min(floors), "alone": _median(go()), "fused": _median(go(fused=cohort))}
        return {"part": part, "precision": _name(amp), **found}

    def g1(self, amp: bool) -> Iterator[Line]:
        cohort = self.size(50, 3)
        task = images([self.size(50, 12)] * self.size(1000, 6), _two_convolutions)
        local = LocalSettings(0.1, epochs=1, batch_size=10)
        yield self._compared("G1", task, local, cohort, amp=amp, rounds=self.size(100, 2))

    def g2(self, amp: bool) -> Iterator[Line]:
        shape = (3, self.size(32, 8), self.size(32, 8))
        draw = np.random.default_rng(1)
        shares = draw.dirichlet([0.1] * self.size(100, 4), CLASSES)
        counts = draw.multinomial(self.size(5_000, 4), shares)  # (classes, clients)
        counts[0] += 2  # every client has samples
        labels = [np.repeat(np.arange(CLASSES), own) for own in counts.T]
        model = partial(ResNet18, shape=shape, classes=CLASSES, norm="group")
        task = images([], model, shape=shape, labels=labels)
        local = LocalSettings(0.05, epochs=1, batch_size=self.size(64, 8))
        cohort, rounds = self.size(10, 2), self.size(20, 1)
        yield self._compared("G2", task, local, cohort, amp=amp, rounds=rounds)

    def cnn(self, amp: bool) -> Iterator[Line]:
        clients, n = self.size(100, 3), self.size(500, 10)
        batch, epochs = self.size(50, 5), self.size(5, 1)
        task = images([n] * clients, partial(CNN, shape=(3, 32, 32), classes=CLASSES))
        local = LocalSettings(0.05, epochs=epochs, batch_size=batch)
        steps = epochs * n // batch
        few = self.size(5, 2)  # enough clients: the loop takes the same time for each client
        go = partial(
            runs.run,
            task,
            self.device,
            local,
            runs.Components(),
            amp=amp,
            rounds=self.size(6, 2),
            most_seconds=self.size(40, 5),
        )
        fused = clients * steps / _median(go(fused=clients))
        alone = few * steps / _median(go(fraction=few / clients))
        peak = self._matmul_peak(torch.bfloat16 if amp else torch.float32)
        goal = min(10_000, peak / 2 / _flops(task, batch))
        yield {
            "part": "CNN", "precision": _name(amp), "fused steps/s": fused, "alone steps/s": alone,
            "times": fused / alone, "matmul flop/s": peak, "goal steps/s": goal,
            "ok": fused >= goal and fused >= 10 * alone,
        }  # fmt: skip

    def _matmul_peak(self, dtype: torch.dtype) -> float:
        """Return the operations per second of the fastest of several large matrix products."""
        n = self.size(8192, 64)
        a, b = (torch.ones(n, n, device=self.device, dtype=dtype) for _ in range(2))
        seconds = []
        for _ in range(10):
            runs.wait(self.device)
            began = time.perf_counter()
            a @ b
            runs.wait(self.device)
            seconds.append(time.perf_counter() - began)
        return 2 * n**3 / min(seconds)


def _two_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, CLASSES),
    )  # fmt: skip


def _name(amp: bool) -> str:
    return "bf16" if amp else "fp32"


def _median(run: tuple[Any, list[float]]) -> float:
    """Return the median seconds of a round. The first does not count: it also prepares the GPU."""
    _, seconds = run
    return statistics.median(seconds[1:] or seconds)


def _apart(*runs: tuple[dict[str, Tree], Any]) -> float:
    """Return the norm of the difference of two runs' weights, relative to the first run's norm."""
    trees = [
        [t.cpu().double().flatten() for x in weights.values() for t in x.values()]
        for weights, _ in runs
    ]
    a, b = map(torch.cat, trees)
    return float((a - b).norm() / a.norm())


def _flops(task: Task, batch: int) -> float:
    """Return the operations of a local step, forwards and backwards."""
    model, data = task.build(), task.clients[0].train
    with FlopCounterMode(display=False) as counter:
        task.criterion(model(data.x[:batch].float()), data.y[:batch]).mean().backward()
    return float(counter.get_total_flops())


def main() -> None:
    """Make the measurements, and print a line for each result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pretend", action="store_true", help="use the pretended accelerator, at tiny sizes"
    )
    parser.add_argument(
        "--seconds", type=float, default=540, help="no part begins after so many seconds"
    )
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    lines: list[Line] = []
    with ExitStack() as stack:
        if args.pretend:
            sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
            from pretend_device import pretend_device

            device, name = stack.enter_context(pretend_device()), "pretended"
            torch.set_num_threads(1)
        elif torch.cuda.is_available():
            device, name = torch.device("cuda"), torch.cuda.get_device_name()
        else:
            raise SystemExit("torch finds no GPU here; --pretend tries the script without one")
        print(f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}")
        for line in Bench(device, args.seconds, tiny=args.pretend).lines():
            lines.append(line)
            shown = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in line.values())
            print("  ".join(f"{k} {v}" for k, v in zip(line, shown, strict=True)), flush=True)
            if folder := os.environ.get("OUT"):  # after each line, because the time may run out
                record = {"device": name, "torch": torch.__version__, "lines": lines}
                Path(folder, "gpu.json").write_text(json.dumps(record, indent=1))
    if any("failed" in line or line.get("ok") is False for line in lines) and not args.pretend:
        raise SystemExit("some lines above have failed or missed their goals")


if __name__ == "__main__":
    main()

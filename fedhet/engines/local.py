"""The in-process engine: the same strategy and client classes, with messages handed over by
reference. Needs no Ray.

With more than one worker, persistent processes serve the clients, longest first, and tensors travel
in shared memory; the replies are put back in order, so the sums, and the final bytes, are those of
one worker."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet.engines.couriers import LocalCourier
from fedhet.engines.pool import PoolCourier
from fedhet.errors import ConfigError
from fedhet.server import run_rounds
from fedhet.state import MemoryStore

if TYPE_CHECKING:
    from fedhet.job import Job


def run(job: Job) -> Path:
    """Run the job to its end; its record is complete when this returns or raises."""
    engine = job.config.cfg.engine
    if engine.workers is None:
        raise ConfigError("engine.workers=null: engine=local needs a number of worker processes")
    if engine.workers > 1 and engine.vectorize:
        raise ConfigError(
            f"engine.vectorize={engine.vectorize} with engine.workers={engine.workers}: use one of"
            " the two"
        )
    if engine.compile and engine.vectorize:
        raise ConfigError(
            f"engine.vectorize={engine.vectorize} with engine.compile=true: use one of the two"
        )
    workers = min(engine.workers, len(job.task.sizes))
    courier: LocalCourier | PoolCourier = _in_process(job)
    # built before the workers are forked and the clock of the first step runs
    recorder = job.recorder
    with ExitStack() as stack:
        if workers > 1:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fedhet-state-"))
            courier = stack.enter_context(PoolCourier(workers, job, Path(folder)))
        observe = stack.enter_context(job.progress())
        with recorder.ending(job.strategy):
            run_rounds(job.strategy, courier, recorder, job.config.cfg.eval.clients, observe)
    return recorder.folder


def _in_process(job: Job) -> LocalCourier:
    store = MemoryStore()
    if not job.config.cfg.engine.vectorize:
        return LocalCourier(lambda: job.client(store))
    from fedhet.engines import vectorized

    return vectorized.courier(job, store)

"""The engine without Ray: clients get messages by reference, in this process.

With more than one worker, long-lived processes serve the clients, largest first, and tensors travel
in shared memory. Replies are put back in order, so sums and final bytes are the same as with one
worker.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from fedhet.core.errors import ConfigError
from fedhet.core.server.loop import Transport
from fedhet.engines.fused.choice import together
from fedhet.engines.fused.clients import FusedTransport
from fedhet.engines.local_transport import LocalTransport
from fedhet.engines.pool import PoolTransport
from fedhet.runs.guard import TemporaryFolder
from fedhet.runs.job import Job, begin
from fedhet.runs.stores import MemoryStore


def run(job: Job) -> Path:
    """Run the job to its end; its record is complete when this returns or raises.

    Raises:
        ConfigError: engine.workers is null.
        RunFailed: a client failed and on_failure is "stop", or no client succeeded.
    """
    if job.config.run.engine.workers is None:
        raise ConfigError("engine.workers=null: engine=local needs a number of worker processes")
    workers = min(job.config.run.engine.workers, len(job.task.sizes))
    store = MemoryStore()
    make = partial(job.client, store)
    transport: Transport = LocalTransport(make, store)
    job.together = together(job)
    if job.together:
        auto = job.config.run.engine.fused == "auto"
        transport = fused = FusedTransport(make, store, job.together, gains=auto)
        job.workspace.batcher = fused.batcher
    loop = begin(job)  # must come before workers are forked and a step is timed
    with loop.ending(), ExitStack() as stack:
        if workers > 1:
            folder = stack.enter_context(TemporaryFolder("fedhet-state-"))
            transport = stack.enter_context(PoolTransport(workers, job, Path(folder)))
        loop.run(transport)
    return job.run_dir

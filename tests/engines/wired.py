"""`python -m fedhet` whose workers' replies travel as Flower carries them, and suffer on the way.

Within a machine, fedhet's own engine passes tensors in shared memory, where nothing is damaged.
Here each reply is packed as by a client of Flower, damaged, and read as by the server of a
deployment.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from engines import all_faults
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters

from fedhet.__main__ import main
from fedhet.core.messages import Broadcast, Reply, Upload, payload
from fedhet.core.server.loop import Clock
from fedhet.engines import in_process
from fedhet.engines.pool import PoolTransport
from fedhet.flower import wire

MAX_BYTES = 2**20  # that a reply may have beyond twice its message


def packed(msg: Broadcast, update: Upload) -> FitRes:
    """What a client of Flower sends.

    Raises:
        TypeError: the reply has something that no client can send.
    """
    arrays, examples, metrics = wire.reply_arrays(msg, update)
    return FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), examples, metrics)


def read(msg: Broadcast, come: FitRes, limit: int) -> Reply:
    """What the server reads of it; `limit` is in bytes beyond twice the message."""
    expected = sum(payload(msg.slot, msg.weights, msg.extras).values())
    return wire.read_result(msg, come, 2 * expected + limit)


class WiredTransport(PoolTransport):
    """Workers whose replies are bytes before the server reads them."""

    _earlier: ClassVar[dict[int, FitRes]] = {}  # client -> what it sent last
    _other: ClassVar[list[FitRes]] = []  # what was sent last by anyone

    def exchange(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        for msg, reply in zip(plan, super().exchange(plan, clock), strict=True):
            yield self._travelled(msg, reply) if isinstance(reply, Upload) else reply

    def _travelled(self, msg: Broadcast, update: Upload) -> Reply:
        """What the server reads of the reply, after the faults that are drawn for it."""
        sent = come = packed(msg, update)
        drawn = all_faults.drawn(msg.pid, msg.step)
        for name in drawn:
            if name in all_faults.ON_THE_WAY:
                random = np.random.default_rng([msg.pid, msg.step, 1])
                sent.parameters.tensors = all_faults.ON_THE_WAY[name](
                    sent.parameters.tensors, random
                )
        earlier, other = (name in drawn for name in all_faults.INSTEAD)
        if earlier:
            come = self._earlier.get(msg.pid, come)
        if other and self._other:
            come = self._other[0]
        self._earlier[msg.pid] = sent
        self._other[:] = [sent]
        return read(msg, come, MAX_BYTES)


if __name__ == "__main__":
    vars(in_process)["PoolTransport"] = WiredTransport
    sys.exit(main())

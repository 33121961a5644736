"""A network between two processes of this machine that can fail."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from contextlib import ExitStack
from typing import Any

HOST = "127.0.0.1"
NO_LINGER = struct.pack("ii", 1, 0)  # closing the socket then resets the connection


class FlakyNetwork:
    """Passes connections on to a port of this machine, until it is told to fail.

    Attributes:
        port: the port that it listens to.
        hit: how many connections its failures have cut, or whose data they have held back.
    """

    def __init__(self, target: int) -> None:
        self.hit = 0
        self.port = 0
        self._target = target
        self._ends: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FlakyNetwork:
        self._thread.start()
        self._call(self._open())
        return self

    def __exit__(self, *error: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def fail(self, how: str, seconds: float) -> None:
        """Fail for so long, and then work again.

        Args:
            how: "reset" cuts all connections and refuses new ones; "stalled" loses whatever is
                sent, which TCP sends again afterwards, and lets no new connection come about.
            seconds: how long.
        """
        self._call(self._fail(how, seconds))

    def _call(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        self._flowing = asyncio.Event()
        self._flowing.set()
        await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connect, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _connect(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, forth = await asyncio.open_connection(HOST, self._target)
        self._ends |= {back, forth}
        await asyncio.gather(self._pass_on(near, forth), self._pass_on(far, back))
        self._ends -= {back, forth}

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                self.hit += not self._flowing.is_set()
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
        except OSError:  # one of the two has cut the connection
            pass
        finally:
            sink.close()

    async def _close(self) -> None:
        self._server.close()
        self._cut()
        while self._ends:  # until all have noticed
            await asyncio.sleep(0.01)

    def _cut(self) -> None:
        """Reset all connections."""
        self.hit += len(self._ends)
        for end in [one for one in self._ends if not one.is_closing()]:
            bare = end.get_extra_info("socket")
            bare.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            end.transport.abort()

    async def _fail(self, how: str, seconds: float) -> None:
        self._server.close()
        with ExitStack() as stack:
            if how == "stalled":
                self._flowing.clear()
                self._fill_a_queue(stack)
            else:
                self._cut()
            await asyncio.sleep(seconds)
        await self._listen()
        self._flowing.set()

    def _fill_a_queue(self, stack: ExitStack) -> None:
        """Listen without accepting, with a full queue, which makes Linux ignore new connections."""
        stack.enter_context(socket.create_server((HOST, self.port), backlog=0))
        for _ in range(3):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex((HOST, self.port))

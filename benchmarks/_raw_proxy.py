"""The floor: a byte pass-through on uvloop and httptools that knows where messages end, and nothing else.

python benchmarks/_raw_proxy.py BACKEND_PORT...

No sessions, no metrics, no deadlines, no limits, no check of what it passes on; it takes the backends in turn.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import httptools
import uvloop


class Upstream(asyncio.Protocol):
    """One connection to a backend."""

    def __init__(self, idle: list[Upstream]) -> None:
        self.idle = idle
        self.client: Client | None = None
        self.transport: asyncio.Transport
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass it to the client."""
        if self.client is not None:
            self.client.transport.write(data)
            self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        """The answer is complete."""
        self.parser = httptools.HttpResponseParser(self)
        self.client = None
        self.idle.append(self)


class Client(asyncio.Protocol):
    """One connection from a client."""

    def __init__(self, pools: Iterator[tuple[int, list[Upstream]]]) -> None:
        self.pools = pools
        self.transport: asyncio.Transport
        self.parser = httptools.HttpRequestParser(self)
        self.pieces: list[bytes] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Keep it until the request is complete."""
        self.pieces.append(data)
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        """Send the request on."""
        self.parser = httptools.HttpRequestParser(self)
        pieces, self.pieces = self.pieces, []
        port, idle = next(self.pools)
        if idle:
            self.send(idle.pop(), pieces)
        else:
            self.tasks.add(asyncio.create_task(self.connect(port, idle, pieces)))

    async def connect(self, port: int, idle: list[Upstream], pieces: list[bytes]) -> None:
        """Send it on over a new connection."""
        make: Callable[[], Upstream] = lambda: Upstream(idle)  # noqa: E731
        _, upstream = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", port)
        self.send(upstream, pieces)

    def send(self, upstream: Upstream, pieces: list[bytes]) -> None:
        """Send it on."""
        upstream.client = self
        upstream.transport.writelines(pieces)


async def main(ports: Sequence[int]) -> None:
    """Serve until killed."""
    pools = itertools.cycle([(port, list[Upstream]()) for port in ports])
    server = await asyncio.get_running_loop().create_server(lambda: Client(pools), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main([int(port) for port in sys.argv[1:]]))

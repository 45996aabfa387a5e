"""Listening sockets on one port, one for each process of a router."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack

from penstock.errors import UserError

BACKLOG = 4096


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """Open `count` sockets that share `host` and `port` (SO_REUSEPORT); the kernel spreads connections over them.

    They listen already: a connection that comes before its process accepts, or while that process is started anew,
    waits in the queue.

    Args:
        host: address or name; of a name with several addresses the first is taken.
        port: 0 for any free one.
        count: how many.

    Raises:
        UserError: the address cannot be used.
    """
    with ExitStack() as opened:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            # A socket that does not share finds out whether anybody has the port, another router of N included.
            with socket.socket(family, kind, protocol) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind(address)
                address = (address[0], alone.getsockname()[1], *address[2:])
            sockets = [opened.enter_context(socket.socket(family, kind, protocol)) for _ in range(count)]
            for one in sockets:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                one.bind(address)
            for one in sockets:
                one.listen(BACKLOG)
                one.setblocking(False)  # noqa: FBT003 - the socket's own signature
        except OSError as error:
            hint = "; choose another port, or 0 for any free one" if error.errno == errno.EADDRINUSE else ""
            raise UserError(f"the router cannot listen on {host}:{port}: {error.strerror or error}{hint}") from error
        opened.pop_all()
        return sockets

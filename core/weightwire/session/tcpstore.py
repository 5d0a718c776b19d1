"""torch's TCPStore: a server on a socket that is bound already, and clients that fail in silence.

A TCPStore asks the name server for the name of every address that it connects to, for its
log; a lost answer costs 5 s, the resolver's patience.  Whatever makes one has to allow for that.
"""

from __future__ import annotations

import datetime
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a scheme is described without torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's __all__

__all__ = ["RESOLVE_SECONDS", "connect", "listen", "probe", "serve"]

_BACKLOG = 1024
RESOLVE_SECONDS = 15.0
"""For lost answers of the name server, beside the connection itself."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on one interface; left to itself, a TCPStore would take all of them.

    A server that comes back may take its port again at once.

    Args:
        port: 0 for a free one.

    Raises:
        OSError: the port is taken, or the host isn't this one.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def serve(host: str, listener: socket.socket, seconds: float) -> TCPStore:
    """A store on ``listener``, which it takes over.

    Args:
        seconds: of each operation of this process.

    Raises:
        RuntimeError: torch can't make it.
    """
    port = listener.getsockname()[1]
    fd = listener.detach()
    return _made(
        host, port, seconds + RESOLVE_SECONDS, seconds, is_master=True, master_listen_fd=fd
    )


def probe(host: str, port: int, seconds: float) -> None:
    """Connect by a plain socket, and hang up: where nobody listens, TCPStore logs a stack trace.

    Raises:
        OSError: nobody answers.
    """
    with socket.create_connection((host, port), timeout=seconds):
        pass


def connect(host: str, port: int, *, within: float, seconds: float) -> TCPStore:
    """A client; ``probe`` first.

    Args:
        within: seconds of the connection, with what names take.
        seconds: of each operation.

    Raises:
        RuntimeError: torch can't connect.
    """
    return _made(host, port, within, seconds, is_master=False)


def _made(host: str, port: int, within: float, seconds: float, **options: Any) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        host,
        port,
        None,
        timeout=datetime.timedelta(seconds=within),
        wait_for_workers=False,
        **options,
    )
    store.set_timeout(datetime.timedelta(seconds=seconds))
    return store

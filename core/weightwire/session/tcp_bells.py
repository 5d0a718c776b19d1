"""Bells in a TCPStore: its server tells at once who waits for a key.

A bell is a counter and a key for each ring.  A listener waits, on a connection and a thread
of its own, for the key of the next ring; the wait has no end but the ring or the server's
own, because TCPStore logs every wait that runs out of time.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's __all__

__all__ = ["TcpBell", "ring"]

log = logging.getLogger("weightwire.session")

_KEPT = 1024
"""Rings whose keys stay: nobody who has just read the counter waits for an older one."""
_FOREVER = datetime.timedelta(days=365)
_BETWEEN_ATTEMPTS = 1.0


def ring(store: TCPStore, key: str) -> None:
    """Ring the bell at ``key`` once."""
    number = store.add(key, 1)
    store.set(f"{key}/{number}", "")
    if number > _KEPT:
        store.delete_key(f"{key}/{number - _KEPT}")


class TcpBell:
    """A listener of one bell.

    Args:
        key: the bell's, in the store.
        connect: opens a connection for the listener alone; raises where there is no server.
    """

    def __init__(self, key: str, connect: Callable[[], TCPStore]) -> None:
        self._key = key
        self._connect = connect
        self._call: Callable[[], None] = _nobody
        self._lock = threading.Lock()
        self._listens = False
        self._closed = False
        self._attempted = float("-inf")

    def listen(self, call: Callable[[], None]) -> None:
        """Call ``call``, and nobody else from now on, after each ring."""
        self._call = call
        with self._lock:
            now = time.monotonic()
            if self._listens or self._closed or now < self._attempted + _BETWEEN_ATTEMPTS:
                return
            self._listens, self._attempted = True, now
        threading.Thread(target=self._run, name="weightwire-bell", daemon=True).start()

    def close(self) -> None:
        """Call nobody any more; the thread ends with the next ring, or with the server."""
        self._closed = True
        self._call = _nobody

    def _run(self) -> None:
        try:
            store = self._connect()
            heard = store.add(self._key, 0)
            while not self._closed:
                store.wait([f"{self._key}/{heard + 1}"], _FOREVER)
                heard = store.add(self._key, 0)
                self._call()
        except Exception as error:
            # Whoever waits looks all the same: it only learns later.
            log.debug("bell %s: its server is gone (%s)", self._key, error)
        finally:
            self._listens = False


def _nobody() -> None:
    """There is nobody to call."""

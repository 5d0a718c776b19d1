"""Warm workers, forked from one process that has imported everything."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from weightwire_conformance.rig import posix
from weightwire_conformance.rig.worker import Worker

__all__ = ["Pool"]


_IMPORT_SECONDS = 120.0
_MOST_ADDRESS = 100
"""Bytes of a local socket's path: 107 on Linux, 103 on macOS."""


class Pool:
    """Workers of one run.

    A worker serves one backend all its life: what a transport's library keeps in
    a process can't disturb another backend.  Scenarios may take them from several threads.

    Args:
        patience: seconds to wait for any answer of a worker.
        environment: added to the workers' environment.
        device: on which trainers' tensors and engines' weights lie.

    Attributes:
        environment: what was added; whatever else a scenario starts needs it, too.
    """

    def __init__(
        self,
        patience: float = 60.0,
        environment: Mapping[str, str] | None = None,
        device: str = "cpu",
    ) -> None:
        self.patience = patience
        self.device = device
        self.directory = Path(tempfile.mkdtemp(prefix="weightwire-conformance-"))
        self._address = str(self.directory / "workers")
        if len(os.fsencode(self._address)) > _MOST_ADDRESS:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise ValueError(
                f"directory {self.directory.parent} is too long for a socket's address: set "
                "TMPDIR to a shorter one"
            )
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._idle: dict[str, list[Worker]] = {}
        self._workers: list[Worker] = []
        self._loaded: set[str] = set()
        self.environment = dict(environment or {})
        log = self.directory / "first.log"
        with log.open("w") as errors:
            self._first = subprocess.Popen(
                [sys.executable, "-m", "weightwire_conformance.rig.process", self._address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env={
                    **{
                        key: value for key, value in os.environ.items() if key != "WEIGHTWIRE_TOKEN"
                    },
                    "OMP_NUM_THREADS": "1",
                    "TORCHINDUCTOR_CACHE_DIR": str(self.directory / "inductor"),
                    **self.environment,
                },
            )
        assert self._first.stdout is not None  # noqa: S101 - asked for above
        if self._first.stdout.readline() != b"ready\n":
            why = log.read_text(errors="replace")
            self.close()
            raise RuntimeError(f"the rig's first process didn't start\n{why}")

    def take(self, backend: str, *, fresh: bool = False) -> Worker:
        """A worker for this backend; warm when there is one, unless it is to be ``fresh``."""
        with self._lock:
            idle = [] if fresh else self._idle.get(backend, [])
            while idle:
                worker = idle.pop()
                if not worker.dead:
                    return worker
        log = self.directory / f"worker-{next(self._count)}.log"
        worker = Worker(self._address, log, self.patience, fresh=fresh)
        with self._lock:
            self._workers.append(worker)
        return worker

    def preload(self, *modules: str) -> None:
        """Import modules once, for all workers that are forked from now on."""
        with self._lock:
            for module in modules:
                if module not in self._loaded:
                    with posix.local_socket() as connection:
                        connection.connect(self._address)
                        connection.sendall(f"import {module}\n".encode())
                        connection.settimeout(_IMPORT_SECONDS)
                        connection.recv(1)  # closed when it is done
                    self._loaded.add(module)

    def give_back(self, backend: str, worker: Worker) -> None:
        worker.forget()
        worker.patience = self.patience
        with self._lock:
            self._idle.setdefault(backend, []).append(worker)

    def end(self, backend: str) -> None:
        """No more scenarios of this backend."""
        with self._lock:
            idle = self._idle.pop(backend, [])
        for worker in idle:
            worker.discard()

    def close(self) -> None:
        """End every process; what those held that were in the midst of a scenario is removed."""
        for backend in list(self._idle):
            self.end(backend)
        held = {path for worker in self._workers for path in worker.held()}
        self._first.kill()  # every worker ends with it
        self._first.communicate()
        for path in held:
            with contextlib.suppress(OSError):
                Path(path).unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

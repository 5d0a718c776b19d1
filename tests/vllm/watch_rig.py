"""``weightwire watch`` in a process, and what it says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

COMMAND = [str(Path(sys.executable).with_name("weightwire")), "watch"]


class Watch:
    """A watcher in a process, and the JSON lines that it has said."""

    def __init__(self, *options: str, **environment: str) -> None:
        self.lines: list[dict] = []
        self._process = subprocess.Popen(
            [*COMMAND, "--json", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self.lines.append(json.loads(line))

    def await_(self, event: str, seconds: float = 90, **fields) -> dict:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if line["event"] == event and fields.items() <= line.items():
                    return line
            assert self._process.poll() is None, self._process.stderr.read()
            time.sleep(0.05)
        raise AssertionError(f"no {event} {fields} in {self.lines}")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def end(self, number: int | None = signal.SIGTERM) -> int:
        """Exit code, after a signal if there is one."""
        if number is not None:
            self._process.send_signal(number)
        code = self._process.wait(timeout=60)
        self._reader.join(timeout=10)
        return code

    @property
    def error(self) -> str:
        return self._process.stderr.read()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._reader.join(timeout=10)
        self._process.stdout.close()
        self._process.stderr.close()

"""What a watcher says: one line a version, and what changes for an engine."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from weightwire.units import printable
from weightwire_vllm.pool import ReplicaReport

__all__ = ["Voice"]

_log = logging.getLogger("weightwire.vllm")


class Voice:
    """Lines on standard output, as text or as JSON objects.

    Args:
        engines: how many there are.
    """

    def __init__(self, engines: int, *, as_json: bool) -> None:
        self._engines = engines
        self._as_json = as_json
        self._versions: dict[int, dict[str, ReplicaReport | str]] = {}

    def says(self, event: str, text: str, **fields: Any) -> None:
        """One line; its first line is what a person needs.

        Nobody who listens, or a full disk, is no reason to leave engines as they are.
        """
        line = f"{time.strftime('%H:%M:%S')} {event}: {printable(text)}"
        if self._as_json:
            line = json.dumps({"time": time.time(), "event": event, **fields, "message": text})
        try:
            print(line, flush=True)
        except OSError as error:
            _log.warning("standard output can't be written (%s): nothing more is said", error)
            sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - as long as this process

    def heard(self, version: int, engine: str, outcome: ReplicaReport | str, missing: int) -> None:
        """An engine has a version, or failed to get it.

        Args:
            missing: engines that can't have it now: gone, or out.
        """
        self._versions.setdefault(version, {})[engine] = outcome
        for older in [known for known in self._versions if known < version]:
            self._tell(older)
        if len(self._versions[version]) >= self._engines - missing:
            self._tell(version)

    def finish(self) -> None:
        """Tell what wasn't told."""
        for version in sorted(self._versions):
            self._tell(version)

    def _tell(self, version: int) -> None:
        outcomes = self._versions.pop(version)
        done = {n: r for n, r in outcomes.items() if isinstance(r, ReplicaReport)}
        failed = {n: r for n, r in outcomes.items() if isinstance(r, str)}
        paused = max((report.paused_seconds for report in done.values()), default=0.0)
        text = f"{version} on {len(done)} of {self._engines} engines"
        if done:
            text += f", paused {paused:.3f} s"
        if failed:
            name, reason = next(iter(failed.items()))
            first = reason.splitlines()[0]
            said = first if first.startswith(name) else f"{name}: {first}"
            text += f"; {len(failed)} failed: {said}"
        fields: dict[str, Any] = {
            "version": version,
            "engines": {n: {"paused_s": r.paused_seconds, **r.seconds} for n, r in done.items()},
            "failed": failed,
            "paused_s": paused,
        }
        self.says("version", text, **fields)

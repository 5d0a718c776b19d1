"""A vLLM engine in a process of its own, driven over a pipe of JSON lines.

Standard output is the reply channel, so whatever vLLM prints there is sent to
standard error, which goes to a log file.  A process that died or doesn't answer
is an error that shows the end of its log.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from weightwire.errors import PeerLost, TransferTimeout, WeightWireError
from weightwire.session.records import ErrorInfo

__all__ = ["Actor"]

_LOG_TAIL = 4000


class Actor:
    """Client of one engine process.

    Args:
        checkpoint: Hugging Face directory that the engine starts from.
        workdir: where the log goes.
        name: of the log, and the receiver's id.
        session: session to receive from, or None for an engine that stays as it is.
        backend: what ``open_receiver`` takes.
    """

    def __init__(
        self,
        checkpoint: Path,
        workdir: Path,
        *,
        name: str = "replica-0",
        session: str | None = None,
        backend: str | Mapping[str, Any] = "filesystem",
        timeout: float = 180.0,
    ) -> None:
        self._name = name
        self._log = workdir / f"{name}.log"
        self._asked = ""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weightwire_vllm.demo.actor_main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            )
        self._buffer = b""
        self._timeout = timeout
        self.ask(
            "open",
            checkpoint=str(checkpoint),
            session=session,
            backend=backend if isinstance(backend, str) else dict(backend),
            receiver_id=name,
        )

    def ready(self) -> None:
        """Wait until the engine has started."""
        self.answer()

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, seed: int
    ) -> list[list[int]]:
        """Sample completions, as token ids, at temperature 1."""
        self.ask("generate", prompts=prompts, max_tokens=max_tokens, seed=seed)
        tokens: list[list[int]] = self.answer()["tokens"]
        return tokens

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each sequence's tokens after its first."""
        self.ask("score", sequences=sequences)
        logprobs: list[list[float]] = self.answer()["logprobs"]
        return logprobs

    def update(self, version: int) -> None:
        """Begin pause, update, resume; ``answer`` returns its report."""
        self.ask("update", version=version)

    def snapshot(self) -> dict[str, Any]:
        """Digests of every tensor reachable from the engine's model."""
        self.ask("snapshot")
        return self.answer()

    def flip_bit(self) -> str:
        """Flip one bit of the running engine's weights; returns which tensor."""
        self.ask("flip_bit")
        return str(self.answer()["tensor"])

    def ask(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting for its answer."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        self._asked = command
        line = json.dumps({"command": command, **arguments}).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError as error:
            raise self._lost() from error

    def answer(self) -> dict[str, Any]:
        """The answer to the last command.

        Raises:
            TransferTimeout: none within the timeout.
            PeerLost: the process died.
            WeightWireError: what the engine raised.
        """
        reply: dict[str, Any] = json.loads(self._read_line())
        if "error" in reply:
            error = ErrorInfo(reply["error"], reply["message"])
            raise error.to_error(f"engine {self._name!r} failed in {self._asked!r}")
        return reply

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TransferTimeout(
                        f"engine {self._name!r} didn't answer {self._asked!r} within "
                        f"{self._timeout:g} s: look at {self._log}"
                    )
                if selector.select(left):
                    chunk = os.read(descriptor, 1 << 20)
                    if not chunk:
                        raise self._lost()
                    self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _lost(self) -> WeightWireError:
        code = self._process.poll()
        tail = self._log.read_bytes()[-_LOG_TAIL:].decode("utf-8", "replace")
        return PeerLost(
            f"engine {self._name!r} ended in {self._asked!r} (exit code {code}): "
            f"the end of its log follows\n{tail}"
        )

    def close(self) -> None:
        """End the process.  Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()  # the end of its input is the order to stop
            except OSError:
                self._process.kill()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

"""Real vLLM API servers on tiny checkpoints, and what a client asks of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from weightwire_vllm.models import save_checkpoint, tiny_model

START_SECONDS = 150
SEEDS = {"A": 1, "B": 2}


def checkpoint(which: str, directory: Path) -> Path:
    """A tiny Qwen3 with a word-level tokenizer, which API servers want."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    path = save_checkpoint(model(which), directory / which)
    words = {f"w{number}": number for number in range(320)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w2", bos_token="w0", eos_token="w1", pad_token="w1"
    ).save_pretrained(path)
    return path


def model(which: str) -> Any:
    return tiny_model("qwen3", SEEDS[which])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One API server in a process group of its own."""

    def __init__(
        self, path: Path, log: Path, *options: str, key: str | None = None, dev: bool = True
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.key = key
        self._log = log
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(path), "--served-model-name", "tiny", "--port", str(self.port)),
            *("--host", "127.0.0.1", "--max-model-len", "128", "--enforce-eager"),
            "--enable-scale-out",  # tokens in, tokens out, with their versions
            *("--weight-transfer-config", '{"backend": "weightwire"}', *options),
            *(("--api-key", key) if key else ()),
        ]
        self._environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "VLLM_SERVER_DEV_MODE": "1" if dev else "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Servers close a connection after a call that failed in them, maybe as it is used again.
        self.client = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=60,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self.said()
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health").status_code == 200:
                    return
            time.sleep(0.2)
        raise AssertionError(f"no server within {START_SECONDS} s: {self.said()}")

    def stop(self, number: int = signal.SIGKILL) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            process.wait(timeout=60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return self.client.post(path, json=body)

    def call(self, path: str, body: Any = None) -> dict[str, Any]:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else {}

    @property
    def paused(self) -> bool:
        return bool(self.client.get("/is_paused").json()["is_paused"])

    @property
    def version(self) -> str:
        return str(self.client.get("/weight_info").json()["weight_version"])

    def checksums(self) -> dict[str, str]:
        return dict(self.call("/weight_checker", {"action": "checksum"})["checksums"])

    def generate(self, tokens: list[int], most: int = 8) -> dict[str, Any]:
        """Greedy tokens, and after which versions they are named."""
        return self.generated(self.ask(tokens, most))

    def ask(self, tokens: list[int], most: int) -> httpx.Response:
        sampling = {"temperature": 0.0, "max_tokens": most, "ignore_eos": True}
        body = {"token_ids": tokens, "sampling_params": sampling, "model": "tiny"}
        return self.post("/inference/v1/generate", body)

    @staticmethod
    def generated(answer: httpx.Response) -> dict[str, Any]:
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["choices"][0])


class Load:
    """Requests in flight, one after the other on each of some threads, until the end."""

    def __init__(self, server: Server, threads: int = 3, most: int = 60) -> None:
        self.answers: list[httpx.Response] = []
        self._server = server
        self._most = most
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(threads)
        ]

    def _run(self, number: int) -> None:
        while not self._ends.is_set():
            self.answers.append(self._server.ask([5 + number, 7, 9], self._most))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        self.goes_on(len(self._threads))
        return self

    def goes_on(self, more: int) -> None:
        """Return when so many more requests were answered."""
        wanted, deadline = len(self.answers) + more, time.monotonic() + 60
        while len(self.answers) < wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(self.answers) >= wanted

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(timeout=90)

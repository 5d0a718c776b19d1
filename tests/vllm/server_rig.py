"""Real vLLM API servers on tiny checkpoints, and what a client asks of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch

import weightwire
from weightwire_vllm.models import TinyKind, save_checkpoint, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

START_SECONDS = 150
LONGEST, MOST = 8192, 250
"""Tokens of a request that outlives any test, and of one that takes a moment."""
SEEDS = {"A": 1, "B": 2}
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(__file__).parent),  # workers import what runs in them
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # each import of vLLM takes seconds
}
PROMPT = [5, 6, 7, 9]


def checkpoint(which: str, directory: Path, kind: TinyKind = "qwen3") -> Path:
    """A tiny model with a word-level tokenizer, which API servers want."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    path = save_checkpoint(model(which, kind), directory / which)
    words = {f"w{number}": number for number in range(320)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w2", bos_token="w0", eos_token="w1", pad_token="w1"
    ).save_pretrained(path)
    return path


def model(which: str, kind: TinyKind = "qwen3") -> Any:
    return tiny_model(kind, SEEDS[which], max_position_embeddings=LONGEST)


def become(source: Any, which: str, kind: TinyKind = "qwen3") -> None:
    """Give a trainer's model the weights of A or B, where they lie."""
    with torch.no_grad():
        for mine, other in zip(source.parameters(), model(which, kind).parameters(), strict=True):
            mine.copy_(other)


def sender_of(session: str, which: str, **options: Any) -> weightwire.WeightSender:
    """A sender of stored versions."""
    return weightwire.open_sender("filesystem", session=session, source=model(which), **options)


def damage(run: Path) -> None:
    """Flip a bit of the newest stored version's last tensor."""
    newest = max((run / "versions").iterdir(), key=lambda path: path.name)
    path = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(-3, 2)
        last = file.read(1)
        file.seek(-3, 2)
        file.write(bytes([last[0] ^ 1]))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def segments(group: int) -> set[Path]:
    """Shared memory that the processes of a group have mapped, by vLLM's names and torch's."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                mapped = re.findall(r"/dev/shm/\S+", (process / "maps").read_text())
                found.update(map(Path, mapped))
    ours = re.compile(r"weightwire-.*-s\d")  # of the test's senders, which still serve
    return {path for path in found if not ours.match(path.name)}


def end_group(process: subprocess.Popen[Any], left: set[Path]) -> None:
    """Kill what is left of a process and its children, and remove their shared memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    for path in left:
        path.unlink(missing_ok=True)


def in_a_group(command: list[str], seconds: float = 280) -> str:
    """Run a program that makes engines; what it says.  Nothing of it is left."""
    process = subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    left: set[Path] = set()
    said, deadline = None, time.monotonic() + seconds
    try:
        while said is None and time.monotonic() < deadline:
            left |= segments(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                said = process.communicate(timeout=0.5)
    finally:
        end_group(process, left)
    assert said is not None, f"not within {seconds} s"
    assert process.returncode == 0, said[0][-2000:] + said[1][-4000:]
    return said[0]


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
            *("--host", "127.0.0.1", "--max-model-len", str(LONGEST), "--enforce-eager"),
            "--enable-scale-out",  # tokens in, tokens out, with their versions
            # Weights in a layout in which all of them can be compared.
            *("--worker-extension-cls", "watched_worker.Watched"),
            *("--weight-transfer-config", '{"backend": "weightwire"}'),
            *(("--api-key", key) if key else ()),
        ]
        self.options = options
        self._environment = {
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_SERVER_DEV_MODE": "1" if dev else "0",
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
                [*self._command, *self.options],
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

    def stop(self) -> None:
        """Kill it, and remove the shared memory that its processes leave then."""
        process, self._process = self._process, None
        if process is not None:
            end_group(process, segments(process.pid))

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return self.client.post(path, json=body)

    def call(self, path: str, body: Any = None) -> dict[str, Any]:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else {}

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def paused(self) -> bool:
        return bool(self.client.get("/is_paused").json()["is_paused"])

    def await_paused(self) -> None:
        deadline = time.monotonic() + 60
        while not self.paused:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    @property
    def version(self) -> str:
        return str(self.client.get("/weight_info").json()["weight_version"])

    def checksums(self) -> dict[str, str]:
        """Of every parameter, by tensor-parallel rank; data-parallel ranks have to agree."""
        found: dict[str, str] = {}
        for name, digest in self.checksums_of_ranks().items():
            _, _, of_rank = name.partition(":")  # dp0:pp0:pcp0:tp0:model.norm.weight
            assert found.setdefault(of_rank, digest) == digest, name
        return found

    def checksums_of_ranks(self) -> dict[str, str]:
        return dict(self.call("/weight_checker", {"action": "checksum"})["checksums"])

    @contextlib.contextmanager
    def asked_for_long(self, tokens: list[int]) -> Iterator[None]:
        """A request is in flight, whatever happens meanwhile; its client goes at the end."""
        body = json.dumps(self._asking(tokens, LONGEST - len(tokens) - 1))
        head = (
            "POST /inference/v1/generate HTTP/1.1",
            f"Host: 127.0.0.1:{self.port}",
            *((f"Authorization: Bearer {self.key}",) if self.key else ()),
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        )
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall("\r\n".join((*head, "", body)).encode())
            deadline = time.monotonic() + 60
            while not self._running():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield  # vLLM drops a request whose connection ends

    def _running(self) -> bool:
        metrics = self.client.get("/metrics").text
        return (
            re.search(r"^vllm:num_requests_running\{.*\} [1-9]", metrics, re.MULTILINE) is not None
        )

    def generate(self, tokens: list[int], most: int = 8) -> dict[str, Any]:
        """Greedy tokens, and after which versions they are named."""
        return self.generated(self.ask(tokens, most))

    def ask(self, tokens: list[int], most: int) -> httpx.Response:
        return self.post("/inference/v1/generate", self._asking(tokens, most))

    @staticmethod
    def _asking(tokens: list[int], most: int) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_tokens": most, "ignore_eos": True}
        return {"token_ids": tokens, "sampling_params": sampling, "model": "tiny"}

    @staticmethod
    def generated(answer: httpx.Response) -> dict[str, Any]:
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["choices"][0])


def is_caught(answer: dict[str, Any], mode: str) -> bool:
    """Whether a pause found this request in flight."""
    if mode == "abort":
        return answer["finish_reason"] == "abort" and answer["token_ids"] != []
    return mode == "wait" or len(answer["weight_versions"]) > 1


class Load:
    """Requests in flight, one after the other on each of some threads, until the end."""

    def __init__(self, server: Server, threads: int = 2, most: int = 24) -> None:
        self.answers: list[httpx.Response] = []
        self._server = server
        self._most = most
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(threads)
        ]

    @staticmethod
    def prompt(thread: int) -> list[int]:
        return [5 + thread, 7, 9]

    def _run(self, number: int) -> None:
        while not self._ends.is_set():
            self.answers.append(self._server.ask(self.prompt(number), self._most))

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


class Cold:
    """What a server on a checkpoint holds and says when it has just started."""

    def __init__(self, server: Server) -> None:
        self.checksums = server.checksums()
        self.tokens = server.generate(PROMPT, 16)["token_ids"]


def holds(server: Server, expected: Cold) -> None:
    """It is what a server that was started on these weights is."""
    assert server.checksums() == expected.checksums
    assert server.generate(PROMPT, 16)["token_ids"] == expected.tokens


class Fleet:
    """Servers that test files share: one on A, and one of two data-parallel ranks on B.

    They are started when they are asked for, and one that a test left in disorder is
    started anew.
    """

    KEY = "not-a-secret"

    def __init__(self, root: Path) -> None:
        self._made = {
            "A": Server(checkpoint("A", root), root / "A.log"),
            "B": Server(
                checkpoint("B", root), root / "B.log", "--data-parallel-size", "2", key=self.KEY
            ),
        }
        self.cold: dict[str, Cold] = {}

    def up(self) -> dict[str, Server]:
        down = [server for server in self._made.values() if not server.is_running]
        for server in down:
            server.start()
        for server in down:
            server.ready()
        if not self.cold:
            self.cold = {which: Cold(server) for which, server in self._made.items()}
        return self._made

    def settle(self) -> None:
        """Leave sessions, and serve."""
        for server in self._made.values():
            try:
                server.call("/shutdown_weight_transfer_engine")
                server.call("/resume")
                server.generate(PROMPT, 1)
            except (AssertionError, httpx.HTTPError):
                server.stop()

    def down(self) -> None:
        for server in self._made.values():
            server.stop()

    def close(self) -> None:
        self.down()
        for server in self._made.values():
            server.client.close()

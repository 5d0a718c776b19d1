"""An RL loop against a vLLM API server, with ``weightwire watch`` beside it.

Nothing here talks to vLLM but for samples: the trainer sends versions to the session,
and the watcher brings them to the server.  Run it with ``python examples/rl_loop_http.py``;
a number of steps may follow.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import weightwire
from weightwire_vllm.demo import Policy
from weightwire_vllm.models import save_checkpoint, tiny_model

BATCH, PROMPT_TOKENS, COMPLETION_TOKENS = 16, 4, 12


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        checkpoint = make_checkpoint(Path(directory) / "initial")
        session = f"file://{directory}/session"
        url, server = start_server(checkpoint, Path(directory) / "server.log")
        stack.callback(end, server)
        # The sidecar: in production a process of its own, under whatever restarts processes.
        command = [Path(sys.executable).with_name("weightwire"), "watch"]
        watch = subprocess.Popen([*command, "--session", session, "--engine", url])
        stack.callback(end, watch)
        client = stack.enter_context(httpx.Client(base_url=url, timeout=60, trust_env=False))
        await_server(client, server)

        policy = Policy("qwen3", seed=0)
        sender = stack.enter_context(
            weightwire.open_sender(
                {"backend": "filesystem", "checkpoint_files": str(checkpoint), "keep": 2},
                session=session,
                source=policy.model,
                wire_dtype="bfloat16",
            )
        )
        ids = random.Random(0)
        for step in range(1, steps + 1):
            prompts = [[ids.randrange(2, 320) for _ in range(PROMPT_TOKENS)] for _ in range(BATCH)]
            completions = [sample(client, prompt, seed=step) for prompt in prompts]
            reward = policy.step(prompts, completions)
            sender.send(step)
            await_version(client, step)
            print(f"step {step}: reward {reward:.3f}, the server serves version {step}", flush=True)


def make_checkpoint(path: Path) -> Path:
    """A tiny random model, with the tokenizer that an API server wants."""
    save_checkpoint(tiny_model("qwen3", seed=0), path)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(320)}, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w2").save_pretrained(path)
    return path


def start_server(checkpoint: Path, log: Path, *more: str) -> tuple[str, subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    options = ["--model", str(checkpoint), "--served-model-name", "policy", "--max-model-len", "64"]
    where = ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    tokens = ["--enable-scale-out"]  # /inference/v1/generate: tokens in, tokens out
    transfer = ["--weight-transfer-config", '{"backend": "weightwire"}']
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",  # vLLM's routes for weights and pauses
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, *options, *where, *tokens, *transfer, *more],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return f"http://127.0.0.1:{port}", server


def await_server(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError("the server didn't start")


def await_version(client: httpx.Client, version: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        # Versions get their name before the engine generates again.
        named = client.get("/weight_info").json()["weight_version"]
        if named == str(version) and not client.get("/is_paused").json()["is_paused"]:
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server doesn't serve version {version}")


def sample(client: httpx.Client, prompt: list[int], seed: int) -> list[int]:
    sampling = {"max_tokens": COMPLETION_TOKENS, "ignore_eos": True, "seed": seed}
    body = {"model": "policy", "token_ids": prompt, "sampling_params": sampling}
    answer = client.post("/inference/v1/generate", json=body)
    answer.raise_for_status()
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)

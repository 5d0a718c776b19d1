"""One rank's process: opens a sender or receiver, and does what it is told."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

import weightwire
from weightwire.deadline import Deadline
from weightwire.plugins import registry
from weightwire.session import OpenRequest

SHAPES = {
    "embed.weight": ((64, 48), torch.bfloat16),
    **{f"layers.{i}.up.weight": ((48, 40), torch.float32) for i in range(4)},
    **{f"layers.{i}.norm.weight": ((48,), torch.float16) for i in range(4)},
    **{f"layers.{i}.steps": ((), torch.int64) for i in range(4)},
    "lm_head.weight": ((96, 48), torch.float8_e4m3fn),
    "mask": ((7,), torch.bool),
    "nothing": ((0, 4), torch.float32),
}
HANDLE: Any = None
WEIGHTS: dict[str, Tensor] = {}


def bytes_of(name: str, version: int) -> bytes:
    """A tensor's bytes in a version, whatever they mean: NaNs included."""
    shape, dtype = SHAPES[name]
    count = torch.Size(shape).numel() * dtype.itemsize
    stream = hashlib.shake_128(f"{version}/{name}".encode()).digest(count)
    return bytes(byte & 1 for byte in stream) if dtype == torch.bool else stream


def empty() -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}


def raw(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def do_open_sender(log: str, **options: Any) -> None:
    global HANDLE, WEIGHTS
    os.environ["WEIGHTWIRE_JSONLOG"] = log
    WEIGHTS = empty()
    options = {"group_bytes": 9000, "verify": "full", "lease_ttl": 0.8, **options}
    HANDLE = weightwire.open_sender("acme", source=WEIGHTS, **options)


def do_open_receiver(log: str, **options: Any) -> None:
    global HANDLE, WEIGHTS
    os.environ["WEIGHTWIRE_JSONLOG"] = log
    WEIGHTS = empty()
    HANDLE = weightwire.open_receiver("acme", target=WEIGHTS, lease_ttl=0.8, **options)


def do_claim(session: str, key: str, at: float) -> bool:
    """Open the session's store when the monotonic clock shows ``at``, and try for a key."""
    scheme = registry().session_scheme(urlsplit(session).scheme)
    request = OpenRequest(urlsplit(session), False, False, Deadline(30))
    time.sleep(max(0.0, at - time.monotonic()))
    store = scheme.open(request)
    try:
        return store.create(key, str(os.getpid()).encode())
    finally:
        store.close()


def do_send(version: int, **options: Any) -> dict[str, Any]:
    for name, tensor in WEIGHTS.items():
        if tensor.numel():
            raw(tensor).copy_(
                torch.frombuffer(bytearray(bytes_of(name, version)), dtype=torch.uint8)
            )
    return HANDLE.send(version, **options).to_dict()


def do_receive(**options: Any) -> dict[str, Any]:
    return HANDLE.receive(**options).to_dict()


def do_begin(**options: Any) -> int:
    return HANDLE.begin(**options).policy.version


def do_fetch() -> None:
    HANDLE.fetch()


def do_commit() -> None:
    HANDLE.commit()


def do_holds(version: int) -> bool:
    return all(
        raw(tensor).numpy().tobytes() == bytes_of(name, version) for name, tensor in WEIGHTS.items()
    )


def do_version() -> int | None:
    return HANDLE.version


def do_close() -> list[str]:
    """Close the handle; returns the names of threads that it left behind."""
    HANDLE.close()
    return [t.name for t in threading.enumerate() if t is not threading.main_thread()]


def serve(connection: socket.socket) -> None:
    """In the forked child."""
    with connection, connection.makefile("rw") as lines:
        print(json.dumps({"result": os.getpid()}), file=lines, flush=True)
        for line in lines:
            command = json.loads(line)
            began = time.monotonic()
            try:
                answer = {"result": globals()[f"do_{command.pop('do')}"](**command)}
            except BaseException as error:
                kinds = [kind.__name__ for kind in type(error).__mro__]
                seconds = time.monotonic() - began
                answer = {"error": kinds, "message": str(error), "seconds": seconds}
            print(json.dumps(answer), file=lines, flush=True)


def main(address: str) -> None:
    torch.set_num_threads(1)
    registry()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped at once
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(16)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                serve(connection)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main(sys.argv[1])

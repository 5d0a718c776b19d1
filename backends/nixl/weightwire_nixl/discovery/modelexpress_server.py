"""A small ModelExpress server: the client's own gRPC modules over a dictionary.

For tests and single-node use: it keeps what is published in memory, knows neither
replicas nor Kubernetes, and serves only the four calls that discovery needs.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import typer
import xxhash

from weightwire.errors import ConfigError
from weightwire_nixl.discovery.base import MAX_PAYLOAD
from weightwire_nixl.discovery.modelexpress import modelexpress

__all__ = ["Server", "serve", "serving"]

_MOST_WORKERS = 1 << 16
_MOST_BYTES = 1 << 30
_MOST_MESSAGE = 2 * MAX_PAYLOAD
_FORGET_AFTER = 20  # times the TTL
_THREADS = 8


@dataclass
class _Worker:
    identity: Any
    metadata: Any
    status: int
    heard: float  # monotonic
    updated_at: int  # milliseconds since the epoch

    @property
    def nbytes(self) -> int:
        return int(self.metadata.ByteSize() + self.identity.ByteSize())


class Server:
    """What the service knows; its methods are called by gRPC's threads.

    Args:
        ttl: seconds of silence after which a worker counts as stale.
    """

    def __init__(self, ttl: float) -> None:
        self._messages = modelexpress("p2p_pb2")
        self._ttl = ttl
        self._lock = threading.Lock()
        self._workers: dict[tuple[str, str], _Worker] = {}
        self._nbytes = 0

    def PublishMetadata(self, request: Any, _: Any) -> Any:  # noqa: N802 - gRPC's names
        source = self._source_id(request.identity)
        worker = _Worker(
            request.identity,
            request.worker,
            request.worker.status or self._messages.SOURCE_STATUS_INITIALIZING,
            time.monotonic(),
            _now(),
        )
        key = (source, request.worker_id)
        with self._lock:
            self._forget_old()
            self._drop(key)
            full = len(self._workers) >= _MOST_WORKERS
            if full or self._nbytes + worker.nbytes > _MOST_BYTES:
                return self._messages.PublishMetadataResponse(
                    success=False, message="this server is full: restart it"
                )
            self._workers[key] = worker
            self._nbytes += worker.nbytes
        return self._messages.PublishMetadataResponse(
            success=True, mx_source_id=source, worker_id=request.worker_id
        )

    def ListSources(self, request: Any, _: Any) -> Any:  # noqa: N802
        wanted = self._source_id(request.identity) if request.HasField("identity") else None
        found = []
        with self._lock:
            for (source, worker_id), worker in self._workers.items():
                if wanted is not None and source != wanted:
                    continue
                if request.HasField("status_filter") and (
                    self._status(worker) != request.status_filter
                ):
                    continue
                found.append(
                    self._messages.SourceInstanceRef(
                        mx_source_id=source,
                        worker_id=worker_id,
                        model_name=worker.identity.model_name,
                        worker_rank=worker.metadata.worker_rank,
                        updated_at=worker.updated_at,
                    )
                )
        return self._messages.ListSourcesResponse(instances=found)

    def GetMetadata(self, request: Any, _: Any) -> Any:  # noqa: N802
        with self._lock:
            worker = self._workers.get((request.mx_source_id, request.worker_id))
            if worker is None:
                return self._messages.GetMetadataResponse(found=False)
            found = self._messages.GetMetadataResponse(
                found=True,
                worker=worker.metadata,
                mx_source_id=request.mx_source_id,
                worker_id=request.worker_id,
                identity=worker.identity,
            )
            found.worker.status = self._status(worker)
            found.worker.updated_at = worker.updated_at
        return found

    def UpdateStatus(self, request: Any, _: Any) -> Any:  # noqa: N802
        with self._lock:
            worker = self._workers.get((request.mx_source_id, request.worker_id))
            if worker is None:
                return self._messages.UpdateStatusResponse(
                    success=False, message="no such worker: publish it first"
                )
            worker.status = request.status
            worker.heard, worker.updated_at = time.monotonic(), _now()
        return self._messages.UpdateStatusResponse(success=True)

    def _status(self, worker: _Worker) -> int:
        stale: int = self._messages.SOURCE_STATUS_STALE
        return stale if time.monotonic() - worker.heard > self._ttl else worker.status

    def _forget_old(self) -> None:
        long_ago = time.monotonic() - _FORGET_AFTER * self._ttl
        for key in [key for key, worker in self._workers.items() if worker.heard < long_ago]:
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        worker = self._workers.pop(key, None)
        if worker is not None:
            self._nbytes -= worker.nbytes

    def _source_id(self, identity: Any) -> str:
        return xxhash.xxh3_64_hexdigest(identity.SerializeToString(deterministic=True))


@contextlib.contextmanager
def serving(host: str = "127.0.0.1", port: int = 0, ttl: float = 30.0) -> Iterator[int]:
    """Serve while the context is entered; yields the port.

    Raises:
        ConfigError: the address can't be served at.
    """
    services = modelexpress("p2p_pb2_grpc")
    import grpc

    server = grpc.server(
        ThreadPoolExecutor(_THREADS, thread_name_prefix="modelexpress"),
        options=[
            ("grpc.so_reuseport", 0),  # two servers at one port would share the calls
            ("grpc.max_receive_message_length", _MOST_MESSAGE),
            ("grpc.max_send_message_length", _MOST_MESSAGE),
        ],
    )
    kind = type("Servicer", (Server, services.P2pServiceServicer), {})
    services.add_P2pServiceServicer_to_server(kind(ttl), server)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"can't serve at {address} ({error}): choose another port") from error
    if not bound:
        raise ConfigError(f"can't serve at {address}: choose another port")
    server.start()
    try:
        yield int(bound)
    finally:
        server.stop(grace=None).wait()


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8001,
    ttl: Annotated[
        float, typer.Option(help="Seconds of silence after which a worker is stale.", min=1)
    ] = 30.0,
    unsafe_public: Annotated[
        bool, typer.Option("--unsafe-public", help="Allow others than this machine to connect.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout when it listens.")
    ] = False,
) -> None:
    """Serve ModelExpress metadata in memory, for tests and single-node use."""
    if not unsafe_public and not _is_loopback(host):
        raise ConfigError(
            f"--host {host} lets everybody who reaches it read and replace metadata, without a "
            "password: use 127.0.0.1, or say --unsafe-public"
        )
    with serving(host, port, ttl) as bound:
        shown = f"[{host}]" if ":" in host else host
        url = f"modelexpress://{shown}:{bound}"
        print(json.dumps({"url": url}) if as_json else f"serving at {url}", flush=True)  # noqa: T201
        threading.Event().wait()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _now() -> int:
    return time.time_ns() // 1_000_000

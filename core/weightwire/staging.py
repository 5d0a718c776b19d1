"""Staging memory, and the copies and casts into it: on CPUs, on GPUs and between them.

Where a GPU takes part, copies run on a stream of their own: after what the caller's stream
has queued so far (an optimizer step), beside what it queues next.  The host waits for these
copies alone, by an event, never for the device.  Between host and GPU bytes go through
pinned memory, already of the wire dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weightwire.copying import copy_all
from weightwire.layout import lay_out

__all__ = ["Scratch", "Stager"]

_CPU = torch.device("cpu")


class Scratch:
    """One buffer a device, that grows to what it must hold and is reused.

    Host memory is pinned where this process uses CUDA.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.device, Tensor] = {}

    def take(self, nbytes: int, device: torch.device = _CPU, *, fresh: bool = False) -> Tensor:
        """At least ``nbytes`` bytes as a contiguous uint8 tensor.

        Args:
            fresh: memory that isn't handed out again.
        """
        if fresh:
            return _allocate(nbytes, device)
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < nbytes:
            self._buffers.pop(device, None)  # the old one goes before the new one comes
            buffer = self._buffers[device] = _allocate(nbytes, device)
        return buffer

    def release(self) -> None:
        self._buffers.clear()


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch
    pinned = device.type == "cpu" and uses_cuda
    return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)


class Stager:
    """Fills staging memory.  One a rank; used by one thread at a time."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._pinned = Scratch()

    def copy(self, destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy, and cast to the destinations' dtypes; returns when the bytes are there.

        Args:
            destinations: by position, of the shape of its source; of any device.
            sources: of any dtype, strides and device.
        """
        routes: dict[tuple[torch.device, torch.device], list[int]] = {}
        for i, (to, source) in enumerate(zip(destinations, sources, strict=True)):
            routes.setdefault((source.device, to.device), []).append(i)
        try:
            events = []
            for (here, there), chosen in routes.items():
                into, of = [destinations[i] for i in chosen], [sources[i] for i in chosen]
                if here.type == there.type == "cuda":
                    events.append(self._on_side_stream(there, into, of))
                elif there.type == "cuda":
                    self._upload(there, into, of)
                elif here.type == "cuda":
                    self._download(here, into, of)
                else:
                    copy_all(into, of)
            for event in events:
                event.synchronize()
        except BaseException:
            # What takes part is held by the caller, and only until this call ends.
            for stream in self._streams.values():
                stream.synchronize()
            raise

    def release(self) -> None:
        """Give the pinned memory back."""
        self._pinned.release()

    def _on_side_stream(self, gpu: torch.device, into: list[Tensor], of: list[Tensor]) -> Any:
        if gpu not in self._streams:
            self._streams[gpu] = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]  # torch
        stream = self._streams[gpu]
        for device in {gpu, *(tensor.device for tensor in of if tensor.device.type == "cuda")}:
            # What the caller queued before, on every GPU that takes part, comes first.
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copy_all(into, of, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            event.record(stream)
        return event

    def _bounce(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        places, nbytes = lay_out(zip(dtypes, shapes, strict=True))
        buffer = self._pinned.take(nbytes)
        return [place.view(buffer) for place in places]

    def _upload(self, gpu: torch.device, into: list[Tensor], of: list[Tensor]) -> None:
        bounced = self._bounce(of, [tensor.dtype for tensor in into])
        copy_all(bounced, of)  # the cast, on the CPU: fewer bytes cross the bus
        self._on_side_stream(gpu, into, bounced).synchronize()  # before the buffer is reused

    def _download(self, gpu: torch.device, into: list[Tensor], of: list[Tensor]) -> None:
        if all(tensor.is_pinned() and tensor.is_contiguous() for tensor in into):
            self._on_side_stream(gpu, into, of).synchronize()
            return
        bounced = self._bounce(of, [tensor.dtype for tensor in into])
        self._on_side_stream(gpu, bounced, of).synchronize()
        copy_all(into, bounced)

"""Staging memory, and the copies and casts into it: on CPUs, on GPUs and between them.

Where a GPU takes part, copies run on a stream of their own: after what the caller's stream
has queued so far (an optimizer step), beside what it queues next.  The host waits for these
copies alone, by an event, never for the device.  Between host and GPU bytes go through
two pinned buffers of bounded size, already of the wire dtype: one crosses the bus while
the CPU fills or empties the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from weightwire.copying import copy_all
from weightwire.layout import lay_out

__all__ = ["Scratch", "Stager"]

_CPU = torch.device("cpu")
_PINNED = 256 << 20  # bytes of a buffer between host and GPU: enough work for several threads

Pairs = tuple[list[Tensor], list[Tensor]]


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
        self._queued: list[Any] = []  # events of copies that nobody waited for
        self._pinned = (Scratch(), Scratch())

    def copy(
        self, destinations: Sequence[Tensor], sources: Sequence[Tensor], *, wait: bool = True
    ) -> None:
        """Copy, and cast to the destinations' dtypes; returns when the bytes are there.

        Args:
            destinations: by position, of the shape of its source; of any device.
            sources: of any dtype, strides and device.
            wait: if False, copies from GPU to GPU may only be queued: both sides' current
                streams come after them, and ``wait`` returns when they are done.
        """
        routes: dict[tuple[torch.device, torch.device], list[int]] = {}
        for i, (to, source) in enumerate(zip(destinations, sources, strict=True)):
            routes.setdefault((source.device, to.device), []).append(i)
        try:
            events = []
            for (here, there), chosen in routes.items():
                into, of = [destinations[i] for i in chosen], [sources[i] for i in chosen]
                if here.type == there.type == "cuda":
                    events.append((self._on_side_stream(there, into, of), (here, there)))
                elif there.type == "cuda":
                    self._upload(there, into, of)
                elif here.type == "cuda":
                    self._download(here, into, of)
                else:
                    copy_all(into, of)
            if not wait:
                # Neither what was copied nor where to may be given out again before.
                for event, (here, there) in events:
                    for device in {here, there}:
                        torch.cuda.current_stream(device).wait_event(event)
            self._queued += [event for event, _ in events]
            if wait:
                self.wait()
        except BaseException:
            # What takes part is held by the caller, and not beyond this call.
            for stream in self._streams.values():
                stream.synchronize()
            raise

    def wait(self) -> None:
        """Return when everything that was queued is there."""
        while self._queued:
            self._queued[-1].synchronize()
            self._queued.pop()

    def release(self) -> None:
        """Give the pinned memory back."""
        for buffer in self._pinned:
            buffer.release()

    def _on_side_stream(
        self, gpu: torch.device, into: Sequence[Tensor], of: Sequence[Tensor]
    ) -> Any:
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

    def _upload(self, gpu: torch.device, into: list[Tensor], of: list[Tensor]) -> None:
        into, of = self._direct(gpu, into, of)
        events: list[Any] = [None, None]
        for turn, (targets, sources) in enumerate(_pieces(into, of, _PINNED)):
            if events[turn % 2] is not None:
                events[turn % 2].synchronize()  # before the buffer is reused
            bounced = self._bounce(turn, targets)
            copy_all(bounced, sources)  # the cast, on the CPU: fewer bytes cross the bus
            events[turn % 2] = self._on_side_stream(gpu, targets, bounced)
        for event in events:
            if event is not None:
                event.synchronize()

    def _download(self, gpu: torch.device, into: list[Tensor], of: list[Tensor]) -> None:
        into, of = self._direct(gpu, into, of)
        last: tuple[Any, list[Tensor], list[Tensor]] | None = None
        for turn, (targets, sources) in enumerate(_pieces(into, of, _PINNED)):
            bounced = self._bounce(turn, targets)
            event = self._on_side_stream(gpu, bounced, sources)  # the cast, on the GPU
            self._land(last)  # meanwhile
            last = event, targets, bounced
        self._land(last)

    def _land(self, last: tuple[Any, list[Tensor], list[Tensor]] | None) -> None:
        if last is not None:
            event, targets, bounced = last
            event.synchronize()
            copy_all(targets, bounced)

    def _direct(self, gpu: torch.device, into: list[Tensor], of: list[Tensor]) -> Pairs:
        """Copy what lies in pinned memory on the host's side; what is left goes through ours."""
        rest: Pairs = ([], [])
        straight: Pairs = ([], [])
        for to, source in zip(into, of, strict=True):
            uploads = to.device.type == "cuda"
            here = source if uploads else to
            # A GPU casts on its way out; on the way in torch would cast in pageable memory.
            fits = here.is_contiguous() and (to.dtype == source.dtype or not uploads)
            chosen = straight if fits and here.numel() and here.is_pinned() else rest
            chosen[0].append(to)
            chosen[1].append(source)
        if straight[0]:
            self._on_side_stream(gpu, *straight).synchronize()
        return rest

    def _bounce(self, turn: int, targets: Sequence[Tensor]) -> list[Tensor]:
        places, nbytes = lay_out([(to.dtype, tuple(to.shape)) for to in targets])
        buffer = self._pinned[turn % 2].take(max(nbytes, 1))
        return [place.view(buffer) for place in places]


def _pieces(into: Sequence[Tensor], of: Sequence[Tensor], most: int) -> Iterator[Pairs]:
    """Pairs in batches of about ``most`` bytes at their destinations; long tensors are cut."""
    batch: Pairs = ([], [])
    nbytes = 0
    for to, source in _cut(into, of, most):
        if batch[0] and nbytes + to.nbytes > most:
            yield batch
            batch, nbytes = ([], []), 0
        batch[0].append(to)
        batch[1].append(source)
        nbytes += to.nbytes
    if batch[0]:
        yield batch


def _cut(
    into: Sequence[Tensor], of: Sequence[Tensor], most: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for to, source in zip(into, of, strict=True):
        if to.nbytes <= most:
            yield to, source
            continue
        if to.is_contiguous() and source.is_contiguous():
            to, source = to.view(-1), source.view(-1)
        # By rows; one that is longer than the buffer makes the buffer longer.
        rows = max(1, most * to.shape[0] // to.nbytes)
        yield from zip(torch.split(to, rows), torch.split(source, rows), strict=True)

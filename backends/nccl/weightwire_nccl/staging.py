"""Two buckets: one is packed or unpacked while the other travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weightwire.copying import raw_bytes

__all__ = ["Staging", "unpack"]

_ALIGNMENT = 64
_LEAST = 1 << 20


class _Bucket:
    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.host = self.memory  # its pinned twin, where the wire's device isn't the CPU
        self.used = 0
        self.pending: list[Callable[[], None]] = []

    def settle(self) -> None:
        """Complete what travels to or from here; then all of it is free."""
        while self.pending:
            self.pending.pop(0)()
        self.used = 0


class Staging:
    """Memory for messages that can't leave from, or land in, the tensors themselves.

    Args:
        device: of the wire.
        bucket_bytes: most bytes of a bucket; they grow to what is needed.
    """

    def __init__(self, device: torch.device, bucket_bytes: int) -> None:
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._buckets = (_Bucket(), _Bucket())
        self._turn = 0
        self._latest = self._buckets[0]

    @property
    def nbytes(self) -> int:
        """Held on the wire's device."""
        return sum(bucket.memory.numel() for bucket in self._buckets)

    def pack(self, boxes: Sequence[Tensor], nbytes: int) -> Tensor:
        """The boxes' bytes one after another, on the wire's device."""
        place, host = self._take(nbytes)
        elsewhere = host is not None and all(box.device.type == "cpu" for box in boxes)
        into = host if elsewhere and host is not None else place
        if len(boxes) == 1:
            into.view(boxes[0].dtype).view(boxes[0].shape).copy_(boxes[0])
        elif all(box.device == into.device for box in boxes):
            torch.cat([raw_bytes(box.contiguous()) for box in boxes], out=into)
        else:
            parts = torch.split(into, [box.numel() * box.element_size() for box in boxes])
            for part, box in zip(parts, boxes, strict=True):
                part.copy_(raw_bytes(box.contiguous()))
        if into is not place:
            place.copy_(into, non_blocking=True)
        return place

    def land(self, nbytes: int) -> Tensor:
        """Memory for a message that arrives."""
        return self._take(nbytes)[0]

    def when_settled(self, complete: Callable[[], None]) -> None:
        """What completes the last message: called before its memory is used again."""
        self._latest.pending.append(complete)

    def drain(self) -> None:
        """Complete all messages, the oldest first."""
        self._buckets[1 - self._turn].settle()
        self._buckets[self._turn].settle()

    def _take(self, nbytes: int) -> tuple[Tensor, Tensor | None]:
        need = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        bucket = self._buckets[self._turn]
        if bucket.used and bucket.used + need > bucket.memory.numel():
            self._turn = 1 - self._turn
            bucket = self._buckets[self._turn]
            bucket.settle()
        if bucket.memory.numel() < need:
            size = max(need, min(_LEAST, self._bucket_bytes))
            bucket.memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            if self._device.type != "cpu":
                bucket.host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        begin = bucket.used
        bucket.used += need
        self._latest = bucket
        host = None if self._device.type == "cpu" else bucket.host[begin : begin + nbytes]
        return bucket.memory[begin : begin + nbytes], host


def unpack(flat: Tensor, boxes: Sequence[Tensor]) -> None:
    """The reverse of ``pack``: bytes into boxes, wherever these lie."""
    if len(boxes) == 1:
        boxes[0].copy_(flat.view(boxes[0].dtype).view(boxes[0].shape))
        return
    parts = torch.split(flat, [box.numel() * box.element_size() for box in boxes])
    into: list[Tensor] = []
    values: list[Tensor] = []
    for box, part in zip(boxes, parts, strict=True):
        if box.is_contiguous():
            into.append(raw_bytes(box))
            values.append(part)
        else:  # a dtype's view must be aligned
            box.copy_(part.clone().view(box.dtype).view(box.shape))
    if into:
        torch._foreach_copy_(into, values)

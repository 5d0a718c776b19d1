"""Two buckets: one is packed or unpacked while the other travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weightwire.copying import raw_bytes
from weightwire_nccl.workers import Job

__all__ = ["Bucket", "Staging", "aligned", "unpack"]

_ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """What a message of so many bytes takes of a bucket."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Bucket:
    """Memory for the messages of one batch.

    Attributes:
        memory: on the wire's device.
        settles: what has to end before it is used again.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.settles: Job[Any] | None = None
        self._host: Tensor | None = None  # its pinned twin, where something comes from the CPU
        self._used = 0

    def empty(self, nbytes: int) -> None:
        """Make room for messages that take ``nbytes`` together."""
        self._used = 0
        if self.memory.numel() < nbytes:
            device, self._host = self.memory.device, None
            del self.memory  # before the new one: never both
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def pack(self, boxes: Sequence[Tensor], nbytes: int) -> Tensor:
        """The boxes' bytes one after another, on the wire's device."""
        begin = self._used
        place = into = self.land(nbytes)
        if place.device.type != "cpu" and all(box.device.type == "cpu" for box in boxes):
            if self._host is None:
                size = self.memory.numel()
                self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            into = self._host[begin : begin + nbytes]
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
        begin = self._used
        self._used += aligned(nbytes)
        return self.memory[begin : begin + nbytes]


class Staging:
    """Memory for messages that can't leave from, or land in, the tensors themselves.

    Args:
        device: of the wire.
        join: waits for the end of what settles a bucket.
    """

    def __init__(self, device: torch.device, join: Callable[[Job[Any]], Any]) -> None:
        self._buckets = (Bucket(device), Bucket(device))
        self._turn = 0
        self._join = join

    @property
    def nbytes(self) -> int:
        """Held on the wire's device."""
        return sum(bucket.memory.numel() for bucket in self._buckets)

    def take(self, nbytes: int) -> Bucket:
        """The next bucket, once what it was used for has settled; it grows to what is needed."""
        self._turn = 1 - self._turn
        bucket = self._buckets[self._turn]
        if bucket.settles is not None:
            self._join(bucket.settles)
            bucket.settles = None
        bucket.empty(nbytes)
        return bucket


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

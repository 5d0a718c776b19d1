"""Registered memory: slots, and words beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from weightwire.devicememory import allocate
from weightwire.errors import ConfigError, TransferError
from weightwire_nixl.agent import Agent
from weightwire_nixl.memory import check_fits, check_shareable
from weightwire_nixl.wire import Arena

__all__ = ["Slots", "Words", "numbered"]

_ALIGNMENT = 4096
_WORD_STRIDE = 8  # words: a cache line each


def numbered(device: torch.device) -> torch.device:
    """A device of this process, with its number.

    Raises:
        ConfigError: it isn't there.
    """
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(
            f"device={str(device)!r}: torch sees {count} CUDA devices here; choose another, or "
            "leave device= out"
        )
    return torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )


class Slots:
    """Equal slots in one piece of registered memory.

    Args:
        nbytes: of one slot.

    Raises:
        ConfigError: there isn't that much memory.
        TransferError: it can't be registered.
    """

    def __init__(self, agent: Agent, count: int, nbytes: int, device: torch.device) -> None:
        self.count = count
        self.slot_nbytes = max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT
        self.device = device
        total = count * self.slot_nbytes
        check_fits(total, device, f"an arena of {count} slots")
        try:
            # On a GPU from the driver itself: torch's settings may give what can't be shared.
            self._memory = (
                allocate(total, device)
                if device.type == "cuda"
                else torch.empty(total, dtype=torch.uint8, device=device)
            )
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"{count} slots of {self.slot_nbytes} bytes on {device} can't be allocated: lower "
                "group_bytes or max_retired_slots, or do without overlap"
            ) from error
        check_shareable(self.address, device, f"an arena of {count} slots")
        agent.register(self._memory, f"an arena of {count} slots")

    @property
    def address(self) -> int:
        return self._memory.data_ptr()

    @property
    def device_id(self) -> int:
        return 0 if self.device.type == "cpu" else self.device.index

    def slot(self, index: int, nbytes: int) -> Tensor:
        """The first bytes of a slot, as uint8."""
        if nbytes > self.slot_nbytes:
            raise TransferError(f"a group has {nbytes} bytes, a slot {self.slot_nbytes}")
        begin = index * self.slot_nbytes
        return self._memory[begin : begin + nbytes]

    def begin(self, index: int) -> int:
        """Address of a slot."""
        return self.address + index * self.slot_nbytes

    def describe(self) -> Arena:
        return Arena(
            address=self.address,
            slot_nbytes=self.slot_nbytes,
            slots=self.count,
            device=self.device.type,
            device_id=self.device_id,
        )


class Words:
    """64-bit words in registered host memory, each in a cache line of its own.

    An aligned word is written and read whole.
    """

    nbytes = 8

    def __init__(self, agent: Agent, count: int) -> None:
        self._memory = torch.zeros(max(1, count) * _WORD_STRIDE, dtype=torch.int64)
        self._values = self._memory.numpy()
        agent.register(self._memory, f"{count} generation words")

    @property
    def address(self) -> int:
        return self._memory.data_ptr()

    def address_of(self, index: int) -> int:
        return word_address(self.address, index)

    def __getitem__(self, index: int) -> int:
        return int(self._values[index * _WORD_STRIDE])

    def __setitem__(self, index: int, value: int) -> None:
        self._values[index * _WORD_STRIDE] = value


def word_address(base: int, index: int) -> int:
    """Where a word lies in its owner's memory."""
    return base + index * _WORD_STRIDE * 8

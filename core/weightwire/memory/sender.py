"""The trainer's end of the ``memory`` backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from torch import Tensor

from weightwire.contract import Context, Offer, Policy, Seal, SenderTransport, decode_message
from weightwire.errors import ConfigError, PeerLost, TransferError
from weightwire.layout import slot_layout
from weightwire.memory.config import MemoryConfig
from weightwire.memory.segment import (
    PAGE,
    Segment,
    default_directory,
    remove_orphans,
    segment_name,
)
from weightwire.memory.wire import ReaderInfo, SenderInfo, session_path
from weightwire.table import TensorTable

__all__ = ["MemorySender"]


class _Reader:
    """One inference rank that reads from this rank."""

    def __init__(
        self, name: str, receiver_id: str, segment: Segment, groups: frozenset[int]
    ) -> None:
        self.name = name
        self.receiver_id = receiver_id
        self.segment = segment
        self.groups = groups


class MemorySender(SenderTransport):
    """Stages groups into one slot (two with ``overlap``) that receivers map."""

    def __init__(self, context: Context) -> None:
        config = context.config
        assert isinstance(config, MemoryConfig)  # noqa: S101 - core validated it
        self._context = context
        self._config = config
        self.column_blocks = config.column_blocks
        self._directory = config.directory or default_directory()
        if not self._directory.is_dir():
            raise ConfigError(
                f"memory option 'directory' {self._directory} doesn't exist: create it"
            )
        self._slot_count = 2 if context.overlap else 1
        self._segment: Segment | None = None
        self._info: SenderInfo | None = None
        self._readers: list[_Reader] = []
        self._lost: set[str] = set()
        self._policy = Policy(0, 0)
        # Generations of a later incarnation are higher: old credits never count for new bytes.
        self._generation = context.incarnation << 40
        self._sequence = 0
        self._in_slot: list[tuple[int, int] | None] = [None] * self._slot_count
        remove_orphans(self._directory, context.session_id)

    def set_table(self, table: TensorTable) -> None:
        rank = self._context.rank
        layouts = [slot_layout(table, group, rank) for group in range(len(table.groups))]
        slot_bytes = _pages(max((layout.nbytes for layout in layouts), default=0))
        # A digest takes at most 9 bytes and its key 5 in msgpack; the rest is framing.
        seal_bytes = 64 + 16 * max((len(layout.places) for layout in layouts), default=0)
        header_bytes = _pages(64 + seal_bytes)
        headers = tuple(PAGE + i * header_bytes for i in range(self._slot_count))
        first = PAGE + self._slot_count * header_bytes
        slots = tuple(first + i * slot_bytes for i in range(self._slot_count))
        nbytes = first + self._slot_count * slot_bytes
        if nbytes > self._config.max_bytes:
            raise ConfigError(
                f"memory option 'max_bytes' is {self._config.max_bytes}, the slots take {nbytes}: "
                "raise it, or lower group_bytes"
            )
        path = self._directory / segment_name(self._context.session_id, f"s{rank}")
        segment = Segment(path, nbytes, create=True)  # before the old one goes: it may fail
        self._release_segment()
        self._segment = segment
        self._info = SenderInfo(str(path), nbytes, headers, slots, slot_bytes, seal_bytes)
        self._in_slot = [None] * self._slot_count

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(self._info)

    def begin(self, offer: Offer, readers: Mapping[str, Sequence[bytes]]) -> None:
        self._policy = offer.policy
        self._opened()[0].give_up(None)
        self._lost = set()
        self._readers = []
        for receiver_id, ranks in readers.items():
            for rank, payload in enumerate(ranks):
                name = f"receiver {receiver_id!r} rank {rank}"
                info = decode_message(payload, ReaderInfo, name)
                groups = frozenset(info.reads.get(self._context.rank, ()))
                if groups:
                    if info.nbytes < PAGE + 8 * self._context.world_size:
                        raise TransferError(
                            f"{name} describes shared memory of {info.nbytes} bytes, too little "
                            "for its credits: run one weightwire version on both sides"
                        )
                    path = session_path(info.path, self._context.session_id, name)
                    try:
                        segment = Segment(path, info.nbytes, create=False)
                    except PeerLost as error:
                        if self._context.goes_on_without_lost:
                            self._lost.add(receiver_id)
                            continue
                        raise PeerLost(
                            f"{name} is gone ({error}): restart it, and send again"
                        ) from error
                    self._readers.append(_Reader(name, receiver_id, segment, groups))

    def slot(self, group: int, nbytes: int) -> Tensor:
        segment, info = self._opened()
        if nbytes > info.slot_bytes:
            raise TransferError(f"group {group} has {nbytes} bytes, the slot {info.slot_bytes}")
        index = self._sequence % self._slot_count
        self._await_credits(index)
        # Whoever still reads the slot sees that it moved, and discards what it has.
        segment.words[info.headers[index] // 8] = 0
        del group
        return segment.tensor(info.slots[index], nbytes)

    def put(self, group: int, tensors: Mapping[int, Tensor], seal: Seal) -> None:
        del tensors  # they lie in the slot
        segment, info = self._opened()
        index = self._sequence % self._slot_count
        self._sequence += 1
        self._generation += 1
        payload = msgspec.msgpack.encode(seal)
        if len(payload) > info.seal_bytes:
            raise TransferError(f"the seal of group {group} has {len(payload)} bytes: too many")
        word = info.headers[index] // 8
        policy = self._policy
        segment.words[word + 1 : word + 6] = (
            policy.incarnation,
            policy.version,
            policy.attempt,
            group,
            len(payload),
        )
        segment.write(info.headers[index] + 64, payload)
        segment.words[word] = self._generation
        self._in_slot[index] = (group, self._generation)

    def finish(self) -> None:
        for index in range(self._slot_count):
            self._await_credits(index)
        self._readers = []

    def abort(self, error: BaseException) -> None:
        del error
        if self._segment is not None:
            self._segment.give_up(self._policy)
        # A reader may still be copying: its slot is bumped before it is filled again.
        self._in_slot = [None] * self._slot_count
        self._readers = []

    def lose(self, receiver_id: str) -> None:
        self._lost.add(receiver_id)

    def release_buffers(self) -> None:
        if self._segment is not None:
            self._segment.discard()
        self._release_segment()
        self._info = None
        self._in_slot = [None] * self._slot_count

    def close(self) -> None:
        self._release_segment()
        self._readers = []

    def _await_credits(self, index: int) -> None:
        held = self._in_slot[index]
        if held is None:
            return
        group, generation = held

        def missing() -> list[_Reader]:
            return [
                reader
                for reader in self._readers
                if group in reader.groups
                and reader.receiver_id not in self._lost
                and not self._has_credited(reader, generation)
            ]

        self._context.watch.until(
            lambda: not missing(),
            f"credit for group {group}",
            lambda: [reader.name for reader in missing()],
        )
        self._in_slot[index] = None

    def _has_credited(self, reader: _Reader, generation: int) -> bool:
        if int(reader.segment.words[PAGE // 8 + self._context.rank]) >= generation:
            return True
        if reader.segment.has_given_up(self._policy):
            if self._context.goes_on_without_lost:
                return True
            raise PeerLost(f"{reader.name} gave up {self._policy}: its own error says why")
        return False

    def _opened(self) -> tuple[Segment, SenderInfo]:
        if self._segment is None or self._info is None:
            raise TransferError("the memory sender has no table: set_table() comes first")
        return self._segment, self._info

    def _release_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


def _pages(nbytes: int) -> int:
    return -(-max(nbytes, 1) // PAGE) * PAGE

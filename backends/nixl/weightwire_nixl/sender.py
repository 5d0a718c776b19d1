"""The trainer rank's end."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weightwire.contract import Context, Offer, Policy, Seal, SenderTransport
from weightwire.errors import PeerLost, TransferError, WeightWireError
from weightwire.layout import slot_layout
from weightwire.session import process
from weightwire.table import TensorTable
from weightwire_nixl.agent import Agent, Counters
from weightwire_nixl.arena import Slots, Words, device_of
from weightwire_nixl.config import NixlConfig
from weightwire_nixl.discovery import Discovery, SessionDiscovery
from weightwire_nixl.fabric import choose_fabric
from weightwire_nixl.peers import check_alike, soon
from weightwire_nixl.route import Route, choose, describe_endpoint
from weightwire_nixl.wire import (
    Aborted,
    Announced,
    Bye,
    Credit,
    GaveUp,
    Over,
    ReaderInfo,
    SenderInfo,
    decode,
    encode,
    read_message,
)

__all__ = ["NixlSender"]


class _Reader:
    """One inference rank that wants something of this rank."""

    def __init__(self, who: str, receiver_id: str, rank: int, info: ReaderInfo) -> None:
        self.who = who
        self.receiver_id = receiver_id
        self.rank = rank
        self.info = info
        self.groups: frozenset[int] = frozenset()
        self.gave_up = Policy(0, 0, 0)
        self.said_bye = False

    @property
    def agent(self) -> str:
        return self.info.agent

    @property
    def is_gone(self) -> bool:
        return self.said_bye or process.is_gone(self.info.process)


class _Slot:
    """One slot, and who may still touch it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.group = -1
        self.generation = 0
        self.outstanding: dict[str, _Reader] = {}


class NixlSender(SenderTransport):
    """Stages groups into slots that receivers read, or writes them into theirs."""

    def __init__(self, context: Context, config: NixlConfig) -> None:
        self._context = context
        self._config = config
        self._device = device_of(config.device)
        self._fabric = choose_fabric(self._device)
        self._discovery: Discovery = SessionDiscovery()
        self._turns = 2 if context.overlap else 1
        self.counters = Counters()
        self._agent: Agent | None = None
        self._info: SenderInfo | None = None
        self._slots: Slots
        self._words: Words
        self._pool: list[_Slot] = []
        self._turn = list(range(self._turns))  # which slot each turn uses
        self._policy = Policy(0, 0, 0)
        # Generations of a later incarnation are higher: old credits never count for new bytes.
        self._generation = context.incarnation << 40
        self._known: dict[str, _Reader] = {}
        self._readers: dict[str, _Reader] = {}
        self._lost: set[str] = set()
        self._sequence = 0

    # ---------------------------------------------------------------------- set-up

    def set_table(self, table: TensorTable) -> None:
        rank = self._context.rank
        nbytes = max(
            (slot_layout(table, group, rank).nbytes for group in range(len(table.groups))),
            default=0,
        )
        if self._agent is not None and nbytes <= self._slots.slot_nbytes:
            return  # peers keep what they prepared for these slots
        agent = Agent(f"sender-{rank}", self._fabric.options, self.counters)
        try:
            count = self._turns + self._config.max_retired_slots
            slots = Slots(agent, count, nbytes, self._device)
            words = Words(agent, count)
            info = SenderInfo(
                session=self._context.session_id,
                agent=agent.name,
                metadata=agent.metadata(),
                process=process.identity(),
                endpoint=describe_endpoint(self._device),
                direction=self._config.direction,
                unsafe_pull=self._config.unsafe_pull,
                arena=slots.describe(),
                words=words.address,
            )
        except BaseException:
            agent.close()
            raise
        self._leave()
        self._agent, self._slots, self._words, self._info = agent, slots, words, info
        self._pool = [_Slot(index) for index in range(count)]
        self._turn = list(range(self._turns))

    def describe(self) -> bytes:
        return self._discovery.put(
            "sender", self._context.member_id, self._context.rank, encode(self._opened()[1])
        )

    # ---------------------------------------------------------------------- a version

    def begin(self, offer: Offer, readers: Mapping[str, Sequence[bytes]]) -> None:
        self._policy = offer.policy
        self._lost = set()
        self._sequence = 0
        self._readers = {}
        routes = set()
        self._poll()
        for receiver_id, ranks in readers.items():
            for rank, carried in enumerate(ranks):
                reader = self._meet(receiver_id, rank, carried)
                if reader.groups:
                    routes.add(str(self._route(reader)))
                    try:
                        self._agent_().add(reader.agent, reader.info.metadata, reader.who)
                    except PeerLost as error:
                        self._miss(reader, error)
                        continue
                    self._readers[reader.agent] = reader
                    # Had it left anything under way, it would have come with another agent.
                    self._release_slots(reader)
        self._forget_gone()
        self.path = "; ".join(sorted(routes)) or "nobody reads from this rank"
        self.path += f"; {self._fabric}"

    def _meet(self, receiver_id: str, rank: int, carried: bytes) -> _Reader:
        who = f"receiver {receiver_id!r} rank {rank}"
        payload = self._discovery.get("receiver", receiver_id, rank, carried)
        info = decode(payload, ReaderInfo, who)
        check_alike(self._context, self._opened()[1], info, who)
        reader = self._known.get(info.agent)
        if reader is None:
            reader = _Reader(who, receiver_id, rank, info)
            self._known[info.agent] = reader
        reader.info = info
        reader.groups = frozenset(info.reads.get(self._context.rank, ()))
        return reader

    def _route(self, reader: _Reader) -> Route:
        return choose(
            self._opened()[1].endpoint,
            reader.info.endpoint,
            self._config.direction,
            unsafe_pull=self._config.unsafe_pull,
            who=reader.who,
        )

    def _forget_gone(self) -> None:
        """Forget agents that are no more, so that joins and leaves leave nothing behind."""
        present = {(reader.receiver_id, reader.rank) for reader in self._readers.values()}
        for name, reader in list(self._known.items()):
            if name in self._readers:
                continue
            replaced = (reader.receiver_id, reader.rank) in present
            if reader.is_gone or (replaced and not self._may_touch(name)):
                self._forget(reader)

    def _forget(self, reader: _Reader) -> None:
        self._known.pop(reader.agent, None)
        self._readers.pop(reader.agent, None)
        self._release_slots(reader)
        self._agent_().remove(reader.agent)

    def slot(self, group: int, nbytes: int) -> Tensor:
        del group
        slot = self._current()
        self._await_credits(slot)
        if slot.outstanding:
            slot = self._replace(slot)
        # Whoever still reads the slot sees that it moved, and discards what it has.
        self._words[slot.index] = 0
        return self._slots.slot(slot.index, nbytes)

    def put(self, group: int, tensors: Mapping[int, Tensor], seal: Seal) -> None:
        del tensors  # they lie in the slot
        slot = self._current()
        self._sequence += 1
        self._generation += 1
        slot.group, slot.generation = group, self._generation
        slot.outstanding = {}
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._words[slot.index] = slot.generation
        message = encode(Announced(self._policy, group, slot.index, slot.generation, encode(seal)))
        for reader in self._of_group(group):
            if self._has_given_up(reader):
                continue
            slot.outstanding[reader.agent] = reader
            try:
                self._agent_().notify(reader.agent, message, reader.who)
            except PeerLost as error:
                del slot.outstanding[reader.agent]
                self._miss(reader, error)

    def finish(self) -> None:
        for turn in range(self._turns):
            self._await_credits(self._pool[self._turn[turn]])
        self._readers = {}

    def lose(self, receiver_id: str) -> None:
        self._lost.add(receiver_id)

    def abort(self, error: BaseException) -> None:
        del error
        if self._agent is None:
            return
        # Slots keep who may still read them: they aren't filled again before that is over.
        message = encode(Aborted(self._policy, in_flight=False))
        for reader in self._readers.values():
            with contextlib.suppress(WeightWireError):
                self._agent.notify(reader.agent, message, reader.who)
        self._readers = {}

    def close(self) -> None:
        self._leave()
        self._discovery.close()

    # ---------------------------------------------------------------------- waiting

    def _current(self) -> _Slot:
        return self._pool[self._turn[self._sequence % self._turns]]

    def _of_group(self, group: int) -> list[_Reader]:
        """Those who want something of it, and aren't lost."""
        return [
            reader
            for reader in self._readers.values()
            if group in reader.groups and reader.receiver_id not in self._lost
        ]

    def _await_credits(self, slot: _Slot) -> None:
        """Wait until everybody who takes part in the version has read the slot."""

        def missing() -> list[_Reader]:
            self._poll()
            found = []
            for reader in list(slot.outstanding.values()):
                takes_part = reader.agent in self._readers and reader.receiver_id not in self._lost
                if takes_part and not self._has_given_up(reader):
                    found.append(reader)
            return found

        self._context.watch.until(
            soon(lambda: not missing()),
            f"credit for group {slot.group}",
            lambda: [reader.who for reader in missing()],
        )

    def _replace(self, slot: _Slot) -> _Slot:
        """Set a slot aside that somebody may still read, and take another one instead."""

        def free() -> _Slot | None:
            self._poll()
            if not self._still_touching(slot):
                return slot
            used = {self._turn[turn] for turn in range(self._turns)} - {slot.index}
            for other in self._pool:
                if other.index not in used and not self._still_touching(other):
                    return other
            return None

        chosen = self._context.watch.until(
            free,
            f"slot, because a read of it may be under way (max_retired_slots="
            f"{self._config.max_retired_slots}), and no sign that it is over",
            lambda: sorted({r.who for s in self._pool for r in s.outstanding.values()}),
        )
        self._turn[self._sequence % self._turns] = chosen.index
        return chosen

    def _still_touching(self, slot: _Slot) -> bool:
        for name, reader in list(slot.outstanding.items()):
            if reader.is_gone:
                del slot.outstanding[name]
        return bool(slot.outstanding)

    def _may_touch(self, agent: str) -> bool:
        return any(agent in slot.outstanding for slot in self._pool)

    def _release_slots(self, reader: _Reader) -> None:
        for slot in self._pool:
            slot.outstanding.pop(reader.agent, None)

    def _has_given_up(self, reader: _Reader) -> bool:
        """Whether it takes part no more; raises unless the version goes on without it."""
        if reader.gave_up != self._policy:
            return False
        self._miss(reader, PeerLost(f"{reader.who} gave up {self._policy}: its own error says why"))
        return True

    def _miss(self, reader: _Reader, error: PeerLost) -> None:
        """Go on without a reader, or raise."""
        if not self._context.goes_on_without_lost:
            raise error
        self._lost.add(reader.receiver_id)

    # ---------------------------------------------------------------------- signals

    def _poll(self) -> None:
        """Take in what peers have signalled."""
        for name, messages in self._agent_().drain().items():
            reader = self._known.get(name)
            for payload in messages:
                if reader is None:
                    continue  # it was forgotten, and says what no longer matters
                self._hear(reader, payload)

    def _hear(self, reader: _Reader, payload: bytes) -> None:
        message = read_message(payload, reader.who)
        match message:
            case Credit():
                for slot in self._pool:
                    if slot.generation == message.generation:
                        slot.outstanding.pop(reader.agent, None)
            case GaveUp():
                reader.gave_up = message.policy
                if not message.in_flight:
                    self._release_slots(reader)
            case Over():
                self._release_slots(reader)
            case Bye():
                reader.said_bye = True
                self._release_slots(reader)
            case _:
                raise TransferError(
                    f"{reader.who} sent a signal that only a trainer sends: "
                    "run one weightwire version on both sides"
                )

    # ---------------------------------------------------------------------- the end

    def _agent_(self) -> Agent:
        return self._opened()[0]

    def _opened(self) -> tuple[Agent, SenderInfo]:
        if self._agent is None or self._info is None:
            raise TransferError("the nixl sender has no table: set_table() comes first")
        return self._agent, self._info

    def _leave(self) -> None:
        """Close the agent; set it aside instead where somebody may still read its memory."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        agent.close()
        self._known, self._readers = {}, {}
        self.path = ""

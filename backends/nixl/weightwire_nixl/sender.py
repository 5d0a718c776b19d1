"""The trainer rank's end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weightwire.contract import Context, Offer, Policy, Seal, SenderTransport, decode_message
from weightwire.errors import PeerLost, TransferError, WeightWireError
from weightwire.layout import slot_layout
from weightwire.session import process
from weightwire.table import TensorTable
from weightwire_nixl.agent import Agent, Counters
from weightwire_nixl.arena import numbered
from weightwire_nixl.backlog import Backlog
from weightwire_nixl.config import NixlConfig
from weightwire_nixl.delivery import Delivery, Writes
from weightwire_nixl.discovery import open_discovery
from weightwire_nixl.fabric import choose_fabric
from weightwire_nixl.leaving import leave
from weightwire_nixl.live import LiveGroup, LiveLayout, LiveMemory
from weightwire_nixl.peers import check_alike, naps
from weightwire_nixl.pool import Slot, SlotPool
from weightwire_nixl.reader import Reader
from weightwire_nixl.route import choose, describe_endpoint
from weightwire_nixl.strangers import Strangers
from weightwire_nixl.wire import (
    Aborted,
    Announced,
    Bye,
    Credit,
    Forgot,
    GaveUp,
    Granted,
    Live,
    Message,
    Over,
    PlanPart,
    ReaderInfo,
    SenderInfo,
    encode,
    read_message,
)

__all__ = ["NixlSender"]

_LIVE_COPIES = 3
_LIVE_SLACK = 64 << 20  # buffers in which the pipeline casts what has another dtype


class NixlSender(SenderTransport):
    """Stages groups into slots that receivers read, or writes them into theirs."""

    def __init__(self, context: Context, config: NixlConfig) -> None:
        self._context = context
        self._config = config
        self._device = numbered(context.device)
        blocks = self._device.type == "cuda" and not config.zero_copy  # live: row by row
        self.column_blocks = blocks if config.column_blocks is None else config.column_blocks
        self._fabric = choose_fabric(self._device)
        self._discovery = open_discovery(context, config.discovery)
        self.counters = Counters()
        self._agent: Agent | None = None
        self._info: SenderInfo | None = None
        self._pool: SlotPool
        self._policy = Policy(0, 0, 0)
        # Generations of a later incarnation are higher: old credits never count for new bytes.
        self._generation = context.incarnation << 40
        self._group_nbytes: dict[int, int] = {}
        self._live: LiveMemory | None = None
        self._live_layouts: dict[int, LiveLayout] = {}
        self._backlog = Backlog()
        self._strangers = Strangers()
        self._deliveries: list[Delivery] = []
        self._known: dict[str, Reader] = {}
        self._readers: dict[str, Reader] = {}
        self._lost: set[str] = set()
        self._sequence = 0

    # ---------------------------------------------------------------------- set-up

    def set_table(self, table: TensorTable) -> None:
        rank = self._context.rank
        groups = range(len(table.groups))
        self._group_nbytes = {group: slot_layout(table, group, rank).nbytes for group in groups}
        nbytes = max(self._group_nbytes.values(), default=0)
        if self._config.zero_copy:
            self._live_layouts = {group: LiveLayout.of(table, group, rank) for group in groups}
            nbytes = 0
        if self._agent is not None and nbytes <= self._pool.slots.slot_nbytes:
            return  # peers keep what they prepared for these slots
        agent = Agent(f"sender-{rank}", self._fabric.options, self.counters, device=self._device)
        try:
            turns, spare = 2 if self._context.overlap else 1, self._config.max_retired_slots
            pool = SlotPool(agent, turns, spare, nbytes, self._device)
            info = SenderInfo(
                session=self._context.session_id,
                agent=agent.name,
                metadata=agent.metadata(),
                process=process.identity(),
                endpoint=describe_endpoint(self._device),
                direction=self._config.direction,
                unsafe_pull=self._config.unsafe_pull,
                arena=pool.slots.describe(),
                words=pool.words.address,
                zero_copy=self._config.zero_copy,
            )
        except BaseException:
            agent.close()
            raise
        self._leave()
        if self._config.zero_copy:
            most = _LIVE_COPIES * sum(self._group_nbytes.values()) + _LIVE_SLACK
            self._live = LiveMemory(agent, most)
        self._agent, self._pool, self._info = agent, pool, info

    def describe(self) -> bytes:
        return self._discovery.put(
            "sender", self._context.member_id, self._context.rank, encode(self._opened()[1])
        )

    # ---------------------------------------------------------------------- a version

    def begin(self, offer: Offer, readers: Mapping[str, Sequence[bytes]]) -> None:
        self._poll()
        self._policy = offer.policy
        self._backlog.begin(offer.policy)
        self._lost = set()
        self._sequence = 0
        self._readers = {}
        for receiver_id, ranks in readers.items():
            for rank, carried in enumerate(ranks):
                try:
                    reader = self._meet(receiver_id, rank, carried)
                    if not reader.groups:
                        continue
                    self._agent_().add(reader.agent, reader.info.metadata, reader.who)
                except PeerLost as error:
                    self._miss(receiver_id, error)
                    continue
                self._readers[reader.agent] = reader
                # Had it left anything under way, it would have come with another agent.
                self._release_slots(reader)
                for payload in self._strangers.meet(reader.agent):
                    self._hear(reader, payload)
        self._strangers.begun(self._agent_())
        self._forget_gone()
        routes = {reader.route for reader in self._readers.values() if reader.route is not None}
        self.slowed_by_copies = any(route.between_gpus for route in routes)
        self.path = "; ".join(sorted(map(str, routes))) or "nobody reads from this rank"
        self.path += f"; {self._fabric}"

    def _meet(self, receiver_id: str, rank: int, carried: bytes) -> Reader:
        who = f"receiver {receiver_id!r} rank {rank}"
        payload = self._discovery.get("receiver", receiver_id, rank, carried)
        info = decode_message(payload, ReaderInfo, who)
        check_alike(self._context, self._opened()[1], info, who)
        if self._strangers.was_answered(info.agent):
            raise PeerLost(f"{who} gave {self._policy} up before it began: its own error says why")
        reader = self._known.get(info.agent)
        if reader is None:
            reader = Reader(who, receiver_id, rank, info)
            self._known[info.agent] = reader
        elif reader.broken:
            self._reconnect(reader)
        reader.info = info
        reader.groups = frozenset(info.reads.get(self._context.rank, ()))
        if reader.groups:
            agent, ours = self._opened()
            reader.route = choose(
                ours.endpoint,
                info.endpoint,
                self._config.direction,
                unsafe_pull=self._config.unsafe_pull,
                who=who,
            )
            if reader.route.push and reader.writes is None:
                reader.writes = Writes(who, info, agent, self._pool.slots, self._group_nbytes)
        return reader

    def _reconnect(self, reader: Reader) -> None:
        """Meet a reader anew whose connection broke, and that lives; its plan is kept."""
        if reader.writes is not None:
            if reader.writes.in_flight:
                return
            reader.writes.release()
        self._agent_().remove(reader.agent)
        reader.heard = 0  # what it was told last may not have arrived
        reader.broken = False

    def _forget_gone(self) -> None:
        """Forget agents that are no more, so that joins and leaves leave nothing behind."""
        present = {(reader.receiver_id, reader.rank): reader for reader in self._readers.values()}
        for name, reader in list(self._known.items()):
            if name in self._readers:
                continue
            successor = present.get((reader.receiver_id, reader.rank))
            replaced = successor is not None and not self._pool.may_touch(name)
            under_way = reader.writes is not None and reader.writes.in_flight
            if under_way or not (reader.is_gone or replaced):
                continue
            self._forget(reader)
            if successor is not None and not reader.said_bye:
                self._tell(successor, Forgot(self._policy, name))

    def _forget(self, reader: Reader) -> None:
        self._known.pop(reader.agent, None)
        self._readers.pop(reader.agent, None)
        if reader.writes is not None:
            reader.writes.release()
        self._backlog.forget(reader.agent)
        self._release_slots(reader)
        self._agent_().remove(reader.agent)

    def slot(self, group: int, nbytes: int) -> Tensor | None:
        del group
        slot = self._pool.of_turn(self._sequence)
        self._await_credits(slot)
        if self._live is not None:
            slot.outstanding = {}  # the tensors are the trainer's: the word tells who is late
            self._pool.open(slot)
            return None
        if slot.outstanding:
            slot = self._replace(slot)
        self._pool.open(slot)
        return self._pool.slots.slot(slot.index, nbytes)

    def put(self, group: int, tensors: Mapping[int, Tensor], seal: Seal) -> None:
        slot = self._pool.of_turn(self._sequence)
        self._sequence += 1
        self._generation += 1
        slot.outstanding = {}
        live: LiveGroup | None = None
        if self._live is not None:
            live, served = self._live_layouts[group].find(group, tensors)
            self._live.add(served)
        for device in {tensor.device for tensor in tensors.values()}:
            if device.type == "cuda":
                # NIXL works beside all streams: what this thread queued comes first.
                torch.cuda.current_stream(device).synchronize()
        self._pool.seal(slot, group, self._generation)
        sealed = encode(seal)
        for reader in self._of_group(group):
            if self._has_given_up(reader):
                continue
            slot.outstanding[reader.agent] = reader
            if reader.writes is not None:
                self._deliveries.append(
                    Delivery(
                        reader.writes,
                        reader.agent,
                        group,
                        slot.index,
                        self._policy,
                        sealed,
                        live,
                        self._backlog,
                    )
                )
                continue
            told: Live | None = None
            if live is not None and self._live is not None:
                told = live.told(self._live.batches[reader.heard :])
                reader.heard = len(self._live.batches)
            announced = Announced(self._policy, group, slot.index, slot.generation, sealed, told)
            try:
                self._agent_().notify(reader.agent, encode(announced), reader.who)
            except PeerLost as error:
                reader.broken = True
                del slot.outstanding[reader.agent]
                self._miss(reader.receiver_id, error)
        self._poll()

    def settle(self) -> None:
        if self._live is not None:
            self._await_all()

    def finish(self) -> None:
        self._await_all()
        if self._live is not None:
            # The source may change from here on: a reader that is late sees that it did.
            self._pool.open_all()
        self._readers = {}

    def _await_all(self) -> None:
        for slot in self._pool.in_turn:
            self._await_credits(slot)

    def lose(self, receiver_id: str) -> None:
        self._lost.add(receiver_id)

    def abort(self, error: BaseException) -> None:
        del error
        if self._agent is None:
            return
        if self._live is not None:
            self._pool.open_all()
        # Slots keep who may still touch them: they aren't filled again before that is over.
        for delivery in list(self._deliveries):
            if not delivery.in_flight:
                self._drop(delivery)
        for reader in self._readers.values():
            under_way = reader.writes is not None and reader.writes.in_flight
            if not under_way:
                reader.told_over = self._policy
            self._tell(reader, Aborted(self._policy, in_flight=under_way))
        self._readers = {}

    def release_buffers(self) -> None:
        """Ends the agent, since peers know its memory; the next table makes another."""
        self._leave()

    def close(self) -> None:
        self._leave()
        self._discovery.close()

    # ---------------------------------------------------------------------- waiting

    def _of_group(self, group: int) -> list[Reader]:
        """Those who want something of it, and aren't lost."""
        return [
            reader
            for reader in self._readers.values()
            if group in reader.groups and reader.receiver_id not in self._lost
        ]

    def _await_credits(self, slot: Slot) -> None:
        """Wait until everybody who takes part in the version has read the slot."""

        def missing() -> list[Reader]:
            self._poll()
            found = []
            for reader in list(slot.outstanding.values()):
                takes_part = reader.agent in self._readers and reader.receiver_id not in self._lost
                if takes_part and not self._has_given_up(reader):
                    found.append(reader)
            return found

        if not missing():
            return
        self._context.watch.until(
            lambda: not missing(),
            f"credit for group {slot.group}",
            lambda: [reader.who for reader in missing()],
            rest=naps(self._device),
        )

    def _replace(self, slot: Slot) -> Slot:
        """Set a slot aside that somebody may still read, and take another one instead."""

        def free() -> Slot | None:
            self._poll()
            return self._pool.untouched(slot)

        chosen = self._context.watch.until(
            free,
            f"slot, because a read of it may be under way (max_retired_slots="
            f"{self._config.max_retired_slots}), and no sign that it is over",
            lambda: sorted({r.who for s in self._pool for r in s.outstanding.values()}),
        )
        self._pool.use(self._sequence, chosen)
        return chosen

    def _release_slots(self, reader: Reader) -> None:
        """It reads none of them any more; what is being written to it stays."""
        busy = {d.slot for d in self._deliveries if d.agent == reader.agent and d.in_flight}
        self._pool.release(reader.agent, but=busy)

    def _has_given_up(self, reader: Reader) -> bool:
        """Whether it takes part no more; raises unless the version goes on without it."""
        if reader.gave_up != self._policy:
            return False
        error = PeerLost(f"{reader.who} gave up {self._policy}: its own error says why")
        self._miss(reader.receiver_id, error)
        return True

    def _miss(self, receiver_id: str, error: PeerLost) -> None:
        """Go on without a replica, or raise."""
        if not self._context.goes_on_without_lost:
            raise error
        self._lost.add(receiver_id)

    # ---------------------------------------------------------------------- signals

    def _poll(self) -> None:
        """Take in what peers have signalled, and move what is pushed on."""
        for name, messages in self._agent_().drain().items():
            reader = self._known.get(name)
            for payload in messages:
                if reader is not None:
                    self._hear(reader, payload)
                else:
                    self._strangers.hear(self._agent_(), name, payload)
        for delivery in list(self._deliveries):
            self._push_on(delivery)
        for reader in self._known.values():
            self._tell_over(reader)

    def _push_on(self, delivery: Delivery) -> None:
        reader = self._known.get(delivery.agent)
        unwanted = (
            reader is None
            or reader.receiver_id in self._lost
            or reader.agent not in self._readers
            or self._has_given_up(reader)
        )
        if unwanted and not delivery.started:
            self._drop(delivery)
            return
        if not delivery.started and self._writes_to(delivery.agent):
            return
        try:
            delivery.advance()
        except PeerLost as error:
            self._drop(delivery)
            if reader is not None:
                reader.broken = True
                if not unwanted:
                    self._miss(reader.receiver_id, error)
            return
        if delivery.done:
            self._drop(delivery)

    def _writes_to(self, agent: str) -> bool:
        """Whether a write to this reader was posted, and isn't known to be over.

        UCX sends a write's notification only when every write to that peer has ended: one
        beside it would keep the reader from what has come.
        """
        return any(other.agent == agent and other.started for other in self._deliveries)

    def _drop(self, delivery: Delivery) -> None:
        """A delivery is over: its slot is free of it."""
        self._deliveries.remove(delivery)
        self._pool.written(delivery.slot, delivery.agent)

    def _tell_over(self, reader: Reader) -> None:
        """A reader that gave up uses its memory again once nothing is written there."""
        if reader.writes is None or reader.told_over >= reader.gave_up:
            return
        if not any(delivery.agent == reader.agent for delivery in self._deliveries):
            reader.told_over = reader.gave_up
            self._tell(reader, Over(reader.gave_up))

    def _tell(self, reader: Reader, message: Message) -> None:
        """Signal what only helps a reader to go on sooner."""
        try:
            self._agent_().notify(reader.agent, encode(message), reader.who)
        except WeightWireError:
            reader.broken = True

    def _hear(self, reader: Reader, payload: bytes) -> None:
        message = read_message(payload, reader.who)
        match message:
            case Credit():
                self._pool.credit(reader.agent, message.generation)
            case GaveUp():
                reader.gave_up = message.policy
                if not message.in_flight:
                    self._release_slots(reader)
            case Over():
                self._release_slots(reader)
            case Granted():
                self._backlog.add(reader.agent, message, reader.who)
            case PlanPart():
                if reader.writes is not None:
                    reader.writes.add(message, reader.groups)
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
        agent, self._agent = self._agent, None
        if agent is None:
            return
        live, self._live = self._live, None
        leave(agent, self._pool, live, self._known, self._strangers, self._policy)
        self._strangers = Strangers()
        del self._pool  # nobody but those who may still touch it keeps it
        self._known, self._readers, self._deliveries = {}, {}, []
        self.path = ""

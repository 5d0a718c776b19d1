"""The inference rank's end."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weightwire.contract import Context, Offer, Policy, ReceiverTransport, Seal
from weightwire.errors import PeerLost, TransferError, WeightWireError
from weightwire.session import process
from weightwire.table import Region, TensorTable
from weightwire_nixl.agent import Agent, Counters
from weightwire_nixl.arena import Slots, Words, device_of
from weightwire_nixl.backlog import Backlog
from weightwire_nixl.config import NixlConfig
from weightwire_nixl.discovery import Discovery, SessionDiscovery
from weightwire_nixl.fabric import choose_fabric
from weightwire_nixl.owner import Owner
from weightwire_nixl.peers import check_alike, soon
from weightwire_nixl.pull import Pull
from weightwire_nixl.route import choose, describe_endpoint
from weightwire_nixl.runs import GroupPlan, plan_groups
from weightwire_nixl.wire import (
    Aborted,
    Announced,
    Bye,
    GaveUp,
    Over,
    ReaderInfo,
    SenderInfo,
    Written,
    decode,
    encode,
    read_message,
)

__all__ = ["NixlReceiver"]


class _Flight:
    """A group that was posted and not fetched."""

    def __init__(self, group: int, slot: int, parts: list[Pull]) -> None:
        self.group = group
        self.slot = slot
        self.parts = parts


class NixlReceiver(ReceiverTransport):
    """Reads its regions out of the owners' slots, each group's from all of them at once."""

    def __init__(self, context: Context, config: NixlConfig) -> None:
        self._context = context
        self._config = config
        self._device = device_of(config.device)
        self._fabric = choose_fabric(self._device)
        self._discovery: Discovery = SessionDiscovery()
        self._slot_count = 2 if context.overlap else 1
        self.counters = Counters()
        self._backlog = Backlog()
        self._agent: Agent | None = None
        self._info: ReaderInfo | None = None
        self._policy = Policy(0, 0, 0)
        self._table_digest = ""
        self._regions: tuple[Region, ...] = ()
        self._plans: dict[int, GroupPlan] = {}
        self._turns: dict[int, int] = {}
        self._owners: dict[int, Owner] = {}
        self._by_agent: dict[str, Owner] = {}
        self._aborted: set[int] = set()
        self._flights: dict[int, _Flight] = {}

    # ---------------------------------------------------------------------- set-up

    def set_plan(self, table: TensorTable, regions: Sequence[Region]) -> None:
        digest = table.digest()
        if (digest, tuple(regions)) != (self._table_digest, self._regions):
            self._leave()
            self._plans = plan_groups(table, regions)
            self._turns = {group: turn % self._slot_count for turn, group in enumerate(self._plans)}
            self._table_digest, self._regions = digest, tuple(regions)
        if self._agent is None:
            self._enter(table)

    def _enter(self, table: TensorTable) -> None:
        """A new agent, with new memory."""
        rank = self._context.rank
        agent = Agent(f"{self._context.member_id}-{rank}", self._fabric.options, self.counters)
        try:
            nbytes = max((plan.nbytes for plan in self._plans.values()), default=0)
            slots = Slots(agent, self._slot_count, nbytes, self._device)
            words = Words(agent, self._slot_count * table.world_size)
            reads: dict[int, list[int]] = {}
            for group, plan in self._plans.items():
                for owner in plan.owners:
                    reads.setdefault(owner, []).append(group)
            info = ReaderInfo(
                session=self._context.session_id,
                agent=agent.name,
                metadata=agent.metadata(),
                process=process.identity(),
                endpoint=describe_endpoint(self._device),
                direction=self._config.direction,
                unsafe_pull=self._config.unsafe_pull,
                arena=slots.describe(),
                reads={owner: tuple(groups) for owner, groups in reads.items()},
                plans={},
            )
        except BaseException:
            agent.close()
            raise
        self._agent, self._slots, self._words, self._info = agent, slots, words, info

    def describe(self) -> bytes:
        return self._discovery.put(
            "receiver", self._context.member_id, self._context.rank, encode(self._opened()[1])
        )

    # ---------------------------------------------------------------------- a version

    def begin(self, offer: Offer) -> None:
        self._policy = offer.policy
        self._backlog.begin(offer.policy)
        self._aborted = set()
        self._flights = {}
        agent, info = self._opened()
        routes = set()
        for rank in info.reads:
            owner = self._meet(agent, rank, offer.senders[rank])
            routes.add(
                str(
                    choose(
                        owner.info.endpoint,
                        info.endpoint,
                        self._config.direction,
                        unsafe_pull=self._config.unsafe_pull,
                        who=owner.who,
                    )
                )
            )
        self.path = "; ".join(sorted(routes)) or "this rank reads nothing"
        self.path += f"; {self._fabric}"

    def _meet(self, agent: Agent, rank: int, carried: bytes) -> Owner:
        who = f"sender rank {rank}"
        info = decode(self._discovery.get("sender", "sender", rank, carried), SenderInfo, who)
        known = self._owners.get(rank)
        if known is not None and known.info == info and not known.broken:
            return known
        check_alike(self._context, self._opened()[1], info, who)
        needed = max(
            int(runs.source[-1] + runs.nbytes[-1])
            for plan in self._plans.values()
            if (runs := plan.owners.get(rank)) is not None
        )
        if needed > info.arena.slot_nbytes:
            raise TransferError(
                f"{who} describes slots of {info.arena.slot_nbytes} bytes, the table needs "
                f"{needed}: run one weightwire version on both sides"
            )
        if known is not None:
            self._drop(known)
        agent.add(info.agent, info.metadata, who)
        owner = Owner(rank, who, info, agent, self._slots, self._words, self._plans)
        self._owners[rank] = owner
        self._by_agent[info.agent] = owner
        return owner

    def _drop(self, owner: Owner) -> None:
        """Forget an owner that is gone, with everything that was prepared for it."""
        owner.release()
        self._opened()[0].remove(owner.info.agent)
        self._backlog.forget(owner.info.agent)
        self._owners.pop(owner.rank, None)
        self._by_agent.pop(owner.info.agent, None)

    def slot(self, group: int, nbytes: int) -> Tensor:
        return self._slots.slot(self._turns[group], nbytes)

    def post(self, group: int, regions: Mapping[int, Tensor]) -> None:
        plan = self._plans[group]
        self._check_memory(group, plan, regions)
        if self._device.type == "cuda":
            # Whatever was in the slot may still be copied out of it.
            torch.cuda.current_stream(self._device).synchronize()
        ranks = list(plan.owners)
        turn = self._context.rank % max(1, len(ranks))  # each receiver starts elsewhere
        slot = self._turns[group]
        parts = [
            Pull(self._owners[rank], group, slot, self._policy, self._backlog)
            for rank in ranks[turn:] + ranks[:turn]
        ]
        self._flights[group] = _Flight(group, slot, parts)
        self._advance()

    def _check_memory(self, group: int, plan: GroupPlan, regions: Mapping[int, Tensor]) -> None:
        """The slot must be laid out as it was planned; both ends show it."""
        base = self._slots.begin(self._turns[group])
        ends = (0, -1) if plan.positions else ()
        for end in ends:
            position, place = plan.positions[end], plan.places[end]
            tensor = regions.get(position)
            fits = tensor is not None and tensor.nbytes == place.nbytes
            if tensor is not None and place.nbytes:
                fits = fits and tensor.data_ptr() == base + place.begin
            if not fits:
                raise TransferError(
                    f"group {group} isn't laid out in its slot as it was planned: this weightwire "
                    "and its nixl backend are of different versions"
                )

    def fetch(self, group: int, regions: Mapping[int, Tensor]) -> Sequence[Seal]:
        flight = self._flights.get(group)
        if flight is None:
            self.post(group, regions)
            flight = self._flights[group]
        self._context.watch.until(
            soon(lambda: self._landed(flight)),
            f"announcement or bytes of group {group}",
            lambda: [part.owner.who for part in flight.parts if not part.landed],
        )
        del self._flights[group]
        return [decode(part.seal, Seal, part.owner.who) for part in flight.parts]

    def _landed(self, flight: _Flight) -> bool:
        self._advance()
        for part in flight.parts:
            if not part.landed and part.owner.rank in self._aborted:
                raise PeerLost(f"{part.owner.who} gave up {self._policy}: its own error says why")
        return all(part.landed for part in flight.parts)

    def _advance(self) -> None:
        """Take every posted group as far as it goes without waiting."""
        self._poll()
        for flight in list(self._flights.values()):
            for part in flight.parts:
                part.advance()

    def finish(self) -> None:
        self._flights = {}

    def abort(self, error: BaseException) -> None:
        del error
        if self._agent is None:
            return
        self._flights = {}
        message = encode(GaveUp(self._policy, in_flight=False))
        for owner in self._owners.values():
            with contextlib.suppress(WeightWireError):
                self._agent.notify(owner.info.agent, message, owner.who)

    def close(self) -> None:
        self._leave()
        self._discovery.close()

    # ---------------------------------------------------------------------- signals

    def _poll(self) -> None:
        for name, messages in self._opened()[0].drain().items():
            for payload in messages:
                self._hear(name, payload)

    def _hear(self, name: str, payload: bytes) -> None:
        owner = self._by_agent.get(name)
        who = owner.who if owner is not None else f"an unknown agent {name[:64]!r}"
        message = read_message(payload, who)
        match message:
            case Announced() | Written():
                self._backlog.add(name, message, who)
            case Aborted():
                if owner is not None and message.policy == self._policy:
                    self._aborted.add(owner.rank)
            case Over() | Bye():
                pass
            case _:
                raise TransferError(
                    f"{who} sent a signal that only a receiver sends: "
                    "run one weightwire version on both sides"
                )

    # ---------------------------------------------------------------------- the end

    def _opened(self) -> tuple[Agent, ReaderInfo]:
        if self._agent is None or self._info is None:
            raise TransferError("the nixl receiver has no plan: set_plan() comes first")
        return self._agent, self._info

    def _leave(self) -> None:
        agent, self._agent = self._agent, None
        if agent is None:
            return
        message = encode(Bye(self._policy))
        for owner in self._owners.values():
            with contextlib.suppress(WeightWireError):
                agent.notify(owner.info.agent, message, owner.who)
        agent.close()
        self._owners, self._by_agent, self._flights = {}, {}, {}
        self._table_digest, self._regions = "", ()

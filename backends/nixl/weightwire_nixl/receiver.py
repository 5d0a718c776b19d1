"""The inference rank's end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from weightwire.contract import Context, Offer, Policy, ReceiverTransport, Seal, decode_message
from weightwire.errors import PeerLost, TransferError, WeightWireError
from weightwire.session import process
from weightwire.table import Region, TensorTable
from weightwire_nixl.agent import Agent, Counters
from weightwire_nixl.arena import Slots, Words, numbered
from weightwire_nixl.aside import Aside
from weightwire_nixl.backlog import Backlog
from weightwire_nixl.config import NixlConfig
from weightwire_nixl.discovery import open_discovery
from weightwire_nixl.fabric import choose_fabric
from weightwire_nixl.owner import PIECES, Owner
from weightwire_nixl.peers import check_alike, least_pause, naps
from weightwire_nixl.progress import PAUSE, Progress
from weightwire_nixl.pull import Pull
from weightwire_nixl.push import Push
from weightwire_nixl.route import choose, describe_endpoint
from weightwire_nixl.runs import GroupPlan, plan_groups
from weightwire_nixl.wire import (
    Aborted,
    Announced,
    Bye,
    Forgot,
    GaveUp,
    Message,
    Over,
    ReaderInfo,
    SenderInfo,
    Written,
    encode,
    read_message,
    readable,
)

__all__ = ["NixlReceiver"]


class _Flight:
    """A group that was posted and not fetched: one part for each owner."""

    def __init__(self, parts: Sequence[Pull | Push]) -> None:
        self.parts = parts


class NixlReceiver(ReceiverTransport):
    """Reads its regions out of the owners' slots, each group's from all of them at once."""

    def __init__(self, context: Context, config: NixlConfig) -> None:
        self._context = context
        self._config = config
        self._device = numbered(context.device)
        self._fabric = choose_fabric(self._device)
        if describe_endpoint(self._device).cma and self._device.type == "cpu":
            self._fabric = self._fabric.with_copiers(config.copy_threads)
        self._discovery = open_discovery(context, config.discovery)
        self._slot_count = 2 if context.overlap else 1
        self._least = least_pause(self._device)
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
        self._clean: set[int] = set()  # of those, who has nothing under way to this rank
        self._flights: dict[int, _Flight] = {}
        self._aside = Aside()
        self._forgotten: set[tuple[str, str]] = set()  # owners' agents, and agents of ours
        self._moving = threading.RLock()  # posted groups are moved on by one thread at a time
        self._progress: Progress | None = None
        self._grants = 0
        self._world_size = 0  # the trainer's
        self._place = 0  # among those who read this version

    # ---------------------------------------------------------------------- set-up

    def set_plan(self, table: TensorTable, regions: Sequence[Region]) -> None:
        digest = table.digest()
        if (digest, tuple(regions)) != (self._table_digest, self._regions):
            self._leave()
            self._plans = plan_groups(table, regions)
            self._turns = {group: turn % self._slot_count for turn, group in enumerate(self._plans)}
            self._table_digest, self._regions = digest, tuple(regions)
            self._world_size = table.world_size
        if self._agent is None:
            self._enter()

    def _enter(self) -> None:
        """A new agent, with new memory."""
        self._aside.sweep()
        if len(self._aside) > self._config.max_retired_slots:
            raise TransferError(
                f"{len(self._aside)} sets of receive slots are set aside, because transfers that "
                "can't be cancelled may still write there (max_retired_slots="
                f"{self._config.max_retired_slots}): restart this process"
            )
        rank = self._context.rank
        agent = Agent(
            f"{self._context.member_id}-{rank}",
            self._fabric.options,
            self.counters,
            device=self._device,
        )
        try:
            nbytes = max((plan.nbytes for plan in self._plans.values()), default=0)
            slots = Slots(agent, self._slot_count, nbytes, self._device)
            words = Words(agent, self._slot_count * self._world_size)
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
            )
        except BaseException:
            agent.close()
            raise
        self._agent, self._slots, self._words, self._info = agent, slots, words, info

    def describe(self) -> bytes:
        if self._agent is None and self._world_size:
            self._enter()  # what there was is set aside
        return self._discovery.put(
            "receiver", self._context.member_id, self._context.rank, encode(self._opened()[1])
        )

    # ---------------------------------------------------------------------- a version

    def begin(self, offer: Offer) -> None:
        self._policy = offer.policy
        self._backlog.begin(offer.policy)
        self._aborted, self._clean = set(), set()
        self._flights = {}
        self._aside.sweep()
        replica = offer.roster.index(self._context.member_id)
        self._place = replica * self._context.world_size + self._context.rank
        agent, info = self._opened()
        routes = {self._meet(agent, rank, offer.senders[rank]).route for rank in info.reads}
        self.slowed_by_copies = any(route.between_gpus for route in routes)
        self.path = "; ".join(sorted(map(str, routes))) or "this rank reads nothing"
        self.path += f"; {self._fabric}"

    def _meet(self, agent: Agent, rank: int, carried: bytes) -> Owner:
        who = f"sender rank {rank}"
        info = decode_message(
            self._discovery.get("sender", "sender", rank, carried), SenderInfo, who
        )
        known = self._owners.get(rank)
        if known is not None and known.info == info and not known.broken:
            return known
        check_alike(self._context, self._opened()[1], info, who)
        needed = max(
            int(runs.source[-1] + runs.nbytes[-1])
            for plan in self._plans.values()
            if (runs := plan.owners.get(rank)) is not None
        )
        if needed > info.arena.slot_nbytes and not info.zero_copy:
            raise TransferError(
                f"{who} describes slots of {info.arena.slot_nbytes} bytes, the table needs "
                f"{needed}: run one weightwire version on both sides"
            )
        route = choose(
            info.endpoint,
            self._opened()[1].endpoint,
            self._config.direction,
            unsafe_pull=self._config.unsafe_pull,
            who=who,
        )
        if known is not None:
            self._drop(known)
        agent.add(info.agent, info.metadata, who)
        pieces = PIECES * self._fabric.copy_threads if route.path == "CMA" else 0
        owner = Owner(rank, who, info, agent, self._slots, self._words, self._plans, route, pieces)
        if known is not None and known.info.agent == info.agent:
            owner.learn(known.heard)  # NIXL has dropped it, and it isn't told twice
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
        first = self._place % max(1, len(ranks))  # each receiver starts at another owner
        slot = self._turns[group]
        parts = [
            self._part(self._owners[rank], group, slot) for rank in ranks[first:] + ranks[:first]
        ]
        with self._moving:
            self._flights[group] = _Flight(parts)
        # What is pushed needs a grant of this rank and no more of it: a thread that looks for
        # news would only take turns with the one that replays.
        if not (self._context.overlap and _moves_on(parts)):
            self._advance()
            return
        if all(part.owner.route.between_gpus for part in parts):
            with torch.cuda.device(self._device):
                self._advance()  # the devices copy, not the thread that posts it
        if self._progress is None:
            self._progress = Progress(self._step)
        self._progress.wake()

    def _part(self, owner: Owner, group: int, slot: int) -> Pull | Push:
        if not owner.route.push:
            return Pull(owner, group, slot, self._policy, self._backlog)
        self._grants += 1
        return Push(owner, group, slot, self._grants, self._policy, self._backlog)

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

    def landed(self, group: int) -> bool:
        flight = self._flights.get(group)
        return flight is not None and self._landed(flight)

    def fetch(self, group: int, regions: Mapping[int, Tensor]) -> Sequence[Seal]:
        flight = self._flights.get(group)
        if flight is None:
            self.post(group, regions)
            flight = self._flights[group]
        self._context.watch.until(
            lambda: self._landed(flight),
            f"announcement or bytes of group {group}",
            lambda: [part.owner.who for part in flight.parts if not part.landed],
            rest=naps(self._device),
        )
        with self._moving:
            del self._flights[group]
        return [decode_message(part.seal, Seal, part.owner.who) for part in flight.parts]

    def _landed(self, flight: _Flight) -> bool:
        if not all(part.landed for part in flight.parts):
            if self._progress is not None:
                self._progress.check()
            if self._progress is None or not _moves_on(flight.parts):
                self._advance()
        for part in flight.parts:
            if not part.landed and (part.owner.rank in self._aborted or part.owner.said_bye):
                raise PeerLost(f"{part.owner.who} gave up {self._policy}: its own error says why")
        return all(part.landed for part in flight.parts)

    def _advance(self) -> None:
        """Take every posted group as far as it goes without waiting.

        Groups are posted in the order in which owners announce them, the table's: so those
        that an owner is read for one at a time come as they are posted.
        """
        with self._moving:
            self._poll()
            busy: set[int] = set()
            for flight in list(self._flights.values()):
                for part in flight.parts:
                    if part.owner.rank in busy:
                        continue
                    part.advance()
                    if part.in_turn and not part.landed:
                        busy.add(part.owner.rank)

    def _step(self) -> float | None:
        """``_advance`` on the progress thread; seconds until the next, None: all has landed."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own
        self._advance()
        with self._moving:
            left = [part for f in self._flights.values() for part in f.parts if not part.landed]
        if not left:
            return None
        return self._least if any(part.in_flight for part in left) else PAUSE

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def finish(self) -> None:
        self._stop_progress()
        self._flights = {}

    def abort(self, error: BaseException) -> None:
        del error
        self._stop_progress()
        if self._agent is None:
            return
        parts = [part for flight in self._flights.values() for part in flight.parts]
        self._flights = {}
        agent, info = self._opened()
        hot = [part for part in parts if self._is_hot(part)]
        for owner in self._owners.values():
            under_way = any(part.owner is owner for part in hot)
            metadata = info.metadata if under_way and owner.route.push else b""
            message = encode(GaveUp(self._policy, under_way, metadata))
            try:
                agent.notify(owner.info.agent, message, owner.who)
            except WeightWireError:
                owner.broken = True
        if hot:
            self._set_aside(agent, hot)

    def _is_hot(self, part: Pull | Push) -> bool:
        """Whether something may still be written into this rank's memory for it."""
        if part.owner.rank in self._clean:
            part.revoke()
        return part.in_flight

    def _set_aside(self, agent: Agent, hot: list[Pull | Push]) -> None:
        """Go on with a new agent and new memory; these stay until nothing touches them."""
        owners, memory = dict(self._owners), [self._slots, self._words]
        policy = self._policy
        names = {owner.info.agent: owner for owner in owners.values()}

        def is_over() -> bool:
            for name, messages in agent.drain().items():
                for payload in messages:
                    if name in names and _ends(readable(payload), policy):
                        for part in hot:
                            if part.owner is names[name]:
                                part.revoke()
            for part in hot:
                if (part.owner.info.agent, agent.name) in self._forgotten:
                    part.revoke()
            return not any(part.in_flight for part in hot)

        def release() -> None:
            self._forgotten -= {(name, agent.name) for name in names}
            _say_bye(agent, owners.values(), policy)
            agent.close()
            memory.clear()

        self._aside.keep(is_over, release)
        self._agent = None
        self._owners, self._by_agent = {}, {}

    def release_buffers(self) -> None:
        """Ends the agent, since peers know its memory; the next plan makes another."""
        self._leave()

    def close(self) -> None:
        self._leave()
        self._aside.close()
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
                    if not message.in_flight:
                        self._clean.add(owner.rank)
            case Bye():
                if owner is not None:
                    owner.said_bye = True
                    self._clean.add(owner.rank)
            case Over():
                if owner is not None and message.policy >= self._policy:
                    self._clean.add(owner.rank)
            case Forgot():
                if owner is not None and len(self._aside):
                    self._forgotten.add((name, message.agent))
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
        self._stop_progress()
        if self._agent is None:
            return
        with contextlib.suppress(WeightWireError):
            self._poll()
        agent, self._agent = self._agent, None
        hot = [
            part for flight in self._flights.values() for part in flight.parts if self._is_hot(part)
        ]
        if hot:
            self._set_aside(agent, hot)
        else:
            _say_bye(agent, self._owners.values(), self._policy)
            agent.close()
        self._owners, self._by_agent, self._flights = {}, {}, {}
        self._table_digest, self._regions = "", ()
        del self._slots, self._words


def _moves_on(parts: Sequence[Pull | Push]) -> bool:
    """Whether some of a group's parts take steps of this rank's once they are posted."""
    return any(part.in_turn for part in parts)


def _say_bye(agent: Agent, owners: Iterable[Owner], policy: Policy) -> None:
    message = encode(Bye(policy))
    for owner in owners:
        if owner.is_gone:
            continue
        with contextlib.suppress(WeightWireError):
            agent.notify(owner.info.agent, message, owner.who)


def _ends(message: Message | None, policy: Policy) -> bool:
    """Whether an owner says that nothing of this version is under way any more."""
    match message:
        case Over():
            return message.policy >= policy
        case Bye():  # an owner's agent closes when nothing of it is under way
            return True
        case Aborted():
            return message.policy == policy and not message.in_flight
    return False

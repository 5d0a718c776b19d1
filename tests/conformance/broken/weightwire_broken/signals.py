"""Whoever waits isn't told, or is told too early."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import torch

from weightwire.deadline import Watch
from weightwire.errors import PeerLost, TransferTimeout, WeightWireError
from weightwire.memory.receiver import MemoryReceiver
from weightwire.memory.sender import MemorySender
from weightwire_broken import BrokenMemory, broken
from weightwire_broken.payload import raw


class Blind(Watch):
    """Waits for its condition, whatever else happens."""

    def until(self, condition, waiting_for, missing=tuple):
        end = time.monotonic() + 20
        while not (value := condition()):
            if time.monotonic() > end:
                raise TransferTimeout(f"no {waiting_for}")
            time.sleep(0.005)
        return value


class Late(Watch):
    """Adds two seconds of its own to every deadline."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def until(self, condition, *rest):
        end = time.monotonic() + 20
        while not (value := condition()):
            try:
                self.inner.check(*rest[:1])
            except TransferTimeout:
                end = min(end, time.monotonic() + 2)
                while time.monotonic() < end:
                    time.sleep(0.01)
                raise
            time.sleep(0.005)
        return value


@broken
class AcknowledgesEarly(BrokenMemory):
    """The sender takes every group for read as soon as it is announced."""

    class sender_class(MemorySender):  # noqa: N801
        def _await_credits(self, index):
            self._in_slot[index] = None


@broken
class AnnouncesWithTheNext(BrokenMemory):
    """A group is announced when the next one is put, or the version ends."""

    class sender_class(MemorySender):  # noqa: N801
        held = None

        def slot(self, group, nbytes):
            self.memory = torch.empty(nbytes, dtype=torch.uint8)
            return self.memory

        def put(self, group, tensors, seal):
            self.announce()
            self.held = group, self.memory, tensors, seal

        def announce(self):
            if self.held is not None:
                (group, memory, *rest), self.held = self.held, None
                super().slot(group, len(memory)).copy_(memory)
                super().put(group, *rest)

        def finish(self):
            self.announce()
            super().finish()

        def abort(self, error):
            self.held = None
            super().abort(error)


@broken
class ReceivesEarly(BrokenMemory):
    """fetch returns, and the bytes come later."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            scratch = {i: t.clone() for i, t in regions.items()}
            seals = super().fetch(group, scratch)

            def land():
                for i, tensor in regions.items():
                    if tensor.numel():
                        raw(tensor).copy_(raw(scratch[i]))

            threading.Timer(1.0, land).start()
            return seals


@broken
class IgnoresALostReceiver(BrokenMemory):
    """The sender waits for a credit that never comes."""

    class sender_class(MemorySender):  # noqa: N801
        def __init__(self, context):
            super().__init__(replace(context, watch=Blind()))


@broken
class IgnoresALostSender(BrokenMemory):
    """The receiver waits for a group that never comes."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def __init__(self, context):
            super().__init__(replace(context, watch=Blind()))


@broken
class HoldsOnToTheLost(BrokenMemory):
    """A receiver that is struck off is waited for all the same."""

    class sender_class(MemorySender):  # noqa: N801
        def lose(self, receiver_id):
            pass


@broken
class LosesByPrefix(BrokenMemory):
    """Whoever's name begins with that of one that is struck off is struck off, too."""

    class sender_class(MemorySender):  # noqa: N801
        def lose(self, receiver_id):
            names = {reader.receiver_id for reader in self._readers}
            self._lost |= {name for name in names if name.startswith(receiver_id)}


@broken
class KeepsItsOwnTime(BrokenMemory):
    """Both sides are two seconds late."""

    class sender_class(MemorySender):  # noqa: N801
        def __init__(self, context):
            super().__init__(replace(context, watch=Late(context.watch)))

    class receiver_class(MemoryReceiver):  # noqa: N801
        def __init__(self, context):
            super().__init__(replace(context, watch=Late(context.watch)))


@broken
class Hangs(BrokenMemory):
    """The second group is never done."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def fetch(self, group, regions):
            if group:
                threading.Event().wait()
            return super().fetch(group, regions)


@broken
class HangsWhenClosed(BrokenMemory):
    """close never returns."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def close(self):
            super().close()
            threading.Event().wait()


@broken
class SpeaksItsOwnErrors(BrokenMemory):
    """Errors of weightwire's tree leave as something else, wherever in a version they come."""

    class sender_class(MemorySender):  # noqa: N801
        def _await_credits(self, index):
            try:
                super()._await_credits(index)
            except WeightWireError as error:
                raise OSError(str(error)) from error

    class receiver_class(MemoryReceiver):  # noqa: N801
        def __init__(self, context):
            super().__init__(context)
            fail = context.watch.fail
            # Whether it has begun to fetch when the sender is missed is a matter of moments.
            context.watch.fail = lambda error, call=None: fail(OSError(str(error)), call)


@broken
class GivesUpWithTheLost(BrokenMemory):
    """A receiver that is struck off ends the version for the others, too."""

    class sender_class(MemorySender):  # noqa: N801
        def lose(self, receiver_id):
            super().lose(receiver_id)
            self._context.watch.fail(PeerLost(f"receiver {receiver_id!r} broke the connection"))

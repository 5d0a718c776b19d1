"""What was before isn't forgotten, or is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import msgspec

from weightwire.errors import ConfigError, PeerLost, TransferError, UnsupportedOperation
from weightwire.memory.receiver import MemoryReceiver
from weightwire.memory.sender import MemorySender
from weightwire_broken import BrokenFilesystem, BrokenMemory, broken
from weightwire_filesystem.receiver import FilesystemReceiver
from weightwire_filesystem.sender import FilesystemSender


@broken
class UnfitAfterAbort(BrokenMemory):
    """After a version that was given up, no other can be received."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        unfit = False

        def begin(self, offer):
            if self.unfit:
                raise TransferError("the transport is in a state that it doesn't know")
            super().begin(offer)

        def abort(self, error):
            self.unfit = True
            super().abort(error)


@broken
class SenderUnfitAfterAbort(BrokenMemory):
    """After a version that was given up, no other can be sent."""

    class sender_class(MemorySender):  # noqa: N801
        unfit = False

        def begin(self, offer, readers):
            if self.unfit:
                raise TransferError("the transport is in a state that it doesn't know")
            super().begin(offer, readers)

        def abort(self, error):
            self.unfit = True
            super().abort(error)


@broken
class FilesUnfitAfterAbort(BrokenFilesystem):
    """After a version that was given up, no other can be received."""

    class receiver_class(FilesystemReceiver):  # noqa: N801
        unfit = False

        def begin(self, offer):
            if self.unfit:
                raise TransferError("the transport is in a state that it doesn't know")
            super().begin(offer)

        def abort(self, error):
            self.unfit = True
            super().abort(error)


@broken
class RemembersTheFirstSender(BrokenMemory):
    """Addresses of the first sender are used for ever."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        first = None

        def begin(self, offer):
            self.first = self.first or offer.senders
            super().begin(msgspec.structs.replace(offer, senders=self.first))


@broken
class KeepsItsRoster(BrokenMemory):
    """Whoever wasn't there at first can't join, and who was can't leave."""

    class sender_class(MemorySender):  # noqa: N801
        roster = None

        def begin(self, offer, readers):
            self.roster = self.roster or set(readers.values())
            if set(readers.values()) != self.roster:
                raise TransferError("the roster isn't what it was")
            super().begin(offer, readers)


@broken
class MissesWhoLeft(BrokenMemory):
    """Whoever was served once must be there for ever, also for the next sender."""

    class sender_class(MemorySender):  # noqa: N801
        known: ClassVar[dict[str, set[str]]] = {}

        def begin(self, offer, readers):
            known = self.known.setdefault(self._context.session_id, set())
            if missing := sorted(known - readers.keys()):
                raise TransferError(f"receiver {missing[0]!r} doesn't answer any more")
            known.update(readers)
            super().begin(offer, readers)


@broken
class WantsEqualReplicas(BrokenMemory):
    """Every replica must have as many ranks as the first."""

    class sender_class(MemorySender):  # noqa: N801
        def begin(self, offer, readers):
            if len({len(ranks) for ranks in readers.values()}) > 1:
                raise TransferError("replicas have different numbers of ranks")
            super().begin(offer, readers)


@broken
class ExpectsTheNext(BrokenMemory):
    """Version numbers must be counted up by one."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        last = None

        def begin(self, offer):
            version = offer.policy.version
            if self.last is not None and version != self.last + 1:
                raise TransferError(f"version {version} doesn't follow version {self.last}")
            self.last = version
            super().begin(offer)


@broken
class NeedsItsSender(BrokenFilesystem):
    """A stored version can be read as long as the process that stored it lives."""

    class sender_class(FilesystemSender):  # noqa: N801
        def publish(self):
            super().publish()
            (self._context.session_dir / "stored-by").write_text(str(os.getpid()))

    class receiver_class(FilesystemReceiver):  # noqa: N801
        def begin(self, offer):
            super().begin(offer)
            pid = (self._context.session_dir / "stored-by").read_text()
            if not Path(f"/proc/{pid}").exists():
                raise PeerLost(f"process {pid}, which stored it, has ended")


@broken
class ServesOneReceiver(BrokenMemory):
    """Declares no limit, and has one."""

    class sender_class(MemorySender):  # noqa: N801
        def begin(self, offer, readers):
            if len(readers) > 1:
                raise UnsupportedOperation("one receiver at a time")
            super().begin(offer, readers)


@broken
class SendsAVersionOnce(BrokenMemory):
    """A version that has gone to some can't go to others."""

    class sender_class(MemorySender):  # noqa: N801
        newest = -1

        def begin(self, offer, readers):
            if offer.policy.version <= self.newest:
                raise TransferError("that version went out already")
            self.newest = offer.policy.version
            super().begin(offer, readers)


@broken
class NeedsTheWholeRoster(BrokenMemory):
    """Can't begin without everybody to whom a version was offered."""

    class sender_class(MemorySender):  # noqa: N801
        def begin(self, offer, readers):
            if set(offer.roster) != set(readers):
                raise TransferError("not everybody is here")
            super().begin(offer, readers)


@broken
class HasOneSlot(BrokenMemory):
    """Can't overlap, and says so only when asked."""

    class sender_class(MemorySender):  # noqa: N801
        def __init__(self, context):
            if context.overlap:
                raise ConfigError("there is one slot")
            super().__init__(context)


@broken
class NeedsADirectory(BrokenMemory):
    """Works only in sessions that are directories."""

    class sender_class(MemorySender):  # noqa: N801
        def __init__(self, context):
            if context.session_dir is None:
                raise ConfigError("no directory")
            super().__init__(context)


@broken
class SizesATableOnce(BrokenMemory):
    """What is given back isn't made again for a table that it knows."""

    class sender_class(MemorySender):  # noqa: N801
        known = None

        def set_table(self, table):
            if table != self.known:
                self.known = table
                super().set_table(table)


@broken
class ForgetsItsPlan(BrokenMemory):
    """A table that changes isn't planned for again."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        planned = False

        def set_plan(self, table, regions):
            if self.planned:
                raise TransferError("planned already")
            self.planned = True
            super().set_plan(table, regions)

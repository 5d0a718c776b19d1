"""What was before isn't forgotten, or is."""

from __future__ import annotations

import msgspec

from weightwire.errors import ConfigError, TransferError, UnsupportedOperation
from weightwire.memory.receiver import MemoryReceiver
from weightwire.memory.sender import MemorySender
from weightwire_broken import BrokenFilesystem, BrokenMemory, broken
from weightwire_filesystem.receiver import FilesystemReceiver


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
class ForgetsItsPlan(BrokenMemory):
    """A table that changes isn't planned for again."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        planned = False

        def set_plan(self, table, regions):
            if self.planned:
                raise TransferError("planned already")
            self.planned = True
            super().set_plan(table, regions)

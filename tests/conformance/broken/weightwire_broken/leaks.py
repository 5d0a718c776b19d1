"""Something stays."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import threading

from weightwire.memory.receiver import MemoryReceiver
from weightwire.memory.sender import MemorySender
from weightwire_broken import BrokenMemory, broken

KEPT = []


@broken
class LeaksADescriptor(BrokenMemory):
    """One a version."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def begin(self, offer):
            KEPT.append(os.open("/dev/null", os.O_RDONLY))
            super().begin(offer)


@broken
class KeepsEveryReader(BrokenMemory):
    """One descriptor for each receiver that ever joined."""

    class sender_class(MemorySender):  # noqa: N801
        def __init__(self, context):
            super().__init__(context)
            self._seen = set()

        def begin(self, offer, readers):
            for ranks in readers.values():
                if tuple(ranks) not in self._seen:
                    self._seen.add(tuple(ranks))
                    KEPT.append(os.open("/dev/null", os.O_RDONLY))
            super().begin(offer, readers)


@broken
class LeaksWhenItAborts(BrokenMemory):
    """One descriptor for each version that was given up."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def abort(self, error):
            KEPT.append(os.open("/dev/null", os.O_RDONLY))
            super().abort(error)


@broken
class LeaksMemory(BrokenMemory):
    """A mebibyte a version."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def begin(self, offer):
            KEPT.append(b"x" * (1 << 20))
            super().begin(offer)


@broken
class LeavesAFile(BrokenMemory):
    """In the directory for temporary files."""

    class sender_class(MemorySender):  # noqa: N801
        def close(self):
            with tempfile.NamedTemporaryFile(delete=False) as file:
                file.write(b"state")
            super().close()


@broken
class LeavesSharedMemory(BrokenMemory):
    """The segment's file isn't removed."""

    class sender_class(MemorySender):  # noqa: N801
        def close(self):
            if self._segment is not None:
                self._segment._owner = False
            super().close()


@broken
class LeavesAThread(BrokenMemory):
    """It waits for ever."""

    class receiver_class(MemoryReceiver):  # noqa: N801
        def __init__(self, context):
            super().__init__(context)
            threading.Thread(target=threading.Event().wait, name="stays", daemon=True).start()


@broken
class LeavesAProcess(BrokenMemory):
    """A helper that nobody ends."""

    class sender_class(MemorySender):  # noqa: N801
        def __init__(self, context):
            super().__init__(context)
            KEPT.append(subprocess.Popen(["sleep", "20"]))


@broken
class LeavesAPort(BrokenMemory):
    """It is still listened on."""

    class sender_class(MemorySender):  # noqa: N801
        def __init__(self, context):
            super().__init__(context)
            listener = socket.create_server(("127.0.0.1", 0))
            KEPT.append(listener)


@broken
class FailsToClose(BrokenMemory):
    """close raises."""

    class sender_class(MemorySender):  # noqa: N801
        def close(self):
            super().close()
            raise OSError("can't close")

"""The ``memory`` backend: shared memory between processes of one host.

The reference implementation of the contract, and the fixture of the tests: a
``pull`` backend small enough to read in one go.
"""

from weightwire.memory.backend import MemoryBackend
from weightwire.memory.config import MemoryConfig

__all__ = ["MemoryBackend", "MemoryConfig"]

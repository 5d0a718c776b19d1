"""What a scenario may need of a backend: capabilities that needn't be declared.

Equality, order, deadlines, cleanup and detected corruption aren't here: they
can't be declared away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "FINISHED_ARE_SERVED",
    "LIVE_RECEIVERS_GET_OFFERS",
    "NOBODY_NEED_LISTEN",
    "Need",
    "limit_of",
    "option",
    "receivers",
]

Declared = Mapping[str, Any]
"""``Capabilities`` by field name, as it comes from a worker; and the names of its ``options``."""


@dataclass(frozen=True)
class Need:
    """A capability; asking for one that isn't declared must get ``UnsupportedOperation``.

    Attributes:
        text: what a backend that declares it can do.
        declared: whether a backend does.
    """

    text: str
    declared: Callable[[Declared], bool]


NOBODY_NEED_LISTEN = Need(
    "a version can be sent to nobody, and read later", lambda c: not c["needs_live_receivers"]
)
FINISHED_ARE_SERVED = Need(
    "a receiver that starts late gets the newest finished version",
    lambda c: bool(c["serves_finished"]) and not c["needs_live_receivers"],
)
LIVE_RECEIVERS_GET_OFFERS = Need(
    "a version is offered to so many receivers and no more", lambda c: c["flow"] != "store"
)


def receivers(count: int) -> Need:
    """That many receivers in one offer."""

    def declared(capabilities: Declared) -> bool:
        most = capabilities["max_receivers"]
        return most is None or most >= count

    return Need(f"{count} receivers in one offer", declared)


def limit_of(nbytes: int) -> Need:
    """A tensor of that many bytes."""

    def declared(capabilities: Declared) -> bool:
        most = capabilities["max_tensor_nbytes"]
        return most is None or most >= nbytes

    return Need(f"a tensor of {nbytes >> 20} MiB", declared)


def option(name: str) -> Need:
    """An optional one (``weightwire.config.OPTIONAL``): declared as a field of the config model."""
    return Need(f"the option {name!r}", lambda c: name in c["options"])

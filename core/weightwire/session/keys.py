"""Where each record of a session lives.

::

    session                                     who this session is
    senders/<n>/{record,lease,closed}           trainer incarnation n
    senders/<n>/{ranks,leases}/<k>, senders/<n>/joined   its other ranks
    receivers/<id>/<n>/{record,lease,closed,status}
    receivers/<id>/<n>/{ranks,leases}/<k>, .../joined
    watchers/<id>/<n>/{record,lease,closed}     who drives a receiver's engine
    tables/<digest>                             tensor tables, as bytes
    versions/<n>/<version>.<attempt>/{offer,started,outcome}
    versions/<n>/<version>.<attempt>/{ready,applied}/<receiver id>/<receiver's n>
    reading/<receiver id>/<receiver's n>        which version a receiver is reading
    retired/<n>/<version>.<attempt>             no reader may start on this any more
    turns/<slot>/<n>/{holder,over}              who may be out of service, one after the other
    agree/<kind>/<n>/<round>/<step>/<rank>    agreement among the ranks of one side

    catch-up/…, snapshot/…                      sessions of their own: see those modules

Every record has one writer: an incarnation that was taken for dead, and wakes up,
can't overwrite what its successor wrote.

Keys are ``/``-separated components of ``[A-Za-z0-9._-]``, none of them ``.``
or ``..``: a store may use them as paths.
"""

from __future__ import annotations

import re

from weightwire.contract import Policy
from weightwire.errors import ConfigError

__all__ = [
    "SESSION",
    "VERSIONS",
    "agree",
    "answer",
    "is_component",
    "member",
    "parse_policy",
    "reading",
    "retired",
    "table",
    "turn",
    "validate_key",
    "validate_member_id",
    "validate_version",
    "version",
]

SESSION = "session"
VERSIONS = 10**12
"""Versions are below: keys hold them in order."""

_COMPONENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,126}\Z")
_VERSION = re.compile(r"(\d{1,19})\.(\d{1,9})\Z")


def validate_member_id(member_id: str) -> str:
    """Return a receiver id that is fit for keys and paths, else raise ``ConfigError``."""
    if not isinstance(member_id, str) or not _COMPONENT.match(member_id):
        raise ConfigError(
            f"receiver id {member_id!r} can't name a record: use 1 to 127 of A-Z a-z 0-9 . _ -, "
            "not starting with a dot"
        )
    return member_id


def validate_version(number: int) -> int:
    """Return a version number that keys hold in order, else raise ``ConfigError``."""
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < VERSIONS:
        raise ConfigError(
            f"version {number!r} isn't a whole number from 0 to 10**12 - 1: pass an int"
        )
    return number


def is_component(name: str) -> bool:
    """Whether a name that a store lists can be part of a key."""
    return _COMPONENT.match(name) is not None


def validate_key(key: str) -> str:
    """Return ``key`` if every component is safe, else raise ``ConfigError``."""
    if not all(_COMPONENT.match(part) for part in key.split("/")):
        raise ConfigError(f"session key {key!r} is malformed: components are [A-Za-z0-9._-]")
    return key


def member(kind: str, incarnation: int | None = None, *rest: str) -> str:
    """Key below a member: ``kind`` is ``senders`` or ``receivers/<id>``."""
    parts = [kind] if incarnation is None else [kind, f"{incarnation:06d}"]
    return "/".join([*parts, *rest])


def table(digest: str) -> str:
    return f"tables/{digest}"


def version(policy: Policy, *rest: str) -> str:
    return "/".join(["versions", _policy(policy), *rest])


def versions(incarnation: int) -> str:
    return f"versions/{incarnation:06d}"


def retired(policy: Policy) -> str:
    return f"retired/{_policy(policy)}"


def answer(policy: Policy, sentinel: str, receiver_id: str, incarnation: int) -> str:
    """Key of a receiver's ``ready`` or ``applied``."""
    return version(policy, sentinel, receiver_id, f"{incarnation:06d}")


def reading(receiver_id: str, incarnation: int) -> str:
    return f"reading/{receiver_id}/{incarnation:06d}"


def turn(slot: int, number: int | None = None, *rest: str) -> str:
    """Key below a slot of those that may be out of service at a time."""
    which = [] if number is None else [f"{number:09d}"]
    return "/".join(["turns", f"{slot:06d}", *which, *rest])


def agree(kind: str, incarnation: int, *rest: str) -> str:
    return "/".join(["agree", kind, f"{incarnation:06d}", *rest])


def parse_policy(incarnation: int, component: str) -> Policy | None:
    """The policy that a directory name under ``versions/<n>`` stands for."""
    match = _VERSION.match(component)
    return Policy(incarnation, int(match[1]), int(match[2])) if match else None


def _policy(policy: Policy) -> str:
    return f"{policy.incarnation:06d}/{policy.version:012d}.{policy.attempt:04d}"

"""What a check is, and what it finds."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weightwire.errors import PluginError

__all__ = ["Check", "CheckOptions", "Finding", "State", "Verdict", "validate_checks"]

State = Literal["ok", "warning", "failed", "absent"]
"""``ok``: it was done, and worked.  ``warning``: it works, and something will be in the way.
``failed``: it is here, and broken.  ``absent``: it isn't here, which matters to those who need it.
"""

_Line = Annotated[str, Meta(max_length=2000)]
_Text = Annotated[str, Meta(max_length=16 << 10)]
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}\.[a-z][a-z0-9_-]{0,63}\Z")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z", re.ASCII)
_MOST_SECONDS = 600.0


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a check found by doing the thing.

    Attributes:
        summary: one line, with figures and units.
        remedy: what to do about it; only ``ok`` needs none.
        details: plain data for ``--json``: names to strings, numbers, lists and mappings.
    """

    state: State
    summary: _Line
    remedy: _Text = ""
    details: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.state != "ok" and not self.remedy:
            raise ValueError(f"a verdict {self.state!r} needs a remedy: {self.summary}")

    @classmethod
    def ok(cls, summary: str, **details: Any) -> Verdict:
        return cls("ok", summary, "", details)

    @classmethod
    def warning(cls, summary: str, remedy: str, **details: Any) -> Verdict:
        return cls("warning", summary, remedy, details)

    @classmethod
    def failed(cls, summary: str, remedy: str, **details: Any) -> Verdict:
        return cls("failed", summary, remedy, details)

    @classmethod
    def absent(cls, summary: str, remedy: str, **details: Any) -> Verdict:
        return cls("absent", summary, remedy, details)


class CheckOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every check is told.

    Attributes:
        scratch: a private directory, removed afterwards.
        session: the URL of ``--session``, or empty.
        directory: of ``--directory``, or of a ``file://`` session, or empty.
        seconds: what is left of the check's own time when it begins.
    """

    scratch: str
    session: str = ""
    directory: str = ""
    seconds: float = 30.0


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that ``weightwire doctor`` tries.

    It runs in a child process, so that it may crash or hang: checks of one group share a
    child, one after the other, until one of them ends it.

    Attributes:
        name: ``group.what``; the group is the backend's or engine's name.
        title: what is tried, such as ``a NIXL read between two processes``.
        function: ``module:function``; takes a ``CheckOptions`` and returns a ``Verdict``.
            Importing the module must not import the transport: the function does.
        seconds: most that it may take.
        remedy: what to do when it crashes, hangs or raises something unforeseen.
        arguments: handed to the function after its options.
    """

    name: Annotated[str, Meta(max_length=130)]
    title: Annotated[str, Meta(max_length=200)]
    function: Annotated[str, Meta(max_length=400)]
    seconds: float = 30.0
    remedy: _Text = ""
    arguments: list[str] = []

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]


class Finding(msgspec.Struct, frozen=True):
    """A verdict, with the check that came to it and how long that took."""

    check: Check
    verdict: Verdict
    took: float


def validate_checks(value: object, distribution: str) -> dict[str, Check]:
    """A plug-in's checks by name.

    Raises:
        PluginError: it returned something else; names the distribution and the remedy.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(item, Check) for item in value):
        raise PluginError(
            f"weightwire_describe_checks of {distribution} returned a {type(value).__name__}: "
            "return a list of weightwire.doctor.Check"
        )
    found: dict[str, Check] = {}
    for check in value:
        if not isinstance(check.name, str) or not _NAME.match(check.name) or check.name in found:
            raise PluginError(
                f"check {check.name!r} of {distribution} has no name of its own like group.what: "
                "use [a-z][a-z0-9_-]* on both sides of one dot"
            )
        if not isinstance(check.function, str) or not _FUNCTION.match(check.function):
            raise PluginError(
                f"check {check.name!r} of {distribution} has function {check.function!r}: "
                "write module:function"
            )
        if not 0 < check.seconds <= _MOST_SECONDS:
            raise PluginError(
                f"check {check.name!r} of {distribution} wants {check.seconds!r} seconds: "
                f"more than 0, and at most {_MOST_SECONDS:g}"
            )
        found[check.name] = check
    return found

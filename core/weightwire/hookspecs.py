"""The hooks by which distributions extend weightwire.

A plug-in is a module or object named by an entry point of the group
``weightwire``; it implements any of these with ``weightwire.hookimpl``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weightwire.contract import Backend
    from weightwire.doctor.check import Check
    from weightwire.report import VersionRecord
    from weightwire.session.store import SessionScheme

__all__ = ["PROJECT", "hookimpl", "hookspec"]

PROJECT = "weightwire"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def weightwire_describe_backend() -> Backend:  # type: ignore[empty-body]
    """Return the backend that this plug-in provides."""


@hookspec
def weightwire_describe_session_scheme() -> SessionScheme:  # type: ignore[empty-body]
    """Return the session-store scheme that this plug-in provides."""


@hookspec
def weightwire_describe_commands() -> Mapping[str, Callable[..., object]]:  # type: ignore[empty-body]
    """Return subcommands of ``weightwire``, by name.

    Each is a function whose parameters typer reads, and whose docstring is its help.
    Import what it needs inside it: the mapping is asked for whenever a subcommand is
    looked up that isn't built in.
    """


@hookspec
def weightwire_describe_checks() -> Sequence[Check]:  # type: ignore[empty-body]
    """Return what ``weightwire doctor`` tries for this plug-in, as ``weightwire.doctor.Check``.

    Each names a function by its module; it runs in a child process with a deadline, does
    the thing rather than look whether it might work, and returns a ``Verdict``.  Describing
    checks must import nothing that may crash or hang.
    """


@hookspec
def weightwire_published(record: VersionRecord) -> None:
    """A sender's rank 0 finished a version.

    Called once per version on the thread that called ``send``; keep it short.
    What it raises is logged, and never fails the version.
    """


@hookspec
def weightwire_applied(record: VersionRecord) -> None:
    """A receiver's rank 0 has wholly applied a version."""


@hookspec
def weightwire_aborted(record: VersionRecord) -> None:
    """A version failed on this side; ``record.error`` says why."""

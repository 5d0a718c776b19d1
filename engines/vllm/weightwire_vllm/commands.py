"""Subcommands of ``weightwire`` that come with vLLM's side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightwire.cli.stubs import ANY_ARGUMENTS
from weightwire.errors import BackendUnavailable
from weightwire.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["weightwire_describe_commands"]


@hookimpl
def weightwire_describe_commands() -> Mapping[str, Callable[..., object]]:
    """``weightwire watch``."""
    try:
        from weightwire_vllm.watch.command import watch
    except ImportError as error:
        missing = error.name

        def watch() -> None:  # type: ignore[misc]  # the same command, which says why it can't
            """Follow a session, and bring its versions to vLLM servers.

            Not installed: pip install 'weightwire[vllm]'
            """
            raise BackendUnavailable(
                f"weightwire watch needs {missing}: pip install 'weightwire[vllm]'"
            )

        watch.context_settings = ANY_ARGUMENTS  # type: ignore[attr-defined]  # read by the group

    return {"watch": watch}

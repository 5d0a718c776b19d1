"""Commands that can't run: whatever they are given, they say why."""

from __future__ import annotations

__all__ = ["ANY_ARGUMENTS"]

ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}
"""The ``context_settings`` of a plug-in's function that stands in for a command."""

"""The plug-in of the group ``weightwire``: what the doctor tries for vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from weightwire.doctor.check import Check
from weightwire.hookspecs import hookimpl

__all__ = ["weightwire_describe_checks"]

_REINSTALL = "import vllm by hand, and mend what it says; reinstall vLLM"


@hookimpl
def weightwire_describe_checks() -> Sequence[Check]:
    return [
        Check(
            "vllm.engine",
            "vLLM imported with its plug-ins: is weightwire among its weight transfers?",
            "weightwire_vllm.checks:engine",
            180.0,
            _REINSTALL,
        ),
        Check(
            "vllm.routes",
            "an API server's routes for weight updates",
            "weightwire_vllm.checks:routes",
            120.0,
            _REINSTALL,
        ),
    ]

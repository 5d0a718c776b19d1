"""What ``weightwire doctor`` tries for the ``memory`` backend."""

from __future__ import annotations

import secrets
from pathlib import Path

from weightwire.doctor.check import CheckOptions, Verdict
from weightwire.doctor.children import Step, together
from weightwire.memory.segment import PAGE, Segment, default_directory

__all__ = ["read_from_another_process", "share"]

_NBYTES = 1 << 20


def share(options: CheckOptions) -> Verdict:
    """Another process maps a segment of ours, and reads what we wrote."""
    path = default_directory() / f"weightwire-doctor-{secrets.token_hex(6)}"
    payload = secrets.token_bytes(_NBYTES - PAGE)
    segment = Segment(path, _NBYTES, create=True)
    try:
        segment.write(PAGE, payload)
        step = Step("weightwire.memory.checks:read_from_another_process", [str(path)])
        (found,) = together([step], options.scratch, options.seconds - 5)
    finally:
        segment.close()
    if found != payload[:64].hex() + payload[-64:].hex():
        return Verdict.failed(
            f"another process reads other bytes in {path.parent} than were written",
            "set the backend's option 'directory' to a filesystem in memory",
        )
    return Verdict.ok(f"another process reads what this one writes in {path.parent}")


def read_from_another_process(path: str) -> str:
    """The other process: both ends of the payload, in hex."""
    segment = Segment(Path(path), _NBYTES, create=False)
    found = segment.read(PAGE, 64) + segment.read(_NBYTES - 64, 64)
    segment.close()
    return found.hex()

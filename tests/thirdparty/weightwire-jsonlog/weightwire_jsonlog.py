"""An observer of weightwire: one JSON line per version and side.

The file is named by ``WEIGHTWIRE_JSONLOG``.  A line is written by one call in append
mode, so that many processes can share the file.
"""

from __future__ import annotations

import json
import os
import time

from weightwire import VersionRecord, hookimpl

__all__ = ["VARIABLE"]

VARIABLE = "WEIGHTWIRE_JSONLOG"


@hookimpl
def weightwire_published(record: VersionRecord) -> None:
    _append("published", record)


@hookimpl
def weightwire_applied(record: VersionRecord) -> None:
    _append("applied", record)


@hookimpl
def weightwire_aborted(record: VersionRecord) -> None:
    _append("aborted", record)


def _append(event: str, record: VersionRecord) -> None:
    path = os.environ.get(VARIABLE)
    if not path:
        return
    line = {
        "time": time.time(),
        "event": event,
        "session": record.session_url,
        "member": record.member_id,
        "version": record.version,
        "report": record.report.to_dict() if record.report else None,
        "error": f"{type(record.error).__name__}: {record.error}" if record.error else None,
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)

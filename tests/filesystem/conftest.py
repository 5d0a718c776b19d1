from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the rig is also a script that children run

import filesystem_rig as rig

from weightwire.contract import ReceiverTransport, SenderTransport
from weightwire_filesystem import FilesystemBackend


@pytest.fixture
def versions(tmp_path: Path) -> Path:
    return tmp_path / "versions"


@pytest.fixture
def open_sender(versions: Path) -> Iterator[Callable[..., SenderTransport]]:
    opened: list[SenderTransport] = []

    def opener(table: Any = None, directory: Path = versions, **options: Any) -> SenderTransport:
        opened.append(FilesystemBackend().open_sender(rig.context(directory, **options)))
        if table is not None:
            opened[-1].set_table(table)
        return opened[-1]

    yield opener
    for transport in opened:
        transport.close()


@pytest.fixture
def open_receiver(versions: Path) -> Iterator[Callable[..., ReceiverTransport]]:
    opened: list[ReceiverTransport] = []

    def opener(
        table: Any = None, regions: Any = None, directory: Path = versions, **options: Any
    ) -> ReceiverTransport:
        options.setdefault("member", "replica-0")
        opened.append(FilesystemBackend().open_receiver(rig.context(directory, **options)))
        if table is not None:
            opened[-1].set_plan(table, rig.whole(table) if regions is None else regions)
        return opened[-1]

    yield opener
    for transport in opened:
        transport.close()


@pytest.fixture
def in_child() -> Callable[..., dict[str, Any]]:
    """Runs one action of the rig in another process and returns what it says."""

    def runner(**arguments: Any) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(Path(rig.__file__)), json.dumps(arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return runner

"""Asks for backends and sessions among bad plug-ins, and prints what became of it as JSON."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import torch

import weightwire

WEIGHTS = {"w": torch.zeros(2)}


def asked(backend: str, session: str) -> str:
    """What went wrong, or nothing."""
    try:
        weightwire.open_sender(backend, session=session, source=WEIGHTS).close()
    except weightwire.WeightWireError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(directory: Path, names: list[str]) -> None:
    logging.basicConfig(stream=sys.stderr)
    answers = {name: asked(name, f"file://{directory / name}") for name in names}
    answers["sqlite"] = asked("memory", f"sqlite://{directory / 'run.db'}")
    session = f"file://{directory / 'sent'}"
    with weightwire.open_sender("filesystem", session=session, source=WEIGHTS) as sender:
        answers["sent"] = str(sender.send(1).version)
    print(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

"""Asks for backends by name among bad plug-ins, and prints what became of it as JSON."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import torch

import weightwire
from weightwire import plugins


def outcome(name: str, directory: Path) -> dict[str, str]:
    try:
        plugins.probe(plugins.registry().backend(name), seconds=0.3)
        session = f"file://{directory / name}"
        weightwire.open_sender(name, session=session, source={"w": torch.zeros(2)}).close()
    except weightwire.WeightWireError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "", "message": ""}


def scheme(url: str) -> str:
    try:
        weightwire.open_sender("memory", session=url, source={"w": torch.zeros(2)})
    except weightwire.WeightWireError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(directory: Path, names: list[str]) -> None:
    logging.basicConfig(stream=sys.stderr)
    found = {name: outcome(name, directory) for name in names}
    weights = {"w": torch.zeros(2)}
    with weightwire.open_sender(
        "filesystem", session=f"file://{directory / 'sent'}", source=weights
    ) as sender:
        version = sender.send(1).version
    url = f"sqlite://{directory / 'run.db'}"
    print(json.dumps({"backends": found, "sqlite": scheme(url), "sent": version}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

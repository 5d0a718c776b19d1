"""One side of a session in a process of its own: ``redis_peer.py``; commands as JSON lines."""

from __future__ import annotations

import json
import os
import sys

import torch

import weightwire
from weightwire.errors import WeightWireError

SIZE = 4096


def values(version: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(version))


def say(**answer: object) -> None:
    print(json.dumps(answer), flush=True)


def refuse_pickles(event: str, arguments: object) -> None:
    """Whatever unpickles anything in this process, however deep in a library, ends it."""
    if event == "pickle.find_class":
        sys.stderr.write(f"something was unpickled: {arguments}\n")
        os._exit(9)


def main() -> None:
    sys.addaudithook(refuse_pickles)
    weights = {"w": torch.zeros(SIZE)}
    side = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            match command.pop("do"):
                case "open_sender":
                    side = weightwire.open_sender(source=weights, **command)
                    say(ok=True)
                case "open_receiver":
                    side = weightwire.open_receiver(target=weights, **command)
                    say(ok=True)
                case "send":
                    weights["w"].copy_(values(command["version"]))
                    report = side.send(command["version"], timeout=command["timeout"])
                    say(version=report.version)
                case "receive":
                    report = side.receive(timeout=command["timeout"])
                    same = torch.equal(weights["w"], values(report.version))
                    say(version=report.version, same=same)
                case "close":
                    side.close()
                    say(ok=True)
        except WeightWireError as error:
            say(error=type(error).__name__, message=str(error))


if __name__ == "__main__":
    main()

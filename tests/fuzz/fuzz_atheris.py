"""Guided by coverage: ``fuzz_atheris.py TARGET SECONDS SEED CORPUS``.

atheris (libFuzzer) keeps the inputs that reach something new, in the directory CORPUS, and
mutates those.  It ends the process at the first error that isn't one of weightwire's, at one
input that takes longer than ten seconds, or at 2 GiB of memory.
"""

from __future__ import annotations

import contextlib
import random
import sys
from pathlib import Path

import atheris
from fuzz_mutator import mutate
from fuzz_targets import TARGETS

from weightwire.errors import WeightWireError


def main(name: str, seconds: str, seed: str, corpus: str) -> None:
    target = next(target for target in TARGETS if target.name == name)
    for function in target.code:
        function.__code__ = atheris.instrument_func(function).__code__
    for i, valid in enumerate(target.seeds):
        Path(corpus, f"seed-{i}").write_bytes(valid)

    def one(payload: bytes) -> None:
        with contextlib.suppress(WeightWireError):
            target.run(payload)

    def other(payload: bytes, size: int, number: int) -> bytes:
        """libFuzzer knows bytes only: most of them say nothing in JSON or msgpack."""
        dice = random.Random(number)
        if dice.random() < 0.2:
            return atheris.Mutate(payload, size)
        return mutate([payload, *target.seeds], dice)[:size]

    options = (f"-max_total_time={seconds}", f"-seed={seed}", "-timeout=10", "-rss_limit_mb=2048")
    atheris.Setup(
        [sys.argv[0], *options, "-print_final_stats=1", "-max_len=65536", corpus],
        one,
        custom_mutator=other,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])

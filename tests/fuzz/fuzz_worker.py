"""Decodes mutated inputs: ``fuzz_worker.py TARGET SEED COUNT COVERED PROGRESS``.

Input number ``i`` follows from the seed and ``i`` alone.  Its number is in the file
PROGRESS while it is decoded, so that whoever watches knows which one hangs or kills
the process.  The process may take little more memory than it has.  The first COVERED
inputs are run under coverage.py.
"""

from __future__ import annotations

import ast
import inspect
import json
import mmap
import random
import resource
import struct
import sys
import textwrap
import time
import traceback
from pathlib import Path
from types import FunctionType

from fuzz_mutator import mutate
from fuzz_targets import TARGETS, Target

from weightwire.errors import WeightWireError

ROOM = 256 << 20
"""Bytes by which decoding one input may raise the process's memory."""


def input_of(target: Target, seed: int, i: int) -> bytes:
    """Input number ``i``; the first are the seeds themselves."""
    if i < len(target.seeds):
        return target.seeds[i]
    return mutate(target.seeds, random.Random(f"{seed}/{target.name}/{i}"))


def try_one(target: Target, payload: bytes) -> str:
    """``accepted``, or ``refused`` by an error of ours.  Anything else passes through."""
    try:
        target.run(payload)
    except WeightWireError:
        return "refused"
    return "accepted"


def body_of(code: FunctionType) -> range:
    """Lines of a function's statements; what comes before them was run by importing it."""
    text, first = inspect.getsourcelines(code)
    tree = ast.parse(textwrap.dedent("".join(text))).body[0]
    statements = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    return range(first + statements[0].lineno - 1, first + len(text))


def coverage_of(target: Target, seed: int, count: int) -> dict[str, object]:
    """Lines of the target's functions that its first inputs reach."""
    import coverage

    files = {inspect.getsourcefile(code) for code in target.code}
    measured = coverage.Coverage(data_file=None, include=sorted(files), config_file=False)
    measured.start()
    try:
        for i in range(count):
            try_one(target, input_of(target, seed, i))
        if target.large:
            try_one(target, bytes(target.large))
    finally:
        measured.stop()
    lines, missing = 0, []
    for code in target.code:
        source = inspect.getsourcefile(code)
        _, statements, _, missed, _ = measured.analysis2(source)
        body = body_of(code)
        lines += sum(line in body for line in statements)
        missing += [f"{Path(source).name}:{line}" for line in missed if line in body]
    return {
        "lines": lines,
        "missing": missing,
        "percent": round(100 * (1 - len(missing) / lines), 1),
    }


def main(name: str, seed: int, count: int, covered: int, progress: Path) -> None:
    target = next(target for target in TARGETS if target.name == name)
    result: dict[str, object] = {"target": name, "seed": seed, "inputs": count}
    result["coverage"] = coverage_of(target, seed, min(covered, count)) if covered else None
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    outcomes = {"accepted": 0, "refused": 0}
    longest = 0.0
    with progress.open("r+b") as file:
        words = mmap.mmap(file.fileno(), 16)
    for i in range(count):
        payload = input_of(target, seed, i)
        struct.pack_into("<Q", words, 0, i)
        began = time.perf_counter()
        try:
            outcomes[try_one(target, payload)] += 1
        except BaseException:
            result["crash"] = {"input": i, "bytes": payload.hex(), "error": traceback.format_exc()}
            break
        longest = max(longest, time.perf_counter() - began)
    struct.pack_into("<Q", words, 0, count)  # what is left is no input's
    result |= {"outcomes": outcomes, "longest_s": round(longest, 4)}
    print(json.dumps(result))


if __name__ == "__main__":
    name, seed, count, covered, progress = sys.argv[1:]
    main(name, int(seed), int(count), int(covered), Path(progress))

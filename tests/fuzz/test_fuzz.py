"""No input makes a decoder do anything but accept it or refuse it with an error of ours."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fuzz_mutator import mutate
from fuzz_targets import TARGETS, Target
from fuzz_worker import input_of, try_one
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightwire_filesystem import manifest

HERE = Path(__file__).parent
NAMES = [target.name for target in TARGETS]
INPUTS = int(os.environ.get("WEIGHTWIRE_FUZZ_INPUTS", "1000000"))
COVERED = 30_000
GUIDED_SECONDS = int(os.environ.get("WEIGHTWIRE_FUZZ_SECONDS", "60"))
HANGS = 20.0
"""Seconds after which one input counts as a hang, on a machine that is busy with others."""


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_what_is_valid_is_accepted(target: Target) -> None:
    assert try_one(target, target.seeds[0]) == "accepted"


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
@settings(
    deadline=None,
    database=None,
    max_examples=200,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(generator=st.randoms(use_true_random=False))
def test_what_is_damaged_is_accepted_or_refused(target: Target, generator: random.Random) -> None:
    try_one(target, mutate(target.seeds, generator))


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_a_few_hundred_inputs_of_every_decoder(target: Target) -> None:
    """As the soak makes them: by a seed, so that each can be made again."""
    for i in range(400):
        try_one(target, input_of(target, 1, i))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_a_million_inputs_of_every_decoder(target: Target, tmp_path: Path, record_property) -> None:
    """Without a crash, a hang or much memory, and nearly all of the decoder is reached."""
    seed = int(os.environ.get("WEIGHTWIRE_SEED", "1"))
    print(f"seed {seed}")
    progress = tmp_path / "progress"
    progress.write_bytes(bytes(16))
    worker = subprocess.Popen(
        [
            *(sys.executable, str(HERE / "fuzz_worker.py"), target.name, str(seed), str(INPUTS)),
            *(str(COVERED), str(progress)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    last, since = -1, time.monotonic()
    try:
        while worker.poll() is None:
            time.sleep(0.2)
            (at,) = struct.unpack("<Q", progress.read_bytes()[:8])
            if at != last:
                last, since = at, time.monotonic()
            # Before the first, coverage is taken; after the last, the process ends.
            limit = HANGS if 0 < at < INPUTS else 600
            assert time.monotonic() - since < limit, f"input {at} of seed {seed} hangs"
        out = worker.stdout.read()
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
    assert worker.returncode == 0, f"input {last} of seed {seed} ended the process"
    result = json.loads(out)
    for name in ("seed", "inputs", "outcomes", "longest_s", "coverage"):
        record_property(name, json.dumps(result[name]))
    assert "crash" not in result, result["crash"]["error"]
    assert sum(result["outcomes"].values()) == INPUTS
    assert result["coverage"]["percent"] >= 95, result["coverage"]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_inputs_that_are_guided_by_coverage(
    target: Target, tmp_path: Path, record_property
) -> None:
    """By atheris, where it can be installed: Linux on x86-64."""
    pytest.importorskip("atheris", reason="atheris isn't installed: it has no build for here")
    seed = int(os.environ.get("WEIGHTWIRE_SEED", "1")) or 1  # libFuzzer takes 0 for none
    print(f"seed {seed}")
    run = subprocess.run(
        [
            *(sys.executable, str(HERE / "fuzz_atheris.py"), target.name, str(GUIDED_SECONDS)),
            *(str(seed), str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (count,) = re.findall(r"number_of_executed_units: (\d+)", run.stderr)
    record_property("guided", count)
    assert int(count) > 1000


def test_a_name_with_a_number_of_thousands_of_digits_is_no_version() -> None:
    """Found by fuzzing: Python refuses to read such a number, by an error of its own."""
    for name in ("v00000042-i1-a" + "3" * 5000, f"v{'4' * 5000}-i1-a1"):
        assert manifest.version_policy(name) is None
        assert manifest.leftover_incarnation(f".staging-{'0' * 12}-{name}", "s") is None

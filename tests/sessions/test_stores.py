"""Every store that comes with weightwire keeps the kit's promises, and broken ones don't."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROMISES = 46


def prove(*arguments: str, site: Path | None = None, code: int = 0) -> dict:
    """One command, as the author of a scheme gives it."""
    done = subprocess.run(
        [Path(sys.executable).parent / "weightwire", "conformance", "--json", *arguments],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **({"PYTHONPATH": str(site)} if site else {})},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_the_built_in_stores_keep_every_promise(tmp_path, redis_server):
    redis_server.command("FLUSHALL")
    stores = (f"file://{tmp_path}", "tcp://127.0.0.1:0", f"redis://{redis_server.address}")
    results = prove(*(f"--store={url}" for url in stores))
    assert results["counts"] == {"passed": 3 * PROMISES, "FAILED": 0}
    assert sorted(results["stores"]) == sorted(stores)
    left = [key.decode().rpartition(":")[2] for key in redis_server.command("KEYS", "*")]
    assert not [name for name in left if "/" in name]  # what is left of each: who it was


CULPRITS = {
    "caches": "it-behaves-as-a-map-whatever-the-order",
    "never-absent": "a-value-is-read-back-and-an-absent-one-is-none",
    "empty-is-absent": "values-are-any-bytes-of-any-size[True]",
    "text": "values-are-any-bytes-of-any-size[True]",
    "keeps-the-first": "what-is-written-is-replaced-whether-durable-or-not",
    "drops-leases": "values-are-any-bytes-of-any-size[False]",
    "cuts": "values-are-any-bytes-of-any-size[False]",
    "looks-then-creates": "threads-share-a-store",
    "creates-over": "creating-what-is-there-changes-nothing",
    "equal-is-mine": "creating-what-is-there-changes-nothing",
    "deletes-below": "deleting-takes-a-record-and-no-more",
    "never-deletes": "deleting-takes-a-record-and-no-more",
    "lists-neighbours": "children-are-the-next-components-sorted",
    "lists-100": "thousands-of-records-are-listed",
    "unsorted": "thousands-of-records-are-listed",
    "deletes-neighbours": "a-prefix-of-a-name-is-not-its-parent",
    "leaves-the-top": "a-tree-is-deleted-without-its-neighbours",
    "forgets": "records-stay-when-members-leave",
    "one-for-all": "sessions-of-other-names-are-others",
}
"""By fault, a promise that it breaks."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The broken stores, installed."""
    site = tmp_path / "site"
    about = site / "broken_stores-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-stores\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[weightwire]\nbroken = broken_stores\n")
    (site / "broken_stores.py").write_text((HERE / "broken" / "broken_stores.py").read_text())
    return site


AMONG_PROCESSES = {
    "caches": "what-is-written-is-seen-by-others-at-once[True]",
    "tears": "a-reader-never-sees-half-a-value",
    "looks-then-creates": "of-many-processes-exactly-one-creates-each-key",
    "cuts": "blobs-cross-processes-in-parts",
}


@pytest.mark.parametrize(
    "culprits", [CULPRITS, pytest.param(AMONG_PROCESSES, marks=pytest.mark.soak)]
)
def test_a_broken_store_is_caught_by_the_promise_that_it_breaks(tmp_path, site, culprits):
    """One run over all of them, of those promises alone."""
    names = {promise.partition("[")[0].replace("-", "_") for promise in culprits.values()}
    urls = {fault: f"broken://{tmp_path}/{fault}" for fault in ("none", *culprits)}
    stores = (f"--store={url}" for url in urls.values())
    results = prove(*stores, "-k", " or ".join(names), site=site, code=1)["stores"]
    assert {found["outcome"] for found in results[urls["none"]].values()} == {"passed"}
    missed = {
        fault: promise
        for fault, promise in culprits.items()
        if results[urls[fault]][promise]["outcome"] != "FAILED"
    }
    assert not missed


def test_what_cannot_be_proven_is_named():
    for arguments, message in (
        (["-k", "x"], "name backends, or stores by --store URL"),
        (["memory", "--store", "file:///tmp"], "name backends, or stores by --store URL"),
        (["--store", "pigeon://x"], "no session scheme 'pigeon' is installed"),
        (["--store", "/tmp"], "is no URL"),
    ):
        done = subprocess.run(
            [Path(sys.executable).parent / "weightwire", "conformance", *arguments],
            capture_output=True,
            text=True,
        )
        assert done.returncode in (1, 2), (arguments, done.stdout, done.stderr)
        assert message in done.stderr + done.stdout

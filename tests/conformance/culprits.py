"""Which broken backend each scenario is shown to catch, and why it is red."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
BROKEN = HERE / "broken"

# Installed, but not proofs of a scenario.
OTHERS = {"cant-run", "probes-for-ever", "older-contract", "plain-model"}

SILENT = "isn't version|isn't what was sent"
LEFT = "left behind"

RED: dict[str, tuple[str, str]] = {
    # culprit: the scenario that must catch it, and what its reason must say
    "acknowledges-early": (
        "published-bytes-survive-their-sender",
        "is gone|reused the slot|no announcement",
    ),
    "chokes-on-empty": ("empty-tensors-arrive", "IndexError"),
    "counts-to-eight": ("versions-in-a-row-arrive-each-with-its-own-values[20]", "isn't version 9"),
    "declares-equality-away": ("every-dtype-arrives-bit-for-bit", "can't be refused"),
    "drops-a-tensor": ("good-bytes-pass-every-level-of-verification[off]", "isn't version 1"),
    "drops-from-files": ("a-version-sent-to-nobody-is-read-later", SILENT),
    "fails-to-close": ("a-target-keeps-its-addresses", "close.. raised"),
    "files-unfit-after-abort": (
        "a-receiver-that-fails-part-way-says-so-and-recovers[committing]",
        "state that it doesn't know",
    ),
    "fills-one-rank": (
        "replicated-trainers-reach-replicas-of-any-size[1-to-2]",
        "isn't what was sent",
    ),
    "forges-seals": ("a-bit-flipped-under-way-is-found[in-place]", "should have failed"),
    "forgets-its-plan": ("another-grouping-is-planned-again", "planned already"),
    "gives-up-with-the-lost": (
        "the-others-go-on-without-a-lost-receiver[fetching]",
        "broke the connection",
    ),
    "hangs": ("version-numbers-may-skip", "hangs: no answer"),
    "hangs-when-closed": ("closing-ends-a-call-that-waits-for-an-offer", "hangs: no answer"),
    "sends-a-version-once": (
        "a-pool-is-updated-one-by-one[one-trainer-rank]",
        "went out already",
    ),
    "needs-the-whole-roster": (
        "a-receiver-that-isnt-ready-may-fall-behind",
        "not everybody is here",
    ),
    "has-one-slot": ("overlap-changes-nothing-but-time[two-slots]", "there is one slot"),
    "holds-on-to-the-lost": (
        "the-others-go-on-without-a-lost-receiver[fetching]",
        "no credit for group",
    ),
    "ignores-a-lost-receiver": ("a-killed-receiver-is-missed[fetching]", "hangs: no answer"),
    "ignores-a-lost-sender": ("a-killed-sender-is-missed[sending]", "hangs: no answer"),
    "keeps-its-own-time": ("a-stalled-sender-doesnt-hold-its-receivers", "with a deadline of"),
    "keeps-its-roster": ("a-receiver-comes-back[closed]", "roster isn't what it was"),
    "keeps-its-pointers": ("zero-copy-changes-nothing-but-the-copies[on]", SILENT),
    "keeps-what-it-posted": (
        "a-receiver-that-fails-part-way-says-so-and-recovers[a-group-ahead]",
        f"{SILENT}|no credit for group",  # what is handed out again is never fetched
    ),
    "launders-floats": ("nan-payloads-negative-zeros-and-subnormals-survive", "isn't version 1"),
    "leaks-a-descriptor": ("a-few-versions-leave-descriptors-flat", "descriptors of .* grew"),
    "leaks-memory": ("fifty-versions-leave-everything-flat", "resident of .* grew"),
    "leaves-a-file": ("opening-and-closing-leaves-nothing", "left behind: file"),
    "leaves-a-port": ("a-session-over-tcp-moves-the-same-bytes", "port .* listened on"),
    "leaves-a-process": ("bytes-that-land-in-staging-memory-arrive", "child process"),
    "leaves-a-thread": ("closing-in-the-midst-of-a-version-leaves-nothing", "thread 'stays'"),
    "leaves-shared-memory": ("versions-must-rise", "left behind: file /dev/shm"),
    "loses-scalars": ("zero-dim-tensors-arrive", SILENT),
    "mistakes-names": ("odd-names-arrive", "UnicodeEncodeError"),
    "mistakes-shards": ("uneven-shards-arrive-whole[rows-of-2-to-one-rank]", SILENT),
    "mutates-after-commit": ("a-version-stays-until-the-next-one-begins", "isn't version 1"),
    "needs-a-directory": ("a-session-over-tcp-moves-the-same-bytes", "no directory"),
    "one-behind": ("a-late-receiver-catches-up-at-once", "isn't version 3"),
    "over-declares": ("a-version-sent-to-nobody-is-read-later", "TransferTimeout|no "),
    "reads-one-owner": (
        "replicated-trainers-reach-replicas-of-any-size[2-to-1]",
        "isn't what was sent",
    ),
    "receives-early": ("good-bytes-pass-every-level-of-verification[off]", "isn't version"),
    "remembers-the-first-sender": ("a-sender-starts-again[closed]", "."),
    "sender-unfit-after-abort": (
        "an-aborted-version-is-sent-again-as-the-next-attempt",
        "state that it doesn't know",
    ),
    "serves-one-receiver": ("every-receiver-gets-every-version[2]", "can't be refused"),
    "serves-stale": ("versions-in-a-row-arrive-each-with-its-own-values[6]", "isn't version 2"),
    "speaks-its-own-errors": ("a-killed-sender-is-missed[beginning]", "not translated"),
    "swaps-two": ("tensors-of-one-shape-arent-confused", "isn't version 1"),
    "takes-any-option": ("unknown-options-are-refused", "should have failed"),
    "thins-floats": ("casts-on-the-wire-are-torchs-own", SILENT),
    "truncates": ("a-tensor-larger-than-its-group-arrives[3-MiB]", SILENT),
    "under-declares": ("capabilities-agree-with-each-other", "are served|needs nobody"),
    "unfit-after-abort": (
        "a-receiver-that-fails-part-way-says-so-and-recovers[fetching]",
        "state that it doesn't know",
    ),
    "widens-integers": ("integer-buffers-and-flags-arrive", SILENT),
}

ALSO: dict[str, str] = {
    # scenarios that no line above names: a culprit that they catch
    "a-bit-flipped-on-arrival-is-found": "unfit-after-abort",
    "a-late-receiver-catches-up-through-another-backend": "keeps-its-roster",
    "a-full-pool-takes-another-when-one-leaves": "keeps-its-roster",
    "a-killed-receiver-is-missed": "ignores-a-lost-receiver",
    "a-killed-inference-rank-ends-the-version-for-its-replica": "ignores-a-lost-receiver",
    "a-killed-trainer-rank-ends-the-version-for-everybody": "ignores-a-lost-sender",
    "a-late-receiver-catches-up-at-once": "one-behind",
    "a-receive-without-an-offer-ends-in-time": "hangs",
    "a-receiver-joins-between-versions": "keeps-its-roster",
    "a-receiver-leaves-and-the-others-go-on": "serves-one-receiver",
    "a-receiver-that-is-behind-takes-the-newest": "one-behind",
    "a-resumed-sender-voids-what-came-after": "drops-from-files",
    "a-slow-receiver-gets-whole-versions": "acknowledges-early",
    "a-stalled-receiver-doesnt-hold-its-sender": "keeps-its-own-time",
    "a-version-that-ends-as-it-begins-is-given-up-on-both-sides": "unfit-after-abort",
    "a-wrong-seal-is-found": "forges-seals",
    "an-interrupted-receiver-tells-its-sender": "unfit-after-abort",
    "an-interrupted-sender-tells-its-receivers": "unfit-after-abort",
    "closing-ends-a-call-that-waits-for-bytes": "ignores-a-lost-sender",
    "digests-are-those-of-every-other-backend": "launders-floats",
    "finished-versions-outlive-their-sender": "drops-from-files",
    "one-receivers-failure-doesnt-harm-the-others": "unfit-after-abort",
    "the-source-may-change-once-send-has-returned": "acknowledges-early",
    "thousands-of-tiny-tensors-arrive": "drops-a-tensor",
}
ENGINES = {"a-vllm-engine-follows-by-its-traced-loader"}
"""Scenarios that start an engine, which takes a minute: not in the table of all culprits."""

SLOW = {
    "hangs",
    "hangs-when-closed",
    "holds-on-to-the-lost",
    "ignores-a-lost-receiver",
    "ignores-a-lost-sender",
    "keeps-what-it-posted",
    "over-declares",
    "remembers-the-first-sender",
}
"""Found out only when a call's time is up: nobody waits for them as long as for the others."""

ANY = "drops-a-tensor"
"""Catches what compares bytes at all; the rest of the scenarios do."""


def base(name: str) -> str:
    """A scenario's name without its case."""
    return name.partition("[")[0]


def proof_of(scenario: str) -> set[str]:
    """Culprits that a scenario is known to catch, by its name with its case."""
    named = {culprit for culprit, (name, _) in RED.items() if name == scenario}
    if named or any(base(name) == base(scenario) for name, _ in RED.values()):
        return named
    return {ALSO.get(base(scenario), ANY)}


def installed() -> dict[str, str]:
    """Entry points by culprit name, read off the sources."""
    found = {}
    for module in sorted((BROKEN / "weightwire_broken").glob("[a-z]*.py")):
        for name in re.findall(r"^@broken\nclass (\w+)", module.read_text(), re.MULTILINE):
            words = "".join(f"-{c.lower()}" if c.isupper() else c for c in name).removeprefix("-")
            found[words] = f"weightwire_broken.{module.stem}:{name}.plugin"
    return found


def install(site: Path) -> str:
    """Make each a distribution of its own in ``site``; returns the workers' PYTHONPATH."""
    for name, entry in installed().items():
        info = site / f"weightwire_{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: weightwire-{name}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(f"[weightwire]\n{name} = {entry}\n")
    return f"{site}:{BROKEN}"

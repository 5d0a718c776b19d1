"""Which broken backend each scenario is shown to catch, and why it is red."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
BROKEN = HERE / "broken"

# Installed, but not proofs of a scenario.
OTHERS = {
    "cant-run",
    "holds-the-interpreter",
    "older-contract",
    "plain-model",
    "probes-for-ever",
}

HURRIED = "is gone|gave up|reused the slot|no announcement"
UNFIT = "state that it doesn't know"
UNNOTICED = "receive should have failed"
SILENT = "isn't version|isn't what was sent"
STALE = "with the seal of another version"
LOST = "hangs: no answer"


class Proof(NamedTuple):
    """A scenario fails over a culprit, and says why.

    Attributes:
        scenario: with its case.
        culprit: name of a broken backend.
        reason: what the failure must say, as a regular expression.
        soak: it takes long: not in every run of the tests.
    """

    scenario: str
    culprit: str
    reason: str
    soak: bool = False


def _proofs(scenario: str, *found: tuple[str, str]) -> list[Proof]:
    return [Proof(scenario, culprit, reason) for culprit, reason in found]


PROOFS = [
    proof
    for proofs in (
        # tensors
        _proofs("every-dtype-arrives-bit-for-bit", ("declares-equality-away", "can't be refused")),
        _proofs(
            "nan-payloads-negative-zeros-and-subnormals-survive",
            ("launders-floats", "isn't version 1"),
        ),
        _proofs("zero-dim-tensors-arrive", ("loses-scalars", SILENT)),
        _proofs("empty-tensors-arrive", ("chokes-on-empty", "IndexError")),
        _proofs("integer-buffers-and-flags-arrive", ("widens-integers", SILENT)),
        _proofs(
            "noncontiguous-sources-arrive-as-they-read",
            ("copies-as-it-lies", "'transposed' isn't version 1"),
        ),
        _proofs(
            "tied-tensors-arrive-under-both-names", ("unties", "doesn't send 'lm_head.weight'")
        ),
        _proofs("odd-names-arrive", ("mistakes-names", "UnicodeEncodeError")),
        _proofs("tensors-of-one-shape-arent-confused", ("swaps-two", "isn't version 1")),
        _proofs(
            "tensors-of-one-shape-arent-confused-with-a-group-ahead",
            ("swaps-with-a-group-ahead", "isn't version 1"),
        ),
        _proofs("thousands-of-tiny-tensors-arrive[300]", ("counts-in-a-byte", SILENT)),
        _proofs("a-tensor-larger-than-its-group-arrives[3-MiB]", ("truncates", SILENT)),
        [Proof("a-tensor-over-two-gibibytes-arrives", "wraps-at-two-gibibytes", SILENT, soak=True)],
        _proofs("casts-on-the-wire-are-torchs-own", ("thins-floats", SILENT)),
        _proofs("casts-to-half-precision-are-torchs-own", ("thins-halves", SILENT)),
        _proofs(
            "good-bytes-pass-every-level-of-verification[full]",
            ("spoils-seals", "isn't what was sent .digest"),
        ),
        _proofs(
            "good-bytes-pass-every-level-of-verification[off]",
            ("drops-a-tensor", "isn't version 1"),
            ("receives-early", "isn't version"),
        ),
        _proofs(
            "replicated-trainers-reach-replicas-of-any-size[1-to-1]",
            ("lies-throughout", "isn't version 1"),
        ),
        _proofs(
            "replicated-trainers-reach-replicas-of-any-size[2-to-1]",
            ("reads-one-owner", "isn't what was sent"),
        ),
        _proofs(
            "replicated-trainers-reach-replicas-of-any-size[1-to-2]",
            ("fills-one-rank", "isn't what was sent"),
        ),
        _proofs("overlap-changes-nothing-but-time[one-slot]", ("acknowledges-early", HURRIED)),
        _proofs(
            "overlap-changes-nothing-but-time[two-slots]", ("has-one-slot", "there is one slot")
        ),
        _proofs("zero-copy-changes-nothing-but-the-copies[on]", ("keeps-its-pointers", SILENT)),
        _proofs(
            "bytes-that-land-in-staging-memory-arrive", ("takes-all-for-landed", "isn't version 1")
        ),
        _proofs(
            "a-target-keeps-its-addresses", ("moves-its-target", "a tensor of the target moved")
        ),
        _proofs(
            "a-session-over-tcp-moves-the-same-bytes",
            ("needs-a-directory", "no directory"),
            ("leaves-a-port", "port .* listened on"),
        ),
        # placements, views
        _proofs("uneven-shards-arrive-whole[rows-of-2-to-one-rank]", ("mistakes-shards", SILENT)),
        _proofs("fused-experts-arrive-one-by-one[one-trainer-rank]", ("takes-one-expert", SILENT)),
        _proofs(
            "fused-experts-reach-every-rank-of-a-replica", ("fills-one-rank", "isn't what was sent")
        ),
        [
            Proof(
                "a-vllm-engine-follows-by-its-traced-loader",
                "lies-throughout",
                "different: ",
                soak=True,
            )
        ],
        # versions
        _proofs(
            "versions-in-a-row-arrive-each-with-its-own-values[6]",
            ("serves-stale", STALE),
        ),
        _proofs(
            "versions-in-a-row-arrive-each-with-its-own-values[20]",
            ("counts-to-eight", STALE),
        ),
        _proofs("version-numbers-may-skip", ("expects-the-next", "version 7 doesn't follow")),
        _proofs("versions-must-rise", ("takes-any-order", "TransferTimeout")),
        _proofs(
            "a-version-is-applied-once", ("offers-again", "an applied version is offered again")
        ),
        _proofs("a-receiver-that-is-behind-takes-the-newest", ("one-behind", STALE)),
        _proofs("the-source-may-change-once-send-has-returned", ("acknowledges-early", HURRIED)),
        _proofs(
            "a-version-stays-until-the-next-one-begins", ("mutates-after-commit", "isn't version 1")
        ),
        _proofs(
            "a-version-counts-only-when-it-is-committed",
            ("claims-too-early", "that isn't committed is claimed"),
        ),
        _proofs(
            "an-aborted-version-is-sent-again-as-the-next-attempt",
            ("sender-unfit-after-abort", UNFIT),
        ),
        _proofs(
            "tensors-that-moved-are-read-where-they-are", ("reads-where-it-read-first", SILENT)
        ),
        _proofs("another-grouping-is-planned-again", ("forgets-its-plan", "planned already")),
        _proofs(
            "released-buffers-come-again-with-the-next-version[one-rank-each]",
            ("sizes-a-table-once", "sender rank 0 sent can't be read"),
        ),
        _proofs(
            "digests-are-those-of-every-other-backend",
            ("mixes-otherwise", "version 1: [0-9a-f]{16} isn't [0-9a-f]{16}"),
        ),
        # membership
        _proofs(
            "every-receiver-gets-every-version[2]", ("serves-one-receiver", "can't be refused")
        ),
        _proofs("a-receiver-joins-between-versions", ("keeps-its-roster", "isn't what it was")),
        _proofs(
            "a-receiver-leaves-and-the-others-go-on",
            ("misses-who-left", "'leaves' doesn't answer any more"),
        ),
        _proofs("a-receiver-comes-back[closed]", ("keeps-its-roster", "roster isn't what it was")),
        _proofs(
            "a-version-sent-to-nobody-is-read-later",
            ("over-declares", "no offer from the sender"),
            ("drops-from-files", SILENT),
        ),
        _proofs("a-late-receiver-catches-up-at-once", ("one-behind", STALE)),
        _proofs("finished-versions-outlive-their-sender", ("needs-its-sender", "has ended")),
        _proofs(
            "a-resumed-sender-voids-what-came-after",
            ("takes-the-void", "version 2 is served, and is void"),
        ),
        _proofs("a-slow-receiver-gets-whole-versions", ("acknowledges-early", HURRIED)),
        _proofs("published-bytes-survive-their-sender", ("acknowledges-early", HURRIED)),
        _proofs(
            "a-sender-starts-again[closed]",
            ("remembers-the-first-sender", "no announcement of group 0"),
        ),
        # worlds
        _proofs(
            "replicas-of-unequal-size-get-every-version",
            ("wants-equal-replicas", "different numbers of ranks"),
        ),
        _proofs(
            "a-roster-that-changes-with-every-version", ("keeps-its-roster", "isn't what it was")
        ),
        _proofs("a-killed-trainer-rank-holds-nobody[1]", ("ignores-a-lost-sender", LOST)),
        _proofs("a-killed-inference-rank-holds-nobody[1]", ("ignores-a-lost-receiver", LOST)),
        # failures
        _proofs(
            "a-receiver-that-fails-part-way-says-so-and-recovers[fetching]",
            ("unfit-after-abort", UNFIT),
            ("writes-late", "isn't version 3"),
        ),
        _proofs(
            "a-receiver-that-fails-part-way-says-so-and-recovers[committing]",
            ("files-unfit-after-abort", UNFIT),
        ),
        _proofs(
            "a-receiver-that-fails-part-way-says-so-and-recovers[a-group-ahead]",
            # What is handed out again is never fetched.
            ("keeps-what-it-posted", f"{STALE}|no credit for group"),
        ),
        _proofs(
            "a-version-that-ends-as-it-begins-is-given-up-on-both-sides[in-begin]",
            ("unfit-after-abort", UNFIT),
        ),
        _proofs("one-receivers-failure-doesnt-harm-the-others", ("unfit-after-abort", UNFIT)),
        _proofs("a-killed-receiver-is-missed[fetching]", ("ignores-a-lost-receiver", LOST)),
        _proofs("a-killed-sender-is-missed[sending]", ("ignores-a-lost-sender", LOST)),
        _proofs(
            "a-killed-sender-is-missed[beginning]", ("speaks-its-own-errors", "not translated")
        ),
        _proofs(
            "a-killed-inference-rank-ends-the-version-for-its-replica[fetching-rank-1]",
            ("ignores-a-lost-receiver", LOST),
        ),
        _proofs(
            "a-killed-trainer-rank-ends-the-version-for-everybody[sending-rank-1]",
            ("ignores-a-lost-sender", LOST),
        ),
        _proofs(
            "the-others-go-on-without-a-lost-receiver[fetching]",
            ("holds-on-to-the-lost", "no credit for group"),
            ("gives-up-with-the-lost", "broke the connection"),
        ),
        _proofs(
            "the-others-go-on-without-a-receiver-that-stands-still[fetching]",
            ("holds-on-to-the-lost", "no credit for group"),
            ("loses-by-prefix", f"{HURRIED}|from receiver 'r-10'"),
        ),
        _proofs(
            "a-receiver-that-dies-before-it-says-so-hasnt-applied-the-version[fail]",
            ("takes-sent-for-applied", "send should have failed"),
        ),
        _proofs("an-interrupted-receiver-tells-its-sender", ("unfit-after-abort", UNFIT)),
        _proofs("an-interrupted-sender-tells-its-receivers", ("sender-unfit-after-abort", UNFIT)),
        # deadlines
        _proofs(
            "a-receive-without-an-offer-ends-in-time", ("outlasts-deadlines", "with a deadline of")
        ),
        _proofs(
            "a-send-that-nobody-answers-ends-in-time", ("outlasts-deadlines", "with a deadline of")
        ),
        _proofs(
            "a-stalled-sender-doesnt-hold-its-receivers",
            ("keeps-its-own-time", "with a deadline of"),
        ),
        _proofs(
            "a-stalled-receiver-doesnt-hold-its-sender",
            ("keeps-its-own-time", "with a deadline of"),
        ),
        _proofs("closing-ends-a-call-that-waits-for-an-offer", ("hangs-when-closed", LOST)),
        _proofs(
            "closing-ends-a-call-that-waits-for-bytes",
            ("ignores-a-lost-sender", LOST),
            ("announces-with-the-next", "must be fetchable without another call on the sender"),
        ),
        # tables
        _proofs(
            "a-table-that-differs-in-something-is-refused[a-name]",
            ("takes-any-table", "receive should have failed"),
        ),
        _proofs(
            "a-table-that-isnt-the-offered-one-is-refused",
            ("takes-any-blob", "came without a digest"),
        ),
        _proofs(
            "names-that-leave-their-directory-are-refused",
            ("takes-any-name", "send should have failed"),
        ),
        # corruption
        _proofs("a-bit-flipped-under-way-is-found[in-place]", ("forges-seals", UNNOTICED)),
        _proofs("a-bit-flipped-on-arrival-is-found[in-place]", ("trusts-every-byte", UNNOTICED)),
        _proofs("a-wrong-seal-is-found", ("forges-seals", UNNOTICED)),
        # elasticity
        _proofs(
            "joins-and-leaves-leave-the-others-flat[6]",
            ("keeps-every-reader", "descriptors of the sender rank 0 grew"),
        ),
        _proofs(
            "a-receiver-that-fails-again-and-again-is-served-each-time",
            ("leaks-when-it-aborts", "descriptors of replica rank 0 grew"),
        ),
        _proofs("reports-say-which-way-the-bytes-took", ("hides-its-way", "the path is")),
        # rollouts
        _proofs(
            "a-pool-is-updated-one-by-one[one-trainer-rank]",
            ("sends-a-version-once", "went out already"),
        ),
        _proofs(
            "a-receiver-that-isnt-ready-may-fall-behind",
            ("needs-the-whole-roster", "not everybody is here"),
        ),
        _proofs(
            "a-full-pool-takes-another-when-one-leaves", ("keeps-its-roster", "isn't what it was")
        ),
        _proofs(
            "a-late-receiver-catches-up-through-another-backend[one-rank-each]",
            ("keeps-its-roster", "isn't what it was"),
        ),
        _proofs(
            "a-late-receiver-is-served-from-a-snapshot[one-rank-each]",
            ("keeps-its-first-snapshot", "isn't version 2"),
        ),
        # flat
        [
            Proof(
                "fifty-versions-leave-everything-flat", "leaks-memory", "resident of .* grew", True
            )
        ],
        _proofs(
            "a-few-versions-leave-descriptors-flat",
            ("leaks-a-descriptor", "descriptors of .* grew"),
        ),
        _proofs(
            "opening-and-closing-leaves-nothing",
            ("leaves-a-file", "left behind: file"),
            ("leaves-shared-memory", "left behind: file /dev/shm"),
            ("leaves-a-process", "children of the sender rank 0 grew"),
            ("fails-to-close", "can't close"),
        ),
        _proofs(
            "closing-in-the-midst-of-a-version-leaves-nothing",
            ("leaves-a-thread", "thread 'stays'"),
        ),
        # declaration
        _proofs(
            "capabilities-agree-with-each-other",
            ("under-declares", "are served|needs nobody"),
            ("hangs", LOST),
        ),
        _proofs("unknown-options-are-refused", ("takes-any-option", "should have failed")),
    )
    for proof in proofs
]
"""In the kit's order; every scenario's smallest case is among them."""

ENGINES = {"a-vllm-engine-follows-by-its-traced-loader"}
"""Start an engine, which takes a minute; absent where vLLM isn't installed."""

SLOW = {
    "acknowledges-early",
    "announces-with-the-next",
    "hangs",
    "hangs-when-closed",
    "holds-on-to-the-lost",
    "holds-the-interpreter",
    "ignores-a-lost-receiver",
    "ignores-a-lost-sender",
    "keeps-what-it-posted",
    "loses-by-prefix",
    "over-declares",
    "remembers-the-first-sender",
    "takes-any-blob",
    "takes-any-order",
}
"""Found out only when a call's time is up: nobody waits for them as long as for the others."""

CULPRITS = sorted({proof.culprit for proof in PROOFS})
LARGE = {"a-tensor-over-two-gibibytes-arrives"}
"""Needs gigabytes."""
EXPENSIVE = ENGINES | LARGE
"""Run over the reference backend and their own culprits only."""


def base(name: str) -> str:
    """A scenario's name without its case."""
    return name.partition("[")[0]


def proofs_of(scenario: str) -> dict[str, str]:
    """By culprit that a scenario, with its case, is known to catch: what it must say."""
    return {proof.culprit: proof.reason for proof in PROOFS if proof.scenario == scenario}


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

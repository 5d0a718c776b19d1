"""Every decoder of what comes from outside: what it is given, and where its code is."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType

import msgspec
import numpy as np

import weightwire_filesystem.announcement
import weightwire_filesystem.checksums
import weightwire_filesystem.layout
import weightwire_filesystem.manifest
import weightwire_nccl.pieces
import weightwire_nccl.records
import weightwire_nixl.delivery
import weightwire_nixl.wire
import weightwire_redis.store
import weightwire_redis.values
from weightwire import parts, table, views
from weightwire.contract import Offer, Policy, Seal, decode_message
from weightwire.errors import SessionError, TransferError
from weightwire.fingerprint import Fingerprint
from weightwire.memory import wire as memory_wire
from weightwire.session import keys, marks, records, tcp
from weightwire.session.records import Codec
from weightwire.table import Group, Part, Region, Shard, TensorEntry, TensorTable
from weightwire_nixl.route import Endpoint

__all__ = ["TARGETS", "Target"]

KEY = "senders/000001/lease"


@dataclass(frozen=True)
class Target:
    """A decoder.

    Attributes:
        seeds: valid inputs.
        run: decodes one, and uses what it says as far as the decoder vouches for it.
        code: the functions of which the coverage is taken.
        large: bytes of an input that is too large; decoded once.
    """

    name: str
    seeds: list[bytes]
    run: Callable[[bytes], object]
    code: tuple[FunctionType, ...] = field(default=())
    large: int = 0


# ---------------------------------------------------------------------- record


def _codec(token: str | None) -> Codec:
    codec = Codec(token)
    codec.session_id = "0123456789abcdef"
    return codec


POLICY = Policy(1, 42, 3)
BODIES: tuple[records.Record, ...] = (
    records.SessionRecord("ab" * 8, 1.5),
    records.MemberRecord(
        "sender", 1, 4, "memory", 10.0, "host", 7, "boot/pid/1", 2.5, "n" * 16, resume_from=3
    ),
    records.Closed(),
    records.Lease(5),
    records.Status("tainted", POLICY, records.ErrorInfo("PeerLost", "gone: restart it"), "ff"),
    records.OfferRecord(
        Offer(POLICY, "d" * 32, ("one", "two"), (b"x", b"yy"), "sample"),
        "memory",
        9,
        "applied",
        1.0,
    ),
    records.Ready((b"a", b"bb"), records.ErrorInfo("TableMismatch", "w")),
    records.Started({"one": 1, "two": 2}),
    records.Applied(3, 0.5, "ff", Fingerprint("aa", "bb"), None, True, {"fetch": 0.25}),
    records.Outcome(records.ErrorInfo("ConfigError", "x"), 1.0, 2.0, False, {"stage": 0.5}),
    records.Reading(POLICY),
    records.Retired(),
    records.RankReport(b"payload", records.ErrorInfo("X", "y")),
    records.RankReports((records.RankReport(b"1"), records.RankReport(b"2"))),
)
PLAIN, SIGNED, FOREIGN = _codec(None), _codec("secret"), _codec("another")
OTHERS = Codec(None)  # of another session
KINDS = {type(body).__name__: type(body) for body in BODIES}


def run_record(payload: bytes) -> None:
    """Opened as what it says that it is, by one with the token and by one without."""
    with contextlib.suppress(SessionError):
        SIGNED.open_dated(KEY, payload, records.Lease)
    reader = SIGNED if b'"mac":""' not in payload and len(payload) % 8 else PLAIN
    name = next((name for name in KINDS if f'"kind":"{name}"'.encode() in payload), "Lease")
    reader.open_dated(KEY, payload, KINDS[name])


# ---------------------------------------------------------------------- table


def _entry(
    name: str, shape: tuple[int, ...], dtype: str = "float32", blocks: int = 1
) -> TensorEntry:
    return TensorEntry(name, shape, dtype, (Shard(0, (0,) * len(shape), shape),), blocks)


def _tables() -> list[TensorTable]:
    operand, step = views.Operand, views.Step
    sharded = TensorEntry(
        "model.layers.0.w", (8, 4), "bfloat16", (Shard(0, (0, 0), (4, 4)), Shard(1, (4, 0), (4, 4)))
    )
    return [
        TensorTable(2, (sharded, _entry("b", (), "int64")), (Group((0,)), Group((1,))), {"c": "b"}),
        TensorTable(
            1,
            (_entry("a", (4, 6)), _entry("e", (0, 3)), _entry("k", (4, 8), blocks=2)),
            (
                Group((0, 1), {0: Part((0, 0), (2, 6))}),
                Group((0, 2), {0: Part((2, 0), (2, 6))}),
            ),
            {},
        ),
        TensorTable(
            1,
            (_entry("fused", (4, 6)), _entry("other", (4, 6))),
            (Group((0, 1)),),
            {},
            (
                views.View("q", (operand("fused", (step("slice", (0, 0, 2, 1)),)),)),
                views.View(
                    "t",
                    (operand("fused"), operand("other")),
                    0,
                    (step("permute", (1, 0)), step("reshape", (48,)), step("select", (0, 3))),
                ),
            ),
        ),
    ]


def run_table(payload: bytes) -> None:
    found = TensorTable.decode(payload)
    found.digest()
    found.checkpoint()


# ---------------------------------------------------------------------- plan

PLANNED = _tables()[0]
REGIONS = [Region(0, (0, 0), (4, 4)), Region(0, (4, 1), (2, 2)), Region(1, (), ())]


def run_regions(payload: bytes) -> None:
    weightwire_nccl.pieces.decode_regions(payload, PLANNED, "receiver 'one'")


def _nixl_reader() -> weightwire_nixl.wire.ReaderInfo:
    return msgspec.convert(
        {
            "session": "s",
            "agent": "a",
            "metadata": b"m",
            "process": "p",
            "endpoint": msgspec.to_builtins(Endpoint("boot", 0, True, False, False, "")),
            "direction": "push",
            "unsafe_pull": False,
            "arena": {
                "address": 0,
                "slot_nbytes": 4096,
                "slots": 2,
                "device": "cpu",
                "device_id": 0,
            },
            "reads": {0: [0, 1]},
        },
        weightwire_nixl.wire.ReaderInfo,
    )


def run_nixl_plan(payload: bytes) -> None:
    """What an owner that pushes is told to write: each 4 integers, in parts of any size."""
    writes = weightwire_nixl.delivery.Writes(
        "receiver 'one'", NIXL_READER, None, None, {0: 4096, 1: 512}
    )
    count = 2 if len(payload) > 64 else 1
    half = len(payload) // 2 if count == 2 else len(payload)
    for part, rows in enumerate((payload[:half], payload[half:])[:count]):
        writes.add(weightwire_nixl.wire.PlanPart(POLICY, part, count, rows), frozenset({0, 1}))
    if writes.is_planned:
        writes.add(weightwire_nixl.wire.PlanPart(POLICY, 0, 1, b"late"), frozenset({0, 1}))


def run_memory(payload: bytes) -> None:
    kind = memory_wire.SenderInfo if b"headers" in payload else memory_wire.ReaderInfo
    found = decode_message(payload, kind, "receiver 'one'")
    memory_wire.session_path(found.path, "ab" * 8, "receiver 'one'")


def run_fetched(payload: bytes) -> None:
    found = parts.Fetched.decode(payload)
    parts.compare_parts(PLANNED, [found], 42)


FETCHED = [
    parts.Fetched(
        7,
        (
            parts.PartDigests(0, 0, (((0, 0), (4, 4), 5), ((4, 0), (4, 4), 6)), {0: 5, 1: 6}),
            parts.PartDigests(1, 1, (((), (), 9),), {0: 9}),
        ),
    ),
    parts.Fetched(7, (parts.PartDigests(0, 0, (((0, 0), (8, 2), 5),), {0: 5}),)),
    parts.Fetched(7, (parts.PartDigests(0, 0, (((0, 0), (8, 4), 5),), {0: 1, 1: 2}),) * 2),
]


# ---------------------------------------------------------------------- header and the like


def run_header(payload: bytes) -> None:
    size = weightwire_nccl.records.HEADER_BYTES
    header = weightwire_nccl.records.Header.decode(
        payload[:size].ljust(size, b"\0"), "sender rank 0"
    )
    header.difference(HEADER)


HEADER = weightwire_nccl.records.Header(POLICY, 2, 9, 4096, b"p" * 16, 77)
NCCL = weightwire_nccl.records
MEMBER = NCCL.Member("one", False, 0, "n", "ab" * 16)
NCCL_SAID = [
    NCCL.ReaderInfo(1, "n", "m", "", "ab" * 16, 1 << 20, "auto", "auto", "cuda:0", "gpu", ""),
    NCCL.Opening(POLICY, "", "e", 1, "t", "p2p", "gloo", "", 1 << 20, (MEMBER,)),
    NCCL.Hello(MEMBER, "o"),
    NCCL.Wait(3, (0, 1)),
]


def run_nccl(payload: bytes) -> None:
    """Decoded as each of what members say."""
    for kind in (NCCL.SenderInfo, NCCL.ReaderInfo, NCCL.Opening, NCCL.Hello, NCCL.Wait):
        with contextlib.suppress(TransferError):
            decode_message(payload, kind, "sender rank 0")


# ---------------------------------------------------------------------- notification


WIRE = weightwire_nixl.wire
MESSAGES = [
    WIRE.Announced(POLICY, 1, 0, 5, b"seal", WIRE.Live(b"\0" * 8, "cpu", 0, (b"m",))),
    WIRE.Announced(POLICY, 1, 0, 5, b"seal", None),
    WIRE.Credit(POLICY, 1, 5),
    WIRE.PlanPart(POLICY, 0, 1, b"\0" * 32),
    WIRE.Granted(POLICY, 1, 1, 4),
    WIRE.Written(POLICY, 1, 4, b"seal"),
    WIRE.Aborted(POLICY, True),
    WIRE.GaveUp(POLICY, False),
    WIRE.Over(POLICY),
    WIRE.Forgot(POLICY, "agent"),
    WIRE.Bye(POLICY),
]


def run_notification(payload: bytes) -> None:
    WIRE.readable(payload)
    WIRE.read_message(payload, "sender rank 0")


def run_nixl_info(payload: bytes) -> None:
    decode_message(payload, WIRE.ReaderInfo, "receiver 'one'")


# ---------------------------------------------------------------------- safetensors index

FILES = weightwire_filesystem.manifest
STORED = _tables()[1]
LAYOUT = weightwire_filesystem.layout.plan_layout(STORED, 1)
DIGEST = STORED.digest()


def _manifest() -> FILES.Manifest:
    count = weightwire_filesystem.checksums.chunk_count
    return FILES.Manifest(
        schema=FILES.SCHEMA,
        session="s",
        policy=POLICY,
        table_digest=DIGEST,
        files_per_rank=1,
        chunk_nbytes=4096,
        files=tuple(FILES.FileRecord(f.name, f.nbytes, f.owner) for f in LAYOUT.files),
        checksums={
            entry.name: "0f" * 8 * sum(count(piece.nbytes, 4096) for piece in pieces)
            for entry, pieces in zip(STORED.tensors, LAYOUT.pieces, strict=True)
        },
        seals={0: {0: Seal({0: 1}, 0), 1: Seal({0: 2}, 0)}},
        ties={},
    )


def run_index(payload: bytes) -> None:
    path = Path("weightwire.json")
    if b'"rank"' in payload[:200]:
        part = FILES.parse(payload, FILES.Part, path)
        FILES.check_part(part, 0, POLICY, DIGEST, LAYOUT)
        return
    manifest = FILES.parse(payload, FILES.Manifest, path)
    FILES.check_manifest(manifest, path, "s", POLICY, STORED, DIGEST)
    FILES.check_files(manifest, path, LAYOUT, STORED)
    for text in manifest.checksums.values():
        weightwire_filesystem.checksums.decode(text)


def _part() -> FILES.Part:
    manifest = _manifest()
    return FILES.Part(0, POLICY, DIGEST, manifest.files, manifest.checksums, manifest.seals[0])


def run_announcement(payload: bytes) -> None:
    weightwire_filesystem.announcement.Announcement.decode(payload, "sender rank 0")


def run_names(payload: bytes) -> None:
    """Names of files and of records, as directories and stores list them."""
    name = payload.decode("utf-8", "replace")
    FILES.version_policy(name)
    FILES.leftover_incarnation(name, "s")
    keys.is_component(name)
    keys.parse_policy(1, name)


# ---------------------------------------------------------------------- store values


def run_store_value(payload: bytes) -> None:
    """What redis and tcp keep at a key, with a record inside."""
    if not payload:
        with contextlib.suppress(SessionError):
            weightwire_redis.values.read_record("senders/1/lease", None)
    record = weightwire_redis.values.read_record("senders/1/lease", payload)
    if record is not None:
        PLAIN.open_dated(KEY, record, records.Lease)


def run_store_heads(payload: bytes) -> None:
    """A store's own words: identity, history, lists of names."""
    first, _, rest = payload.partition(b"|")
    weightwire_redis.values.read_identity(first)
    entry, mark, *names = [*rest.split(b"|"), b"", b""][: rest.count(b"|") + 2]
    weightwire_redis.store.names_of("redis://h/run", [names or None, [first]])
    known = weightwire_redis.values.read_write(entry, mark)
    weightwire_redis.values.read_write(known.entry.encode(), mark)
    weightwire_redis.store.follows(None, [], [])
    written = [[entry, [b"w", mark]]] if mark else []
    weightwire_redis.store.follows(known, written, [])
    weightwire_redis.store.follows(known._replace(number=known.number + 1), written, written)


def run_tcp_index(payload: bytes) -> None:
    tcp.keys_of(payload)


def _rows() -> bytes:
    rows = [(0, 0, 0, 64), (0, 64, 128, 64), (1, 0, 512, 512)]
    return np.array(rows, dtype="<u8").tobytes()


NIXL_READER = _nixl_reader()
PACK = msgspec.msgpack.encode
TARGETS = [
    Target(
        "record",
        [
            *(codec.seal(KEY, body) for codec in (PLAIN, SIGNED) for body in BODIES),
            *(codec.seal(KEY, records.Lease(1)) for codec in (FOREIGN, OTHERS)),
            PLAIN.seal(KEY, records.Lease(1)).replace(b'"schema":1', b'"schema":2'),
        ],
        run_record,
        (Codec.open_dated, Codec._authenticate),
        large=records.MAX_RECORD + 1,
    ),
    Target(
        "table",
        [
            *(table.encode() for table in _tables()),
            _tables()[2].encode().replace(b"float32", b"float16", 1),  # views of two dtypes
        ],
        run_table,
        (
            *(TensorTable.decode.__func__, TensorTable.validate, TensorTable._validate_groups),
            *(TensorTable._validate_views, table._validate_shards, table._is_part),
        ),
    ),
    Target(
        "plan of nccl",
        [weightwire_nccl.pieces.encode_regions(REGIONS), weightwire_nccl.pieces.encode_regions([])],
        run_regions,
        (weightwire_nccl.pieces.decode_regions,),
    ),
    Target(
        "plan of nixl",
        [_rows(), _rows() * 2, _rows()[:64]],
        run_nixl_plan,
        (weightwire_nixl.delivery.Writes.add, weightwire_nixl.delivery.Writes._fits),
    ),
    Target(
        "plan of memory",
        [
            PACK(memory_wire.ReaderInfo(f"/dev/shm/weightwire-{'ab' * 8}-x", 4096, {0: (0, 1)})),
            PACK(
                memory_wire.SenderInfo(f"/dev/shm/weightwire-{'ab' * 8}-x", 9, (0,), (1, 2), 4, 5)
            ),
        ],
        run_memory,
        (decode_message, memory_wire.session_path),
    ),
    Target(
        "digests of a plan",
        [fetched.encode() for fetched in FETCHED],
        run_fetched,
        (parts.Fetched.decode.__func__, parts.compare_parts, parts._compare),
    ),
    Target(
        "header of nccl",
        [HEADER.encode(), struct.pack("<8s", b"wwnccl\0\1") + bytes(range(60))],
        run_header,
        (NCCL.Header.decode.__func__, NCCL.Header.difference),
    ),
    Target("words of nccl", [PACK(said) for said in NCCL_SAID], run_nccl, (decode_message,)),
    Target(
        "notification of nixl",
        [WIRE.encode(message) for message in MESSAGES],
        run_notification,
        (WIRE.read_message, WIRE.readable),
    ),
    Target("words of nixl", [PACK(NIXL_READER)], run_nixl_info, (decode_message,)),
    Target(
        "safetensors index",
        [
            *(msgspec.json.encode(_manifest()), msgspec.json.encode(_part())),
            msgspec.json.encode(msgspec.structs.replace(_manifest(), files=())),
            msgspec.json.encode(msgspec.structs.replace(_manifest(), ties={"x": "a"})),
            msgspec.json.encode(msgspec.structs.replace(_part(), files=())),
        ],
        run_index,
        (
            *(FILES.parse, FILES.check_part, FILES.check_manifest, FILES.check_files),
            weightwire_filesystem.checksums.decode,
        ),
    ),
    Target(
        "announcement of filesystem",
        [weightwire_filesystem.announcement.Announcement("/x", 2).encode()],
        run_announcement,
        (weightwire_filesystem.announcement.Announcement.decode.__func__,),
    ),
    Target(
        "names",
        [
            *(b"v00000042-i1-a3", b"000000000042.0003"),
            FILES.staging_name(POLICY, "s").encode(),
            FILES.trash_name(POLICY, "s", "ff").encode(),
        ],
        run_names,
        (FILES.version_policy, FILES.leftover_incarnation, keys.is_component, keys.parse_policy),
    ),
    Target(
        "store value",
        [marks.seal_value(b"0123456789abcdef", PLAIN.seal(KEY, records.Lease(5)))],
        run_store_value,
        (weightwire_redis.values.read_record, marks.open_value),
        large=marks.MAX_VALUE + 1,
    ),
    Target(
        "store heads",
        [
            b"0123456789abcdef|42-0|0123456789abcdef|a/b|a/c",
            b"0123456789abcdef|42-1||a",
            b"|7-12|0123456789abcdef|x",
            b"|123-0|x|y|z",
        ],
        run_store_heads,
        (
            *(weightwire_redis.values.read_identity, weightwire_redis.values.read_writes),
            *(weightwire_redis.values.read_write, weightwire_redis.values.Write.entry.fget),
            *(weightwire_redis.store.names_of, weightwire_redis.store.follows),
        ),
    ),
    Target(
        "index of tcp",
        [b"+a/b\n+a/c\n-a/b\n+d\n", b""],
        run_tcp_index,
        (tcp.keys_of,),
        large=records.MAX_RECORD + 1,
    ),
]

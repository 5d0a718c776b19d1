"""``weightwire.json``: what a version is, written last, and all that a receiver trusts.

A manifest comes from another process, so it is decoded into typed, bounded
structures, and compared with what the table says, before anything in it is used.
Each trainer rank leaves a *part* in the staging directory; rank 0 joins them.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec import Meta

from weightwire.contract import Policy, Seal
from weightwire.errors import TableMismatch, TransferError, VerificationError
from weightwire.table import MAX_NAME, TensorTable
from weightwire_filesystem import checksums
from weightwire_filesystem.layout import MAX_FILES_PER_RANK, Layout

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "MANIFEST_NAME",
    "FileRecord",
    "Manifest",
    "Part",
    "check_files",
    "check_manifest",
    "check_part",
    "leftover_incarnation",
    "parse",
    "part_name",
    "staging_name",
    "trash_name",
    "version_name",
    "version_policy",
]

MANIFEST_NAME = "weightwire.json"
MAX_MANIFEST_NBYTES = 256 << 20
SCHEMA = 1

Size = Annotated[int, Meta(ge=0, le=1 << 60)]
Rank = Annotated[int, Meta(ge=0, le=1 << 20)]
FileName = Annotated[
    str, Meta(pattern=r"^model-[0-9]{5,7}-of-[0-9]{5,7}\.safetensors$", max_length=64)
]
TensorName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]*$", max_length=1 << 26)]
Groups = Annotated[dict[Annotated[int, Meta(ge=0, le=1 << 24)], Seal], Meta(max_length=1 << 24)]


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file.

    Attributes:
        name: base name.
        nbytes: size of the whole file.
        owner: trainer rank that wrote it.
    """

    name: FileName
    nbytes: Size
    owner: Rank


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one trainer rank contributes.

    Attributes:
        rank: trainer rank.
        policy: identity of the version.
        table_digest: digest of the table that it follows.
        files: its files.
        checksums: by tensor name, 16 hex digits for each chunk of each of its pieces.
        seals: by group, core's seal of this rank's tensors.
    """

    rank: Rank
    policy: Policy
    table_digest: Annotated[str, Meta(max_length=128)]
    files: Annotated[tuple[FileRecord, ...], Meta(max_length=1 << 20)]
    checksums: Annotated[dict[TensorName, Hex], Meta(max_length=1 << 24)]
    seals: Groups


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finished version.

    Attributes:
        schema: number of this format.
        session: id of the session that wrote it.
        policy: identity.
        table_digest: digest of the tensor table.
        files_per_rank: with the table, what the layout follows from.
        chunk_nbytes: bytes covered by one checksum.
        files: all files with tensors.
        checksums: by tensor name, 16 hex digits for each chunk of each of its pieces.
        seals: by trainer rank, by group.
        ties: alias to the name under which the tensor is stored.
    """

    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)]
    session: Annotated[str, Meta(max_length=128)]
    policy: Policy
    table_digest: Annotated[str, Meta(max_length=128)]
    files_per_rank: Annotated[int, Meta(ge=1, le=MAX_FILES_PER_RANK)]
    chunk_nbytes: Annotated[int, Meta(ge=4096, le=1 << 28)]
    files: Annotated[tuple[FileRecord, ...], Meta(max_length=1 << 20)]
    checksums: Annotated[dict[TensorName, Hex], Meta(max_length=1 << 24)]
    seals: Annotated[dict[Rank, Groups], Meta(max_length=1 << 20)]
    ties: Annotated[dict[TensorName, TensorName], Meta(max_length=1 << 20)]


T = TypeVar("T", Part, Manifest)


def parse(data: bytes, kind: type[T], path: Path) -> T:
    """Decode a part or manifest that came from another process.

    Raises:
        VerificationError: torn, or not of this schema.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise VerificationError(
            f"{path} is torn or not of this weightwire version: send a newer version, and run "
            f"one weightwire version on both sides\n{error}"
        ) from error


def check_part(part: Part, rank: int, policy: Policy, digest: str, layout: Layout) -> None:
    """Compare a part with what the table says that ``rank`` wrote.

    Raises:
        TransferError: the rank wrote something else.
    """
    expected = tuple(
        FileRecord(file.name, file.nbytes, file.owner)
        for file in layout.files
        if file.owner == rank
    )
    if (part.rank, part.policy, part.table_digest) != (rank, policy, digest):
        raise TransferError(
            f"trainer rank {rank} wrote {part.policy} of another table, not {policy}: "
            "give each run a directory of its own"
        )
    if part.files != expected:
        raise TransferError(
            f"trainer rank {rank} wrote other files than the table says: set `files_per_rank` "
            f"alike on all ranks\nwritten: {part.files}\nexpected: {expected}"
        )


def check_manifest(
    manifest: Manifest, path: Path, session: str, policy: Policy, table: TensorTable, digest: str
) -> None:
    """Compare a manifest's identity with the offer and the table.

    Raises:
        VerificationError: it describes another version.
        TableMismatch: it follows another table.
    """
    if manifest.session != session or manifest.policy != policy:
        raise VerificationError(
            f"{path} holds {manifest.policy} of another run, not {policy}: "
            "give each run a directory of its own"
        )
    if manifest.table_digest != digest or manifest.ties != table.ties:
        raise TableMismatch(
            f"{path} follows table {manifest.table_digest}, the offer {digest}: "
            "receive the newest version again"
        )


def check_files(manifest: Manifest, path: Path, layout: Layout, table: TensorTable) -> None:
    """Compare the manifest's files and checksums with the layout that the table gives.

    Raises:
        VerificationError: they differ, or there are too few checksums.
    """
    for entry, pieces in zip(table.tensors, layout.pieces, strict=True):
        sums = manifest.checksums.get(entry.name)
        chunks = sum(checksums.chunk_count(piece.nbytes, manifest.chunk_nbytes) for piece in pieces)
        if sums is None or len(sums) != 16 * chunks:
            raise VerificationError(
                f"{path} lacks checksums of tensor {entry.name!r}: send a newer version"
            )
    expected = tuple(FileRecord(file.name, file.nbytes, file.owner) for file in layout.files)
    if manifest.files != expected:
        raise VerificationError(
            f"{path} lists other files than the table gives: run one weightwire version on both "
            f"sides\nlisted: {manifest.files}\nexpected: {expected}"
        )


def part_name(rank: int) -> str:
    """Base name of a rank's part, in the staging directory."""
    return f".part-{rank:05d}.json"


def version_name(policy: Policy) -> str:
    """Base name of a finished version's directory."""
    return f"v{policy.version:08d}-i{policy.incarnation}-a{policy.attempt}"


def staging_name(policy: Policy, session: str) -> str:
    """Base name of a version's directory while it is being written."""
    return f".staging-{_tag(session)}-{version_name(policy)}"


def trash_name(policy: Policy, session: str, token: str) -> str:
    """Base name of a version's directory while it is being deleted."""
    return f".trash-{_tag(session)}-{version_name(policy)}-{token}"


def _tag(session: str) -> str:
    return hashlib.blake2b(session.encode(), digest_size=6).hexdigest()


# Bounded: Python refuses to read numbers of thousands of digits.
_VERSION = re.compile(r"v([0-9]{8,19})-i([0-9]{1,19})-a([0-9]{1,19})")
_HIDDEN = re.compile(
    r"\.(?:staging|trash)-([0-9a-f]{12})-v[0-9]{8,19}-i([0-9]{1,19})-a[0-9]{1,19}(?:-[0-9a-f]+)?"
)


def version_policy(name: str) -> Policy | None:
    """The policy that a version's directory is named for, or None for other names."""
    match = _VERSION.fullmatch(name)
    if match is None:
        return None
    version, incarnation, attempt = map(int, match.groups())
    return Policy(incarnation, version, attempt)


def leftover_incarnation(name: str, session: str) -> int | None:
    """The incarnation that left a hidden directory of this session, or None for other names."""
    match = _HIDDEN.fullmatch(name)
    if match is None or match[1] != _tag(session):
        return None
    return int(match[2])

"""Digests of tensors that no rank of a replica reads whole: compared together.

Digests add up over boxes.  Each rank tells which boxes of a tensor it has read,
their digests, and what the tensor's owners sealed; where the ranks' boxes hold
every element once, and every owner's seal is known, the sums have to be equal.
A tensor of which a replica reads less than all is not verified, and not said to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from weightwire.errors import SessionError, VerificationError
from weightwire.table import Part, TensorEntry, TensorTable

__all__ = ["Fetched", "PartDigests", "compare_parts"]

_MASK = (1 << 64) - 1
Count = Annotated[int, Meta(ge=0)]
Dims = tuple[Count, ...]


class PartDigests(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a group holds of one tensor, as far as one rank has read it.

    Attributes:
        group: index into the table's groups.
        tensor: index into the table's tensors.
        boxes: offsets, sizes and digest of each region.
        sealed: by owner, the digest of its shard.
    """

    group: Count
    tensor: Count
    boxes: tuple[tuple[Dims, Dims, int], ...]
    sealed: dict[int, int]


class Fetched(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What one rank has fetched of a version.

    Attributes:
        digest: sum over all of its regions.
        parts: tensors that it holds in part.
    """

    digest: int = 0
    parts: tuple[PartDigests, ...] = ()

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, payload: bytes) -> Fetched:
        try:
            return msgspec.msgpack.decode(payload, type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise SessionError(
                f"a rank's digests can't be read ({error}): run one weightwire version on all ranks"
            ) from error


def compare_parts(table: TensorTable, ranks: Sequence[Fetched], version: int) -> None:
    """Compare what the ranks of a replica hold in part; the same outcome on every rank.

    Raises:
        VerificationError: a tensor isn't what its owners sealed.
    """
    together: dict[tuple[int, int], list[PartDigests]] = {}
    for fetched in ranks:
        for part in fetched.parts:
            if part.group < len(table.groups) and part.tensor in table.groups[part.group].tensors:
                together.setdefault((part.group, part.tensor), []).append(part)
    for (group, tensor), parts in together.items():
        _compare(table.tensors[tensor], table.part(group, tensor), parts, version)


def _compare(entry: TensorEntry, here: Part, parts: Iterable[PartDigests], version: int) -> None:
    boxes: dict[tuple[Dims, Dims], int] = {}
    sealed: dict[int, int] = {}
    for part in parts:
        for offsets, sizes, digest in part.boxes:
            if boxes.setdefault((offsets, sizes), digest) != digest:
                raise VerificationError(
                    f"ranks hold different bytes of tensor {entry.name!r} of version {version} at "
                    f"{offsets}: send it again"
                )
        for owner, digest in part.sealed.items():
            if sealed.setdefault(owner, digest) != digest:
                raise VerificationError(
                    f"tensor {entry.name!r} of version {version} has two seals of sender rank "
                    f"{owner}: send it again"
                )
    owners = {shard.owner for shard in entry.shards if here.meet(shard.offsets, shard.sizes)}
    if not owners <= sealed.keys() or not here.is_tiled_by(list(boxes)):
        return
    arrived = sum(boxes.values()) & _MASK
    expected = sum(sealed[owner] for owner in owners) & _MASK
    if arrived != expected:
        raise VerificationError(
            f"tensor {entry.name!r} of version {version}, which its ranks hold in parts, isn't "
            f"what was sent (digest {arrived:016x}, sealed {expected:016x}): send it again"
        )

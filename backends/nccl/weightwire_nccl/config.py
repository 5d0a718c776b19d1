"""Options of the nccl backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weightwire.contract import BackendConfig

__all__ = ["NcclConfig"]


class NcclConfig(BackendConfig):
    """Options of the nccl backend.  ``bucket_bytes`` and ``library`` are equal on all members.

    Attributes:
        mode: ``"p2p"``: owners send each inference rank just its slices.
            ``"broadcast"``: owners broadcast to all ranks that read the same bytes.
            ``"auto"``: broadcast where every inference rank shares its reads with
            another one, else p2p.  The sender decides; a receiver that asks for
            one of the two insists on it.
        bucket_bytes: size of a bucket.  Each rank stages at most two; a message is
            never larger, so larger tensors are split.
        library: ``"nccl"`` or ``"gloo"``.  ``"auto"``: NCCL where any member's tensors
            lie on a GPU, for which each member needs a GPU of its own; else Gloo.
            Tensors on a GPU never travel over Gloo: that is refused.
        host: address of this process that the other members reach.  Default:
            loopback in sessions on files and on loopback; otherwise the address
            by which this host reaches the session's.
    """

    mode: Literal["auto", "p2p", "broadcast"] = "auto"
    bucket_bytes: int = Field(default=64 << 20, ge=4096, le=1 << 32)
    library: Literal["auto", "gloo", "nccl"] = "auto"
    host: str | None = Field(default=None, min_length=1, max_length=255)

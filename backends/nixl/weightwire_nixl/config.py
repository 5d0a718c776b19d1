"""Options of the NIXL backend."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from weightwire.contract import BackendConfig

__all__ = ["Direction", "NixlConfig"]

Direction = Literal["auto", "pull", "push"]


class NixlConfig(BackendConfig):
    """Options of the NIXL backend.

    Attributes:
        direction: who moves the bytes: receivers ``pull`` (READ) or trainers
            ``push`` (WRITE).  ``auto`` decides for each pair of ranks by the path
            between them: pull over shared memory, NVLink and RDMA, push over TCP
            and between processes on one GPU.  Equal on both sides.
        unsafe_pull: allow ``direction="pull"`` over TCP, where a receiver that dies
            in the midst of a read can abort the trainer's process.
        zero_copy: serve the trainer's own tensors where their dtype is the one on the
            wire and they are contiguous, instead of copying them into slots first.
            Their memory is registered, and stays allocated as long as this sender.
        column_blocks: stage large matrices in as many blocks of columns as the readers say
            that they take (``WeightTarget.column_slices``), so that they read few long runs;
            those who read whole matrices take none.  None does so where slots lie on a GPU.
            On CPUs copies into blocks run at a third of plain ones, and thousands of runs
            cost less than that.  Equal on all trainer ranks.
        snapshot: ``"host"``: each trainer rank keeps a copy of its shards in host memory,
            from which a receiver that comes late gets the newest finished version as soon
            as it asks.  It takes as much memory as the rank's shards on the wire, when the
            sender opens, and a copy in each ``send``.  Equal on both sides.
        discovery: where ranks find each other's metadata: ``"session"``, or a
            ModelExpress server, ``"modelexpress://host:port"``.  Equal on both sides.
        copy_threads: of an inference rank whose slots lie on a CPU: that many threads of
            NIXL's own share the copies out of a trainer's memory on the same host;
            0 leaves each copy to the thread that posts it.
        max_retired_slots: slots that may be set aside, because a transfer that can't
            be cancelled may still touch them, before this rank refuses to go on.
            A trainer rank reserves the memory for them at set-up, beside its one
            slot (two with ``overlap``).
    """

    direction: Direction = "auto"
    unsafe_pull: bool = False
    zero_copy: bool = False
    column_blocks: bool | None = None
    snapshot: Literal["none", "host"] = "none"
    discovery: Annotated[
        str,
        StringConstraints(
            max_length=300, pattern=r"^(session|modelexpress://[A-Za-z0-9_.:\[\]-]+:[0-9]{1,5})$"
        ),
    ] = "session"
    copy_threads: int = Field(default=2, ge=0, le=16)
    max_retired_slots: int = Field(default=2, ge=0, le=64)

    @model_validator(mode="after")
    def _blocks_are_staged(self) -> NixlConfig:
        if self.zero_copy and self.column_blocks:
            raise ValueError(
                "column_blocks=True needs tensors that are staged, zero_copy=True serves them "
                "where they lie: choose one"
            )
        return self

"""Trainer ranks that hold shards: DTensors over a real process group, of any placement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from weightwire_conformance.oracle import Cut, Cuts, Leaf, Model

__all__ = ["MEETING_SECONDS", "PLACEMENTS", "PRELOAD", "Placed", "part"]


@dataclass(frozen=True)
class Placement:
    """How tensors lie on a mesh of trainer ranks.

    Attributes:
        along: for each mesh dimension the tensor's dimension that it cuts, or None where
            its ranks hold the same.  Tensors without that dimension are replicated.
        rows: ranks along the mesh's first dimension, when it has two.
        in_turn: cut only every other tensor; those between are plain ones, whole on every rank.
    """

    along: tuple[int | None, ...]
    rows: int = 2
    in_turn: bool = False

    def mesh(self, world_size: int) -> tuple[int, ...]:
        if len(self.along) == 1:
            return (world_size,)
        return (self.rows, world_size // self.rows)


PLACEMENTS: Mapping[str, Placement] = {
    "rows": Placement((0,)),
    "columns": Placement((1,)),
    "replicated": Placement((None,)),
    "some-plain": Placement((0,), in_turn=True),
    "hybrid": Placement((None, 0)),
    "rows-then-columns": Placement((0, 1)),
    "columns-then-rows": Placement((1, 0)),
    "rows-twice": Placement((0, 0)),
}
"""By the name that scenarios use."""


PRELOAD = ("torch.distributed.tensor", "torch._dynamo")
"""What making a DTensor or recording a conversion imports, which takes seconds."""
MEETING_SECONDS = 30.0
"""In which all ranks of a trainer have found each other."""


class Placed:
    """One trainer rank's place on the mesh.  Every rank of the trainer makes one.

    Args:
        rendezvous: a file that all ranks can see, and that doesn't exist yet.
        device: on which the pieces lie.  The mesh is Gloo's all the same, so that several ranks
            may share a GPU: nothing is sent over it.
    """

    def __init__(
        self, placement: str, rendezvous: str, rank: int, world_size: int, device: str
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._placement = PLACEMENTS[placement]
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=MEETING_SECONDS),
        )
        self._shape = self._placement.mesh(world_size)
        self._mesh = init_device_mesh(torch.device(device).type, self._shape)
        self._at = [rank // math.prod(self._shape[k + 1 :]) % n for k, n in enumerate(self._shape)]

    def cuts(self, leaves: Model) -> Cuts:
        """This rank's piece of each tensor."""
        plain = {leaf.name for leaf in leaves[::2]} if self._placement.in_turn else set()

        def of(leaf: Leaf) -> Sequence[Cut]:
            if leaf.name in plain:
                return ()
            return [
                Cut(dimension, parts, index)
                for dimension, parts, index in zip(
                    self._along(leaf), self._shape, self._at, strict=True
                )
                if dimension is not None
            ]

        return of

    def _along(self, leaf: Leaf) -> list[int | None]:
        return [
            dimension if dimension is not None and dimension < len(leaf.shape) else None
            for dimension in self._placement.along
        ]

    def place(self, leaves: Model, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """DTensors over this rank's pieces; they share the pieces' memory."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placed: dict[str, Tensor] = {}
        for number, leaf in enumerate(leaves):
            if self._placement.in_turn and number % 2 == 0:
                placed[leaf.name] = local[leaf.name]
                continue
            placements = [Replicate() if d is None else Shard(d) for d in self._along(leaf)]
            placed[leaf.name] = DTensor.from_local(
                local[leaf.name],
                self._mesh,
                placements,
                run_check=False,
                shape=torch.Size(leaf.shape),
                stride=tuple(math.prod(leaf.shape[k + 1 :]) for k in range(len(leaf.shape))),
            )
        return placed

    def leave(self) -> None:
        """Drop the process group."""
        dist.destroy_process_group()


def part(name: str | None, rank: int, world_size: int) -> Cuts:
    """What an inference rank holds: of each tensor its ``rows`` or ``columns``, or all of it."""

    def of(leaf: Leaf) -> Sequence[Cut]:
        dimension = {"rows": 0, "columns": 1}.get(name or "")
        if dimension is None or dimension >= len(leaf.shape):
            return ()
        return [Cut(dimension, world_size, rank)]

    return of

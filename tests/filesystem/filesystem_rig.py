"""Drives the filesystem backend's transports as core does, in this process or in a child."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from weightwire.contract import (
    Context,
    Offer,
    Policy,
    ReceiverTransport,
    Seal,
    SenderTransport,
)
from weightwire.cuts import Cuts
from weightwire.deadline import Deadline, Watch
from weightwire.grouping import make_groups
from weightwire.layout import cut_out
from weightwire.table import (
    DTYPES,
    Group,
    Part,
    Region,
    Shard,
    TensorEntry,
    TensorTable,
    dtype_name,
)
from weightwire_filesystem import FilesystemBackend, FilesystemConfig

SESSION = "5e551011"


def context(
    directory: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    incarnation: int = 1,
    member: str = "sender",
    session: str = SESSION,
    timeout: float = 60,
    **options: Any,
) -> Context:
    options.setdefault("visible_within", 0)
    watch = Watch()
    watch.start(Deadline(timeout))
    return Context(
        config=FilesystemConfig(directory=directory, **options),
        session_url="file:///run",
        session_id=session,
        session_dir=None,
        rank=rank,
        world_size=world_size,
        member_id=member,
        incarnation=incarnation,
        overlap=False,
        watch=watch,
    )


def random_tensor(name: str, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bits, from the name and a seed: every process can make them again."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest(), "big")
    generator = torch.Generator().manual_seed(key)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator, dtype=torch.uint8).bool()
    numel = int(torch.Size(shape).numel())
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return (
        raw.view(dtype).reshape(tuple(shape)) if numel else torch.empty(tuple(shape), dtype=dtype)
    )


def weights(seed: int = 0, rows: int = 300) -> dict[str, Tensor]:
    """A small state dict; its largest tensor has several checksum chunks."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "model.embed.weight": ((rows, 4096), torch.bfloat16),
        "model.layers.0.up.weight": ((rows, 512), torch.bfloat16),
        "model.layers.0.norm.weight": ((512,), torch.float32),
        "model.layers.1.up.weight": ((rows, 512), torch.bfloat16),
        "model.layers.1.norm.weight": ((512,), torch.float32),
        "steps": ((), torch.int64),
    }
    return {name: random_tensor(name, *spec, seed) for name, spec in shapes.items()}


def everything() -> dict[str, Tensor]:
    """Every dtype, 0-d and empty tensors, and names that need care."""
    tensors = {}
    for name, dtype in DTYPES.items():
        tensors[f"{name}.matrix"] = random_tensor(f"{name}.matrix", (7, 5), dtype)
        tensors[f"{name}.scalar"] = random_tensor(f"{name}.scalar", (), dtype)
        tensors[f"{name}.empty"] = torch.empty((0, 3), dtype=dtype)
    odd = ["x", "näme.重み", 'with "quotes"', "a/b\\c", "spaced  name ", "n" * 1024, "{}", "model"]
    for name in odd:
        tensors[name] = random_tensor(name, (3,), torch.float16)
    return tensors


def make_table(
    tensors: Mapping[str, Tensor],
    owners: Sequence[int] | None = None,
    world_size: int = 1,
    ties: Mapping[str, str] | None = None,
    per_group: int = 2,
    budget: int | None = None,
) -> TensorTable:
    """Groups of so many tensors, or by a budget that may cut tensors."""
    owners = owners or [0] * len(tensors)
    entries = tuple(
        TensorEntry(
            name,
            tuple(tensor.shape),
            dtype_name(tensor.dtype),
            (Shard(owner, (0,) * tensor.dim(), tuple(tensor.shape)),),
        )
        for (name, tensor), owner in zip(tensors.items(), owners, strict=True)
    )
    indices = range(len(entries))
    groups = tuple(
        Group(tuple(indices[i : i + per_group])) for i in range(0, len(entries), per_group)
    )
    if budget is not None:
        groups = make_groups(entries, budget)
    table = TensorTable(world_size, entries, groups, dict(ties or {}))
    table.validate()
    return table


def offer_of(
    table: TensorTable, version: int, senders: Sequence[SenderTransport], incarnation: int = 1
) -> Offer:
    blobs = tuple(sender.describe() for sender in senders)
    return Offer(Policy(incarnation, version), table.digest(), (), blobs, "full")


def seal_of(group: int, tensors: Mapping[int, Tensor]) -> Seal:
    return Seal({i: (1 << 63) + group * 1000 + i for i in tensors})


def put_all(
    sender: SenderTransport, table: TensorTable, tensors: Mapping[str, Tensor], rank: int = 0
) -> None:
    for number, group in enumerate(table.groups):
        part = {
            i: box_of(tensors[table.tensors[i].name], table.part(number, i))
            for i in group.tensors
            if table.tensors[i].shards[0].owner == rank
        }
        if part:
            sender.put(number, part, seal_of(number, part))


def send(
    sender: SenderTransport,
    table: TensorTable,
    tensors: Mapping[str, Tensor],
    version: int,
    incarnation: int = 1,
) -> Offer:
    offer = offer_of(table, version, [sender], incarnation)
    sender.begin(offer, {})
    put_all(sender, table, tensors)
    sender.finish()
    sender.publish()
    return offer


def box_of(tensor: Tensor, box: Part | Region) -> Tensor:
    return cut_out(tensor, box.offsets, box.sizes, (0,) * tensor.dim())


def whole(table: TensorTable) -> list[Region]:
    """Every tensor, those that are cut over several groups by their parts."""
    cuts = Cuts(table)
    return [
        piece
        for i, entry in enumerate(table.tensors)
        for _, piece in cuts.cut(Region.whole(i, entry))
    ]


def fetch_all(
    receiver: ReceiverTransport, table: TensorTable, regions: Sequence[Region]
) -> dict[int, Tensor]:
    """The regions' tensors, by position."""
    targets = {
        i: torch.zeros(region.sizes, dtype=table.tensors[region.tensor].torch_dtype)
        for i, region in enumerate(regions)
    }
    cuts = Cuts(table)
    for number in range(len(table.groups)):
        part = {i: t for i, t in targets.items() if cuts.group_of(regions[i]) == number}
        if part:
            receiver.fetch(number, part)
    return targets


def same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return torch.equal(left, right)


def _become(user: int) -> None:
    """Go on as another user, who may not be able to read this project's own files."""
    importlib.import_module("weightwire_filesystem.sender")
    importlib.import_module("weightwire_filesystem.receiver")
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def _io_read() -> int:
    if not os.access("/proc/self/io", os.R_OK):  # after a change of user
        return 0
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise AssertionError("no rchar in /proc/self/io")


def _child(arguments: dict[str, Any]) -> dict[str, Any]:
    """What a child process does; ``arguments["do"]`` says what."""
    directory = Path(arguments["directory"])
    tensors = weights(arguments.get("seed", 0))
    table = make_table(tensors)
    do = arguments["do"]
    if "user" in arguments:
        _become(arguments["user"])
    if do == "stage":  # everything but publish; then wait to be killed
        sender = FilesystemBackend().open_sender(context(directory))
        sender.set_table(table)
        sender.begin(offer_of(table, arguments["version"], [sender]), {})
        put_all(sender, table, tensors)
        sender.finish()
        print("staged", flush=True)
        sys.stdin.read()
    if do == "open":
        FilesystemBackend().open_sender(context(directory)).close()
    if do == "receive":
        receiver = FilesystemBackend().open_receiver(context(directory, member="replica"))
        boxes = arguments.get("regions")
        regions = msgspec.convert(boxes, list[Region]) if boxes else whole(table)
        receiver.set_plan(table, regions)
        offer = msgspec.json.decode(arguments["offer"], type=Offer)
        before = _io_read()
        receiver.begin(offer)
        opened = _io_read()
        got = fetch_all(receiver, table, regions)
        read = _io_read()
        receiver.finish()
        receiver.close()
        good = all(
            same_bits(got[i], box(tensors[table.tensors[region.tensor].name], region))
            for i, region in enumerate(regions)
        )
        return {"good": good, "opening": opened - before, "fetching": read - opened}
    return {}


def box(tensor: Tensor, region: Region) -> Tensor:
    """The region of a tensor, cut by torch."""
    return tensor[tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))]


if __name__ == "__main__":
    try:
        print(json.dumps(_child(json.loads(sys.argv[1]))))
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))

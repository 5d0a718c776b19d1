"""How a version travels: decided by the sender's rank 0, with the reason for the report."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from weightwire.errors import TableMismatch
from weightwire_nccl.config import NcclConfig
from weightwire_nccl.records import Member, ReaderInfo, SenderInfo

__all__ = [
    "by_plan",
    "choose_library",
    "choose_mode",
    "owners_of",
    "refuse_unlike",
    "refuse_unreachable",
]

_MOST_SHARED = 64
"""Communicators of one owner and its readers; each costs every member memory and time."""

Info = SenderInfo | ReaderInfo
Mode = Literal["p2p", "broadcast"]
Library = Literal["gloo", "nccl"]


def refuse_unlike(mine: Info, me: str, infos: Mapping[str, Info]) -> None:
    """Refuse members that are configured otherwise than this one.

    Both sides look: receivers before they say that they are ready, so that nothing starts
    where options differ, and the sender's rank 0 for the other trainer ranks.

    Args:
        infos: what others say of themselves, by what they are called.

    Raises:
        TableMismatch: naming the member and the option.
    """
    for who, info in infos.items():
        for what in ("protocol", "bucket_bytes", "library", "mode"):
            theirs, ours = getattr(info, what), getattr(mine, what)
            # Trainer ranks are alike; between the sides "auto" leaves the mode to the other.
            if what == "mode" and type(info) is not type(mine) and "auto" in (theirs, ours):
                continue
            if theirs != ours:
                raise TableMismatch(
                    f"{who} has {what}={theirs!r}, {me} {ours!r}: "
                    "give the nccl backend the same options on all sides"
                )


def refuse_unreachable(first: SenderInfo, infos: Mapping[str, Info]) -> None:
    """Refuse members that can't reach the store of the sender's rank 0.

    Args:
        first: what that rank says of itself.

    Raises:
        TableMismatch: naming the member and the option.
    """
    for who, info in infos.items():
        if info.machine != first.machine and _is_loopback(first.host):
            raise TableMismatch(
                f"{who} runs on another host than sender rank 0, which listens on {first.host}: "
                "set the nccl backend's option 'host' on each side to an address that the others "
                "reach"
            )


def choose_mode(config: NcclConfig, infos: Mapping[Member, Info], owners: int) -> tuple[Mode, str]:
    """Point-to-point or broadcast, and why.

    Raises:
        TableMismatch: a receiver insists on the other mode.
    """
    mode, reason = _choose_mode(config, tuple(infos), owners)
    for member, info in infos.items():
        wanted = info.mode if isinstance(info, ReaderInfo) else mode
        if wanted not in ("auto", mode):
            raise TableMismatch(
                f"{member} has mode={wanted!r}, the sender sends by {mode} ({reason}): "
                "give the nccl backend the same mode on both sides, or 'auto'"
            )
    return mode, reason


def _choose_mode(config: NcclConfig, members: Sequence[Member], owners: int) -> tuple[Mode, str]:
    if config.mode != "auto":
        return config.mode, f"mode={config.mode!r}"
    classes = by_plan(members)
    if sum(len(ranks) for ranks in classes.values()) < 2:
        return "p2p", "one inference rank reads"
    alone = [ranks[0] for ranks in classes.values() if len(ranks) == 1]
    if alone:
        whole = "the replicas read different bytes"
        return "p2p", f"{whole}: {members[alone[0]]} shares its reads with nobody"
    if len(classes) * owners > _MOST_SHARED:
        return "p2p", f"a broadcast would need {len(classes) * owners} communicators"
    return "broadcast", "the replicas read the same bytes"


def choose_library(config: NcclConfig, infos: Mapping[Member, Info]) -> tuple[Library, str]:
    """NCCL or Gloo, and why.

    Raises:
        TableMismatch: a member can't use the library that it would take.
    """
    on_gpu = [m for m, info in infos.items() if torch.device(info.device).type != "cpu"]
    if config.library == "gloo" or (config.library == "auto" and not on_gpu):
        return "gloo", "library='gloo'" if config.library == "gloo" else "all tensors on CPUs"
    seen: dict[str, Member] = {}
    for member, info in infos.items():
        problem = f"{member}: {info.no_gpu}"
        if info.gpu in seen:
            problem = f"{seen[info.gpu]} and {member} use the same one"
        if not info.gpu or info.gpu in seen:
            raise TableMismatch(
                f"NCCL needs a GPU of its own for every member ({problem}): correct that, or "
                "choose a backend that carries what lies on GPUs otherwise"
            )
        seen[info.gpu] = member
    return "nccl", f"{on_gpu[0]} has GPU tensors" if on_gpu else "library='nccl'"


def by_plan(members: Sequence[Member]) -> dict[str, tuple[int, ...]]:
    """Ranks that read the same bytes, by their plan's digest, in order of their first rank."""
    classes: dict[str, tuple[int, ...]] = {}
    for rank, member in enumerate(members):
        if member.plan:
            classes[member.plan] = (*classes.get(member.plan, ()), rank)
    return classes


def owners_of(members: Sequence[Member]) -> tuple[int, ...]:
    """Group ranks of the trainer ranks: the same as their own."""
    return tuple(rank for rank, member in enumerate(members) if member.is_sender)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

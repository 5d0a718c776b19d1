"""The public API: this rank's sender, and this rank's receiver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
import torch.distributed
from torch import Tensor, nn

from weightwire.config import BackendChoice
from weightwire.digest import Verify
from weightwire.handle import ranks_of
from weightwire.options import DEFAULT_GROUP_BYTES, ReceiverOptions, SenderOptions, make_options
from weightwire.placements import LocalShard
from weightwire.receiver import WeightReceiver
from weightwire.sender import WeightSender
from weightwire.sources import WeightSource
from weightwire.targets import WeightTarget

__all__ = ["open_receiver", "open_sender"]


def open_sender(
    backend: BackendChoice,
    *,
    session: str,
    source: nn.Module | Mapping[str, Tensor | LocalShard] | WeightSource,
    rank: int | None = None,
    world_size: int | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    token: str | None = None,
    wire_dtype: str | torch.dtype | None = None,
    keep_dtype: Sequence[str] = (),
    group_bytes: int = DEFAULT_GROUP_BYTES,
    verify: Verify = "sample",
    overlap: bool = False,
    device: str | torch.device | None = None,
    resume_from: int | None = None,
    catch_up: BackendChoice | None = None,
    min_receivers: int = 1,
    max_receivers: int | None = None,
    on_receiver_loss: Literal["fail", "continue"] = "fail",
    max_unavailable: int | None = None,
    max_version_lag: int | None = None,
    ready_within: float = 5.0,
    lease_ttl: float = 10.0,
    timeout: float = 600.0,
    open_timeout: float = 60.0,
) -> WeightSender:
    """Open this trainer rank's sender.

    Args:
        backend: a name, ``{"backend": name, **options}``, or ``(name, config)``.
        session: URL of the session: ``file:///shared/run42``, ``tcp://host:port/run42``,
            ``redis://host/run42``.
        source: module, mapping of names to tensors, or ``WeightSource``.
        rank, world_size: this rank among the trainer's; by default the only one.
        group: a process group to take rank and world size from; it isn't used otherwise.
        token: shared secret; by default the environment's ``WEIGHTWIRE_TOKEN``.
        wire_dtype: dtype of floating-point tensors on the wire; by default as stored.
        keep_dtype: shell patterns of names that stay as stored.
        group_bytes: budget of a transfer group, in bytes.
        verify: how much of each tensor receivers compare with the sender's digest.
        overlap: two slots instead of one: a group is staged while the last one is read.
        device: where slots lie (``cpu``, ``cuda:0``); by default where the source does, if
            the backend can send from there.
        resume_from: last version of earlier senders that stays readable; without it
            none does.
        catch_up: a backend that stores versions, for receivers that come when a version
            has been sent.  They are opened with the same.
        min_receivers: receivers that must have joined before a version is offered
            (only where the backend needs live ones); 0 says that it may go to nobody,
            which such a backend refuses.
        max_receivers: receivers that get an offer: those of the last one, then those that
            joined first; others wait.  By default all that joined.
        on_receiver_loss: ``"fail"`` the version, or ``"continue"`` without the lost one.
        max_unavailable: receivers that may be out of service at a time.  A version then
            goes to the pool in waves, and ``send`` returns after the last one; of stored
            versions, receivers take turns.  By default all at once.
        max_version_lag: finished versions by which a receiver may fall behind.  One that
            isn't ready is then left out of a version, instead of being waited for; before
            a stored version, ``send`` waits for those that are further behind.
        ready_within: seconds that a receiver has to get ready before it is left out.
        lease_ttl: seconds of silence after which this sender counts as dead.
        timeout: seconds for a ``send``.
        open_timeout: seconds for reaching the session.

    Raises:
        ConfigError: an argument is wrong.
        BackendNotFound: nothing installed has this name.
        BackendUnavailable: the backend can't run here.
        UnsupportedOperation: ``min_receivers=0``, and the backend needs live receivers;
            ``max_receivers`` or ``catch_up``, and it stores versions.
        SessionError: the session can't be reached, or has a live sender.
    """
    rank, world_size = ranks_of(rank, world_size, group)
    options = make_options(
        SenderOptions,
        rank=rank,
        world_size=world_size,
        token=token,
        wire_dtype=_by_name(wire_dtype),
        keep_dtype=_patterns(keep_dtype),
        group_bytes=group_bytes,
        verify=verify,
        overlap=overlap,
        device=_by_name(device),
        resume_from=resume_from,
        catch_up=catch_up,
        min_receivers=min_receivers,
        max_receivers=max_receivers,
        on_receiver_loss=on_receiver_loss,
        max_unavailable=max_unavailable,
        max_version_lag=max_version_lag,
        ready_within=ready_within,
        lease_ttl=lease_ttl,
        timeout=timeout,
        open_timeout=open_timeout,
    )
    return WeightSender(backend, session, source, options)


def open_receiver(
    backend: BackendChoice,
    *,
    session: str,
    target: nn.Module | Mapping[str, Tensor] | WeightTarget,
    receiver_id: str,
    rank: int | None = None,
    world_size: int | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    token: str | None = None,
    overlap: bool = False,
    device: str | torch.device | None = None,
    catch_up: BackendChoice | None = None,
    lease_ttl: float = 10.0,
    timeout: float = 600.0,
    open_timeout: float = 60.0,
) -> WeightReceiver:
    """Open this inference rank's receiver.

    Args:
        backend: a name, ``{"backend": name, **options}``, or ``(name, config)``; the sender's.
        session: URL of the session.
        target: module, mapping of names to tensors to fill in place, or ``WeightTarget``.
        receiver_id: names this replica in the session; unique among live replicas.
        rank, world_size: this rank among the replica's; by default the only one.
        group: a process group to take rank and world size from; it isn't used otherwise.
        token: shared secret; by default the environment's ``WEIGHTWIRE_TOKEN``.
        overlap: two slots instead of one: a group arrives while the one before it is
            verified and written, where the transport can bring it meanwhile.
        device: where slots lie (``cpu``, ``cuda:0``); by default where the target does, if
            the backend can receive there.
        catch_up: the sender's: a replica that serves nothing takes the newest finished
            version from there at once, instead of waiting for the next one.
        lease_ttl: seconds of silence after which this replica counts as dead.
        timeout: seconds for a ``receive``.
        open_timeout: seconds for reaching the session.

    Raises:
        ConfigError: an argument is wrong.
        BackendNotFound: nothing installed has this name.
        BackendUnavailable: the backend can't run here.
        UnsupportedOperation: ``catch_up``, and the backend stores versions itself.
        SessionError: the session can't be reached, or a live replica has this id.
    """
    rank, world_size = ranks_of(rank, world_size, group)
    options = make_options(
        ReceiverOptions,
        rank=rank,
        world_size=world_size,
        token=token,
        overlap=overlap,
        device=_by_name(device),
        catch_up=catch_up,
        lease_ttl=lease_ttl,
        timeout=timeout,
        open_timeout=open_timeout,
    )
    return WeightReceiver(backend, session, target, receiver_id, options)


def _patterns(names: object) -> object:
    """One pattern is as good as a list of one; anything else is for validation to refuse."""
    if isinstance(names, str):
        return (names,)
    return tuple(names) if isinstance(names, Iterable) else names


def _by_name(value: str | torch.dtype | torch.device | None) -> str | None:
    """A dtype or a device as options have it."""
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    return value

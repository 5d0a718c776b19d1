"""weightwire as a vLLM weight transfer engine: one receiver in each worker.

vLLM's session maps onto the receiver's calls, on every worker of the replica::

    init_weight_transfer_engine   open_receiver
    start_weight_update           nothing: the engine still serves the old version
    update_weights                begin, fetch: the newest offer arrives in the model
    finish_weight_update          commit: it is in place, attention layers included

Ranks agree inside the receiver, so that a failure is one on every worker.  Only
the last worker raises it, and every worker closes vLLM's session: vLLM's executor
reads the workers' replies in rank order and stops at the first failure, and what
it leaves unread would be taken for the replies to the next call.  After a failure
the kernel tensors are back and the engine can run, but it has to stay out of
service until an update succeeds; the next one begins with
``start_weight_update`` as always.

Finishing an update doesn't drop what the scheduler has cached: reset the prefix
cache (or pause with ``clear_cache``) before the engine serves the new version.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import weightwire
from weightwire.errors import ConfigError, HandleError, UnsupportedOperation
from weightwire_vllm import compat
from weightwire_vllm.compat import (
    TransferEngine,
    TransferInitInfo,
    TransferUpdateInfo,
    replica_layout,
)
from weightwire_vllm.target import VllmTarget

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from weightwire import WeightReceiver

__all__ = ["InitInfo", "UpdateInfo", "WeightWireEngine"]

_log = logging.getLogger("weightwire.vllm")


@dataclass
class InitInfo(TransferInitInfo):  # type: ignore[misc]  # vLLM is Any here
    """``init_info`` of ``init_weight_transfer_engine``.

    The session's token isn't part of it: it is read from ``WEIGHTWIRE_TOKEN``.

    Attributes:
        session: URL of the session.
        backend: name of the backend, or a mapping with its options.
        receiver_id: id of this replica; data-parallel replicas of one engine
            get ``-dp<index>`` behind it.
        timeout: seconds for an update, from waiting for an offer to commit,
            unless the update says otherwise; None: the receiver's default.
    """

    session: str
    backend: str | dict[str, Any]
    receiver_id: str
    timeout: float | None = None


@dataclass
class UpdateInfo(TransferUpdateInfo):  # type: ignore[misc]  # vLLM is Any here
    """``update_info`` of ``update_weights``.

    Attributes:
        version: the version to wait for, or None for the newest offer.  A
            version that is already applied is answered, not fetched again; a
            newer offer than the expected one is taken.
        timeout: seconds, instead of ``init_info``'s.
    """

    version: int | None = None
    timeout: float | None = None


class WeightWireEngine(TransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]  # as above
    """What ``weight_transfer_config={"backend": "weightwire"}`` runs in each worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._target = VllmTarget(model, vllm_config)
        self._receiver: WeightReceiver | None = None
        self._timeout: float | None = None
        self._fetched = False
        self._is_answered = False  # the version that was asked for was there already
        self._speaks = replica_layout(vllm_config).speaks

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo | Exception:
        """As the base class, but ``init_transfer_engine`` raises what is wrong."""
        try:
            info: InitInfo = super().parse_init_info(init_dict)
        except ValueError as error:
            return ConfigError(str(error))
        return info

    def init_transfer_engine(self, init_info: InitInfo | Exception) -> None:
        """Open the receiver; a second call leaves the first session."""
        with self._one_voice():
            if isinstance(init_info, Exception):
                raise init_info
            self._open(init_info)

    def _open(self, init_info: InitInfo) -> None:
        if self._fetched:
            raise HandleError("init during an update: finish it first")
        if not isinstance(init_info.receiver_id, str) or not init_info.receiver_id:
            raise ConfigError("init_info needs receiver_id: a name for this replica")
        self.shutdown()
        layout = replica_layout(self.vllm_config)
        self._receiver = weightwire.open_receiver(
            init_info.backend,
            session=init_info.session,
            target=self._target,
            receiver_id=init_info.receiver_id + layout.suffix,
            rank=layout.rank,
            world_size=layout.world_size,
        )
        self._timeout = init_info.timeout

    def start_weight_update(self) -> None:
        """Nothing: the engine may serve until ``update_weights``, which also refuses.

        An error here couldn't close the session that vLLM opens on other workers.
        """

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Fetch the newest offer into the model.

        Overrides the base class, which synchronises an accelerator that a CPU
        engine doesn't have; the target synchronises where there is one.

        Raises:
            WeightWireError: on the last worker; the kernel tensors are back on all.
        """
        with self._one_voice():
            self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """As ``update_weights``, with parsed arguments."""
        receiver = self._require()
        if self._fetched:
            _log.info("update_weights repeated before finish: the version is already here")
            return
        wanted = update_info.version
        if wanted is not None and receiver.holds(wanted):
            _log.info("version %d is already applied", receiver.version)
            self._is_answered = True
            return
        self._is_answered = False
        timeout = self._timeout if update_info.timeout is None else update_info.timeout
        receiver.begin(timeout=timeout, minimum=wanted or 0)
        receiver.fetch()
        self._fetched = True

    def finish_weight_update(self) -> None:
        """Process the last layers; the version is in place when this returns.

        Raises:
            WeightWireError: on the last worker; the kernel tensors are back on all.
        """
        with self._one_voice():
            receiver = self._require()
            if self._fetched:
                # Whatever happens, the next update starts afresh.
                self._fetched = False
                receiver.commit()
            elif not self._is_answered:
                raise HandleError("no update to finish: update_weights failed or wasn't called")
            self._is_answered = False

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """No trainer sends through this class; vLLM before 0.32 asks every engine for it.

        Raises:
            UnsupportedOperation: always; it names what to call.
        """
        raise UnsupportedOperation(
            "weightwire's trainers don't send through vLLM's engine class: open a sender with "
            "weightwire.open_sender and call its send()"
        )

    def shutdown(self) -> None:
        """Leave the session; the engine keeps its weights."""
        receiver, self._receiver = self._receiver, None
        self._fetched = False
        if receiver is not None:
            receiver.close()

    @property
    def version(self) -> int | None:
        """Version that this worker serves, or None."""
        return None if self._receiver is None else self._receiver.version

    @contextmanager
    def _one_voice(self) -> Iterator[None]:
        """Close vLLM's session on an error, and let only the last worker raise it."""
        try:
            yield
        except Exception as error:
            compat.end_update(self)
            if self._speaks:
                raise
            _log.error("%s: %s", type(error).__name__, error)

    def _require(self) -> WeightReceiver:
        if self._receiver is None:
            raise HandleError("no session: call init_weight_transfer_engine first")
        return self._receiver

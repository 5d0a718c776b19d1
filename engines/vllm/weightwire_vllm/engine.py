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
from typing import TYPE_CHECKING, Any

import weightwire
from weightwire.errors import ConfigError, HandleError, UnsupportedOperation, WeightWireError
from weightwire.session.urls import shown
from weightwire_vllm import compat
from weightwire_vllm.adapter import AdapterTarget
from weightwire_vllm.compat import TransferEngine, replica_layout
from weightwire_vllm.info import InitInfo, UpdateInfo, parse
from weightwire_vllm.outcome import told
from weightwire_vllm.target import VllmTarget

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from weightwire import WeightReceiver, WeightTarget

__all__ = ["WeightWireEngine"]

_log = logging.getLogger("weightwire.vllm")


class WeightWireEngine(TransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]  # as above
    """What ``weight_transfer_config={"backend": "weightwire"}`` runs in each worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._module = model
        self._target = VllmTarget(model, vllm_config)
        self._receiver: WeightReceiver | None = None
        self._attached: InitInfo | None = None
        self._mixed = False  # outlives a receiver: the next one knows nothing of it
        self._fetched = False
        self._has_base = True  # False once a sleep has discarded what an adapter stands on
        self._is_answered = False  # the version that was asked for was there already
        self._speaks = replica_layout(vllm_config).speaks
        compat.watch_sleep(_told_of_sleep)

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo | Exception:
        """Validated; ``init_transfer_engine`` raises what is wrong, with one voice."""
        try:
            return parse(InitInfo, "init_info", init_dict)
        except ConfigError as error:
            return error

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        """Validated.

        Raises:
            ConfigError: a field is unknown or wrong.
        """
        return parse(UpdateInfo, "update_info", update_dict)

    def init_transfer_engine(self, init_info: InitInfo | Exception) -> None:
        """Open the receiver.

        Asked again for what it is attached to, it stays as it is; for another session or
        id it leaves the first, unless ``take_over=False`` forbids that.
        """
        with self._one_voice():
            if isinstance(init_info, Exception):
                raise init_info
            self._open(init_info)

    def _open(self, init_info: InitInfo) -> None:
        if self._fetched:
            raise HandleError("init during an update: finish it first")
        asked = init_info.model_copy(update={"take_over": True})
        if self._attached == asked and self._still_attached():
            return
        self._refuse_other(init_info)
        self.shutdown()
        layout = replica_layout(self.vllm_config)
        target: WeightTarget = self._target
        if init_info.adapter is not None:
            target = AdapterTarget(self._module, self.vllm_config, init_info.adapter)
            compat.keep_adapters(self, lambda: self._is_for_adapter)
        self._receiver = weightwire.open_receiver(
            init_info.backend,
            session=init_info.session,
            target=target,
            receiver_id=init_info.receiver_id + layout.suffix,
            rank=layout.rank,
            world_size=layout.world_size,
            **init_info.receiver_options(),
        )
        self._attached = asked

    def _still_attached(self) -> bool:
        """Whether the receiver is in the session, after joining one that was made anew."""
        try:
            self._require().poll()
        except WeightWireError as error:
            _log.warning("attached anew: %s", error)
            return False
        return True

    def _refuse_other(self, wanted: InitInfo) -> None:
        now = self._attached
        if now is None or wanted.take_over:
            return
        if (now.session, now.receiver_id) != (wanted.session, wanted.receiver_id):
            raise ConfigError(
                f"the engine is attached to session {shown(now.session)} as "
                f"{now.receiver_id!r} already: stop whoever drives it there, or take it over "
                "(take_over=True, or `weightwire watch --take-over`)"
            )

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
        self.fetch(update_info)

    def fetch(self, update_info: dict[str, Any]) -> bool:
        """``update_weights``; False if it failed, on the workers that don't raise it."""
        has_arrived = False
        with self._one_voice():
            self.receive_weights(self.parse_update_info(update_info))
            has_arrived = True
        return has_arrived  # noqa: RET504 - the context may keep an error to itself

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
        if self._is_for_adapter and not self._has_base:
            raise HandleError(
                "the adapter's base weights were discarded by sleep(level=2): send the model "
                "(target='model'), or restart the engine, and use level 1 beside adapters"
            )
        timeout = update_info.timeout
        if timeout is None and self._attached is not None:
            timeout = self._attached.timeout
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
                self._mixed = False
                self._has_base = self._has_base or not self._is_for_adapter
                if self._attached is not None and self._attached.release_buffers:
                    receiver.release_buffers()
            elif not self._is_answered:
                raise HandleError("no update to finish: update_weights failed or wasn't called")
            self._is_answered = False

    def sleeps(self, level: int) -> None:
        """The worker is about to sleep: receive buffers go, and at level 2 the version does."""
        receiver = self._receiver
        if level >= 2:
            self._mixed, self._has_base = True, False
        if receiver is None or level < 1:
            return
        try:
            if level >= 2:
                receiver.invalidate("the engine's weights were discarded by sleep(level=2)")
            receiver.release_buffers()
        except WeightWireError as error:
            # It knows itself; and vLLM's workers may not fail one without the other.
            _log.error("the session wasn't told that the engine sleeps: %s", error)

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
        self._attached = None
        if self._fetched:
            self._mixed = True
        self._fetched = False
        if receiver is not None:
            receiver.close()

    @property
    def _is_for_adapter(self) -> bool:
        return self._attached is not None and self._attached.target == "adapter"

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
            if self._receiver is not None and self._receiver.tainted is not None:
                self._mixed = True
            error = told(error, mixed=self._mixed or self._fetched)
            if self._speaks:
                raise error from error.__cause__
            _log.error("%s: %s", type(error).__name__, error)

    def _require(self) -> WeightReceiver:
        if self._receiver is None:
            raise HandleError("no session: call init_weight_transfer_engine first")
        return self._receiver


def _told_of_sleep(worker: Any, level: int) -> None:
    for name in ("weight_transfer_engine", "_weightwire"):
        engine = getattr(worker, name, None)
        if isinstance(engine, WeightWireEngine):
            engine.sleeps(level)

"""The trainer's half of vLLM's weight transfer API: a framework that drives it switches by a name.

vLLM has no plug-in loading in trainers: importing this module registers the engine.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import weightwire
from weightwire.errors import ConfigError, HandleError, TransferError, WeightWireError
from weightwire_vllm import compat
from weightwire_vllm.compat import TrainerEngine, TrainerInfoBase
from weightwire_vllm.sources import from_vllm

if TYPE_CHECKING:
    from weightwire import Report, WeightSender

__all__ = ["TrainerInfo", "WeightWireTrainer"]

_LAST_WORDS = 2.0
"""Seconds in which the other side of a round that failed may still say why."""


@dataclass
class TrainerInfo(TrainerInfoBase):  # type: ignore[misc]  # vLLM is Any here
    """``init_info`` of ``WeightTransferTrainerFactory.trainer_init``.

    Attributes:
        rank: this trainer rank (keyword only, vLLM's own field).
        session: URL of the session.
        inner: what ``open_sender`` takes as its backend: a name, or a mapping with options.
        receiver_id: id of the replica behind ``client``.
        world_size: trainer ranks.
        timeout: seconds for a round.
        sender_options: further arguments of ``weightwire.open_sender``.
        receiver_options: further fields of the engine's ``init_info``.
        first_version: of the first round; each one counts on.
    """

    backend: ClassVar[str] = compat.ENGINE_NAME

    session: str
    inner: str | dict[str, Any] = "filesystem"
    receiver_id: str = "replica-0"
    world_size: int = 1
    timeout: float = 600.0
    sender_options: dict[str, Any] = field(default_factory=dict)
    receiver_options: dict[str, Any] = field(default_factory=dict)
    first_version: int = 1


class WeightWireTrainer(TrainerEngine[TrainerInfo]):  # type: ignore[misc]  # as above
    """Sends each round through weightwire; made by vLLM's ``WeightTransferTrainerFactory``.

    Nothing here pauses the engine: pause it first, and resume it after, as with vLLM's
    own engines.  An engine with requests in flight that isn't paused refuses the update.
    """

    init_info_cls = TrainerInfo

    def __init__(
        self, info: TrainerInfo, *, client: Any, source: Any, sender: WeightSender
    ) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._info = info
        self._sender = sender
        self._next = info.first_version
        self.report: Report | None = None
        """Of the last round, on this rank."""

    @classmethod
    def trainer_init(cls, init_info: TrainerInfo, *, client: Any, source: Any = None) -> Self:
        """Open this rank's sender, and on rank 0 the engine's receivers.

        Raises:
            ConfigError: there is no source, or an option is wrong.
            WeightWireError: as ``open_sender``.
        """
        if source is None:
            raise ConfigError("trainer_init needs a source: a WeightSource of vLLM's or ours")
        sender = weightwire.open_sender(
            init_info.inner,
            session=init_info.session,
            source=from_vllm(source),
            rank=init_info.rank,
            world_size=init_info.world_size,
            **{"timeout": init_info.timeout, **init_info.sender_options},
        )
        try:
            if init_info.is_sender:
                client.init_weight_transfer_engine(
                    {
                        "session": init_info.session,
                        "backend": init_info.inner,
                        "receiver_id": init_info.receiver_id,
                        "timeout": init_info.timeout,
                        **init_info.receiver_options,
                    }
                )
        except Exception as error:
            sender.close()
            raise _explained(error, "init_weight_transfer_engine") from error
        return cls(init_info, client=client, source=source, sender=sender)

    def send_weights(self, version: int | None = None) -> None:
        """One round on every trainer rank: start, update, finish; its report is in ``report``.

        Args:
            version: by default one more than the last.

        Raises:
            TransferError: the engine refused or failed; the message has its reason.
            HandleError: an event loop runs on this thread: await ``asend_weights``.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(self.asend_weights(version))
            return
        raise HandleError("send_weights() inside an event loop: await asend_weights() instead")

    async def asend_weights(self, version: int | None = None) -> None:
        """``send_weights`` for asyncio."""
        version = self._next if version is None else version
        sending = asyncio.create_task(self._sender.asend(version))
        if not self.is_sender:
            self.report = await sending
        else:
            driving = asyncio.create_task(asyncio.to_thread(self._drive, version))
            self.report = await self._both(sending, driving)
        self._next = version + 1

    async def _both(self, sending: asyncio.Task[Report], driving: asyncio.Task[None]) -> Report:
        tasks = (sending, driving)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if driving.done() and driving.exception() is not None and not sending.done():
                # The engine's receiver told the session why; else the sender would wait on.
                await asyncio.wait([sending], timeout=_LAST_WORDS)
                sending.cancel()
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            sending.cancel()
            raise
        failed = None if driving.cancelled() else driving.exception()
        refused = None if sending.cancelled() else sending.exception()
        if refused is not None:
            if failed is not None:
                refused.add_note(f"the engine: {failed}")
            raise refused
        if failed is not None:
            raise failed
        return sending.result()

    def _drive(self, version: int) -> None:
        step = "start_weight_update"
        try:
            self.client.start_weight_update()
            step = "update_weights"
            self.client.update_weights({"version": version, "timeout": self._info.timeout})
            step = "finish_weight_update"
            self.client.finish_weight_update(str(version))
        except Exception as error:
            raise _explained(error, step) from error

    def shutdown(self) -> None:
        """Leave the session; the engine keeps its weights."""
        self._sender.close()


def _explained(error: Exception, step: str) -> WeightWireError:
    """With the server's own reason, which vLLM's HTTP client leaves in the response."""
    if isinstance(error, WeightWireError):
        return error
    body = getattr(getattr(error, "response", None), "text", "")
    return TransferError(f"the engine's {step} failed: {error}" + (f": {body}" if body else ""))


compat.register_trainer(__name__, "WeightWireTrainer")

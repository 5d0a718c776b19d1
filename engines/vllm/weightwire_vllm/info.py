"""What callers hand to vLLM's weight transfer calls, validated by field."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from weightwire.errors import ConfigError

__all__ = ["AdapterInfo", "InitInfo", "UpdateInfo", "parse"]

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class AdapterInfo(BaseModel):
    """A LoRA adapter that an engine serves.

    Attributes:
        id: vLLM's number of it: ``lora_int_id``, from 1 in the order of ``--lora-modules``.
        config: PEFT's, as ``adapter_config.json`` has it, and ``LoraConfig.to_dict()``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[int, Field(ge=1, strict=True)]
    config: dict[str, Any]


class InitInfo(BaseModel):
    """``init_info`` of ``init_weight_transfer_engine``.

    The session's token isn't part of it: it is read from ``WEIGHTWIRE_TOKEN``.

    Attributes:
        session: URL of the session.
        backend: name of the backend, or a mapping with its options.
        receiver_id: id of this replica; data-parallel replicas of one engine
            get ``-dp<index>`` behind it, but for the first of a dense model.
        timeout: seconds for an update, from waiting for an offer to commit,
            unless the update says otherwise; None: the receiver's default.
        take_over: leave another session, or another id, that the engine is attached to;
            if False, that is an error.
        target: what of the engine is updated: its model, or one LoRA adapter alone.
        adapter: which one.
        release_buffers: give receive buffers back after each update, for a trainer that
            shares the GPU or host.
        overlap, device, catch_up, lease_ttl, open_timeout: as ``weightwire.open_receiver``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    session: str = Field(min_length=1)
    backend: str | dict[str, Any]
    receiver_id: str = Field(min_length=1)
    timeout: Seconds | None = None
    take_over: bool = True
    target: Literal["model", "adapter"] = "model"
    adapter: AdapterInfo | None = None
    release_buffers: bool = False
    overlap: bool = False
    device: str | None = None
    catch_up: str | dict[str, Any] | None = None
    lease_ttl: Annotated[float, Field(ge=0.2, le=86400)] = 10.0
    open_timeout: Seconds = 60.0

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.target == "adapter") != (self.adapter is not None):
            raise ValueError("target='adapter' and adapter={'id', 'config'} go together")
        return self

    def receiver_options(self) -> dict[str, Any]:
        """Those fields that ``open_receiver`` takes as they are."""
        options: dict[str, Any] = {
            "overlap": self.overlap,
            "device": self.device,
            "catch_up": self.catch_up,
            "lease_ttl": self.lease_ttl,
            "open_timeout": self.open_timeout,
        }
        return options


class UpdateInfo(BaseModel):
    """``update_info`` of ``update_weights``.

    Attributes:
        version: the version to wait for, or None for the newest offer.  A
            version that is already applied is answered, not fetched again; a
            newer offer than the expected one is taken.
        timeout: seconds, instead of ``init_info``'s.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Annotated[int, Field(ge=0, lt=10**12, strict=True)] | None = None
    timeout: Seconds | None = None


M = TypeVar("M", bound=BaseModel)


def parse(kind: type[M], name: str, values: Any) -> M:
    """Validate; every wrong field is named.

    Args:
        name: of the argument, for messages.

    Raises:
        ConfigError: a field is unknown, missing or wrong.
    """
    try:
        return kind.model_validate(values)
    except pydantic.ValidationError as error:
        problems = [
            ".".join([name, *map(str, problem["loc"])]) + f": {problem['msg'].lower()}"
            for problem in error.errors(include_url=False)
        ]
        known = ", ".join(kind.model_fields)
        raise ConfigError("; ".join(problems) + f" (fields: {known})") from None

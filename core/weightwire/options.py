"""Options of senders and receivers that don't depend on the backend, validated."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from weightwire.errors import ConfigError
from weightwire.session.keys import VERSIONS

__all__ = ["DEFAULT_GROUP_BYTES", "ReceiverOptions", "SenderOptions", "make_options"]

DEFAULT_GROUP_BYTES = 256 << 20

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    token: str | None = None
    overlap: bool = False
    device: str | None = None
    catch_up: Any = None
    lease_ttl: Annotated[float, Field(ge=0.2, le=86400)] = 10.0
    timeout: Seconds = 600.0
    open_timeout: Seconds = 60.0


class SenderOptions(_Options):
    """See ``open_sender``."""

    wire_dtype: str | None = None
    keep_dtype: tuple[str, ...] = ()
    group_bytes: int = Field(ge=8)
    verify: Literal["off", "sample", "full"] = "sample"
    resume_from: int | None = Field(default=None, ge=0, lt=VERSIONS)
    min_receivers: int = Field(default=1, ge=0)
    max_receivers: int | None = Field(default=None, ge=1)
    on_receiver_loss: Literal["fail", "continue"] = "fail"
    max_unavailable: int | None = Field(default=None, ge=1, le=1 << 20)
    max_version_lag: int | None = Field(default=None, ge=0, lt=VERSIONS)
    ready_within: Seconds = 5.0

    @field_validator("max_receivers")
    @classmethod
    def _no_fewer_than_it_waits_for(cls, most: int | None, info: ValidationInfo) -> int | None:
        least = info.data.get("min_receivers", 0)
        if most is not None and most < least:
            raise PydanticCustomError("fewer", f"fewer than min_receivers={least}")
        return most


class ReceiverOptions(_Options):
    """See ``open_receiver``."""


def _shown(problem: Any) -> str:
    return "..." if problem["loc"][0] == "token" else repr(problem["input"])


O = TypeVar("O", bound=_Options)  # noqa: E741


def make_options(kind: type[O], **values: Any) -> O:
    """Validate; a wrong value is a ``ConfigError`` that names the argument."""
    try:
        return kind(**values)
    except pydantic.ValidationError as error:
        problems = [
            f"{problem['loc'][0]}={_shown(problem)}: {problem['msg'].lower()}"
            for problem in error.errors(include_url=False)
        ]
        raise ConfigError("\n".join(problems)) from None

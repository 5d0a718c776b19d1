"""The states of both machines, and which may follow which."""

from __future__ import annotations

from enum import Enum

__all__ = ["RECEIVER_TRANSITIONS", "SENDER_TRANSITIONS", "ReceiverState", "SenderState"]


class SenderState(Enum):
    IDLE = "idle"
    OFFERED = "offered"
    STARTED = "started"
    CLOSING = "closing"


class ReceiverState(Enum):
    IDLE = "idle"
    PREPARING = "preparing"
    READY = "ready"
    INSTALLING = "installing"
    APPLIED = "applied"
    TAINTED = "tainted"


SENDER_TRANSITIONS = {
    SenderState.IDLE: {SenderState.OFFERED},
    SenderState.OFFERED: {SenderState.STARTED, SenderState.IDLE},
    SenderState.STARTED: {SenderState.CLOSING, SenderState.IDLE},
    SenderState.CLOSING: {SenderState.IDLE},
}
RECEIVER_TRANSITIONS = {
    ReceiverState.IDLE: {ReceiverState.PREPARING},
    ReceiverState.PREPARING: {ReceiverState.READY, ReceiverState.IDLE, ReceiverState.TAINTED},
    ReceiverState.READY: {ReceiverState.INSTALLING, ReceiverState.IDLE, ReceiverState.TAINTED},
    ReceiverState.INSTALLING: {
        ReceiverState.APPLIED,
        ReceiverState.IDLE,
        ReceiverState.TAINTED,
    },
    ReceiverState.APPLIED: {ReceiverState.PREPARING},
    ReceiverState.TAINTED: {ReceiverState.PREPARING},
}

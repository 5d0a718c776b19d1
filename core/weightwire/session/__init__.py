"""The control plane: a session's store, records, membership and agreement."""

from weightwire.session.session import Session
from weightwire.session.store import OpenRequest, SessionScheme, SessionStore

__all__ = ["OpenRequest", "Session", "SessionScheme", "SessionStore"]

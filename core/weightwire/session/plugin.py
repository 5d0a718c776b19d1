"""The session schemes that come with weightwire, registered like anyone's."""

from __future__ import annotations

from weightwire.hookspecs import hookimpl
from weightwire.session.file import FileScheme
from weightwire.session.store import SessionScheme
from weightwire.session.tcp import TcpScheme

__all__: list[str] = []


class FilePlugin:
    @hookimpl
    def weightwire_describe_session_scheme(self) -> SessionScheme:
        return FileScheme()


class TcpPlugin:
    @hookimpl
    def weightwire_describe_session_scheme(self) -> SessionScheme:
        return TcpScheme()


file = FilePlugin()
tcp = TcpPlugin()

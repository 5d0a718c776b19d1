"""What ``weightwire doctor`` tries for acme."""

from __future__ import annotations

import secrets
import socket

from weightwire_acme import CHALLENGE_BYTES, AcmeConfig

from weightwire import hookimpl
from weightwire.doctor import Check, CheckOptions, Verdict


@hookimpl
def weightwire_describe_checks() -> list[Check]:
    tried, remedy = "bytes over TCP within this host", "see `ip addr` and the firewall's rules"
    return [Check("acme.connect", tried, "weightwire_acme_doctor:connect", 20.0, remedy)]


def connect(options: CheckOptions) -> Verdict:
    with socket.create_server((AcmeConfig().host, 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address, options.seconds / 2) as sender:
            receiver, _ = listener.accept()
            with receiver:
                sender.sendall(sent := secrets.token_bytes(CHALLENGE_BYTES))
                arrived = receiver.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
    if arrived != sent:
        return Verdict.failed("other bytes arrived than were sent", "find out what is between")
    return Verdict.ok(f"bytes arrive at {address[0]}", address=address[0])

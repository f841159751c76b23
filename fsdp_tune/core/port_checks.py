"""Whether processes of this machine can connect to each other, and listen on a port."""

from __future__ import annotations

import errno
import socket

LOOPBACK_SECONDS = 5.0


def loopback_refusal() -> OSError | None:
    """Return why processes of this machine cannot connect to each other on 127.0.0.1; None if they can."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=LOOPBACK_SECONDS),
        ):
            return None
    except OSError as error:
        return error


def port_refusal(port: int) -> OSError | None:
    """Return why no process can listen on a port of this machine, in IPv4 or in IPv6, as torch's store does;
    None if one can."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(("", port))
        except OSError as error:
            # a machine without addresses of the family
            if error.errno not in (
                errno.EAFNOSUPPORT,
                errno.EADDRNOTAVAIL,
            ):
                return error
    return None

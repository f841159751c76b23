"""torch's TCPStore: serve it on a listening socket, and connect to it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Protocol, cast

OPERATION_SECONDS = 10.0
"""Limit for one operation of the store, after which the child connects again."""
CONNECT_SECONDS = 5.0


class KeyValueStore(Protocol):
    """What the exchange needs of torch's store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def delete_key(self, key: str, /) -> bool: ...


class StoreFault(Exception):
    """The store cannot be reached."""

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused


def listening_socket(address: str, port: int) -> tuple[socket.socket, str | None]:
    """Return a socket that listens on the interface of `address` only, and None.

    If the address is not one of this machine (behind a translation of addresses), it listens on all
    interfaces and a notice is returned.
    Raises: OSError.
    """
    family, _, _, _, there = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    notice: str | None = None
    try:
        try:
            listener.bind(there)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))
            notice = (
                f"{address} is not an address of this machine: port {port} is open on all of its interfaces"
            )
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener, notice


def serve(listener: socket.socket, keys: Iterable[str]) -> KeyValueStore:
    """Serve a store on a listening socket, and return a connection to it. The `keys` exist from the start, so
    that reading them never waits.

    The store takes the socket over: `listener` is of no use afterwards, also after an error. Raises:
    RuntimeError.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented, and not in `__all__`

    address, port, *_ = listener.getsockname()
    host = str({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address))
    limit = timedelta(seconds=OPERATION_SECONDS)
    store = TCPStore(
        host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    for key in keys:
        # only a key that does not exist: another machine may have been quicker
        store.compare_set(key, "", "{}")
    return cast(KeyValueStore, store)


def connect_to(address: str, port: int) -> KeyValueStore:
    """Connect to the store of the first machine. Raises: StoreFault, RuntimeError."""
    try:  # torch's own attempts do not distinguish these
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        raise StoreFault(f"{address}:{port} refuses connections", is_refused=True) from None
    except socket.gaierror as error:
        raise StoreFault(f"{address} cannot be resolved ({error.strerror})") from None
    except OSError as error:
        raise StoreFault(f"{address}:{port} does not answer ({error.strerror or error})") from None
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented, and not in `__all__`

    limit = timedelta(seconds=OPERATION_SECONDS)
    return cast(KeyValueStore, TCPStore(address, port, None, False, limit, wait_for_workers=False))

"""Sockets of the store between machines: on which interfaces it listens, and why it cannot be reached."""

from __future__ import annotations

import errno
import socket

import pytest

from fsdp_tune.launch.machines import tcp_store
from fsdp_tune.launch.machines.tcp_store import StoreFault, connect_to, listening_socket


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_store_listens_on_the_interface_of_its_address_only(free_port: int) -> None:
    listener, notice = listening_socket("127.0.0.1", free_port)
    with listener:
        assert (listener.getsockname(), notice) == (("127.0.0.1", free_port), None)
        socket.create_connection(("127.0.0.1", free_port), 5.0).close()


def test_address_behind_a_translation_is_served_on_all_interfaces_with_a_notice(free_port: int) -> None:
    """192.0.2.0/24 is reserved for documentation, so that no machine has such an address."""
    listener, notice = listening_socket("192.0.2.1", free_port)
    with listener:
        assert listener.getsockname() == ("0.0.0.0", free_port)
        assert notice == (
            f"192.0.2.1 is not an address of this machine: port {free_port} is open on all of its interfaces"
        )
        socket.create_connection(("127.0.0.1", free_port), 5.0).close()


def test_port_of_another_server_is_an_error_that_leaves_no_socket(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, new = list[socket.socket](), socket.socket

    def remember(*arguments: object) -> socket.socket:
        made.append(new(*arguments))  # type: ignore[arg-type]
        return made[-1]

    with socket.create_server(("127.0.0.1", free_port)), monkeypatch.context() as patch:
        patch.setattr(tcp_store.socket, "socket", remember)
        with pytest.raises(OSError, match="in use") as caught:
            listening_socket("127.0.0.1", free_port)
    assert caught.value.errno == errno.EADDRINUSE
    assert [each.fileno() for each in made] == [-1]


def reason(address: str, port: int) -> StoreFault:
    with pytest.raises(StoreFault) as caught:
        connect_to(address, port)
    return caught.value


def test_machine_that_refuses_is_distinguished_from_one_that_does_not_answer(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first machine that answers without a store has ended its launch; one that does not answer may
    start."""
    found = reason("127.0.0.1", free_port)
    assert (found.is_refused, str(found)) == (True, f"127.0.0.1:{free_port} refuses connections")
    for error, words in (
        (
            socket.gaierror(-2, "Name or service not known"),
            "head cannot be resolved (Name or service not known)",
        ),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "head:29501 does not answer (No route to host)"),
        (TimeoutError("timed out"), "head:29501 does not answer (timed out)"),
    ):

        def fails(*_: object, error: OSError = error) -> None:
            raise error

        monkeypatch.setattr(tcp_store.socket, "create_connection", fails)
        found = reason("head", 29501)
        assert (found.is_refused, str(found)) == (False, words)

"""Machines whose processes cannot connect to each other are refused before ranks start."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core import port_checks
from fsdp_tune.core.errors import FailedError, FsdpTuneError
from fsdp_tune.core.port_checks import loopback_refusal
from fsdp_tune.launch.command.ports import check_port
from tests.launch.recipes import resolved

MACHINES = ("launch.num_machines=2", "launch.num_processes=8", "launch.main_process_ip=10.0.0.1")


def test_used_port_is_refused_before_launch(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(FsdpTuneError, match=f"port {port}") as caught:
            check_port(resolved(tmp_path, f"launch.main_process_port={port}"))
        assert caught.value.exit_code == 1
        check_port(resolved(tmp_path, f"launch.main_process_port={port}"), machine_rank=1)
    check_port(resolved(tmp_path))


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.ENETUNREACH, "`ip link set lo up`"), (errno.EADDRNOTAVAIL, "net.ipv4.ip_local_port_range")],
)
def test_machine_whose_processes_cannot_connect_is_refused_before_ranks_start(
    number: int, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the agent tries for a minute, and then again."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    assert loopback_refusal() is None
    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(FailedError, match=f"each other on 127.0.0.1: {os.strerror(number)}") as caught:
        check_port(resolved(tmp_path))
    assert hint in str(caught.value.problems[0].hint)
    check_port(resolved(tmp_path, *MACHINES))


def test_port_that_is_used_in_ipv6_alone_is_refused_too(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            listener.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(FsdpTuneError, match=f"port {port} .*: Address already in use"):
            check_port(resolved(tmp_path, f"launch.main_process_port={port}"))


def test_machine_without_ipv6_needs_a_free_port_in_ipv4_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = socket.socket

    def without_ipv6(family: int, *how: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return made(family, *how)

    monkeypatch.setattr(port_checks.socket, "socket", without_ipv6)
    check_port(resolved(tmp_path, "launch.main_process_port=29433"))

"""Two network namespaces as two machines: each with a host name that resolves to loopback, and a router
between them that can drop packets.

Needs root and `ip`. The machines share the file system.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

HOSTS = ("machine-a", "machine-b")
NAMES = tuple(f"{host}-{os.getpid()}" for host in HOSTS)
ROUTER = f"router-{os.getpid()}"
ADDRESSES = ("10.91.1.1", "10.91.2.1")
IPV6_ADDRESSES = ("fd91:1::1", "fd91:2::1")
"""Those of machines without IPv4 addresses."""
ROUTER_ADDRESS = "10.91.1.254"
"""Both machines reach it."""
INTERFACE = "wire"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def reason_without() -> str | None:
    """Return why this machine cannot have the namespaces, or None."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs root, `ip` and `unshare`"
    try:
        with two_namespaces() as link:
            link.cut()
    except (subprocess.CalledProcessError, OSError) as error:
        return f"this system makes no network namespaces ({error})"
    return None


class Wire:
    """The link between the two."""

    def __init__(self) -> None:
        self._is_cut = False

    def cut(self) -> None:
        """Lose every packet in both directions, without an error at the ends, as behind a broken switch."""
        if not self._is_cut:
            self._route("add")
            self._is_cut = True

    def restore(self) -> None:
        if self._is_cut:
            self._route("del")
            self._is_cut = False

    @staticmethod
    def _route(verb: str) -> None:
        for address in ADDRESSES:
            ip("-n", ROUTER, "route", verb, "blackhole", f"{address}/32")


def marks_of_machines() -> list[pytest.MarkDecorator]:
    """Return the marks of a file whose tests run commands on machines that are namespaces."""
    reason = reason_without()
    return [
        pytest.mark.e2e,
        pytest.mark.ranks,
        pytest.mark.slow,
        pytest.mark.skipif(reason is not None, reason=str(reason)),
    ]


@contextmanager
def two_namespaces(addresses: tuple[str, str] = ADDRESSES) -> Iterator[Wire]:
    """Within the context, the two machines and their router exist. `addresses`: of one family, IPv4 or
    IPv6."""
    _remove()
    is_ipv6 = ":" in addresses[0]
    width, separator, options = ("64", ":", ["nodad"]) if is_ipv6 else ("24", ".", [])
    try:
        ip("netns", "add", ROUTER)
        forwarding = "ipv6/conf/all/forwarding" if is_ipv6 else "ipv4/ip_forward"
        ip("netns", "exec", ROUTER, "sh", "-c", f"echo 1 > /proc/sys/net/{forwarding}")
        for name, host, address in zip(NAMES, HOSTS, addresses, strict=True):
            ip("netns", "add", name)
            hosts = Path("/etc/netns") / name / "hosts"  # `ip netns exec` mounts it over /etc/hosts
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host}\n")
            gateway = f"{address.rpartition(separator)[0]}{separator}254"
            ip(
                "-n",
                name,
                "link",
                "add",
                INTERFACE,
                "type",
                "veth",
                "peer",
                "name",
                f"to-{host}",
                "netns",
                ROUTER,
            )
            for end, interface, own in ((name, INTERFACE, address), (ROUTER, f"to-{host}", gateway)):
                ip("-n", end, "link", "set", "lo", "up")
                ip("-n", end, "addr", "add", f"{own}/{width}", "dev", interface, *options)
                ip("-n", end, "link", "set", interface, "up")
            ip("-n", name, *(["-6"] if is_ipv6 else []), "route", "add", "default", "via", gateway)
        yield Wire()
    finally:
        _remove()


def _remove() -> None:
    for name in (*NAMES, ROUTER):
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def on_machine(machine: int, command: Sequence[str]) -> list[str]:
    """Return the command for one of the machines. Each program on the way replaces itself, so that the pid is
    the command's own."""
    shell = f'hostname {HOSTS[machine]}; exec "$@"'
    return ["ip", "netns", "exec", NAMES[machine], "unshare", "--uts", "sh", "-c", shell, "sh", *command]


def on_router(command: Sequence[str]) -> list[str]:
    """Return the command for the router, whose services both machines reach."""
    return ["ip", "netns", "exec", ROUTER, *command]

"""The route of a machine to the first one: its address, and the network interface that libraries are to
use."""

from __future__ import annotations

import socket
from collections.abc import Collection
from dataclasses import dataclass

import psutil

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Address:
    ip: str
    port: int
    """0: any free port, chosen when it is bound."""

    @property
    def control_port(self) -> int:
        """The port of the control channel between the machines: the next one."""
        return self.port + 1 if self.port < LAST_PORT else self.port - 1


@dataclass(frozen=True, slots=True)
class Route:
    """How this machine reaches the first one, or is reached by the others if it is the first."""

    interface: str
    address: str
    """Of this machine, on that interface."""
    first: str
    """Address of the first machine, as the recipe or a scheduler names it."""

    def __str__(self) -> str:
        where = "has the address" if self.is_first else "is on the route to the first machine,"
        return f"`{self.interface}`, which {where} {self.first}"

    @property
    def is_first(self) -> bool:
        """Whether the first machine's address is one of this interface."""
        return self.address == _numeric(self.first)


def route_to(first: str, port: int) -> Route | None:
    """Return the route to the first machine; None if its name cannot be resolved, or no interface has the
    address of the route."""
    try:
        family, _, _, _, there = socket.getaddrinfo(first, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # sends nothing: the kernel only looks up the route
            address = str(probe.getsockname()[0])
    except OSError:
        return None
    name = _owner_of(address)
    return Route(name, address, first) if name is not None else None


def _owner_of(address: str) -> str | None:
    """Return the interface that has an address. All of 127.0.0.0/8 is on loopback, which lists one
    address."""
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    loopback = [
        name
        for name, addresses in interfaces.items()
        if any(each.address == "127.0.0.1" for each in addresses)
    ]
    return loopback[0] if loopback and address.startswith("127.") else None


def _numeric(host: str) -> str | None:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError:
        return None


def interface_settings(route: Route | None, given: Collection[str]) -> dict[str, str]:
    """Return the variables that name the interface of the route to the first machine, except those that the
    user has given."""
    if route is None:
        return {}
    # NCCL takes a name as the beginning of others: with `=` it is exact.
    values = dict(zip(INTERFACE_VARIABLES, (route.interface, f"={route.interface}"), strict=True))
    return {name: value for name, value in values.items() if name not in given}

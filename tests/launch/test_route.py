"""The interface on the route to the first machine, among fake interfaces."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from fsdp_tune.launch.machines import route as routes
from fsdp_tune.launch.machines.channel import network_message
from fsdp_tune.launch.machines.route import Address, Route, interface_settings, route_to

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.5", "fe80::1%eth0"],
    "ib0": ["192.168.7.5"],
}


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The address from which the kernel would reach another one."""
    found = dict[str, str]()
    listed = {
        name: [SimpleNamespace(address=each) for each in addresses] for name, addresses in INTERFACES.items()
    }

    class Probe:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...

        def connect(self, there: tuple[str, int]) -> None:
            if there[0] not in found:
                raise OSError("Network is unreachable")
            self.address = found[there[0]]

        def getsockname(self) -> tuple[str, int]:
            return self.address, 0

    def resolve(host: str, port: int | None, **_: object) -> list[tuple[object, ...]]:
        if host == "unknown":
            raise socket.gaierror("Name or service not known")
        return [
            (socket.AF_INET, 0, 0, "", ({"head": "192.168.7.1", "self": "10.0.0.5"}.get(host, host), port))
        ]

    monkeypatch.setattr(routes, "psutil", SimpleNamespace(net_if_addrs=lambda: listed))
    replaced = SimpleNamespace(socket=Probe, getaddrinfo=resolve, SOCK_DGRAM=socket.SOCK_DGRAM)
    monkeypatch.setattr(routes, "socket", replaced)
    return found


@pytest.mark.parametrize(
    ("first", "source", "interface"),
    [
        ("head", "192.168.7.5", "ib0"),
        ("10.0.0.9", "10.0.0.5", "eth0"),
        ("fe80::9", "fe80::1", "eth0"),
        ("127.0.1.1", "127.0.1.1", "lo"),
        ("172.16.0.1", "172.17.0.3", None),
        ("unknown", "", None),
        ("8.8.8.8", "", None),
    ],
    ids=[
        "name",
        "address",
        "scope of an interface",
        "second loopback",
        "unlisted",
        "unresolved",
        "unreachable",
    ],
)
def test_route_is_the_interface_with_its_address(
    sources: dict[str, str], first: str, source: str, interface: str | None
) -> None:
    if source:
        sources[{"head": "192.168.7.1"}.get(first, first)] = source
    found = route_to(first, 29500)
    assert found == (None if interface is None else Route(interface, source, first))


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    ("address", "first", "words"),
    [
        ("192.168.7.5", "head", "`ib0`, which is on the route to the first machine, head"),
        ("10.0.0.5", "self", "`ib0`, which has the address self"),
        ("192.168.7.5", "unknown", "`ib0`, which is on the route to the first machine, unknown"),
    ],
)
def test_first_machine_is_the_one_with_the_address(address: str, first: str, words: str) -> None:
    route = Route("ib0", address, first)
    assert str(route) == words
    assert route.is_first == ("has the address" in words)


def test_libraries_use_the_route_unless_the_user_names_an_interface() -> None:
    route = Route("ib0", "192.168.7.5", "192.168.7.1")
    both = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    assert interface_settings(route, ()) == both
    assert interface_settings(route, ["NCCL_SOCKET_IFNAME"]) == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert interface_settings(None, ()) == {}


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    ("env", "end"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}, "192.168.7.1"),
        ({"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "eth0"}, "; NCCL_SOCKET_IFNAME=eth0 is set"),
    ],
)
def test_network_of_the_ranks_is_reported_with_what_the_user_has_set(env: dict[str, str], end: str) -> None:
    message = network_message(Route("ib0", "192.168.7.5", "192.168.7.1"), "192.168.7.1", env)
    assert message.startswith("the network is `ib0`, which is on the route to the first machine, ")
    assert message.endswith(end)


def test_network_without_a_route_is_left_to_the_libraries() -> None:
    assert network_message(None, "10.0.0.1", {}) == (
        "no interface leads to 10.0.0.1: gloo and NCCL choose one themselves "
        "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
    )


@pytest.mark.parametrize(("port", "control"), [(29500, 29501), (65535, 65534)])
def test_control_channel_has_a_port_next_to_that_of_the_ranks(port: int, control: int) -> None:
    assert Address("10.0.0.1", port).control_port == control

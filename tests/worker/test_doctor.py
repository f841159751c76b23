"""What a rank of `doctor` measures of its machine and reports of a failure, without other ranks."""

from __future__ import annotations

import os
import socket
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fsdp_tune.core.errors import FailedError
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.health_files import NetworkFacts, NetworkInterface
from fsdp_tune.worker import doctor, speed_probe


def recipe(**launch: object) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"name_or_path": "model"},
            "data": {"train": [{"path": "builtin:arithmetic"}]},
            "launch": {"device": "cpu", "num_processes": 2, **launch},
        }
    )


@pytest.mark.parametrize(
    ("running", "stopped", "least"),
    [(1.0, 0.0, 0.010), (0.05, 0.05, 0.018), (0.04, 0.16, 0.030)],
    ids=["free", "half of a core", "a fifth of a core"],
)
def test_products_in_a_row_show_a_limit_of_the_cpu(running: float, stopped: float, least: float) -> None:
    times, now = [0.0], 0.0
    while now < 0.7:
        now += 0.010
        if now % (running + stopped) > running:
            now += stopped
        times.append(now)
    assert min(after - before for before, after in pairwise(times)) == pytest.approx(0.010)
    assert least <= speed_probe.least_mean(times) < 4 * least
    assert speed_probe.least_mean([0.0, 0.1]) == float("inf")


def test_directory_without_weights_is_a_missing_input(tmp_path: Path) -> None:
    own = recipe().model_copy(
        update={"model": recipe().model.model_copy(update={"name_or_path": str(tmp_path)})}
    )
    assert doctor.input_digests(own)["model"] == f"error: there are no weights in `{tmp_path}`"
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert doctor.input_digests(own)["model"].startswith("blake2b:")


def test_other_number_of_ranks_than_in_the_recipe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    doctor._refuse_other_world(recipe())
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "3")
    with pytest.raises(
        FailedError, match="the machines started 3 ranks together, and the recipe of this one is for 2"
    ):
        doctor._refuse_other_world(recipe())


def test_interfaces_of_containers_without_address_and_those_that_are_down_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interface(address: str, *, is_up: bool = True) -> tuple[list[SimpleNamespace], SimpleNamespace]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [SimpleNamespace(family=family, address=address)] if address else [], SimpleNamespace(
            isup=is_up, speed=1000, mtu=1500
        )

    found = {
        "lo": interface("127.0.0.1"),
        "docker0": interface("172.17.0.1"),
        "eth0": interface("10.0.0.1"),
        "eth1": interface("fe80::1%eth1"),
        "eth2": interface(""),
        "eth3": interface("10.0.3.1", is_up=False),
        "veth9": interface("10.0.9.1"),
    }
    monkeypatch.setattr(
        psutil, "net_if_addrs", lambda: {name: addresses for name, (addresses, _) in found.items()}
    )
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: state for name, (_, state) in found.items()})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "veth9")
    kept = [NetworkInterface(name, 1000, 1500) for name in ("eth0", "veth9")]
    assert doctor._network() == NetworkFacts("veth9", kept), "the one in use is kept whatever its name is"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert doctor._network() == NetworkFacts(None, kept[:1])

"""What a rank of `doctor` measures of its machine, and reports of a failure."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fsdp_tune.cluster.health_facts import NOT_COMPARED
from fsdp_tune.core.errors import FailedError, usage_error
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.health_files import HealthFiles, NetworkFacts, NetworkInterface
from fsdp_tune.worker import doctor, speed_probe
from tests.ranks import Ranks


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


def test_inputs_are_read_compared_elsewhere_or_reported_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    paths = [str(tmp_path / "rows.jsonl"), "org/rows", str(tmp_path / "gone.jsonl"), "builtin:arithmetic"]
    own = Recipe.model_validate(
        {
            "model": {"name_or_path": "org/model", "tokenizer": str(tmp_path)},
            "data": {"train": [{"path": path} for path in paths]},
        }
    )

    def unreadable(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(doctor, "describe_base", unreadable)
    found = doctor.input_digests(own)
    assert found["model"] == f"error: [Errno {errno.ESTALE}] Stale file handle"
    assert found["data.train[0]"].startswith("blake2b:")
    assert found["data.train[1]"] == NOT_COMPARED, "it would be downloaded"
    assert found["data.train[2]"].startswith("error: ")
    assert "gone.jsonl" in found["data.train[2]"]
    assert "data.train[3]" not in found, "it is a part of the package"
    before = found["tokenizer"]
    (tmp_path / "tokenizer.json").write_text("{}")
    assert doctor.input_digests(own)["tokenizer"] != before


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (usage_error("model-refused", "no such model"), "model-refused", "no such model"),
        (
            RuntimeError("[gloo/pair.cc:1] Connection closed by peer [127.0.0.1]:1"),
            "lost-rank",
            "another rank is gone (Connection closed by peer)",
        ),
        (ValueError("no shape\nof this"), "doctor-failed", "ValueError: no shape"),
        (ValueError(), "doctor-failed", "ValueError: no message"),
    ],
)
def test_error_of_a_rank_is_written_for_the_command(
    error: Exception, code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = HealthFiles(tmp_path)
    (tmp_path / "recipe.json").write_text(recipe().model_dump_json(by_alias=True))
    files.request.write_text(json.dumps({"messages": [], "checkpoint_bytes": None, "gpus_before": []}))
    for name in ("die_with_launcher", "open_standard_streams"):
        monkeypatch.setattr(doctor, name, lambda: None)
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def measure(_recipe: Recipe, rank: Any, *_: object) -> None:
        if rank.index == 1:
            raise error

    monkeypatch.setattr(doctor, "_measure", measure)
    assert doctor.main([str(tmp_path)]) == 1
    [(rank, path)] = files.problems().items()
    problem = json.loads(path.read_text())
    assert (rank, problem["code"], problem["message"]) == (1, code, message)
    path.unlink()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert (doctor.main([str(tmp_path)]), files.problems()) == (0, {})


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


def as_machine(index: int) -> Any:
    """The first rank of a machine that has one rank, as `doctor` reads it."""
    return SimpleNamespace(index=index, is_first=index == 0, local_index=0, world_size=2)


def locked(paths: list[str]) -> str:
    """On a rank, which stands for a machine: whether locks of the other one hold here."""
    import torch.distributed as dist

    index = dist.get_rank()
    return doctor._lock(Path(paths[index]), as_machine(index), is_first_here=True)


@pytest.mark.ranks
def test_locks_work_only_between_machines_that_share_them(tmp_path: Path, on_ranks: Ranks) -> None:
    first, second, gone = (str(tmp_path / name) for name in ("first", "second", "no/such"))
    (tmp_path / "second").touch()
    assert on_ranks.run(2, locked, [first, first]) == ["works", "works"]
    assert on_ranks.run(2, locked, [first, second]) == ["works", "not shared"]
    assert on_ranks.run(2, locked, [first, gone]) == ["works", "untested"]


@pytest.mark.parametrize(("number", "word"), [(errno.ENOLCK, "missing"), (errno.EIO, "untested")])
def test_file_system_without_locks_differs_from_one_that_fails(
    number: int, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(_descriptor: int, _how: int) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(doctor.fcntl, "flock", flock)
    assert doctor._try_lock(0, free="works", taken="untested") == word


def difference(variables: list[dict[str, str]], first_ranks: list[bool]) -> str | None:
    """On a rank, which is the first of its machine or not: how this machine differs from the first."""
    import torch.distributed as dist

    index = dist.get_rank()
    os.environ.update(variables[index])
    return doctor._difference(recipe(), index, is_first_here=first_ranks[index])


@pytest.mark.ranks
def test_first_rank_of_a_machine_reports_how_it_differs(on_ranks: Ranks) -> None:
    variables = [{"NCCL_IB_TIMEOUT": "18"}, {"NCCL_IB_TIMEOUT": "22"}]
    first, second = on_ranks.run(2, difference, variables, [True, True])
    assert first is None
    assert "machine 1" in str(second)
    assert "NCCL_IB_TIMEOUT 22 instead of 18" in str(second)
    assert on_ranks.run(2, difference, variables, [True, False]) == [None, None]
    assert on_ranks.run(2, difference, variables[:1] * 2, [True, True]) == [None, None]


def written_to_full_disk(path: str) -> Any:
    """On a rank: the facts of an output directory that takes no file."""
    from unittest.mock import patch

    refused = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    files = HealthFiles(Path(path))
    rank: Any = SimpleNamespace(index=0, is_first=True, local_index=0, world_size=1)
    with (
        patch.object(doctor, "SEEN_SECONDS", 0.1),
        patch.object(type(doctor.DISK), "mkdir", side_effect=refused),
    ):
        return doctor.probe_output(files.path / "run", 100, rank, files, is_first_here=True)


@pytest.mark.ranks
def test_full_disk_is_a_fact_of_the_machine(tmp_path: Path, on_ranks: Ranks) -> None:
    [found] = on_ranks.run(1, written_to_full_disk, str(tmp_path))
    assert (found.error, found.visible_ranks, found.sees_rename) == ("No space left on device", 0, False)
    assert (found.lock, found.written_bytes) == ("untested", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["probe"], "the file that names what was left"


def counting(*found: int | None) -> Callable[[], int]:
    """Return what counts files: one number after the other. None: the directory cannot be listed."""
    left = list(found)

    def count() -> int:
        number = left.pop(0)
        if number is None:
            raise OSError(errno.ESTALE, "Stale file handle")
        return number

    return count


def test_files_of_others_may_be_seen_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(doctor, "time", clock)
    assert doctor._await(counting(1, None, 2), 2) == 2
    monkeypatch.setattr(doctor, "SEEN_SECONDS", 0.12)
    assert doctor._await(counting(1, 1, 1, 1, 2), 2) == 1, "too late"

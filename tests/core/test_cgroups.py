"""Limits of control groups, in fake trees of version 1, version 2 and both."""

from __future__ import annotations

import errno
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_tune.core import cgroups
from fsdp_tune.core.cgroups import GroupLimit, core_limit, memory_limit, process_limit
from fsdp_tune.core.devices import this_machine
from fsdp_tune.core.host import host
from fsdp_tune.core.limits import limit_problem

GIB = 1 << 30
UNLIMITED_V1 = (1 << 63) - 4096
NAMES = ["kubepods.slice", "pod-1", "a group", "system.slice:job"]


@dataclass
class Hierarchy:
    """A mounted hierarchy. `limits`: of each group from its top to this process's, by file."""

    controllers: str
    """"": version 2."""
    groups: list[str]
    limits: list[dict[str, str]]
    shown_from: int
    """The first group that is below the mount: 0 on a host, the container's own in a container."""
    has_namespace: bool
    """Whether the process sees the mount's root as the root of its path (a cgroup namespace)."""
    files: dict[str, str] = field(default_factory=dict[str, str])

    def write(self, tree: Path, number: int) -> tuple[str, str]:
        """Return the lines of cgroup and mountinfo."""
        point = tree / (f"mount {number}" if number else "mount")
        for index in range(self.shown_from, len(self.limits)):
            folder = point.joinpath(*self.groups[self.shown_from : index])
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in self.limits[index].items():
                (folder / name).write_text(text + "\n")
        point.mkdir(exist_ok=True)
        root, own = "/" + "/".join(self.groups[: self.shown_from]), "/" + "/".join(self.groups)
        if self.has_namespace:
            root, own = "/", "/" + "/".join(self.groups[self.shown_from :])
        kind = (
            f"cgroup2 cgroup2 rw{number}" if not self.controllers else f"cgroup cgroup rw,{self.controllers}"
        )
        line = f"3{number} 25 0:2{number} {root} {point} rw,relatime shared:9 - {kind}".replace(
            str(point), str(point).replace(" ", "\\040")
        )
        line = line.replace(root, root.replace(" ", "\\040"), 1) if root != "/" else line
        return f"{number if self.controllers else 0}:{self.controllers}:{own}", line

    @property
    def visible(self) -> list[dict[str, str]]:
        return self.limits[self.shown_from :]


def limits_of(version: int) -> Any:
    memory, pids = st.integers(1, 900), st.integers(10, 5000)
    quota, period = st.integers(1000, 900_000), st.sampled_from([50_000, 100_000])
    if version == 2:
        return st.fixed_dictionaries(
            {},
            optional={
                "memory.max": st.one_of(st.just("max"), memory.map(lambda gib: str(gib * GIB))),
                "pids.max": st.one_of(st.just("max"), pids.map(str)),
                "cpu.max": st.one_of(
                    st.just("max 100000"), st.tuples(quota, period).map(lambda pair: f"{pair[0]} {pair[1]}")
                ),
            },
        )
    return st.fixed_dictionaries(
        {"cpu.cfs_period_us": period.map(str)},
        optional={
            "memory.limit_in_bytes": st.one_of(
                st.just(str(UNLIMITED_V1)), memory.map(lambda gib: str(gib * GIB))
            ),
            "pids.max": st.one_of(st.just("max"), pids.map(str)),
            "cpu.cfs_quota_us": st.one_of(st.just("-1"), quota.map(str)),
        },
    )


@st.composite
def hierarchies(draw: st.DrawFn) -> list[Hierarchy]:
    """Version 2 alone, version 1 in some order of its controllers, or hybrid: controllers of version 1 and an
    empty version 2."""
    kind = draw(st.sampled_from(["v1", "v2", "hybrid"]))
    of = {
        "v1": ["cpu,cpuacct", "memory", "pids", "name=systemd"],
        "v2": [""],
        "hybrid": ["memory", "pids", ""],
    }[kind]
    made: list[Hierarchy] = []
    for controllers in draw(st.permutations(of)):
        groups = [NAMES[index] for index in range(draw(st.integers(0, 3)))]
        limits = [draw(limits_of(1 if controllers else 2)) for _ in range(len(groups) + 1)]
        made.append(
            Hierarchy(controllers, groups, limits, draw(st.integers(0, len(groups))), draw(st.booleans()))
        )
    return made


def expected(found: list[Hierarchy], controller: str, *, of: str) -> int | None:
    """The least of all limits that the files of the visible groups have."""
    values: list[float] = []
    for hierarchy in found:
        if hierarchy.controllers and controller not in hierarchy.controllers.split(","):
            continue
        for files in hierarchy.visible:
            if of == "cores" and hierarchy.controllers:
                quota = float(files.get("cpu.cfs_quota_us", "-1"))
                values += [math.ceil(quota / float(files["cpu.cfs_period_us"]))] if quota > 0 else []
            elif of == "cores":
                quota_word, _, period = files.get("cpu.max", "max ").partition(" ")
                values += [math.ceil(float(quota_word) / float(period))] if quota_word != "max" else []
            else:
                text = files.get(
                    of if not hierarchy.controllers or of != "memory.max" else "memory.limit_in_bytes", "max"
                )
                values += [float(text)] if text not in ("max", str(UNLIMITED_V1)) else []
    return int(min(values)) if values else None


def value(limit: GroupLimit | None) -> int | None:
    return None if limit is None else limit.value


def show(tree: Path, found: list[Hierarchy]) -> None:
    lines = [hierarchy.write(tree, number) for number, hierarchy in enumerate(found, 1)]
    (tree / "cgroup").write_text("".join(own + "\n" for own, _ in lines))
    (tree / "mountinfo").write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw,cpu\n" + "".join(mount + "\n" for _, mount in lines)
    )


def cores_64(_: int) -> set[int]:
    return set(range(64))


@given(found=hierarchies())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_least_limit_of_all_visible_groups_holds(found: list[Hierarchy]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        tree = Path(folder)
        show(tree, found)
        patch.setattr(cgroups, "OWN_GROUPS", tree / "cgroup")
        patch.setattr(cgroups, "MOUNTS", tree / "mountinfo")
        patch.setattr("fsdp_tune.core.devices.os.sched_getaffinity", cores_64)
        assert value(memory_limit()) == expected(found, "memory", of="memory.max")
        assert value(process_limit()) == expected(found, "pids", of="pids.max")
        cores = expected(found, "cpu", of="cores")
        assert value(core_limit()) == cores
        assert this_machine("cpu").cores == min(64, cores or 64)
        assert host()["memory_limit_bytes"] == value(memory_limit())


@pytest.mark.parametrize(
    ("own", "root", "files", "cores"),
    [
        ("0::/", "/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", "/", {"cpu.max": "5000 100000"}, 1),
        ("0::/", "/", {"cpu.max": ""}, None),
        ("0::/", "/", {"cpu.max": "100000 0"}, None),
        # a container that sees its own group at the root
        (
            "0::/of/the/host",
            "/another",
            {"cpu.max": "200000 100000"},
            2,
        ),
        ("0::/../../elsewhere", "/", {"cpu.max": "200000 100000", "../cpu.max": "100000 100000"}, 2),
        ("0::/it", "/..", {"cpu.max": "200000 100000"}, 2),
        ("", "/", {"cpu.max": "200000 100000"}, None),
        ("0:/", "/", {}, None),
    ],
)
def test_odd_paths_and_files(
    own: str,
    root: str,
    files: dict[str, str],
    cores: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = tmp_path / "outer" / "mount"
    point.mkdir(parents=True)
    for name, text in files.items():
        (point / name).write_text(text)
    (tmp_path / "cgroup").write_text(own + "\n")
    (tmp_path / "mountinfo").write_text(f"30 25 0:26 {root} {point} rw - cgroup2 cgroup2 rw\n")
    monkeypatch.setattr(cgroups, "OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mountinfo")
    assert value(core_limit()) == cores


@pytest.mark.parametrize(
    ("controllers", "files", "error", "named"),
    [
        (
            "memory",
            {"memory.limit_in_bytes": str(GIB)},
            MemoryError(),
            "memory.limit_in_bytes of the cgroup: 1.00 GiB",
        ),
        ("", {"memory.max": str(GIB)}, MemoryError(), "memory.max of the cgroup: 1.00 GiB"),
        ("pids", {"pids.max": "77"}, RuntimeError("can't start new thread"), "pids.max of the cgroup: 77"),
    ],
)
def test_error_names_the_limit_by_the_file_of_its_version(
    controllers: str,
    files: dict[str, str],
    error: Exception,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    show(tmp_path, [Hierarchy(controllers, ["job"], [files, {}], 0, has_namespace=False)])
    monkeypatch.setattr(cgroups, "OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mountinfo")
    problem = limit_problem(error)
    assert problem is not None
    assert named in problem.message


def test_system_without_cgroups_has_no_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OWN_GROUPS", "MOUNTS"):
        monkeypatch.setattr(cgroups, name, tmp_path / "absent")
    assert (memory_limit(), process_limit(), core_limit()) == (None, None, None)
    problem = limit_problem(OSError(errno.EAGAIN, "Resource temporarily unavailable"))
    assert problem is not None
    assert "cgroup" not in problem.message

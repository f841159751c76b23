from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.cli.known_combinations import TESTED, known_bad, version_tuple
from fsdp_tune.core.host import host
from fsdp_tune.core.package_versions import versions
from tests.cli.conftest import Cli, document

ROOT = Path(__file__).parents[2]
GOOD: dict[str, Any] = {
    "versions": {"torch": "2.13.0+cu128", "transformers": "5.23.0", "accelerate": "1.15.0"},
    "host": {"system": "Linux 6.8.0-50-generic", "shared_memory_bytes": 1 << 36, "open_files_limit": 65536},
    "devices": [{"kind": "cuda", "name": "NVIDIA H100", "memory_bytes": 80 << 30}] * 2,
    "driver": "570.10.1",
    "torch": {"device": "cuda", "device_count": 2, "bf16": True},
    "variables": {"inherited": {}, "removed_at_launch": []},
    "accelerate_default_config": None,
    "lost_devices": [],
    "hidden_by": None,
}


def with_change(path: str, value: Any) -> dict[str, Any]:
    facts = copy.deepcopy(GOOD)
    *sections, name = path.split(".")
    holder = facts
    for section in sections:
        holder = holder[section]
    holder[name] = value
    return facts


def test_good_machine_matches_no_known_bad_row() -> None:
    assert known_bad(GOOD) == []
    assert known_bad(with_change("versions.torch", "2.15.0+cu132")) == []


def test_versions_of_the_tests_are_tested_ones() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in pins if line.split("==")[0] in TESTED)
    assert pinned.keys() == TESTED.keys()
    for name, version in pinned.items():
        first, last = TESTED[name]
        assert first <= version_tuple(version)[:2] <= last, f"{name} {version}"


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        ("versions.torch", "2.11.0", "short-grace"),
        ("versions.torch", "2.16.0", "untested-torch"),
        ("versions.transformers", "4.57.0", "untested-transformers"),
        ("host.system", "Linux 4.18.0-553.el8", "old-kernel"),
        ("host.shared_memory_bytes", 64 << 20, "small-shared-memory"),
        ("host.open_files_limit", 256, "few-open-files"),
        ("torch.bf16", False, "no-bf16"),
        ("lost_devices", ["GPU 1 (GPU is lost)"], "gpu-lost"),
        ("hidden_by", "CUDA_VISIBLE_DEVICES=7", "devices-hidden"),
        ("torch.device", None, "cpu-only-torch"),
        ("variables.inherited", {"CUDA_LAUNCH_BLOCKING": "1"}, "launch-blocking"),
        ("variables.inherited", {"NCCL_P2P_DISABLE": "1"}, "p2p-disabled"),
        ("accelerate_default_config", {"path": "x"}, "foreign-accelerate-config"),
    ],
)
def test_each_known_bad_row_matches_its_facts(path: str, value: Any, code: str) -> None:
    assert [row.code for row in known_bad(with_change(path, value))] == [code]


def test_old_drivers_matter_for_several_consumer_cards_only() -> None:
    facts = with_change(
        "devices", [{"kind": "cuda", "name": "NVIDIA GeForce RTX 4090", "memory_bytes": 24 << 30}] * 2
    )
    assert known_bad(facts) == []
    assert [row.code for row in known_bad({**facts, "driver": "535.1"})] == ["consumer-p2p"]
    assert known_bad({**facts, "driver": "535.1", "devices": facts["devices"][:1]}) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.13.0+cpu", (2, 13, 0)), ("5.23.0.dev0", (5, 23, 0)), (None, ()), ("6.8.0-50-generic", (6, 8, 0))],
)
def test_version_strings_are_parsed(text: str | None, expected: tuple[int, ...]) -> None:
    assert version_tuple(text) == expected


def test_env_prints_all_fields_of_a_bug_report(cli: Cli) -> None:
    done = cli("env", "--json", RANK="3", HF_TOKEN="hf_abcdefghijklmnopqrstuvwx", NCCL_DEBUG="INFO")
    assert done.returncode == 0
    facts = document(done)
    assert {
        "versions",
        "host",
        "devices",
        "torch",
        "interconnect",
        "variables",
        "accelerate_default_config",
        "known_bad",
    } <= facts.keys()
    assert facts["versions"]["torch"]
    assert facts["torch"]["backends"]
    assert facts["variables"]["removed_at_launch"] == ["RANK"]
    assert facts["variables"]["inherited"]["NCCL_DEBUG"] == "INFO"
    assert "hf_abc" not in done.stdout + done.stderr


def test_host_facts_need_no_torch() -> None:
    described = host()
    assert described["usable_cores"] >= 1
    assert described["memory_bytes"] > 1 << 28
    assert versions()["fsdp-tune"]

"""`fsdp.activation_checkpointing: auto` in the commands: ranks get the resolved value, the recipe keeps
`auto`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fsdp_tune.cli.app import app
from fsdp_tune.core import devices, host
from fsdp_tune.core.devices import Device
from fsdp_tune.core.gpus import Hardware, find_hardware
from fsdp_tune.core.units import GIB
from fsdp_tune.jobs import plan_session
from fsdp_tune.jobs.plan_session import budget_of, visible_gpu
from fsdp_tune.planner.predict.calibration import Calibration
from tests.cli.conftest import Cli, document
from tests.cli.fake_tracing import FakeTracing, replaced_tracing  # noqa: F401  a fixture
from tests.cli.inspection import fake_model  # noqa: F401  a fixture
from tests.planner.recipes import resolved
from tests.planner.test_search import ModelTracer

KEY = "fsdp.activation_checkpointing"
STATE_GIB = 4
"""Of which each of two ranks holds a half, besides 4, 2 or 0.5 GiB of activations."""


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTracing, "state_gib", STATE_GIB)


def host_with(monkeypatch: pytest.MonkeyPatch, memory: int | None, limit: int | None = None) -> None:
    known = host.host() | {"memory_bytes": memory, "memory_limit_bytes": limit}
    monkeypatch.setattr(host, "host", lambda: known)


def run(*arguments: str) -> Result:
    keys = (f"{KEY}=auto", "data.max_length=64", "training.per_device_train_batch_size=1")
    return CliRunner().invoke(
        app, [*arguments, "--config", "gpt2_smoke", *(word for key in keys for word in ("--set", key))]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory_gib", "kind"), [pytest.param(16, "none", marks=pytest.mark.slow), (12, "selective")]
)
def test_cpu_run_recomputes_the_least_that_fits_the_host(
    memory_gib: int, kind: str, fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host_with(monkeypatch, memory_gib * GIB)
    done = run("train", "--no-start", "--set", f"output_dir={tmp_path / 'run'}")
    assert done.exit_code == 0, done.output
    written: dict[str, Any] = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert written["fsdp"]["activation_checkpointing"] == kind
    assert "activation_checkpointing=auto" in "".join(
        path.read_text() for path in (tmp_path / "run").glob("*.yaml")
    )
    assert f"{KEY}: {kind} (the least that fits the host's memory, shared by 2 ranks: " in done.output
    assert [each.is_closed for each in fake.made] == [True]


@pytest.mark.usefixtures("fake_model")
def test_validate_decides_where_the_machine_has_the_ranks_memory(
    fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch
) -> None:
    host_with(monkeypatch, 8 * GIB)
    found = json.loads(run("validate", "--json").stdout)
    assert found["resolved"]["fsdp"]["activation_checkpointing"] == "full"
    assert "the host's memory" in found["reasons"][KEY]
    assert fake.made


@pytest.mark.slow
def test_validate_does_not_decide_without_the_gpu(
    fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "visible_devices", lambda _: [])
    found = json.loads(
        run("validate", "--json", "--set", "launch.device=cuda", "--set", "launch.num_processes=2").stdout
    )
    assert found["resolved"]["fsdp"]["activation_checkpointing"] == "auto"
    assert any("plan --gpu" in line for line in found["unchecked"])
    assert fake.made == []


@pytest.mark.parametrize(("gpu", "kind"), [("A100-40GB", "none"), ("RTX3090", "selective")])
def test_plan_decides_for_the_named_gpu(gpu: str, kind: str, fake: type[FakeTracing]) -> None:
    fake.state_gib = 36
    found = json.loads(run("plan", "--gpu", gpu, "--num-gpus", "2", "--no-search", "--json").stdout)
    assert found["decided"][KEY].startswith(f"{kind} (the least that fits {gpu}")
    assert found["fits"] == "yes"


def test_written_recipe_has_every_key_decided(fake: type[FakeTracing], tmp_path: Path) -> None:
    fake.state_gib = 36
    best = tmp_path / "best.yaml"
    assert run("plan", "--gpu", "RTX3090", "--num-gpus", "2", "--write", str(best)).exit_code == 0
    assert "activation_checkpointing: auto" not in best.read_text()
    assert "activation_checkpointing: " in best.read_text()


@pytest.mark.parametrize(
    ("card", "usable"),
    [
        (Device("cuda", "NVIDIA A100-SXM4-40GB", memory_bytes=1), find_hardware("A100-40GB").usable_bytes),
        (Device("cuda", "NVIDIA Nobody's", memory_bytes=7 * GIB), 7 * GIB),
        (Device("cuda", "AMD GPU"), None),
    ],
)
def test_gpu_budget_comes_from_table_or_driver(card: Device, usable: int | None) -> None:
    found = budget_of(resolved(), card)
    assert (found.usable_bytes if found else None) == usable


def test_what_was_learned_about_a_gpu_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def known(cache: Path, hardware: Hardware) -> list[Calibration]:
        read.append(f"{cache.name} {hardware.name}")
        return []

    monkeypatch.setattr(plan_session, "known_calibrations", known)
    recipe = resolved(data={"train": [{"path": "builtin:arithmetic"}], "cache_dir": str(tmp_path / "cache")})
    budget = budget_of(recipe, Device("cuda", "NVIDIA A100-SXM4-40GB", memory_bytes=1))
    assert budget is not None
    assert read == [], "nothing is left to decide yet"
    for _ in range(3):
        budget.fit(recipe, ModelTracer(80).trace(recipe))
    assert read == ["cache A100-40GB"]


def test_cpu_budget_is_a_share_of_the_container_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = resolved(gpus=4, launch={"device": "cpu"})
    host_with(monkeypatch, 64 * GIB, limit=16 * GIB)
    found = budget_of(recipe, visible_gpu(recipe))
    assert found is not None
    assert found.usable_bytes == 4 * GIB
    host_with(monkeypatch, None)
    assert budget_of(recipe, None) is None


@pytest.mark.slow
def test_run_resumes_with_its_chosen_recomputation(cli: Cli, tmp_path: Path) -> None:
    keys = (
        f"{KEY}=auto",
        "training.save_steps=1",
        "training.save_strategy=steps",
        "output_dir=run",
        "data.cache_dir=cache",
    )
    words = [word for key in keys for word in ("--set", key)]
    done = cli("train", "--config", "gpt2_smoke", *words, "--set", "training.max_steps=2", "--json")
    assert done.returncode == 0, done.stderr
    assert document(done)["exit_reason"] == "finished"
    assert f"{KEY}: none (the least that fits the host's memory" in done.stderr
    readback = json.loads((tmp_path / "run" / "readback.json").read_text())
    assert readback["activation_checkpointing"] == "none"
    assert list((tmp_path / "cache" / "traces").glob("*.npz")), (
        "the step was traced once, and the next command finds it"
    )
    again = cli(
        "train",
        "--config",
        "gpt2_smoke",
        *words,
        "--set",
        "training.max_steps=3",
        "--resume",
        "auto",
        "--json",
    )
    assert again.returncode == 0, again.stderr

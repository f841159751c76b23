"""What a plan predicts to be allocated is allocated: recipes on emulated devices against the replay of their
traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.cuda.devices import require
from tests.cuda.drawn_memory import Weighed, drawn, weigh
from tests.cuda.live_memory import recorded_run
from tests.cuda.memory_page import HEADING, ComparedRow, results, section, written
from tests.cuda.memory_report import compare, difference
from tests.cuda.memory_step import MemoryChange, MemoryStep, only_at_peak, parting
from tests.ranks import Ranks, shared_ranks

MIB = 2**20
FAST, SLOW = 2, (6, 7)
"""FSDP2 with packed rows; FSDP1 with recomputation, DDP."""


@pytest.fixture(scope="module")
def on_ranks() -> Ranks:
    require("cuda")
    return shared_ranks("cuda")


@pytest.fixture(scope="module")
def weighed(tmp_path_factory: pytest.TempPathFactory, on_ranks: Ranks) -> Weighed:
    return weigh(drawn(FAST), tmp_path_factory.mktemp("weighed") / "recipe", on_ranks)


def _step(*sizes: float, begin: int = 0) -> MemoryStep:
    """Allocations of so many MiB, each freed at the end, in order."""
    made = [MemoryChange(index, int(size * MIB), f"op {index}") for index, size in enumerate(sizes)]
    return MemoryStep([*made, *(MemoryChange(each.block, -each.size, "") for each in made)], begin)


def test_peak_is_that_of_the_step_in_blocks() -> None:
    early = [MemoryChange(0, 8 * MIB, "load"), MemoryChange(0, -8 * MIB, "")]
    step = MemoryStep(
        [*early, MemoryChange(1, MIB, "mm"), MemoryChange(2, 100, "sum"), MemoryChange(2, -100, "")], begin=2
    )
    assert step.peak_bytes == MIB + 512
    assert [change.label for change in step.alive()] == ["mm", "sum"]


def test_parting_names_the_first_allocation_of_one_side_alone() -> None:
    assert parting(_step(4, 2, 3), _step(4, 2, 3)) is None
    assert parting(_step(4, 2, 3), _step(4, 3)) == "live 2.00 MiB by op 1"
    assert parting(_step(4, 2, 3), _step(4, 1, 3)) == "live 2.00 MiB by op 1; plan 1.00 MiB by op 1"
    assert only_at_peak(_step(4, 2, 2), _step(4)) == {"live": ["2 × 2.00 MiB by op 2"], "plan": []}


def test_draws_cover_what_a_device_has() -> None:
    assert str(drawn(7)) == str(drawn(7)) != str(drawn(8))
    switches = [drawn(seed).switches for seed in range(300)]
    found = {(name, str(value)) for each in switches for name, value in each.items()}
    wanted = {
        ("fsdp.sharding_strategy", name)
        for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
    }
    wanted |= {(name, "True") for name in ("fsdp.offload_params", "fsdp.activation_checkpointing_offload")}
    wanted |= {
        ("lora.r", "8"),
        ("quantization.scales", "fp32"),
        ("kernels.loss", "chunked"),
        ("fsdp.version", "1"),
    }
    assert found >= wanted | {
        ("training.optim", "muon"),
        ("precision.mixed_precision", "bf16"),
        ("fsdp.auto_wrap_policy", "SIZE_BASED_WRAP"),
    }


def test_section_replaces_the_old_one_alone() -> None:
    rows = [
        ComparedRow(5, "llama", 100 * MIB, 101 * MIB, False, "first live 1.00 MiB by mm"),
        ComparedRow(6, "gpt2", failure="no kernel"),
    ]
    page = "# Page\n\n## Compared with an emulated GPU\n\nold\n\n### What differs\n\nkept\n"
    new = written(page, section(results(rows)))
    assert new.endswith("\n\n### What differs\n\nkept\n")
    assert "old" not in new
    assert "| 5 | llama | 100.00 | +1.00 % |" in new
    assert "**0 of 1 recipes are within bounds**: median 1.00 %" in new
    assert "Off by at most 1 %: 1." in new
    assert written("# Page\n", section(results(rows))).count(HEADING) == 1


@pytest.mark.ranks
def test_plan_holds_what_a_run_holds(weighed: Weighed) -> None:
    assert weighed.is_within, difference(weighed)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("seed", SLOW)
def test_plan_of_a_drawn_recipe_holds_what_its_run_holds(tmp_path: Path, on_ranks: Ranks, seed: int) -> None:
    row = compare(seed, tmp_path / "recipe", on_ranks)
    assert row.failure is None, row
    assert row.is_within, row


def leaky_run(path: str) -> MemoryStep | dict[str, Any]:
    """On a rank: the worker, which keeps 3 MiB that no plan knows while gradients are clipped."""
    import torch

    from fsdp_tune.worker.step_checks import GradientGate

    original, kept = GradientGate.pass_or_skip, []

    def pass_or_skip(self: Any, *arguments: Any) -> Any:
        kept.append(torch.zeros(3 * MIB // 4, device="cuda"))
        return original(self, *arguments)

    with patch.object(GradientGate, "pass_or_skip", pass_or_skip):
        return recorded_run(path)


@pytest.mark.slow
@pytest.mark.ranks
def test_memory_that_no_plan_knows_is_found_and_named(
    tmp_path: Path, on_ranks: Ranks, weighed: Weighed
) -> None:
    leaky = weigh(drawn(FAST), tmp_path / "recipe", on_ranks, run=leaky_run, planned=weighed.planned)
    assert not leaky.is_within
    named = difference(leaky) or ""
    assert "only the live's peak has 2 × 3.00 MiB by aten::empty, worker/trainer.py" in named, named
    assert "_checked_norm" in named, named


@pytest.mark.slow
@pytest.mark.ranks
def test_plans_of_thirty_drawn_recipes_hold_what_runs_hold(tmp_path: Path, on_ranks: Ranks) -> None:
    rows = [compare(seed, tmp_path / str(seed), on_ranks) for seed in range(100, 130)]
    assert [str(row) for row in rows if row.failure is None and not row.is_within] == []

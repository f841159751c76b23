"""Ranks with different views of the disk decide together; states of another world size, clock or tool load
correctly or are refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from fsdp_tune.run.directory import RunDir, latest_checkpoint
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file, read_manifest
from tests.cuda.devices import on_devices
from tests.faults import ranks
from tests.faults.checks import verified_steps
from tests.faults.training import STEPS, Training
from tests.ranks import Ranks

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("blind", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_damage_found_by_one_rank_is_agreed_by_all(blind: int, tmp_path: Path, on_ranks: Ranks) -> None:
    on_ranks.run(2, ranks.save, tmp_path, ranks.FIRST)
    told = on_ranks.run(2, ranks.come_back_half_blind, tmp_path / f"checkpoint-{ranks.FIRST}", blind)
    assert told[0] == told[1]
    assert told[0] in ("checkpoint-damaged", "checkpoint-unusable")


@pytest.mark.parametrize(
    ("seconds", "by_name", "wait_seconds", "ends"),
    [
        (1e9, False, 0.0, "the same"),
        (1.0, True, 60.0, "the same"),
        pytest.param(1e9, True, 1.0, "refused", marks=pytest.mark.slow),
    ],
    ids=["in listings, for ever", "by name, a second late", "by name, for ever"],
)
@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_machine_waits_until_checkpoint_files_are_visible(
    late: int, seconds: float, by_name: bool, wait_seconds: float, ends: str, tmp_path: Path, on_ranks: Ranks
) -> None:
    on_ranks.run(2, ranks.save, tmp_path, ranks.FIRST)
    checkpoint = tmp_path / f"checkpoint-{ranks.FIRST}"
    told = on_ranks.run(2, ranks.come_back_late, checkpoint, late, seconds, by_name, wait_seconds)
    if ends == "refused":
        ends = "checkpoint-unusable" if late == 0 else "checkpoint-damaged"
    assert told == [ends] * 2


@on_devices
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_full_and_sharded_checkpoints_load_into_each_other(
    world: int, tmp_path: Path, on_ranks: Ranks
) -> None:
    """Moments included, on the same and on another number of ranks."""
    on_ranks.run(2, ranks.save, tmp_path, ranks.FIRST, True)
    assert (tmp_path / f"checkpoint-{ranks.FIRST}" / "model.safetensors").exists()
    assert on_ranks.run(world, ranks.loads, tmp_path, ranks.FIRST) == [True] * world
    on_ranks.run(world, ranks.save, tmp_path, ranks.SECOND)
    assert verified_steps(RunDir(tmp_path)) == [ranks.SECOND]
    assert on_ranks.run(1, ranks.loads, tmp_path, ranks.SECOND) == [True]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a day back", "ten years on"])
def test_clock_jump_changes_neither_numbers_nor_order(how: str, training: Training) -> None:
    run = training.new()
    ends = training.attempt(run, sabotage=[(how, 0, 0), (how, 1, 0)])
    assert [end.value["exit_reason"] for end in ends] == ["finished"] * 2
    training.is_whole(run)
    for path in run.path.glob("checkpoint-*"):
        os.utime(path, (0, 0))
    os.utime(run.checkpoint(3), None)  # the oldest by step is the youngest by time
    newest, _ = latest_checkpoint(run, digests=True)
    assert newest is not None
    assert newest.step == STEPS


class RunsCode:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


def test_pickled_code_in_rank_state_is_not_run(tmp_path: Path, on_ranks: Ranks) -> None:
    """By somebody who wrote a manifest that fits."""
    run = tmp_path / "run"
    run.mkdir()
    on_ranks.run(2, ranks.save, run, ranks.FIRST)
    checkpoint, sentinel = run / f"checkpoint-{ranks.FIRST}", tmp_path / "sentinel"
    (checkpoint / "rng_state_1.pth").write_bytes(pickle.dumps(RunsCode(sentinel)))
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    files = manifest.files | {"rng_state_1.pth": digest_file(checkpoint / "rng_state_1.pth")}
    (checkpoint / MANIFEST_NAME).write_text(Manifest(manifest.kind, files, manifest.facts).to_json())
    assert verified_steps(RunDir(run)) == [ranks.FIRST]
    nobody = 2
    # no save after it: the other rank would wait in it
    ends = on_ranks.ends(2, ranks.come_back_late, checkpoint, nobody, 0.0, False, 0.0)
    assert ends[1].code == 1
    assert "weights_only" in ends[1].text.lower() or "unpickl" in ends[1].text.lower()
    assert not sentinel.exists()
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == ranks.FIRST

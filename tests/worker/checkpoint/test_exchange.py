"""Checkpoints of machines that each have a run directory: written in parts, read by any division of ranks,
complete or refused."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdp_tune.run.directory import (
    Checkpoint,
    Rejected,
    RunDir,
    complete_checkpoints,
    held_checkpoints,
    inspect_checkpoint,
    is_of_weights,
    latest_checkpoint,
)
from fsdp_tune.run.manifest import MANIFEST_NAME, read_manifest
from tests.ranks import Ranks
from tests.session import made_once
from tests.worker.checkpoint import scattered_ranks

pytestmark = pytest.mark.ranks


def machine(folder: Path, number: int) -> RunDir:
    return RunDir(folder / f"machine-{number}")


@pytest.fixture
def saved_twice(on_ranks: Ranks, tmp_path: Path) -> Path:
    """Two machines of one rank each that have saved steps 10 and 20."""

    def make(folder: Path) -> None:
        assert on_ranks.run(2, scattered_ranks.save, folder, (1, 1), (10, 20)) == [[]] * 2

    return shutil.copytree(made_once("two-machines", make), tmp_path / "saved")


@pytest.fixture
def saved(saved_twice: Path) -> Path:
    """The same machines as they were after step 10."""
    for number in (0, 1):
        shutil.rmtree(machine(saved_twice, number).checkpoint(20))
    return saved_twice


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2, 3, 4, 5))]
)
def test_ranges_of_other_machines_have_the_bytes_of_their_files(
    on_ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    ranks_of = draw.choice([(1, 1), (2, 2), (1, 2, 1), (3, 1), (1, 1, 1)])
    contents = {f"file-{number}": draw.randbytes(draw.choice([0, 1, 36, 37, 38, 500])) for number in range(5)}
    held: list[list[str]] = [[] for _ in ranks_of]
    for name in contents:
        for at in draw.sample(range(len(ranks_of)), draw.randint(1, len(ranks_of))):
            held[at].append(name)
    assert on_ranks.run(sum(ranks_of), scattered_ranks.fetch, tmp_path, contents, ranks_of, held, seed) == [
        0
    ] * sum(ranks_of)


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["sharded", "full"])
def test_checkpoint_in_parts_is_loaded_by_any_division_of_ranks(
    on_ranks: Ranks, tmp_path: Path, full: bool
) -> None:
    four = tmp_path / "saved"
    assert on_ranks.run(4, scattered_ranks.save, four, (2, 2), (10, 20), full) == [[]] * 4
    parts = [machine(four, number).checkpoint(20) for number in (0, 1)]
    assert read_manifest(parts[0]) == read_manifest(parts[1])
    if not full:
        assert all(isinstance(inspect_checkpoint(part, digests=False), Rejected) for part in parts)
    for ranks_of in ((2, 2), (1, 1), (2, 1)):
        loaded = tmp_path / f"loaded-{sum(ranks_of)}"
        shutil.copytree(four, loaded)
        found = on_ranks.run(sum(ranks_of), scattered_ranks.load, loaded, ranks_of, 20, full)
        assert [each[0] for each in found] == [True] * sum(ranks_of)
        assert sum(each[1] for each in found) == 1.0 + 2.0 + 3.0 + 4.0
        if ranks_of == (2, 2):
            drawn = [
                torch.rand(1, generator=torch.Generator().manual_seed(20 + rank)).item() for rank in range(4)
            ]
            assert [each[2] for each in found] == drawn
        assert not list(loaded.glob("machine-*/.checkpoint-*"))


def test_machine_with_an_empty_disk_gets_what_the_first_has(on_ranks: Ranks, saved: Path) -> None:
    first, second = machine(saved, 0).checkpoint(10), machine(saved, 1).checkpoint(10)
    lost = set(held_checkpoints(machine(saved, 1))[0].files) - set(
        held_checkpoints(machine(saved, 0))[0].files
    )
    for name in lost:
        shutil.copy2(second / name, first / name)
    shutil.rmtree(second)
    assert [each[0] for each in on_ranks.run(2, scattered_ranks.load, saved, (1, 1), 10)] == [True, True]
    assert (second / "trainer_state.json").is_file()


def test_missing_and_damaged_files_end_the_load_on_every_rank(on_ranks: Ranks, saved: Path) -> None:
    shards = sorted((machine(saved, 1).checkpoint(10) / "pytorch_model_fsdp_0").glob("*.distcp"))
    raw = shards[0].read_bytes()
    shards[0].write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    damaged = on_ranks.run(2, scattered_ranks.refused, saved, (1, 1), 10)
    assert all(
        each.startswith("checkpoint-damaged: ")
        and "/checkpoint-10 on the machine of rank 1: " in each
        and shards[0].name in each
        for each in damaged
    )
    assert f"{shards[0].parent.name}/{shards[0].name}" not in held_checkpoints(machine(saved, 1))[0].files
    shards[0].unlink()
    missing = on_ranks.run(2, scattered_ranks.refused, saved, (1, 1), 10)
    assert all(
        each.startswith("checkpoint-incomplete: checkpoint-10: 1 of its") and "machine-1 had it" in each
        for each in missing
    )


def changed(raw: bytes) -> bytes:
    """Return a shard with another number as the first of its first tensor, which its reader does not
    notice."""
    header = raw.rindex(b"PK\3\4", 0, raw.index(b"/data/0"))
    at = header + 30 + sum(struct.unpack_from("<HH", raw, header + 26))
    return raw[:at] + bytes(each ^ 0x40 for each in raw[at : at + 4]) + raw[at + 4 :]


def cut(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


@pytest.mark.parametrize("damage", [changed, pytest.param(cut, marks=pytest.mark.slow)])
def test_damaged_shard_is_read_from_a_machine_with_a_good_one(
    on_ranks: Ranks, saved: Path, damage: Callable[[bytes], bytes]
) -> None:
    on_ranks.run(2, scattered_ranks.bring_weights, saved, (1, 1), 10)
    second = machine(saved, 1)
    (shard,) = (second.checkpoint(10) / "pytorch_model_fsdp_0").glob("*.distcp")
    shard.write_bytes(damage(shard.read_bytes()))
    assert f"{shard.parent.name}/{shard.name}" not in held_checkpoints(second, digests=True)[0].files
    assert [each[0] for each in on_ranks.run(2, scattered_ranks.load, saved, (1, 1), 10)] == [True, True]
    assert not list(saved.glob("machine-*/.checkpoint-*"))


def test_weights_come_to_the_first_machine_alone(on_ranks: Ranks, saved: Path) -> None:
    before = held_checkpoints(machine(saved, 1))
    on_ranks.run(2, scattered_ranks.bring_weights, saved, (1, 1), 10)
    (held,) = held_checkpoints(machine(saved, 0), digests=True)
    manifest = read_manifest(machine(saved, 0).checkpoint(10))
    assert manifest is not None
    assert {name for name in manifest.files if is_of_weights(name)} <= set(held.files) < set(manifest.files)
    assert held_checkpoints(machine(saved, 1)) == before
    assert isinstance(
        inspect_checkpoint(machine(saved, 0).checkpoint(10), digests=True, weights_only=True), Checkpoint
    )
    assert isinstance(
        inspect_checkpoint(machine(saved, 1).checkpoint(10), digests=False, weights_only=True), Rejected
    )


def test_machines_that_see_one_directory_are_refused(on_ranks: Ranks, tmp_path: Path) -> None:
    assert on_ranks.run(3, scattered_ranks.one_directory, tmp_path, (2, 1), False) == ["", "", ""]
    refused = on_ranks.run(3, scattered_ranks.one_directory, tmp_path, (2, 1), True)
    assert all(each.startswith("run-in-use: set `launch.shared_directory: true`") for each in refused)
    assert not list(tmp_path.rglob(".checkpoint-*"))


def test_rotation_counts_what_all_machines_have(on_ranks: Ranks, saved_twice: Path) -> None:
    shutil.rmtree(machine(saved_twice, 1).checkpoint(20))
    on_ranks.run(2, scattered_ranks.save, saved_twice, (1, 1), (30,), False, 2)
    steps = [
        [each.step for each in complete_checkpoints(machine(saved_twice, number), elsewhere=None)[0]]
        for number in (0, 1)
    ]
    assert steps == [[30, 20, 10], [30, 10]]


@pytest.mark.parametrize("killed", [0, 1])
def test_kill_between_the_renames_of_two_machines_leaves_the_checkpoint_before(
    on_ranks: Ranks, saved_twice: Path, killed: int
) -> None:
    unfinished = machine(saved_twice, killed).checkpoint(20)
    # as the save left it before its rename
    unfinished.rename(unfinished.with_name(".checkpoint-20.stage-20"))
    first, second = machine(saved_twice, 0), machine(saved_twice, 1)
    checkpoint, rejected = latest_checkpoint(first, elsewhere=held_checkpoints(second))
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert [each.path.name for each in rejected] == ["checkpoint-20"] * (1 - (killed == 0))
    assert (first.checkpoint(10) / MANIFEST_NAME).is_file()

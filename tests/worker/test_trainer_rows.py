"""The rows that ranks train in a run of several attempts, with other ranks, micro-batches, accumulation and
global batches each."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from fsdp_tune.data.preparation import Prepared, rows_of_step
from fsdp_tune.data.row_record import ROWS_FACT, RowRecord
from fsdp_tune.data.skipped_rows import SkippedRow
from fsdp_tune.data.store import RowStore
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.manifest import read_manifest
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.store import TRAIN_ROWS
from tests.ranks import Leaves

LONGEST = 48
FAST = (28,)
"""Sequences of few steps."""


def train_and_note_rows(path: str) -> dict[str, Any]:
    """On a rank: the worker. Returns its outcome with the rows of each step that this rank counts."""
    import torch.distributed as dist

    from fsdp_tune.worker.trainer import FsdpTrainer

    global_batch = FsdpTrainer._global_batch
    seen: dict[int, list[int]] = {}

    def note(self: Any, *arguments: Any) -> Any:
        batches, total = global_batch(self, *arguments)
        if self.parts.recipe.topology.counts_rows(dist.get_rank()):
            seen[self.state.global_step] = [row for batch in batches for row in batch.row_ids]
        return batches, total

    with patch.object(FsdpTrainer, "_global_batch", note):
        outcome = runs.run_worker(path)
    if outcome["exit_code"]:
        raise Leaves(outcome)
    return outcome | {"seen": seen}


def attempt(
    bench: Bench,
    changes: dict[str, Any],
    ranks: int,
    *,
    packed: bool,
    donor: RunDir | None,
    step: int,
    skipped: tuple[SkippedRow, ...],
) -> tuple[RunDir, dict[int, list[int]]]:
    """Train from a checkpoint of `donor`, in a directory of its own. Returns the rows of each step."""
    recipe = {
        "model": {"name_or_path": str(bench.model("llama-16"))},
        "data": {"packing": packed},
        "launch": {"num_processes": ranks},
    }
    run = bench.written_run(runs.merged(recipe, changes), packed=packed)
    prepared = Prepared.read(run.data_json)
    assert prepared is not None
    replace(prepared, skipped=skipped).write(run.data_json)
    if donor is not None:
        runs.resume_from(run, donor, step)
    outcomes = runs.train(bench.on_ranks, run, ranks, train_and_note_rows)
    seen: dict[int, list[int]] = defaultdict(list)
    for outcome in outcomes:
        for at, rows in outcome["seen"].items():
            seen[at].extend(rows)
    return run, {at: sorted(rows) for at, rows in seen.items()}


def drawn(dice: random.Random) -> tuple[dict[str, Any], int]:
    """Ranks and a global batch, by rows or by tokens, and with rows that ranks share."""
    ranks = dice.choice([1, 2, 2, 4])
    sequence = dice.choice([1, 2]) if ranks > 1 else 1
    micro_batch, accumulation = dice.choice([3, 4, 5, 8]), dice.choice([1, 2, 3])
    training: dict[str, Any] = {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
    }
    if dice.random() < 0.25:
        training = {
            "global_batch_size": dice.choice([12, 16, 20]),
            "per_device_train_batch_tokens": 2 * LONGEST,
        }
    return {"parallelism": {"sp_size": sequence}, "training": training}, ranks


def check_sequence(bench: Bench, seed: int) -> None:
    dice = random.Random(seed)
    packed, epochs = dice.random() < 0.3, dice.choice([1, 2])
    common: dict[str, Any] = {"data": {"max_length": LONGEST, "shuffle": dice.random() < 0.8}}
    quiet = {"eval_strategy": "no", "save_steps": 1, "witness": "first"}
    seen: dict[int, list[int]] = {}
    donor, step, skipped = None, 0, tuple[SkippedRow, ...]()
    for _ in range(dice.randint(1, 2)):
        changes, ranks = drawn(dice)
        steps = dice.randint(1, 4)
        limits = {"training": quiet | {"max_steps": step + steps}}
        changes = runs.merged(runs.merged(changes, common), limits)
        run, found = attempt(bench, changes, ranks, packed=packed, donor=donor, step=step, skipped=skipped)
        step += dice.randint(1, steps)  # killed there, or continued from an older checkpoint
        seen = {at: rows for at, rows in (seen | found).items() if at < step}
        donor = run
        # the end is not behind the checkpoint
        epochs = max(epochs, 1 + int(runs.loss_lines(run)[step - 1]["epoch"]))
        if not packed and dice.random() < 0.4:
            skipped = (*skipped, SkippedRow("hand-made", dice.randint(1, TRAIN_ROWS), step))
    changes, ranks = drawn(dice)
    limits = {"training": quiet | {"max_steps": -1, "num_train_epochs": epochs, "save_steps": 100}}
    changes = runs.merged(runs.merged(changes, common), limits)
    run, found = attempt(bench, changes, ranks, packed=packed, donor=donor, step=step, skipped=skipped)
    seen |= found
    trained = [row for at in sorted(seen) for row in seen[at]]
    left_out = {each.row - 1 for each in skipped}
    for row in range(TRAIN_ROWS):
        assert trained.count(row) == epochs or (row in left_out and trained.count(row) <= epochs), (seed, row)
    ends = [line["epoch"] for line in runs.loss_lines(run)]
    assert ends == sorted(set(ends)), seed
    assert ends[-1] == epochs, seed
    check_record(run, seen)


def check_record(run: RunDir, seen: dict[int, list[int]]) -> None:
    """The last checkpoint has the record, and `rows_of_step` names the rows of each step."""
    manifest = read_manifest(run.checkpoint(len(seen)))
    assert manifest is not None
    record = RowRecord.from_dict(manifest.facts[ROWS_FACT])
    prepared, recipe = Prepared.read(run.data_json), Recipe.model_validate_json(run.recipe_json.read_bytes())
    assert prepared is not None
    # as the command writes it
    replace(prepared, attempts=record.attempts, skipped=record.skipped or ()).write(run.data_json)
    for at, rows in seen.items():
        trained = prepared.continued(recipe.global_batch_size, len(seen), record)
        batch = trained.order(recipe, RowStore(prepared.train)).batch_after(at).tolist()
        assert sorted(batch) == rows
        left_out = [each.origin for each in trained.skipped if each.step <= at]
        assert rows_of_step(run.data_json, recipe, at + 1) == RowStore(
            prepared.train, left_out
        ).describe_rows(batch)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "seed",
    [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 31) if seed not in FAST)],
)
def test_ranks_train_each_row_of_an_epoch_once_over_several_attempts(bench: Bench, seed: int) -> None:
    check_sequence(bench, seed)


@pytest.mark.ranks
@pytest.mark.slow
def test_resume_with_another_batch_after_the_last_row_trains_no_step(bench: Bench) -> None:
    """Such as a run that was killed between its last save and its outcome."""
    limits = {"eval_strategy": "no", "num_train_epochs": 1, "max_steps": -1, "gradient_accumulation_steps": 1}
    run, seen = attempt(
        bench,
        {"training": limits | {"per_device_train_batch_size": 8}},
        2,
        packed=False,
        donor=None,
        step=0,
        skipped=(),
    )
    last = len(seen)
    assert last == -(-TRAIN_ROWS // 16)
    run, seen = attempt(
        bench,
        {"training": limits | {"per_device_train_batch_size": 4}},
        2,
        packed=False,
        donor=run,
        step=last,
        skipped=(),
    )
    assert not seen
    assert runs.loss_lines(run)[-1]["epoch"] == 1.0

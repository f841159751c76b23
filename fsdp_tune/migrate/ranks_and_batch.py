"""Ranks and batch of an import: what several keys of the file say of them together."""

from __future__ import annotations

import math
from typing import TypeGuard

from fsdp_tune.core.topology import ROW_KEYS
from fsdp_tune.core.units import enumerated
from fsdp_tune.migrate.ledger import AccountRow, Ledger
from fsdp_tune.migrate.open_keys import is_asked
from fsdp_tune.migrate.read.command_line import ENVIRONMENT, LAUNCHER
from fsdp_tune.migrate.read.foreign_file import MANIFEST
from fsdp_tune.recipe.key_paths import KeyPath, dotted
from fsdp_tune.recipe.outcome import Fate, Weight
from fsdp_tune.recipe.read.tool_detection import SWIFT

MICRO: KeyPath = ("training", "per_device_train_batch_size")
ACCUMULATION: KeyPath = ("training", "gradient_accumulation_steps")
GLOBAL: KeyPath = ("training", "global_batch_size")
RANKS: KeyPath = ("launch", "num_processes")
MACHINES: KeyPath = ("launch", "num_machines")
GPUS_OF_A_MACHINE = 8
"""Few machines have more."""


def settle_ranks(ledger: Ledger) -> None:
    """Launchers count the ranks of one machine; a recipe those of all."""
    machines = ledger.get(*MACHINES)
    for path in (
        (MANIFEST, "processes"),
        (LAUNCHER, "nproc_per_node"),
        (ENVIRONMENT, "NPROC_PER_NODE"),
        ("nproc_per_node",),
    ):
        local = ledger.value(*path)
        row = next((row for row in ledger.rows if row.path == path), None)
        if (
            row is None
            or not isinstance(local, int)
            or isinstance(local, bool)
            or (path[0] == MANIFEST and row.fate is Fate.DROPPED)
        ):
            continue
        ranks = local * machines if isinstance(machines, int) else local
        ledger.settings.pop(RANKS, None)
        if is_asked(ledger, MACHINES):
            row.fate, row.targets = Fate.QUESTION, (RANKS,)
            row.reason = (
                f"{local} on each machine, whose number is not known: write `launch: {{num_processes: "
                f"N}}` for all of them"
            )
            continue
        ledger.set(RANKS, ranks, row.key, Weight.GIVEN, row)
        row.fate, row.targets, row.reason = (
            Fate.COMPUTED,
            (RANKS,),
            f"{local} × {machines or 1} machine{'' if machines in (None, 1) else 's'}: it counts all ranks "
            "here",
        )


def settle_batch(ledger: Ledger, num_gpus: int | None) -> None:
    """The product of micro-batch, accumulation and ranks is what a recipe fixes."""
    micro, accumulation = ledger.decided(MICRO, ledger.get(*MICRO)), ledger.get(*ACCUMULATION) or 1
    ranks = ledger.get(*RANKS)
    if num_gpus is not None and ranks not in (num_gpus, None):
        ledger.decide(RANKS, f"the file says {ranks} GPUs, and `--num-gpus` {num_gpus}")
    elif num_gpus is not None:
        ranks = num_gpus
        ledger.set(RANKS, ranks, f"--num-gpus {num_gpus}", Weight.GIVEN)
        if num_gpus > GPUS_OF_A_MACHINE and ledger.get(*MACHINES) is None:
            words = (
                f"{num_gpus} GPUs are more than most machines have: "
                f"{math.ceil(num_gpus / GPUS_OF_A_MACHINE)} with {GPUS_OF_A_MACHINE} each"
            )
            ledger.decide(MACHINES, words)
    # the file's accumulation would fix the number of ranks
    if ledger.is_answered(GLOBAL) and ledger.get(*GLOBAL) is not None:
        ledger.discard(ACCUMULATION, "follows from `training.global_batch_size`, which `--set` decides")
    if ledger.get(*GLOBAL) is not None or ledger.is_answered(GLOBAL):
        return
    if unknown := [
        f"`{dotted(target)}`"
        for target in (MICRO, ACCUMULATION)
        if is_asked(ledger, target) and not ledger.has_answer(target)
    ]:
        ledger.decide(
            GLOBAL, f"micro-batch × accumulation × ranks, of which {enumerated(unknown, 'and')} is not known"
        )
        return
    if not _is_number(micro) or not _is_number(accumulation):
        return
    if ledger.tool == SWIFT and ledger.get(*ACCUMULATION) is None:
        accumulation = _accumulation_of_swift(ledger, micro, ranks)
    if not isinstance(ranks, int) and micro * accumulation == 1:
        return
    if not isinstance(ranks, int):
        words = (
            f"{micro} × {accumulation} = {micro * accumulation} sequences for each GPU: write the sum "
            "over all GPUs"
        )
        ledger.decide(GLOBAL, f"{words}, so that their number can change (`import --num-gpus N` does)")
        return
    sharing = math.prod(size for key in ROW_KEYS if _is_number(size := ledger.get("parallelism", key)))
    product = micro * accumulation * ranks // sharing
    reason = f"{micro} × {accumulation} × {ranks} ranks" + (
        f" / {sharing} ranks for each row" if sharing != 1 else ""
    )
    setting = ledger.settings.pop(ACCUMULATION, None) if not ledger.is_answered(ACCUMULATION) else None
    ledger.set(GLOBAL, product, reason, Weight.GIVEN)
    for row in setting.rows if setting is not None else []:
        _compute(ledger, row, reason)


def _accumulation_of_swift(ledger: Ledger, micro: int, ranks: object) -> int:
    """ms-swift accumulates up to 16 sequences of all ranks, unless its file says otherwise."""
    if isinstance(ranks, int):
        return max(1, math.ceil(16 / micro / ranks))
    ledger.set(
        GLOBAL, max(16, micro), "default of ms-swift: it accumulates up to 16 sequences", Weight.DEFAULT
    )
    return 1


def _compute(ledger: Ledger, row: AccountRow, reason: str) -> None:
    row.fate, row.targets, row.reason = Fate.COMPUTED, (GLOBAL,), reason
    ledger.settings[GLOBAL].rows.append(row)


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0

"""The rows that the ranks of a run trained, by step: from the token ids that reach the model, not from what
the run records."""

from __future__ import annotations

import json
from pathlib import Path

from fsdp_tune.data.store import RowStore
from fsdp_tune.run.directory import RunDir

RECORDER = """
import json
import os
import sys

import torch
from transformers import TrainerCallback


class Recorder(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.file = open(os.path.join(args.output_dir, f"seen-{os.environ['RANK']}.jsonl"), "a")
        json.dump({"start": state.global_step}, self.file)
        self.file.write("\\n")

        def note(module, given, named):
            ids = named.get("input_ids", given[0] if given else None)
            if module.training and torch.is_grad_enabled():
                json.dump({"step": state.global_step + 1, "ids": ids.tolist()}, self.file)
                self.file.write("\\n")
                self.file.flush()

        model.register_forward_pre_hook(note, with_kwargs=True)
"""


def install_recorder(folder: Path) -> str:
    """Write a package with the callback `recorder` into a folder for PYTHONPATH, and return that folder."""
    facts = folder / "recorder.dist-info"
    facts.mkdir(parents=True)
    (folder / "rows_recorder.py").write_text(RECORDER)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: recorder\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[fsdp_tune.callbacks]\nrecorder = rows_recorder:Recorder\n")
    return str(folder)


def rows_seen(run: RunDir) -> dict[int, list[int]]:
    """Return the rows of each step of the run over all ranks, sorted, from its last training: a repeated step
    counts once.

    Rows of the prepared data must differ in their token ids. Ranks of earlier attempts that are gone have
    left their files.
    """
    store = RowStore(json.loads(run.data_json.read_text())["train"])
    by_ids = {tuple(store[row].input_ids.tolist()): row for row in range(len(store))}
    assert len(by_ids) == len(store), "rows must differ"
    attempts: list[dict[int, list[int]]] = []
    for path in sorted(run.path.glob("seen-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        number = -1
        for line in lines:
            if "start" in line:
                number += 1
                if len(attempts) <= number:
                    attempts.append({})
                continue
            found = attempts[number].setdefault(line["step"], [])
            found.extend(row for ids in line["ids"] for row in [_row_of(ids, by_ids)] if row is not None)
    seen: dict[int, list[int]] = {}
    for attempt in attempts:
        start = min(attempt, default=None)
        seen = {step: rows for step, rows in seen.items() if start is None or step < start} | attempt
    return {step: sorted(rows) for step, rows in sorted(seen.items())}


def _row_of(ids: list[int], by_ids: dict[tuple[int, ...], int]) -> int | None:
    """Return the row whose ids are the longest prefix; None for a filler, which is padding alone."""
    return next(
        (by_ids[tuple(ids[:end])] for end in range(len(ids), 0, -1) if tuple(ids[:end]) in by_ids), None
    )

"""Each key that is declared without effect on data and numbers is changed in a run: losses, rows and weights
stay."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp_tune.recipe.schema.key_effects import DATA, NUMBERS, RESULT
from fsdp_tune.recipe.schema.keys import all_keys, effect_of
from fsdp_tune.recipe.schema.training_fields import PASSED_EFFECTS
from fsdp_tune.run.directory import RunDir, latest_checkpoint
from tests import ranks, warm
from tests.cli.conftest import Cli
from tests.cli.small_runs import make_base, training_lines, write_rows
from tests.cli.unaffecting_keys import BASE, BASES, CHANGES, NOT_RUN, Change

ROUNDING = 1e-5
"""Relative, of losses and gradient norms in fp32 after two steps."""
WEIGHT_ROUNDING = 1e-3
"""Of the learning rate: how far a weight may be from the other run's. AdamW's first update is nearly the sign
of a gradient."""


def declared_without_effect() -> set[str]:
    names = [key.name for key in all_keys()] + [f"training.{name}" for name in PASSED_EFFECTS]
    return {name for name in names if not effect_of(name).affects & (DATA | NUMBERS)}


def test_every_key_without_effect_is_changed_in_a_run_or_has_a_reason() -> None:
    changed, excused = {change.key for change in CHANGES}, set(NOT_RUN)
    assert changed & excused == set()
    assert declared_without_effect() - changed - excused == set(), (
        "add a value to CHANGES, or a reason to NOT_RUN"
    )
    assert (changed | excused) - declared_without_effect() == set(), (
        "these keys affect data or numbers, or do not exist"
    )
    assert {change.base for change in CHANGES} <= set(BASES)


def write_inputs(folder: Path) -> None:
    rows = [
        {"prompt": f"{number} + {number % 7} = ", "completion": f"{number + number % 7}" * (1 + number % 5)}
        for number in range(40)
    ]
    write_rows(folder / "rows.jsonl", rows)
    (folder / "bad.jsonl").write_text((folder / "rows.jsonl").read_text() + '{"prompt": 3}\n')
    make_base(folder / "base")
    make_base(folder / "extra")
    weights = folder / "extra" / "model.safetensors"
    save_file(load_file(weights) | {"extra.weight": torch.ones(4, 4)}, weights, {"format": "pt"})
    (folder / "mirror").mkdir()
    (folder / "recipe.yaml").write_text(json.dumps(BASE))


class Runs:
    """Runs of the recipe under overrides."""

    def __init__(self, cli: Cli, folder: Path) -> None:
        self.cli, self.folder = cli, folder
        self.counts: Counter[str] = Counter()

    def train(self, name: str, overrides: tuple[str, ...]) -> RunDir:
        self.counts[name] += 1
        given = dict(override.split("=", 1) for override in overrides)
        given.setdefault("output_dir", f"run-{re.sub(r'[^a-z0-9]+', '-', name.lower())}-{self.counts[name]}")
        done = self.cli(
            "train",
            "--config",
            "recipe.yaml",
            *(word for key, value in given.items() for word in ("--set", f"{key}={value}")),
        )
        assert done.returncode == 0, f"{overrides}: {done.stderr[-2000:]}"
        run = RunDir(self.folder / given["output_dir"])
        if given.get("merge.at_end") == "false":
            assert self.cli("merge-checkpoint", str(run.path)).returncode == 0
        return run

    def changed(self, change: Change) -> RunDir:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            value = change.value.replace("{folder}", str(self.folder)).replace(
                "{port}", str(free.getsockname()[1])
            )
        overrides = (*BASES[change.base], *change.beside, f"{change.key}={value}")
        return self.train(change.key, overrides)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def rows_of(run: RunDir) -> tuple[Any, ...]:
    """Return what decides the trained rows: the record of the last checkpoint, and the bytes of the prepared
    rows."""
    saved = latest_checkpoint(run)[0]
    assert saved is not None
    prepared = json.loads(run.data_json.read_text())
    stored = Path(prepared["train"])
    return saved.manifest.facts["rows"], {
        path.name: path.read_bytes() for path in sorted(stored.iterdir()) if path.suffix != ".json"
    }


def differences(change: Change, before: RunDir, after: RunDir) -> list[str]:
    """Return what differs of two runs beyond what the change allows."""
    found: list[str] = []
    lines, others = ({line["step"]: line for line in training_lines(run.path)} for run in (before, after))
    common = [step for step in lines if step in others]
    if 2 not in common:
        found.append(f"no line of the last step: {sorted(others)}")
    for step in common:
        names = ["grad_norm", "learning_rate", "tokens"]
        # or the loss is a mean over other steps
        if lines[step]["supervised_tokens"] == others[step]["supervised_tokens"]:
            names.append("loss")
        for name in names:
            one, other = lines[step][name], others[step][name]
            limit = 0.0 if change.is_exact or name == "tokens" else ROUNDING * abs(one)
            if abs(one - other) > limit:
                found.append(f"{name} of step {step}: {one} and {other}")
    if rows_of(before) != rows_of(after):
        found.append(f"rows: {rows_of(before)[0]} and {rows_of(after)[0]}")
    if not effect_of(change.key).affects & RESULT:
        found += weight_differences(change, before, after)
    return found


def weight_differences(change: Change, before: RunDir, after: RunDir) -> list[str]:
    found: list[str] = []
    folders = [("merged", before.merged, after.merged), ("adapter", before.adapter, after.adapter)]
    both = [(name, one, other) for name, one, other in folders if one.exists() and other.exists()]
    if not both:
        found.append("no delivered model to compare")
    for name, one, other in both:
        tensors, others = weights_of(one), weights_of(other)
        if tensors.keys() != others.keys():
            found.append(f"{name}: tensors {sorted(tensors.keys() ^ others.keys())}")
        limit = 0.0 if change.is_exact else WEIGHT_ROUNDING * BASE["training"]["learning_rate"]
        distances = {
            key: (tensors[key].double() - others[key].double()).abs().max().item()
            for key in tensors.keys() & others.keys()
        }
        far = {
            key: distance
            for key, distance in distances.items()
            if distance > limit or tensors[key].dtype != others[key].dtype
        }
        if far:
            found.append(f"{name}: {len(far)} tensors differ by up to {max(far.values()):.2g}")
    return found


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
@pytest.mark.parametrize("base", BASES)
def test_key_without_effect_changes_no_loss_row_or_weight(
    base: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform == "linux":  # a hundred runs: as forks of a process that has imported the stack
        monkeypatch.setattr(warm, "connect", lambda: ranks.connect("cpu"))
    write_inputs(tmp_path)
    runs = Runs(cli, tmp_path)
    before = runs.train(base, BASES[base])
    found = {
        f"{change.key}={change.value}": different
        for change in CHANGES
        if change.base == base and (different := differences(change, before, runs.changed(change)))
    }
    assert found == {}

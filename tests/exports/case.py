"""Export a tiny model of an architecture, and compare what transformers 5 and an older version read."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.model.adapters.lora import name_in_file
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.model_files import save_model_files
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.exports import older
from tests.merge.checkpoints import make_run
from tests.model.recipes import recipe_of

IDS = [5, 17, 40, 3, 99, 101, 7, 64, 2, 31, 200, 150, 8, 9, 77, 12, 250, 33, 21, 4]
TEXT = "12 + 34 = 46"
TOLERANCE = 1e-5
"""Of logits, relative to the largest."""


def train_and_export(base: Path, out: Path, *, lora: bool = False, **model: Any) -> Path:
    """Write a run on `base` with changed weights, and return its exported model, or its exported adapter."""
    run, _ = write_run(base, out, lora={"r": 1, "target_modules": "all-linear"} if lora else None, **model)
    return merge_checkpoint(run, MergeOptions(dtype="keep", adapter=lora, verify="quick")).output


def write_run(
    base: Path, out: Path, *, lora: dict[str, Any] | None = None, **model: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write the files of a run on `base` with changed weights. Returns (run, its weights)."""
    sections: dict[str, Any] = {"data": {"train": [{"path": "x"}], "max_length": 64}} | (
        {"lora": lora} if lora is not None else {}
    )
    recipe = recipe_of({"name_or_path": str(base), "tokenizer": None, **model}, **sections)
    document, encoder = find_facts(recipe), load_encoder(recipe)
    if document.facts is None or document.problems:
        raise ValueError(document.problems[0].message)
    files = out / "files"
    files.mkdir(parents=True)
    save_model_files(files, document.facts, encoder.tokenizer, encoder.origin)
    state = trained_state(recipe, encoder.vocabulary_size)
    return make_run(out / "run", {1: state}, model=files, recipe=recipe), state


def trained_state(recipe: Recipe, vocabulary: int) -> dict[str, torch.Tensor]:
    """Return the weights of the recipe's model with noise on those that are trained, as a checkpoint has
    them."""
    model = build_full(recipe, vocabulary=vocabulary)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    if recipe.lora is None:
        return dict(model.state_dict())
    return {
        name_in_file(name): parameter.data
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    folder: Path
    adapter: Path | None = None
    has_tokenizer: bool = True

    def as_line(self) -> str:
        text = TEXT if self.has_tokenizer else None
        adapter = str(self.adapter) if self.adapter is not None else None
        return json.dumps({"folder": str(self.folder), "adapter": adapter, "ids": IDS, "text": text})


def load_with(python: Path, jobs: list[Job], folder: Path) -> list[dict[str, Any]]:
    """Return what the transformers of another interpreter reads in each folder. It runs in an empty
    directory, without this package."""
    script = folder / "older.py"
    shutil.copy(older.__file__, script)
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
        "HOME": str(folder),
        "PATH": "/usr/bin:/bin",
    }
    child = subprocess.run(
        [python, "-P", script],
        input="".join(job.as_line() + "\n" for job in jobs),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        check=False,
    )
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    if len(lines) < len(jobs):
        lines.append({"error": f"the process ended with {child.returncode}: {child.stderr.strip()[-300:]}"})
        lines += load_with(python, jobs[len(lines) :], folder) if jobs[len(lines) :] else []
    return lines


def differences(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """Return how two readings of one export differ."""
    if (error := new.get("error") or old.get("error")) is not None:
        return [f"{'5' if 'error' in new else 'older'}: {error}"]
    found = (
        []
        if (relative := relative_difference(new, old)) <= TOLERANCE
        else [f"logits differ by {relative:.1e}"]
    )
    wrong = [
        name
        for name, value in new["generation"].items()
        if not _same_setting(name, value, old["generation"][name])
    ]
    found += [
        f"generation setting `{name}`: {new['generation'][name]} and {old['generation'][name]}"
        for name in wrong
    ]
    tokens = new.get("tokens") or {}
    return found + [
        f"{name} of the tokenizer: {value!r} and {old['tokens'][name]!r}"
        for name, value in tokens.items()
        if value != old["tokens"][name]
    ]


def relative_difference(new: dict[str, Any], old: dict[str, Any]) -> float:
    left, right = torch.tensor(new["logits"]), torch.tensor(old["logits"])
    return ((left - right).abs().max() / left.abs().max()).item()


_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "do_sample": False, "max_length": 20}
"""transformers 4 fills unset settings in when it reads the file, transformers 5 when it generates."""


def _same_setting(name: str, new: Any, old: Any) -> bool:
    return (_DEFAULTS.get(name) if new is None else new) == old

"""The training loss of each source in a line equals a plain computation, one example at a time, however the
rows are trained."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from fsdp_tune.data.batches import order_of
from fsdp_tune.data.store import IGNORE_INDEX, STORE_KIND, RowStore
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file, list_files
from fsdp_tune.run.records import read_object
from tests.cuda.devices import on_devices
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case
from tests.parity.store import GLOBAL_BATCH_SIZE

TRAIN = [{"path": "hand-made", "label": "mine"}, {"path": "others"}, {"path": "few", "label": "rare"}]
NAMES = ["mine", "1", "rare"]
RARE = 11
"""Every eleventh example is of the rare source, which some steps lack."""
SETTINGS = {
    "data": {"train": TRAIN, "pad_to_multiple_of": 8},
    "training": {"learning_rate": 0.0, "weight_decay": 0.0, "max_steps": 4, "logging_steps": 2},
}
SLICES = (("loss", "chunked"),)
BASE = Case(packed=True)
CASES = [
    replace(BASE, accumulation=2, kernels=SLICES, training=(("label_smoothing_factor", 0.1),)),
    replace(BASE, architecture="llama-16", sequence=2, training=(("label_smoothing_factor", 0.1),)),
    replace(BASE, packed=False, tokens=64),
    replace(BASE, architecture="llama-16", ranks=4, sequence=2, kernels=SLICES),
    replace(BASE, version=1, kernels=SLICES),
    replace(BASE, strategy="NO_SHARD", kernels=SLICES),
    replace(BASE, packed=False, ranks=1, accumulation=4, lora=(("r", 4), ("lora_alpha", 4))),
    replace(BASE, architecture="mixtral-balanced"),
    replace(BASE, precision="bf16", kernels=SLICES),
]
FAST = CASES[:1]


@pytest.fixture(scope="module")
def store(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the bench, its examples in turn of three files."""
    folder = tmp_path_factory.mktemp("sources") / "store"
    shutil.copytree(bench.store, folder)
    origins = np.fromfile(folder / "origins.int64", np.int64).reshape(-1, 2)
    numbers = np.arange(len(origins))
    origins[:, 0] = np.where(numbers % RARE == 0, 2, numbers % 2)
    origins.tofile(folder / "origins.int64")
    (folder / MANIFEST_NAME).unlink()
    files = {name: digest_file(folder / name) for name in list_files(folder)}
    (folder / MANIFEST_NAME).write_text(
        Manifest(STORE_KIND, files, {"files": [str(entry["path"]) for entry in TRAIN]}).to_json()
    )
    return folder


def run_of(case: Case, bench: Bench, store: Path) -> RunDir:
    lora = {"lora": dict(case.lora) | {"adapter": str(bench.adapter(case))}} if case.lora else {}
    changes = runs.merged(case.recipe(str(bench.model(case.architecture))), SETTINGS | lora)
    run = bench.written_run(changes, store, packed=case.packed)
    document = read_object(run.data_json)
    document["report"] = {
        "inputs": [
            entry | {"label": entry.get("label"), "set": "train", "files": 1, "tokens": 1, "repeats": 1}
            for entry in TRAIN
        ]
    }
    run.data_json.write_text(json.dumps(document))
    return run


def steps_of(run: RunDir) -> Iterator[list[int]]:
    recipe = Recipe.model_validate_json(run.recipe_json.read_bytes())
    store = RowStore(read_object(run.data_json)["train"])
    order = order_of(recipe, 0, store.lengths)
    for start in range(0, len(order), GLOBAL_BATCH_SIZE):
        yield [int(row) for row in order[start : start + GLOBAL_BATCH_SIZE]]


def plain_losses(run: RunDir, model: Any, smoothing: float) -> list[dict[str, tuple[float, int]]]:
    """Loss sum and number of targets of each source, for each step, from the initial weights."""
    store = RowStore(read_object(run.data_json)["train"])
    found: list[dict[str, tuple[float, int]]] = []
    for rows in steps_of(run):
        sums: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for row in rows:
            stored = store[row]
            ends = np.cumsum(stored.lengths)
            for end, length, (file, _) in zip(ends, stored.lengths, store.origins(row), strict=True):
                ids, labels = (
                    torch.from_numpy(each[end - length : end].astype(np.int64))
                    for each in (stored.input_ids, stored.labels)
                )
                with torch.no_grad():
                    logits = model(input_ids=ids.unsqueeze(0)).logits[0, :-1]
                total = float(F.cross_entropy(logits, labels[1:], reduction="sum", label_smoothing=smoothing))
                name = NAMES[[str(entry["path"]) for entry in TRAIN].index(file)]
                count = int((labels[1:] != IGNORE_INDEX).sum())
                sums[name] = (sums[name][0] + (total if count else 0.0), sums[name][1] + count)
        found.append(dict(sums))
    return found


def losses(line: dict[str, Any]) -> dict[str, float | None]:
    return {name: line[f"source_{name}_loss"] for name in NAMES}


def expected_line(steps: list[dict[str, tuple[float, int]]]) -> dict[str, float | None]:
    sums = {
        name: [sum(part) for part in zip(*(step.get(name, (0.0, 0)) for step in steps), strict=True)]
        for name in NAMES
    }
    return {name: total / count if count else None for name, (total, count) in sums.items()}


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=[] if case in FAST else pytest.mark.slow) for case in CASES],
)
def test_losses_of_sources_equal_a_plain_computation(case: Case, bench: Bench, store: Path) -> None:
    run = run_of(case, bench, store)
    runs.train(bench.on_ranks, run, case.ranks, runs.run_with_kernels)
    if case.lora:
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(bench.adapter(case)).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(
            bench.model(case.architecture), dtype=torch.float32
        ).eval()
    steps = plain_losses(run, model, dict(case.training).get("label_smoothing_factor", 0.0))
    tolerance = 2e-2 if case.precision == "bf16" else 1e-5
    for index, line in enumerate(runs.loss_lines(run)):
        counted = steps[2 * index : 2 * index + 2]
        assert losses(line) == pytest.approx(expected_line(counted), rel=tolerance)
        counts = {name: sum(step.get(name, (0.0, 0))[1] for step in counted) for name in NAMES}
        mean = sum(counts[name] * (losses(line)[name] or 0.0) for name in NAMES) / line["supervised_tokens"]
        assert mean == pytest.approx(line["loss"], rel=1e-6)

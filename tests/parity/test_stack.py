"""Faults of the stack (docs/evidence/numerics.md), each on the stock path and in fsdp-tune.

If a test of the stock path fails, upstream may have fixed the fault, and the workaround can be removed.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.parity import runs, stock
from tests.parity.bench import Bench
from tests.parity.cases import Case
from tests.parity.report import FAULTS_OF_STACK
from tests.ranks import Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture
def stock_run(on_ranks: Ranks, bench: Bench):
    """Calls a function of `stock` on two ranks and returns rank 0's value."""

    def run(function: Any, architecture: str = "llama", **options: Any) -> Any:
        folder = bench.new_folder()
        folder.mkdir()
        return on_ranks.run(
            2, functools.partial(function, str(bench.model(architecture)), str(folder), **options)
        )[0]

    return run


@pytest.fixture
def record(record_property):
    """Records a row of the page: the case, what the stock path gives and what fsdp-tune gives."""

    def write(case: str, stock: str, here: str) -> None:
        record_property("parity", {"section": FAULTS_OF_STACK, "case": case, "stock": stock, "here": here})

    return write


def fsdp2(**options: Any) -> dict[str, Any]:
    return {"version": 2, **options}


def readback(bench: Bench, case: Case) -> dict[str, Any]:
    return json.loads(bench.run(case).readback_json.read_text())


def test_stock_recomputation_draws_another_dropout_mask(stock_run, bench: Bench, record) -> None:
    """§7, 3: Accelerate's FSDP2 path wraps with preserve_rng_state=False."""
    layer = fsdp2(transformer_layer_cls_to_wrap=["GPT2Block"])
    plain = stock_run(stock.train, "gpt2-dropout", fsdp_config=layer)[0]
    recomputed = stock_run(
        stock.train, "gpt2-dropout", fsdp_config=layer | {"activation_checkpointing": True}
    )[0]
    assert recomputed["loss"] == plain["loss"], "the forward is the same"
    wrong = abs(recomputed["grad_norm"] / plain["grad_norm"] - 1)
    assert wrong > 1e-3
    ours = [
        runs.loss_lines(bench.run(Case("gpt2-dropout", recomputation=kind)))[0]["grad_norm"]
        for kind in ("none", "full")
    ]
    assert ours[0] == ours[1]
    record(
        "dropout under activation checkpointing: gradient norm of step 1, recomputed against not",
        f"{recomputed['grad_norm']:.4f} against {plain['grad_norm']:.4f}",
        f"{ours[1]:.4f} against {ours[0]:.4f}",
    )


def test_bf16_rounds_the_loss_and_the_sums(stock_run, bench: Bench, record) -> None:
    """§7, 4: Accelerate's policy sets output_dtype and reduce_dtype to bf16."""
    losses = [line["loss"] for line in stock_run(stock.train, bf16=True)]
    assert all(is_bf16(loss) for loss in losses)
    wrapped = stock_run(stock.units, bf16=True)
    assert (wrapped["reduce_dtype"], wrapped["output_dtype"]) == ({"torch.bfloat16"}, {"torch.bfloat16"})
    case = Case(precision="bf16")
    ours = [line["loss"] for line in runs.loss_lines(bench.run(case))]
    assert not any(is_bf16(loss) for loss in ours)
    document = readback(bench, case)
    assert (document["reduce_dtype"], document["output_dtype"]) == ("float32", None)
    numbers = [", ".join(f"{loss:.6g}" for loss in some[:3]) for some in (losses, ours)]
    record("first losses under bf16", numbers[0], numbers[1])


def is_bf16(value: float) -> bool:
    import torch

    return float(torch.tensor(value, dtype=torch.bfloat16)) == value


def test_cpu_ranks_train_with_ddp_without_a_warning(stock_run, bench: Bench, record) -> None:
    """§7, 2: Accelerate enters FSDP only for a distributed type MULTI_<accelerator>."""
    assert stock_run(stock.units, configured=False)["wrapper"] == "DistributedDataParallel"
    ours = readback(bench, Case())
    assert (ours["wrapper"], ours["not_sharded"]) == ("fsdp2", [])
    record("fsdp: true on CPU ranks", "DDP", "FSDP2")


def test_unknown_fsdp_config_keys_are_ignored(stock_run, record) -> None:
    """§7, 1: `offload_params` is the plugin's word; `fsdp_config` reads `cpu_offload`, and drops what it does
    not know."""
    assert (
        stock_run(stock.offload_policy, fsdp_config=fsdp2(offload_params=True, no_such_key=1))
        == "OffloadPolicy"
    )
    with pytest.raises(FsdpTuneError, match="offload_parms"):
        parse("fsdp: {offload_parms: true}")
    record("unknown or misplaced key of the FSDP section", "ignored", "an error")


def test_size_wrap_does_not_work_on_fsdp2(stock_run, bench: Bench, record) -> None:
    """§7, 18."""
    options = fsdp2(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1000)
    message = stock_run(stock.raised, fsdp_config=options)
    assert "does not support containers" in message
    units = readback(bench, Case(wrap="size"))["units"]
    assert len(units) > 3
    record("SIZE_BASED_WRAP", "ValueError", f"{len(units)} units")


def test_recomputation_without_units_fails(stock_run, bench: Bench, record) -> None:
    """§7, 18: NO_WRAP with activation checkpointing."""
    options = fsdp2(auto_wrap_policy="NO_WRAP", activation_checkpointing=True)
    assert "'NoneType' object is not callable" in stock_run(stock.raised, fsdp_config=options)
    document = readback(bench, Case(wrap="none", recomputation="full"))
    assert (document["activation_checkpointing"], len(document["units"])) == ("full", 1)
    record("NO_WRAP with activation checkpointing", "TypeError", "3 layers recomputed")


def test_hybrid_sharding_is_not_on_fsdp2(stock_run, bench: Bench, record) -> None:
    """§7, 5."""
    assert "only available with FSDP1" in stock_run(
        stock.raised, fsdp="hybrid_shard auto_wrap", fsdp_config=fsdp2()
    )
    assert readback(bench, Case(strategy="HYBRID_SHARD", ranks=4))["mesh"] == [2, 2]
    record("hybrid_shard", "ValueError", "mesh 2 × 2")


def test_stock_fp16_on_cpu_is_silently_ignored(stock_run, bench: Bench, record) -> None:
    """§7, 19."""
    assert stock_run(stock.scaler) == ("None", False)
    lines = runs.loss_lines(bench.run(Case(precision="fp16")))
    assert lines[-1]["loss_scale"] >= 1.0
    assert readback(bench, Case(precision="fp16"))["compute_dtype"] == "float16"
    record("fp16 on CPU", "no scaler, fp32", f"scale {lines[-1]['loss_scale']:g}")


def test_stock_resume_ignores_a_new_learning_rate(stock_run, bench: Bench, record) -> None:
    """§7, 22: transformers#9099."""
    rates = stock_run(stock.resumed_rate)
    assert rates == [1e-3] * 4, "the second half was asked for 1e-2"
    case = Case()
    changes = runs.merged(case.recipe(str(bench.model("llama"))), {"training": {"learning_rate": 3e-2}})
    run = bench.written_run(changes)
    runs.resume_from(run, bench.run(case))
    runs.train(bench.on_ranks, run, case.ranks)
    old, new = (runs.loss_lines(each)[runs.SAVED_STEP :] for each in (bench.run(case), run))
    for before, after in zip(old, new, strict=True):
        assert math.isclose(after["learning_rate"], 10 * before["learning_rate"], rel_tol=1e-12)
    record("resume with ten times the learning rate", "the old rate", "the new rate")


def test_accumulation_keeps_unsharded_gradients(stock_run, bench: Bench, record) -> None:
    """§7, 23: the Trainer reduces only the last micro-batch."""
    kept = stock_run(stock.kept_unsharded)
    parameters = readback(bench, Case())["parameters"]
    assert kept >= 4 * parameters, "unsharded gradients in fp32, on every rank"
    case = Case(accumulation=4)
    ours = largest_unsharded(bench, case)
    assert ours == 0
    assert largest_unsharded(bench, replace(case, fsdp=(("sync_each_batch", False),))) >= 4 * parameters
    record(f"bytes of unsharded gradients between micro-batches, of {4 * parameters}", str(kept), str(ours))


def test_sharded_save_model_writes_nothing(stock_run, bench: Bench, record) -> None:
    """§7, 6."""
    files = stock_run(stock.saved_files)
    assert not any("safetensors" in name or name == "config.json" for name in files)
    run = bench.run(Case())
    assert (run.checkpoint(runs.STEPS) / "manifest.json").exists()
    record("save_model of sharded weights", f"{len(files)} files", "checkpoint with a manifest")


def largest_unsharded(bench: Bench, case: Case) -> int:
    run = bench.written_run(case.recipe(str(bench.model("llama"))))
    return max(
        outcome["unsharded_bytes"]
        for outcome in runs.train(bench.on_ranks, run, case.ranks, stock.run_watching_gradients)
    )


def parse(text: str) -> Recipe:
    return parse_recipe(
        "model: {name_or_path: m}\ndata: {train: [{path: d}]}\n" + text + "\n", Path("recipe.yaml")
    ).recipe


def test_yaml_reads_exponents_as_text(record) -> None:
    """§7, 11."""
    text = "training: {learning_rate: 2e-5}"
    assert yaml.safe_load(text)["training"]["learning_rate"] == "2e-5"
    assert parse(text).training.learning_rate == 2e-5
    record("`learning_rate: 2e-5` in YAML", "text", "a number")

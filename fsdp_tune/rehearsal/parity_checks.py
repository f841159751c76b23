"""`rehearse --parity`: train the recipe once for each switch, and compare each run with a plain PyTorch loop
on one device.

Torch-free: the runs are `fsdp-tune train`, and the reference is a child process. Settings that make numbers
incomparable (dropout draws different masks on each rank) or that the reference lacks (other optimizers) are
replaced in all runs, and listed.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdp_tune.core.topology import ROW_KEYS
from fsdp_tune.recipe.rules.experts import EXPERT_PARALLEL_RULES
from fsdp_tune.recipe.schema.optimizers import DEFAULT_OPTIMIZER
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.world import World, experts_divide, readers
from fsdp_tune.rehearsal.lifecycle_checks import Check, run_fsdp_tune, run_torch_script
from fsdp_tune.rehearsal.scaled_data import ROWS
from fsdp_tune.rehearsal.scaled_recipe import ScaledRecipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.events import LossScaleBackedOff, read_event
from fsdp_tune.run.metrics_file import read_metrics

STEPS = 12
LEARNING_RATE = 1e-3
WARMUP_STEPS = 3
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-5
"""Relative, in fp32: a hundred times the effect of another order of additions."""
HALF_PRECISION_FACTOR = 2.0
"""A run in bf16 or fp16 may deviate from fp32 by this factor times the deviation of one device in bf16."""
FP8_FACTOR = 50.0
"""In the tests' tiny models fp8 deviates 5 to 20 times as far as bf16 (docs/guide/precision.md)."""

Changes = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Switch:
    name: str
    changes: Changes = field(default_factory=dict[str, dict[str, Any]])
    """Section → keys."""
    precision: str = "no"


def make_comparable(small: ScaledRecipe) -> ScaledRecipe:
    """Return the recipe without the settings that have no counterpart in the plain loop."""
    result = ScaledRecipe(copy.deepcopy(small.document), list(small.changes))
    document = result.document
    config = document["model"]["from_config"]
    dropped = [
        name for name, value in config.items() if "drop" in name and isinstance(value, float) and value > 0.0
    ]
    config |= dict.fromkeys(dropped, 0.0)
    if dropped:
        result.changes.append(f"dropout: off ({', '.join(dropped)}), since each rank draws different masks")
    if document["model"].pop("freeze", None):
        result.changes.append("model.freeze: nothing, since the reference trains all parameters")
    document["data"]["shuffle"] = True
    if document["data"].get("streaming"):
        document["data"] |= {"streaming": False, "stream_lanes": "auto", "curriculum": []}
        for source in document["data"]["train"]:
            source |= {"max_rows": ROWS, "repeats": None}
        result.changes.append(
            f"data: the first {ROWS} rows of each source, prepared, which the reference reads"
        )
    kept = {
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "seed",
        "data_seed",
    }
    kept |= {
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "report_to",
        "logging_steps",
        "eval_strategy",
    }
    document["training"] = {name: value for name, value in document["training"].items() if name in kept} | {
        # Divided experts are updated by fused AdamW alone.
        "optim": DEFAULT_OPTIMIZER if document.get("fsdp", {}).get("ep_size", 1) > 1 else "adamw_torch",
        "lr_scheduler_type": "cosine",
        "learning_rate": LEARNING_RATE,
        "warmup_steps": WARMUP_STEPS,
        "max_steps": STEPS,
        "save_steps": STEPS,
        "eval_steps": STEPS,
    }
    result.changes = [line for line in result.changes if not line.startswith(("training:", "merge."))]
    result.changes.append(
        f"training: {STEPS} steps of AdamW with a peak learning rate of {LEARNING_RATE} and a cosine"
    )
    document["checkpoint"] = {"probe": False}
    document["merge"] = {"at_end": False}
    return result


def switches(document: dict[str, Any]) -> list[Switch]:
    """Return the recipe as written, and one variant for each FSDP setting that can change alone on the same
    ranks."""
    fsdp = document.get("fsdp", {})
    strategy = fsdp.get("sharding_strategy", "FULL_SHARD")
    ranks = document["launch"]["num_processes"]
    sharded = strategy != "NO_SHARD"
    found = [Switch("as written, in fp32")]
    strategies = (
        ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"]
        if ranks % 2 == 0 and ranks > 2
        else ["FULL_SHARD", "SHARD_GRAD_OP"]
    )
    found += [
        Switch(f"sharding_strategy {name}", {"fsdp": {"sharding_strategy": name}})
        for name in strategies
        if name != strategy
    ]
    if sharded:
        plain = {
            "sharding_strategy": "NO_SHARD",
            "offload_params": False,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        }
        found.append(Switch("sharding_strategy NO_SHARD", {"fsdp": plain}))
    kinds = (
        ("none", "selective", "full")
        if document.get("kernels", {}).get("mlp_slice_tokens") is None
        else ("none", "full")
    )
    for kind in kinds:  # slices of the MLP exclude selective recomputation
        if kind != fsdp.get("activation_checkpointing", "none"):
            found.append(
                Switch(f"activation_checkpointing {kind}", {"fsdp": {"activation_checkpointing": kind}})
            )
    if sharded and fsdp.get("version", 2) == 2:
        offload = not fsdp.get("offload_params", False)
        found.append(Switch(f"offload_params {str(offload).lower()}", {"fsdp": {"offload_params": offload}}))
    if sharded and fsdp.get("auto_wrap_policy") != "NO_WRAP":
        found.append(
            Switch(
                "auto_wrap_policy NO_WRAP",
                {"fsdp": {"auto_wrap_policy": "NO_WRAP", "forward_prefetch": False}},
            )
        )
    if fsdp.get("ep_size", 1) > 1:
        found.append(Switch("ep_size 1", {"fsdp": {"ep_size": 1}}))
    return [_possible(document, switch) for switch in (*found, *_batches(document), *_precision(document))]


def _possible(document: dict[str, Any], switch: Switch) -> Switch:
    """Return the switch with all experts on every rank if it excludes that ranks divide them."""
    changed = _switched(document, switch)
    recipe, world = Recipe.model_validate(changed), World(changed["launch"]["num_processes"], 1)
    if not any(True for rule in EXPERT_PARALLEL_RULES for _ in rule(recipe)) and not any(
        True for _ in experts_divide(recipe, world)
    ):
        return switch
    undivided = {"fsdp": switch.changes.get("fsdp", {}) | {"ep_size": 1}}
    return replace(switch, name=f"{switch.name}, ep_size 1", changes=switch.changes | undivided)


def _switched(document: dict[str, Any], switch: Switch) -> dict[str, Any]:
    result = document | {"precision": document.get("precision", {}) | {"mixed_precision": switch.precision}}
    return result | {section: result.get(section, {}) | keys for section, keys in switch.changes.items()}


def _batches(document: dict[str, Any]) -> list[Switch]:
    """Return other splits of the same global batch."""
    training, written = document["training"], document.get("parallelism", {})
    alone_in_rows = dict.fromkeys((key for key in ROW_KEYS if written.get(key, 1) > 1), 1)
    sharing = math.prod(written[key] for key in alone_in_rows)
    ranks = document["launch"]["num_processes"] // sharing
    micro_batch = training.get("per_device_train_batch_size", 1)
    accumulation = training.get("gradient_accumulation_steps", 1)
    found: list[Switch] = []
    if micro_batch % 2 == 0:
        name = f"{micro_batch // 2} × {readers(ranks, sharing)} × {accumulation * 2} accumulation"
        halved = {
            "per_device_train_batch_size": micro_batch // 2,
            "gradient_accumulation_steps": accumulation * 2,
        }
        found.append(Switch(name, {"training": halved}))
    if ranks * sharing > 1 and not document.get("fsdp", {}).get("sharding_strategy", "").startswith("HYBRID"):
        alone: Changes = {
            "training": {"gradient_accumulation_steps": accumulation * ranks},
            "launch": {"num_processes": 1},
        }
        if alone_in_rows:
            alone["parallelism"] = alone_in_rows
        found.append(Switch(f"{micro_batch} × 1 rank × {accumulation * ranks} accumulation", alone))
    return found


def _precision(document: dict[str, Any]) -> list[Switch]:
    written = document.get("precision", {}).get("mixed_precision", "bf16")
    return [] if written == "no" else [Switch(f"as written, in {written}", precision=written)]


def parity_checks(base: ScaledRecipe, folder: Path, options: Sequence[str] = ()) -> Iterator[Check]:
    """Yield one check for each switch, in the order of `switches`. `base` comes from `make_comparable`; a
    failed run is a failed check.

    `options` are added to every `train`.
    """
    reference: dict[str, Any] | None = None
    for number, switch in enumerate(switches(base.document)):
        started = time.monotonic()
        run = RunDir(folder / f"{number:02d}")
        why = _train(base, switch, run, options)
        if why is None and reference is None:
            result = run_torch_script(
                "run_trajectory", {"run": str(run.path), "compute_dtype": "fp32", "skipped": []}
            )
            reference, why = (
                result.document,
                None if result.exit_code == 0 else f"the reference: {result.error}",
            )
        if why is not None or reference is None:
            yield Check(switch.name, passed=False, detail=str(why), seconds=time.monotonic() - started)
            return
        factor = FP8_FACTOR if switch.precision == "fp8" else HALF_PRECISION_FACTOR
        passed, detail = _compared(run, reference) if switch.precision == "no" else _scattered(run, factor)
        yield Check(switch.name, passed, detail, time.monotonic() - started)


def _train(base: ScaledRecipe, switch: Switch, run: RunDir, options: Sequence[str]) -> str | None:
    """Train one switch. Returns None, or why the run failed."""
    document = _switched(base.document, switch) | {"output_dir": str(run.path), "name": run.name}
    result = run_fsdp_tune(
        "train", "--config", str(ScaledRecipe(document).write(run.path.parent, f"{run.name}.yaml")), *options
    )
    return None if result.exit_code == 0 else result.error


def _compared(run: RunDir, reference: dict[str, Any]) -> tuple[bool, str]:
    written = read_metrics(run)
    lines = [line for line in written if "loss" in line]
    eval_loss = next((line["eval_loss"] for line in reversed(written) if "eval_loss" in line), None)
    if [line["supervised_tokens"] for line in lines] != reference["supervised_tokens"]:
        return (
            False,
            "the steps have other numbers of supervised tokens than on one device, so they read other rows",
        )
    loss = max(map(abs, _relative(lines, reference, "loss")))
    norm = max(map(abs, _relative(lines, reference, "grad_norm")))
    words = f"loss {loss:.1e}  gradient norm {norm:.1e}"
    passed = loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE
    if eval_loss is not None and reference["eval_loss"] is not None:
        off = abs(float(eval_loss) / reference["eval_loss"] - 1.0)
        words, passed = f"{words}  eval loss {off:.1e}", passed and off <= LOSS_TOLERANCE
    return passed, words


def _scattered(run: RunDir, factor: float) -> tuple[bool, str]:
    """Check that a low-precision run deviates from fp32 at most `factor` times as far as one device in bf16
    that skips the same steps."""
    written = read_metrics(run)
    lines = [line for line in written if "loss" in line]
    skipped = sorted(
        event.step for line in written if isinstance(event := read_event(line), LossScaleBackedOff)
    )
    request = {"run": str(run.path), "skipped": skipped}
    true, alone = (
        run_torch_script("run_trajectory", request | {"compute_dtype": dtype}) for dtype in ("fp32", "bf16")
    )
    for result in (true, alone):
        if result.exit_code != 0:
            return False, f"the reference: {result.error}"
    ours = _root_mean_square(_relative(lines, true.document, "loss"))
    theirs = _root_mean_square(
        [a / b - 1.0 for a, b in zip(alone.document["loss"], true.document["loss"], strict=True)]
    )
    return (
        ours <= factor * theirs,
        f"loss {ours:.1e} around fp32 (root mean square); one device in bf16: {theirs:.1e}",
    )


def _relative(lines: list[dict[str, Any]], reference: dict[str, Any], key: str) -> list[float]:
    """Return relative deviations by step; infinity for a step one of whose values is not finite."""
    values = [float(line[key]) if line[key] is not None else math.inf for line in lines]
    return [
        value / true - 1.0 if math.isfinite(value) and math.isfinite(true) else math.inf
        for value, true in zip(values, reference[key], strict=True)
    ]


def _root_mean_square(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))

"""One trial: the recipe is judged by the rules, run by the real worker, perhaps killed and resumed, and held
against the plain loop."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.data.store import RowStore
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.rehearsal.parity import plain_loop as reference
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import read_object
from tests.fuzz import ranks
from tests.fuzz.families import PACKED_EXAMPLES_MEET, VOCABULARY, make_model
from tests.fuzz.space import SAVED_STEP, STEPS, Draw
from tests.model.flash import FLASH_STAND_IN
from tests.parity import runs
from tests.parity.compare import relative
from tests.parity.store import fill_rows, write_store
from tests.ranks import Ranks, RanksFailed

MAX_LENGTH = 48
EVAL_ROWS = 5
# fp32: what docs/evidence/numerics.md promises. The first gradient is held by tensor, before an optimizer can
# turn rounding into a sign.
LOSS_TOLERANCE, NORM_TOLERANCE, GRADIENT_TOLERANCE, PARAMETER_TOLERANCE = 1e-5, 1e-5, 1e-4, 1e-3
AMPLIFYING_OPTIMIZERS, AMPLIFIED_TOLERANCE = frozenset({"adagrad", "rmsprop"}), 1e-2
"""Their first update is close to the sign of the gradient, so rounding of a tiny gradient moves a parameter
by a full step."""
ROUNDING_RATIO = 10.0
"""A run may be farther off where rounding alone carries the plain loop away: so many times its own distance
from float64."""
HALF_RATIO = 3.0
"""A run in bf16 scatters around fp32 at most so many times as far as one device in bf16."""
HALF_FLOOR = 2e-3


@dataclass
class Verdict:
    """`failures`: what is wrong, in sentences. `refusals`: codes of the rules that refused, each with the
    switch that was taken out."""

    draw: Draw
    """As it was run in the end: without refused switches."""
    failures: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def judge(draw: Draw, folder: Path, on_ranks: Ranks, plant: str | None = None) -> Verdict:
    """Runs a trial in an empty folder."""
    verdict = Verdict(draw)
    store = make_rows(folder / "rows", draw)
    model = make_model(draw.family, draw.overrides)
    if not _accepted(verdict, folder, model):
        return verdict
    try:
        run = _run(verdict, folder, store, model, on_ranks, plant)
    except RanksFailed as error:
        verdict.failures.append(f"a rank crashed: {error}")
        return verdict
    if isinstance(run, RunDir):
        _compare(verdict, run, store, model)
    elif (switch := blamed_by_ranks(run, verdict.draw)) is None:
        verdict.failures.append(f"the run failed: [{run.code}] {run.message}")
    else:  # the ranks inspect the live model; without the switch it must train
        rest = verdict.draw.unpacked() if switch == PACKING else verdict.draw.without(switch)
        smaller = judge(rest, folder / "without", on_ranks, plant)
        return Verdict(
            smaller.draw, smaller.failures, [*verdict.refusals, f"{run.code}: {switch}", *smaller.refusals]
        )
    return verdict


PACKING = "data.packing"
SEEN_IN_THE_MODEL = frozenset({"contradiction"})
"""Refusals whose rule reads the model's modules: `validate` shows them, but the rules on the recipe alone do
not."""


def _accepted(verdict: Verdict, folder: Path, model: Path) -> bool:
    """Takes out what the rules refuse, switch by switch; a refusal that no switch of the draw explains is a
    failure."""
    for _ in range(20):
        problem = _refused(verdict.draw, folder, model)
        if problem is None:
            return True
        switch = blamed(problem, verdict.draw)
        if switch is None:
            verdict.failures.append(
                f"refused, and no drawn switch explains it: [{problem.code}] {problem.message}"
            )
            return False
        verdict.refusals.append(f"{problem.code}: {switch}")
        verdict.draw = verdict.draw.without(switch)
    verdict.failures.append("refused again and again, whatever switch is taken out")
    return False


def _refused(draw: Draw, folder: Path, model: Path) -> Problem | None:
    for each in (draw, draw.resumed):
        if each is None:
            continue
        tree = runs.merged(BASE, each.recipe() | {"output_dir": str(folder / "run")})
        tree["model"]["name_or_path"] = str(model)
        # no flash kernel of the hub runs on the CPU, but this one does
        if tree["model"].get("attn_implementation") == FLASH_STAND_IN:
            tree["model"]["attn_implementation"] = "sdpa"
        try:
            resolve(
                parse_recipe(yaml.safe_dump(tree), folder / "drawn.yaml").recipe,
                Machine(None, 0, 2, None),
                cwd=folder,
            )
        except FsdpTuneError as error:
            return error.problems[0]
    return None


def blamed_by_ranks(problem: Problem, draw: Draw) -> str | None:
    """The switch behind what only the live model shows, None for what is a failure."""
    if problem.code == "packing-not-isolated":
        return PACKING if draw.batch[PACKING] and draw.family in PACKED_EXAMPLES_MEET else None
    return blamed(problem, draw) if problem.code in SEEN_IN_THE_MODEL else None


def blamed(problem: Problem, draw: Draw) -> str | None:
    """The drawn switch that a refusal names: by its key, else in its words."""
    drawn = {**draw.switches, **(draw.resumed.switches if draw.resumed else {})}
    text = f"{problem.where.key or ''} {problem.message} {problem.hint or ''}"
    named = [name for name in re.findall(r"[\w]+(?:\.[\w]+)+", text) if name in drawn]
    return named[0] if named else None


BASE: dict[str, Any] = {
    "model": {"tokenizer": "builtin:arithmetic"},
    "data": {"train": [{"path": "hand-made.jsonl"}], "eval": {"rows": EVAL_ROWS}, "max_length": MAX_LENGTH},
    "precision": {"mixed_precision": "no"},
    "training": {
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_steps": SAVED_STEP,
        "save_total_limit": None,
        "eval_strategy": "steps",
        "eval_steps": STEPS,
        "report_to": [],
    },
    "checkpoint": {"probe": False},
    "launch": {"device": "cpu"},
}


def make_rows(folder: Path, draw: Draw) -> Path:
    """Sets `train` and `eval` of unequal examples, one a row or packed; more than an epoch and less than two
    of them are trained."""
    dice = np.random.default_rng(draw.seed)
    size = _batch_size(draw)
    count = size * (STEPS - 2) + int(dice.integers(1, size))
    lengths = dice.integers(3, 41, size=8 * count).astype(np.int64)
    rows = fill_rows(lengths, MAX_LENGTH) if draw.batch["data.packing"] else np.arange(len(lengths) + 1)
    sets = {"train": rows[: count + 1], "eval": rows[count : count + EVAL_ROWS + 1]}
    return write_store(folder, dice, lengths, sets, vocabulary=VOCABULARY)


def _batch_size(draw: Draw) -> int:
    return (
        draw.ranks
        * draw.batch["training.per_device_train_batch_size"]
        * draw.batch["training.gradient_accumulation_steps"]
    )


def _write(folder: Path, draw: Draw, store: Path, model: Path) -> RunDir:
    changes = runs.merged(BASE, draw.recipe())
    changes["model"]["name_or_path"] = str(model)
    run = runs.write_run(folder, changes, store, vocabulary=VOCABULARY)
    document = read_object(run.data_json)
    document |= {
        "train": str(store / "train"),
        "evals": {"eval": str(store / "eval")},
        "train_rows": len(RowStore(store / "train")),
    }
    run.data_json.write_text(json.dumps(document))
    return run


def _run(
    verdict: Verdict, folder: Path, store: Path, model: Path, on_ranks: Ranks, plant: str | None
) -> RunDir | Problem:
    """The finished run, or what a rank failed with."""
    draw = verdict.draw
    killed = draw.killed_after if draw.resumed else None
    run = _write(folder / "run", draw, store, model)
    outcomes = on_ranks.run(
        draw.ranks,
        ranks.run,
        str(run.path),
        _orders(draw, plant, bad_step=draw.bad_step, killed_after=killed),
    )
    if draw.resumed is None or any("Killed" not in str(outcome["traceback"]) for outcome in outcomes):
        return _failure(outcomes) or run
    resumed = _write(folder / "resumed", draw.resumed, store, model)
    runs.resume_from(resumed, run, SAVED_STEP)
    outcomes = on_ranks.run(draw.resumed.ranks, ranks.run, str(resumed.path), _orders(draw.resumed, plant))
    if (gradients := run.path / ranks.GRADIENTS).exists():
        gradients.rename(resumed.path / ranks.GRADIENTS)
    return _failure(outcomes) or resumed


def _orders(draw: Draw, plant: str | None, **fields: Any) -> dict[str, Any]:
    uses_kernels = (
        bool(draw.switches.get("kernels.compile")) or draw.switches.get("kernels.loss") == "chunked"
    )
    uses_flash = draw.switches.get("model.attn_implementation") == FLASH_STAND_IN
    return ranks.orders_of(uses_kernels=uses_kernels, uses_flash=uses_flash, plant=plant, **fields)


def _failure(outcomes: list[dict[str, Any]]) -> Problem | None:
    problem = next((outcome["problem"] or {} for outcome in outcomes if outcome["exit_code"] != 0), None)
    return None if problem is None else Problem.from_dict({"code": None, "message": None, **problem})


def settings_of(draw: Draw, *, compute: torch.dtype) -> reference.LoopSettings:
    tree = runs.merged(BASE, draw.recipe())
    training = tree["training"]
    warmup = training.get("warmup_steps", 0)
    return reference.LoopSettings(
        steps=STEPS,
        global_batch_size=_batch_size(draw),
        learning_rate=training["learning_rate"],
        warmup_steps=math.ceil(warmup * STEPS) if 0 < warmup < 1 else int(warmup),
        weight_decay=training.get("weight_decay", 0.0),
        betas=(training.get("adam_beta1", 0.9), training.get("adam_beta2", 0.999)),
        epsilon=training.get("adam_epsilon", 1e-8),
        max_grad_norm=training.get("max_grad_norm", 1.0),
        optimizer="adamw" if training.get("optim", "adamw").startswith("adamw") else training["optim"],
        schedule=training["lr_scheduler_type"],
        label_smoothing=training.get("label_smoothing_factor", 0.0),
        frozen=tuple(tree["model"].get("freeze", ())),
        seed=training["seed"],
        shuffle=tree["data"].get("shuffle", True),
        packed=tree["data"]["packing"],
        compute_dtype=compute,
        stored_dtype=torch.bfloat16 if tree["model"].get("dtype") == "bf16" else torch.float32,
        skipped=frozenset({draw.bad_step} if draw.bad_step else ()),
        schedule_waits=False,
    )


def _compare(verdict: Verdict, run: RunDir, store: Path, model: Path) -> None:
    draw = verdict.draw
    rows = (RowStore(store / "train"), RowStore(store / "eval"))
    half = (
        draw.switches.get("precision.mixed_precision") == "bf16" or draw.switches.get("model.dtype") == "bf16"
    )
    settings = dataclasses.replace(settings_of(draw, compute=torch.float32), stored_dtype=torch.float32)
    true = reference.train(settings, model, *rows)
    lines = runs.loss_lines(run)
    if [line["step"] for line in lines] != list(range(1, STEPS + 1)):
        verdict.failures.append(f"steps in metrics.jsonl: {[line['step'] for line in lines]}")
        return
    if [line["supervised_tokens"] for line in lines] != true.supervised_tokens:
        verdict.failures.append(
            f"supervised tokens {[line['supervised_tokens'] for line in lines]} instead of "
            f"{true.supervised_tokens}"
        )
        return
    rates = [line["learning_rate"] for line in lines]
    if any(
        not math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-15)
        for one, other in zip(rates, true.learning_rates, strict=True)
    ):
        verdict.failures.append(f"learning rates {rates} instead of {true.learning_rates}")
    found = _trajectory(run, draw)
    if half:
        alone = reference.train(settings_of(draw, compute=torch.bfloat16), model, *rows)
        verdict.failures += _half_failures(found, alone, true)
    else:
        least = AMPLIFIED_TOLERANCE if draw.switches.get("training.optim") in AMPLIFYING_OPTIMIZERS else 0.0
        failures = _fp32_failures(found, true, least)
        if failures:
            exact = reference.train(
                dataclasses.replace(settings, compute_dtype=torch.float64, stored_dtype=torch.float64),
                model,
                *rows,
            )
            failures = _fp32_failures(found, true, least, exact)
        verdict.failures += failures


def _trajectory(run: RunDir, draw: Draw) -> reference.Trajectory:
    lines = runs.loss_lines(run)
    gradients = run.path / ranks.GRADIENTS
    return reference.Trajectory(
        losses=[float(line["loss"]) for line in lines],
        grad_norms=[
            math.nan if line["step"] == draw.bad_step else float(line["grad_norm"]) for line in lines
        ],
        eval_loss=[line["eval_loss"] for line in runs.lines(run) if "eval_loss" in line][-1],
        first_gradients=torch.load(gradients) if gradients.exists() else {},
        final=runs.saved_parameters(run, STEPS),
    )


def _fp32_failures(
    found: reference.Trajectory,
    true: reference.Trajectory,
    least: float,
    exact: reference.Trajectory | None = None,
) -> list[str]:
    """`least` is the smallest tolerance for what follows the first update; `exact` is the plain loop in
    float64."""
    failures = []
    for name, ours, theirs, in_float64, tolerance in (
        ("loss", found.losses, true.losses, exact and exact.losses, LOSS_TOLERANCE),
        ("gradient norm", found.grad_norms, true.grad_norms, exact and exact.grad_norms, NORM_TOLERANCE),
        ("eval loss", [found.eval_loss], [true.eval_loss], exact and [exact.eval_loss], LOSS_TOLERANCE),
    ):
        off = _relative_all(ours, theirs)
        rounding = _relative_all(theirs, in_float64) if in_float64 else [0.0]
        if max(off) > max(tolerance, least, ROUNDING_RATIO * max(rounding)):
            step = off.index(max(off)) + 1
            failures.append(
                f"{name} is off by {max(off):.1e} at step {step} ({ours[step - 1]:.8g} instead of "
                f"{theirs[step - 1]:.8g}); rounding carries the plain loop by {max(rounding):.1e}"
            )
    if found.first_gradients:
        failures += _gradient_failures(found.first_gradients, true.first_gradients)
    moved_off = _update_deviation(found, true)
    if moved_off > max(
        PARAMETER_TOLERANCE, least, ROUNDING_RATIO * (_update_deviation(true, exact) if exact else 0.0)
    ):
        failures.append(f"the parameters are off by {moved_off:.1e} of their update")
    return failures


def _relative_all(ours: list[float], theirs: list[float]) -> list[float]:
    return [
        abs(relative(one, other)) if not math.isnan(one) else 0.0
        for one, other in zip(ours, theirs, strict=True)
    ]


def _gradient_failures(found: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> list[str]:
    if found.keys() != true.keys():
        return [f"other parameters have gradients: {sorted(found.keys() ^ true.keys())[:3]}"]
    total = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in true.values()))
    off = {
        name: float((found[name].double() - one.double()).norm())
        / (float(one.double().norm()) + 1e-3 * total)
        for name, one in true.items()
    }
    worst = max(off, key=lambda name: off[name])
    return (
        [f"the first gradient of {worst} is off by {off[worst]:.1e}"]
        if off[worst] > GRADIENT_TOLERANCE
        else []
    )


def _update_deviation(found: reference.Trajectory, true: reference.Trajectory) -> float:
    names = [
        name
        for name in true.final
        if not torch.equal(true.final[name], true.initial[name]) or name not in found.final
    ]
    missing = [name for name in names if name not in found.final]
    if missing:
        return math.inf
    off = sum(
        float((found.final[name].double() - true.final[name].double()).square().sum())
        for name in true.final
        if name in found.final
    )
    moved = sum(
        float((true.final[name].double() - true.initial[name].double()).square().sum()) for name in true.final
    )
    return math.sqrt(off / moved) if moved else 0.0


def _half_failures(
    found: reference.Trajectory, alone: reference.Trajectory, true: reference.Trajectory
) -> list[str]:
    """A run in half precision is held to how far one device in the same precision is from fp32."""
    failures = []
    # Of the larger scatter: one evaluation of one device may be near fp32 by chance.
    scatter = max(_rms(alone.losses, true.losses), _rms([alone.eval_loss], [true.eval_loss]))
    for name, ours, exact in (
        ("loss", found.losses, true.losses),
        ("eval loss", [found.eval_loss], [true.eval_loss]),
    ):
        off = _rms(ours, exact)
        if not off <= HALF_RATIO * scatter + HALF_FLOOR:
            failures.append(f"{name} scatters by {off:.1e} around fp32, and one device by {scatter:.1e}")
    if found.first_gradients:
        off, device_off = (
            _gradient_distance(each.first_gradients, true.first_gradients) for each in (found, alone)
        )
        if not off <= HALF_RATIO * device_off:
            failures.append(f"the first gradient is {off:.1e} from fp32, and one device's {device_off:.1e}")
    return failures


def _rms(values: list[float], exact: list[float]) -> float:
    return math.sqrt(
        sum(relative(one, other) ** 2 for one, other in zip(values, exact, strict=True)) / len(values)
    )


def _gradient_distance(found: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> float:
    if found.keys() != true.keys():
        return math.inf
    off = sum(float((found[name].double() - true[name].double()).square().sum()) for name in true)
    return math.sqrt(off / sum(float(one.double().square().sum()) for one in true.values()))

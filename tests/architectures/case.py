"""One architecture: train on two ranks, resume, merge, generate, and compare the losses with a plain loop on
one device."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.data.store import RowStore
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.model.generate import generate
from fsdp_tune.rehearsal.parity import plain_loop
from fsdp_tune.run.directory import RunDir
from tests.architectures.tiny import config_of, make_model, set_fields, unreached_limits
from tests.parity import runs
from tests.parity.compare import relative
from tests.parity.store import LONGEST_EXAMPLE
from tests.ranks import Ranks, RanksFailed

RANKS, MICRO_BATCH, STEPS, SAVED_STEP, NEW_TOKENS = 2, 2, 3, 2, 6
TIMEOUT_SECONDS = 120.0
TRAINING: dict[str, Any] = {
    "learning_rate": 3e-3,
    "adam_epsilon": 1e-4,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "max_steps": STEPS,
    "save_steps": SAVED_STEP,
    "eval_strategy": "no",
    "per_device_train_batch_size": MICRO_BATCH,
    "gradient_accumulation_steps": 1,
}


@dataclass
class Result:
    """Fields are None or False for what was refused or failed.

    `model_class` is empty if transformers cannot build the model, for the reason in `refused`. `has_balance`:
    its configuration offers a load-balancing loss. `unpacked` and `packed`: relative differences of the first
    and last loss from the plain loop. `resumed`: largest difference between the losses and parameters of the
    resumed and the uninterrupted run. `unreached`: fields of the configuration that limit tokens, and that no
    row is long enough for. `refused` and `failed`: reasons, by what could not be done.
    """

    architecture: str
    model_class: str = ""
    unpacked: tuple[float, float] | None = None
    packed: tuple[float, float] | None = None
    resumed: float | None = None
    merged: bool = False
    generated: bool = False
    has_balance: bool = False
    unreached: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Refused(Exception):
    """A rule or a rank refused the run."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass
class Bench:
    folder: Path
    store: Path
    on_ranks: Ranks


def try_architecture(name: str, bench: Bench) -> Result:
    """Return what works. Never raises for a reason of the architecture."""
    result = Result(name)
    bench.folder.mkdir(parents=True)
    try:
        if (model := _built(result, bench)) is not None:
            _try_runs(result, model, bench)
    finally:
        shutil.rmtree(bench.folder)
    return result


def _built(result: Result, bench: Bench) -> Path | None:
    try:
        config = config_of(result.architecture)
        model = make_model(config, bench.folder / "model")
        result.has_balance = "output_router_logits" in config
        result.unreached = unreached_limits(config, LONGEST_EXAMPLE)
        result.model_class = type(AutoModelForCausalLM.from_pretrained(model)).__name__
    except Exception as error:  # noqa: BLE001  a row with its reason, whatever the architecture's code raises
        result.refused["model"] = _line(error)
        return None
    return model


def _try_runs(result: Result, model: Path, bench: Bench) -> None:
    changes: dict[str, Any] = {
        "model": {"name_or_path": str(model)},
        "fsdp": {"version": 2, "activation_checkpointing": "full"},
        "kernels": {"loss": "chunked"},
    }
    complete = None
    for way in ("unpacked", "packed"):
        try:
            run = _train_with_fallback(result, way, changes, bench)
            setattr(result, way, _differences(run, way, model, bench))
            complete = (way, run)
        except Refused as refused:
            result.refused[way] = refused.problem.message
        except RanksFailed as error:
            result.failed[way] = _last_line(str(error))
        except Exception as error:  # noqa: BLE001
            result.failed[way] = _line(error)
    if complete is None:
        return
    way, run = complete
    for stage, check in (("resumed", _resume), ("merged", _merge), ("generated", _generate)):
        try:
            setattr(result, stage, check(run, way, changes, bench))
        except Exception as error:  # noqa: BLE001
            result.failed[stage] = _last_line(str(error)) if isinstance(error, RanksFailed) else _line(error)


def _train_with_fallback(result: Result, way: str, changes: dict[str, Any], bench: Bench) -> RunDir:
    """Train, without what is refused for this architecture alone: its load-balancing loss, and the chunked
    loss."""
    for attempt in range(3):
        try:
            return _train(bench.folder / f"{way}-{attempt}", way, changes, bench)
        except Refused as refused:
            problem = refused.problem
            if problem.code == "balance-unknown":
                result.refused["balance"] = problem.message
                set_fields(Path(changes["model"]["name_or_path"]), output_router_logits=False)
            elif (
                "kernels.loss" in f"{problem.where.key} {problem.message} {problem.hint}"
                and changes["kernels"]
            ):
                result.refused["chunked loss"] = problem.message
                changes["kernels"] = {}
            else:
                raise
    raise AssertionError("refused again without what was refused")


def _train(
    folder: Path, way: str, changes: dict[str, Any], bench: Bench, donor: RunDir | None = None
) -> RunDir:
    """Return the finished run. Raises: Refused, RanksFailed."""
    recipe = changes | {"data": {"eval": None, "packing": way == "packed"}, "training": TRAINING}
    try:
        run = runs.write_run(folder, recipe, bench.store, packed=way == "packed")
    except FsdpTuneError as error:
        raise Refused(error.problems[0]) from error
    if donor is not None:
        runs.resume_from(run, donor, SAVED_STEP)
    outcomes = bench.on_ranks.run(RANKS, runs.run_with_kernels, str(run.path), limit_seconds=TIMEOUT_SECONDS)
    for outcome in outcomes:
        problem = outcome["problem"]
        if problem is not None and problem["code"] not in ("worker-failed", "lost-rank"):
            raise Refused(Problem.from_dict(problem))
    if crashed := [outcome["traceback"] for outcome in outcomes if outcome["exit_code"] != 0]:
        raise RanksFailed(crashed[0])
    return run


def _differences(run: RunDir, way: str, model: Path, bench: Bench) -> tuple[float, float]:
    """Return the relative differences of the first and the last loss from the plain loop."""
    settings = plain_loop.LoopSettings(
        steps=STEPS,
        global_batch_size=RANKS * MICRO_BATCH,
        learning_rate=TRAINING["learning_rate"],
        epsilon=TRAINING["adam_epsilon"],
        packed=way == "packed",
    )
    rows = RowStore(bench.store / ("train-packed" if way == "packed" else "train"))
    true = plain_loop.train(settings, model, rows).losses
    lines = runs.loss_lines(run)
    first, last = (abs(relative(float(lines[at]["loss"]), true[at])) for at in (0, -1))
    return first, last


def _resume(run: RunDir, way: str, changes: dict[str, Any], bench: Bench) -> float:
    resumed = _train(bench.folder / "resumed", way, changes, bench, donor=run)
    one, other = (runs.saved_parameters(each, STEPS) for each in (run, resumed))
    moved = [
        float((one[name].double() - other[name].double()).abs().max()) for name in one if one[name].numel()
    ]
    losses = [
        abs(a["loss"] - b["loss"])
        for a, b in zip(runs.loss_lines(run), runs.loss_lines(resumed), strict=True)
    ]
    return max(*moved, *losses)


def _merge(run: RunDir, way: str, changes: dict[str, Any], bench: Bench) -> bool:
    """Whether the merged model, loaded by transformers alone, has the trained parameters bit for bit."""
    merge_checkpoint(
        run.path, MergeOptions(dtype="fp32", verify="none", base=changes["model"]["name_or_path"])
    )
    merged = AutoModelForCausalLM.from_pretrained(run.merged).state_dict()
    trained = runs.saved_parameters(run, STEPS)
    return trained.keys() <= merged.keys() and all(
        torch.equal(merged[name], trained[name]) for name in trained
    )


def _generate(run: RunDir, way: str, changes: dict[str, Any], bench: Bench) -> bool:
    """Whether greedy generation gives the tokens of transformers' `generate`."""
    model = AutoModelForCausalLM.from_pretrained(run.merged).eval()
    prompt = RowStore(bench.store / "train")[0].input_ids[:5].astype(np.int64)
    with torch.no_grad():
        [ours] = generate(
            model,
            [prompt.tolist()],
            max_new_tokens=NEW_TOKENS,
            end_ids=(),
            pad_id=0,
            device=torch.device("cpu"),
        )
        ids = torch.from_numpy(prompt)[None]
        model.generation_config = GenerationConfig(pad_token_id=0)  # without forced tokens and penalties
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS)
    return ours == theirs[0, len(prompt) :].tolist()


def _line(error: Exception) -> str:
    """Return the exception's type and the first line of its message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if len(line.strip()) > 1]
    return ": ".join([type(error).__name__, *lines[:1]])


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1].strip()

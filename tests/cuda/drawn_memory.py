"""Recipes for the comparison of memory: draws of `tests.fuzz.space` that apply to a device, on models large
enough to be weighed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.data.store import RowStore
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.key_effects import Affects
from fsdp_tune.recipe.schema.keys import effect_of
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import read_object
from tests.cuda.live_memory import STEADY_STEP, VOCABULARY, Recorded, RunRefused, live_memory
from tests.cuda.memory_step import MemoryStep
from tests.cuda.planned_memory import PlannedMemory, planned_memory
from tests.fuzz.families import FAMILIES, make_model
from tests.fuzz.space import Draw, draw
from tests.fuzz.trial import BASE, blamed, blamed_by_ranks
from tests.model.flash import FLASH_STAND_IN
from tests.parity import runs
from tests.parity.store import write_store
from tests.ranks import Ranks

MAX_LENGTH = 128
GLOBAL_BATCH = 8
_RELATIVE, _ABSOLUTE = 0.005, 2**20
"""A plan may be off by so much of the live peak, or by so many bytes, whichever is more."""
_PADDED, _BY_EXAMPLE = 0.02, "lfm2"
"""The same where mixers pad packed examples (`packed_mixers.MOST_PADDING`): a trace has complete rows."""
_LARGER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 384),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "shared_expert_intermediate_size"), 1024),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    "vocab_size": VOCABULARY,
    "moe_intermediate_size": 384,
    "head_dim": 64,
    "sliding_window": 64,
}
_NOT_WEIGHED = (
    "kernels.compile",
    "kernels.liger",
    "training.eval_",
    "training.per_device_eval_",
    "training.dataloader_",
    "checkpoint.",
)
_NOT_WEIGHED += ("data.pad_to_multiple_of", "fsdp.state_dict_type", "fsdp.cpu_ram_efficient_loading")
"""Keys without effect on a steady step of full rows, and compilers, of which the emulated device has none."""
_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop", "adafactor", "muon")
"""Without those of torchao, which compile their step: a plan counts the temporaries of an eager one."""


@dataclass(frozen=True)
class Weighed:
    """One recipe, as it ran in the end: without what was refused."""

    draw: Draw
    live: MemoryStep
    planned: PlannedMemory
    refusals: tuple[str, ...]

    @property
    def off_bytes(self) -> int:
        """Plan minus run."""
        return self.planned.peak_allocated_bytes - self.live.peak_bytes

    @property
    def off(self) -> float:
        return self.off_bytes / self.live.peak_bytes

    @property
    def is_within(self) -> bool:
        pads = self.draw.family == _BY_EXAMPLE and self.draw.batch["data.packing"]
        return abs(self.off_bytes) <= max(_ABSOLUTE, (_PADDED if pads else _RELATIVE) * self.live.peak_bytes)


def drawn(seed: int) -> Draw:
    """The draw of `tests.fuzz.space` with this seed, with the values of a device in place of those that only
    numbers need."""
    fuzzed, dice = draw(seed), random.Random(f"memory {seed}")
    switches = {
        name: value
        for name, value in fuzzed.switches.items()
        if effect_of(name).affects & Affects.MEMORY
        and not name.startswith(_NOT_WEIGHED)
        and value != FLASH_STAND_IN
    }
    if dice.random() < 0.5:
        switches["training.optim"] = dice.choice(_OPTIMIZERS)
    switches |= _adapters(dice) if dice.random() < 0.25 else {}
    # no trace of FSDP1 gets past `flat_param.data = flat_param.to("cpu")`: fake devices do not mix
    if switches.get("fsdp.version") == 1:
        switches.pop("fsdp.offload_params", None)
    ranks = dice.choice((1, 2, 2))
    micro = dice.choice((1, 2, 4))
    batch = {
        "data.packing": fuzzed.batch["data.packing"],
        "training.per_device_train_batch_size": micro,
        "training.gradient_accumulation_steps": GLOBAL_BATCH // ranks // micro,
        "training.seed": 1,
    }
    layers = dice.choice((2, 2, 2, 7))
    return replace(
        fuzzed,
        ranks=ranks,
        batch=batch,
        switches=switches,
        overrides=_larger(fuzzed.family, layers),
        bad_step=None,
        resumed=None,
    )


def _adapters(dice: random.Random) -> dict[str, Any]:
    adapters = {"lora.r": 8} | ({"lora.use_dora": True} if dice.random() < 0.3 else {})
    return adapters | ({"quantization.scales": "fp32"} if dice.random() < 0.3 else {})


def _larger(family: str, layers: int) -> dict[str, Any]:
    """Fields of the config: the family's own keys with larger values. More layers than six are traced as
    fewer."""
    fields = FAMILIES[family]
    larger = {name: value for name, value in _LARGER.items() if name in fields}
    if "layer_types" in fields:  # one of each
        return larger
    return larger | {name: layers for name in ("num_hidden_layers", "n_layer") if name in fields}


def layers_of(one: Draw) -> int:
    return next(
        (one.overrides[name] for name in ("num_hidden_layers", "n_layer") if name in one.overrides), 2
    )


def weigh(
    one: Draw,
    folder: Path,
    on_ranks: Ranks,
    run: Recorded | None = None,
    planned: PlannedMemory | None = None,
) -> Weighed:
    """Train and plan a recipe in an empty folder, without the switches that the rules or the ranks refuse.
    `planned`: an earlier plan.

    Raises: RunRefused for a run that fails otherwise, AssertionError for a recipe that is refused for no
    switch of the draw.
    """
    model = make_model(one.family, one.overrides, f"models of {layers_of(one)} layers")
    refusals: list[str] = []
    while (problem := _refused(one, folder, model)) is not None:
        one = _without(one, blamed(problem, one), problem, refusals)
    while True:
        rows = full_rows(folder / f"rows-{len(refusals)}", packed=one.batch["data.packing"])
        written = _write(folder / f"run-{len(refusals)}", one, rows, model)
        try:
            live = live_memory(on_ranks, one.ranks, str(written.path), run)
            break
        except RunRefused as refused:
            code = Problem.from_dict({"code": None, "message": None, **refused.problem})
            switch = blamed_by_ranks(code, one)
            if switch is None:
                raise
            one = _without(one, switch, code, refusals)
    recipe = Recipe.model_validate(json.loads(written.recipe_json.read_text()))
    return Weighed(one, live, planned or planned_memory(recipe), tuple(refusals))


def _without(one: Draw, switch: str | None, problem: Problem, refusals: list[str]) -> Draw:
    assert switch is not None, f"refused, and no drawn switch explains it: [{problem.code}] {problem.message}"
    refusals.append(f"{problem.code}: {switch}")
    return one.unpacked() if switch == "data.packing" else one.without(switch)


def _tree(one: Draw, folder: Path, model: Path) -> dict[str, Any]:
    steps = {"max_steps": STEADY_STEP, "save_steps": 100, "eval_strategy": "no", "eval_steps": None}
    tree = runs.merged(
        runs.merged(BASE, {"training": steps, "data": {"eval": None, "max_length": MAX_LENGTH}}), one.recipe()
    )
    return runs.merged(
        tree, {"model": {"name_or_path": str(model)}, "launch": {"device": "cuda"}, "output_dir": str(folder)}
    )


def _refused(one: Draw, folder: Path, model: Path) -> Problem | None:
    try:
        text = yaml.safe_dump(_tree(one, folder / "run", model))
        resolve(parse_recipe(text, folder / "drawn.yaml").recipe, Machine("cuda", 4, 2, None), cwd=folder)
    except FsdpTuneError as error:
        return error.problems[0]
    return None


def _write(folder: Path, one: Draw, store: Path, model: Path) -> RunDir:
    run = runs.write_run(folder, _tree(one, folder, model), store, vocabulary=VOCABULARY)
    document: Mapping[str, Any] = read_object(run.data_json)
    changed = {
        **document,
        "train": str(store / "train"),
        "evals": {},
        "train_rows": len(RowStore(store / "train")),
    }
    run.data_json.write_text(json.dumps(changed))
    return run


def full_rows(folder: Path, *, packed: bool) -> Path:
    """A set `train` whose rows are all as long as `data.max_length`, as a plan assumes, of one example or of
    several."""
    dice = np.random.default_rng(0)
    rows = GLOBAL_BATCH * (STEADY_STEP + 1)
    parts = [
        [int(size) for size in dice.multinomial(MAX_LENGTH - 12, [1 / 4] * 4) + 3] if packed else [MAX_LENGTH]
        for _ in range(rows)
    ]
    lengths = np.array([size for part in parts for size in part], np.int64)
    ends = np.cumsum([0, *(len(part) for part in parts)])
    return write_store(folder, dice, lengths, {"train": ends}, vocabulary=VOCABULARY)

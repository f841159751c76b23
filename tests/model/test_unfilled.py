"""A parameter that the files do not fill is refused by name, whatever they hold instead, before transformers
draws it at random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.merge.lora.adapt import merge_problems
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.unfilled import require_filled
from tests.architectures.tiny import config_of, names
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of
from tests.parity.architectures import make_model

UP = "model.layers.0.mlp.up_proj.weight"
MODULE = UP.removesuffix("weight")
Tensors = dict[str, torch.Tensor]


def make_base(folder: Path, family: str, change: Callable[[Tensors], Tensors]) -> Path:
    config = FAMILIES[family] if family in FAMILIES else config_of(family)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)
    save_file(
        change(load_file(folder / "model.safetensors")),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def instead(name: str, **parts: torch.Tensor) -> Callable[[Tensors], Tensors]:
    """Store `parts` of a module in the place of its weight."""

    def change(tensors: Tensors) -> Tensors:
        del tensors[name]
        return tensors | {
            name.removesuffix("weight") + part.replace("__", "."): value for part, value in parts.items()
        }

    return change


def ints(*shape: int, kind: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape, dtype=kind)


CHANGES: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "a weight": ("llama", instead(UP), UP),
    "a norm": ("llama", instead("model.norm.weight"), "model.norm.weight"),
    "the head of an untied model": ("llama", instead("lm_head.weight"), "lm_head.weight"),
    "a shape": ("llama", lambda tensors: tensors | {UP: tensors[UP][:-1].clone()}, "[47, 32]"),
    "an expert": ("mixtral", instead("model.layers.1.block_sparse_moe.experts.2.w3.weight"), "gate_up_proj"),
    "hqq": ("llama", instead(UP, W_q=ints(24, 32), scale=torch.ones(4), zero=torch.ones(4)), MODULE),
    "quanto": (
        "llama",
        instead(UP, weight___data=ints(48, 32, kind=torch.int8), weight___scale=torch.ones(48, 1)),
        MODULE,
    ),
    "aqlm": (
        "llama",
        instead(
            UP,
            codes=ints(48, 4, 1, kind=torch.int8),
            codebooks=torch.ones(1, 256, 1, 8),
            scales=torch.ones(48),
        ),
        MODULE,
    ),
    "vptq": (
        "llama",
        instead(UP, indices=ints(48, 4, kind=torch.int32), centroids__weight=torch.ones(1, 64)),
        MODULE,
    ),
    "sparse": (
        "llama",
        instead(
            UP, compressed=torch.ones(100), bitmask=ints(48, 4), row_offsets=ints(48, 1, kind=torch.int64)
        ),
        MODULE,
    ),
    "bitsandbytes in bf16": (
        "llama",
        instead(UP, weight=torch.zeros(384, 1).bfloat16(), weight__absmax=torch.ones(24)),
        UP,
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_parameter_that_files_do_not_fill_is_refused_by_validate_and_by_loading(
    what: str, tmp_path: Path
) -> None:
    family, change, named = CHANGES[what]
    recipe = recipe_of({"name_or_path": str(make_base(tmp_path, family, change))})
    problems = find_facts(recipe).problems
    assert problems
    assert all(
        problem.code in ("model-weights-missing", "model-weights-shapes", "model-quantised")
        for problem in problems
    )
    assert named in " ".join(problem.message for problem in problems)
    # whatever the format of the files, which may have no headers
    with pytest.raises(FsdpTuneError) as caught:
        build_full(recipe)
    assert caught.value.exit_code == 2


def all_without(ending: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: value for name, value in tensors.items() if not name.endswith(ending)}


@pytest.mark.parametrize(
    ("family", "buffer"),
    [
        ("deepseek_v3", "e_score_correction_bias"),
        pytest.param("deepseek_v4", "tid2eid", marks=pytest.mark.slow),
        pytest.param("zaya", "balancing_biases", marks=pytest.mark.slow),
        pytest.param("apertus", "act_fn.eps", marks=pytest.mark.slow),
    ],
)
def test_persistent_buffer_that_files_do_not_fill_is_refused(
    family: str, buffer: str, tmp_path: Path
) -> None:
    """A bias or a table of a router, or a constant: transformers 5.24 leaves memory that nothing has
    written."""
    if family not in names():
        pytest.skip("the installed transformers does not have it")
    recipe = recipe_of({"name_or_path": str(make_base(tmp_path, family, all_without(buffer)))})
    (problem,) = [
        problem for problem in find_facts(recipe).problems if problem.code == "model-weights-missing"
    ]
    assert "of the model, which would have no value: `model.layers." in problem.message
    assert buffer in problem.message
    with pytest.raises(FsdpTuneError, match=buffer):
        build_full(recipe)


@pytest.mark.parametrize(
    ("family", "without", "model"),
    [
        ("qwen3", None, {}),  # a tied head, which files do not have
        ("llama", "lm_head.weight", {"config_overrides": {"tie_word_embeddings": True}}),
        # starts as a copy of the embedding
        (
            "qwen3",
            None,
            {"config_overrides": {"tie_word_embeddings": False}},
        ),
        ("hrm_text", None, {}),  # its files join q, k and v, gate and up
    ],
)
def test_parameters_that_are_tied_split_or_started_by_rule_are_filled(
    family: str, without: str | None, model: dict[str, Any], tmp_path: Path
) -> None:
    base = make_base(tmp_path, family, instead(without) if without is not None else dict)
    recipe = recipe_of({"name_or_path": str(base), **model})
    assert find_facts(recipe).problems == ()
    build_full(recipe)


def test_weights_that_are_held_in_4_bits_are_frozen_tensors_of_the_base(tmp_path: Path) -> None:
    base = make_model("llama-blocks", tmp_path)
    recipe = recipe_of({"name_or_path": str(base)}, lora={"r": 2}, quantization={})
    facts = find_facts(recipe).facts
    assert facts is not None
    assert facts.tensors.counts == {"frozen": len(load_file(base / "model.safetensors"))}
    assert merge_problems(recipe, facts) == []


def test_names_of_a_loaded_model_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each parameter: a list takes as long as the model has parameters."""
    recipe = recipe_of("llama")
    model, calls = build_full(recipe), list[int]()
    names = model.state_dict

    def counted() -> dict[str, Any]:
        calls.append(1)
        return names()

    monkeypatch.setattr(model, "state_dict", counted)
    require_filled(recipe, model, {"missing_keys": set(), "mismatched_keys": []})
    with pytest.raises(FsdpTuneError, match=UP):
        require_filled(recipe, model, {"missing_keys": {UP}, "mismatched_keys": []})
    assert len(calls) == 2

"""Names in `lora:` that hit nothing, hit the wrong modules or do not fit the model are errors that name what
to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.adapters.lora import inject_lora
from fsdp_tune.model.adapters.targets import _without_text, find_targets
from fsdp_tune.model.loading.construct import build_empty
from tests.model.recipes import lora_recipe, recipe_of

REFUSED: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "misspelt": (
        "llama",
        {"target_modules": ["q_proj", "v_porj"]},
        "lora-target",
        "`v_porj` matches no module",
        "did you mean `v_proj`",
    ),
    "of another model": (
        "gpt2",
        {"target_modules": ["q_proj"]},
        "lora-target",
        "`q_proj` matches no module",
        "c_proj",
    ),
    "like no name": (
        "llama",
        {"target_modules": ["xyz"]},
        "lora-target",
        "matches no module",
        "its linear layers are q_proj",
    ),
    "not adapted": (
        "llama",
        {"target_modules": ["self_attn"]},
        "lora-target",
        "is a LlamaAttention",
        "q_proj, k_proj",
    ),
    "bad expression": (
        "llama",
        {"target_modules": "(q_proj"},
        "lora-target",
        "not a valid regular expression",
        "",
    ),
    "expression without a match": (
        "llama",
        {"target_modules": ".*q_porj"},
        "lora-target",
        "matches no module",
        "q_proj",
    ),
    "expression for an end": (
        "llama",
        {"target_modules": "q_proj"},
        "lora-target",
        "matches no module",
        "q_proj",
    ),
    "layer beyond the last": (
        "llama",
        {"layers_to_transform": [2]},
        "lora-target",
        "layer 2 does not exist; the model has the layers 0 to 1",
        "",
    ),
    "rank pattern": (
        "llama",
        {"rank_pattern": {"q_porj": 2}},
        "lora-target",
        "`lora.rank_pattern`: `q_porj`",
        "`q_proj`",
    ),
    "bad pattern": (
        "llama",
        {"alpha_pattern": {"(": 2.0}},
        "lora-target",
        "not a valid regular expression",
        "",
    ),
    "saved module": (
        "llama",
        {"modules_to_save": ["head"]},
        "lora-target",
        "`head` matches no module",
        "lm_head",
    ),
    "tied head": (
        "gpt2",
        {"modules_to_save": ["lm_head"]},
        "lora-tied",
        "`lm_head` shares its weight with `transformer.wte`",
        "leave",
    ),
    "tied embedding": (
        "gpt2",
        {"target_modules": ["wte"]},
        "lora-tied",
        "shares its weight with `lm_head`",
        "leave `wte` out",
    ),
    "adapter of a tied head": (
        "qwen3",
        {"target_modules": ["lm_head"]},
        "lora-tied",
        "shares its weight with `model.embed_tokens`",
        "leave",
    ),
    "tied embedding in full": (
        "qwen3",
        {"modules_to_save": ["embed_tokens"]},
        "lora-tied",
        "shares its weight with `lm_head`",
        "leave",
    ),
    "rank": ("llama", {"r": 33}, "lora-rank", "`lora.r`: the rank 33 is above that of", "at most 32"),
    "rank of a pattern": (
        "llama",
        {"rank_pattern": {"q_proj": 33}},
        "lora-rank",
        "`lora.rank_pattern`: the rank 33 is above that of",
        "at most 32, or `target_modules: [k_proj,",
    ),
    "rank of a pattern of parameters": (
        "mixtral",
        {
            "target_modules": [],
            "target_parameters": ["down_proj", "gate_up_proj"],
            "rank_pattern": {"down_proj": 33},
        },
        "lora-rank",
        "`lora.rank_pattern`: the rank 33 is above that of",
        "at most 32, or `target_parameters: [gate_up_proj]`",
    ),
    "rank of a gate": (
        "qwen2_moe",
        {"r": 4},
        "lora-rank",
        "`model.layers.0.mlp.shared_expert_gate`, which is 1 x 32",
        "`target_modules: [q_proj, k_proj,",
    ),
    "misspelt parameter": (
        "mixtral",
        {"target_parameters": ["experts.gate_up_porj"]},
        "lora-target",
        "`lora.target_parameters`: `experts.gate_up_porj` matches no parameter",
        "did you mean `gate_up_proj`",
    ),
    "parameter of another model": (
        "mixtral",
        {"target_parameters": ["experts.w1"]},
        "lora-target",
        "`experts.w1` matches no parameter",
        "mlp.experts.gate_up_proj, mlp.experts.down_proj",
    ),
    "no experts": (
        "llama",
        {"target_parameters": ["experts.w1"]},
        "lora-target",
        "matches no parameter",
        "has no stacked matrices",
    ),
    "a matrix": (
        "llama",
        {"target_parameters": ["q_proj.weight"]},
        "lora-target",
        "is [32, 32], not a stack",
        "`lora.target_modules`",
    ),
    "rank of an expert": (
        "mixtral",
        {"r": 33, "target_modules": [], "target_parameters": ["down_proj"]},
        "lora-rank",
        "32 x 48",
        "at most 32",
    ),
    "pattern of a parameter": (
        "mixtral",
        {"target_modules": [], "target_parameters": ["down_proj"], "rank_pattern": {"gate_up_proj": 2}},
        "lora-target",
        "`lora.rank_pattern`: `gate_up_proj` matches no adapted module",
        "adapted are down_proj",
    ),
    "nothing": (
        "llama",
        {"target_modules": []},
        "lora-target",
        "`[]` matches no module",
        "its linear layers are",
    ),
    "DoRA of Conv1D": ("gpt2", {"use_dora": True}, "lora-dora", "is a Conv1D", "use_dora: false"),
    "DoRA of an embedding": (
        "llama",
        {"target_modules": ["embed_tokens"], "use_dora": True},
        "lora-dora",
        "is a Embedding",
        "linear layers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_names_what_is_wrong_and_what_to_write(case: str, tmp_path: Path) -> None:
    family, lora, code, message, hint = REFUSED[case]
    with pytest.raises(FsdpTuneError) as caught:
        build_empty(lora_recipe(tmp_path, {"r": 4, **lora}, family))
    (problem,) = caught.value.problems
    assert problem.code == code
    assert str(problem.where.key).startswith("lora.")
    assert message in problem.message
    assert hint in (problem.hint or "")


@pytest.mark.parametrize("key", ["target_modules", "modules_to_save"])
def test_part_that_rows_of_text_do_not_call_is_refused_by_its_key(key: str) -> None:
    [problem] = _without_text(f"lora.{key}", "vision_tower.q_proj", ["vision_tower"]).problems
    assert problem.hint == f"name layers outside of vision_tower, or leave `{key}` out"


@pytest.mark.parametrize(
    ("lora", "found"),
    [
        (
            {"target_modules": ["q_proj"]},
            ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"],
        ),
        (
            {"target_modules": ["self_attn.q_proj"], "layers_to_transform": [1]},
            ["model.layers.1.self_attn.q_proj"],
        ),
        ({"target_modules": r".*q_proj", "layers_to_transform": [1]}, ["model.layers.1.self_attn.q_proj"]),
        (
            {"target_modules": r"model\.layers\.0\.mlp\.(up|down)_proj"},
            ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"],
        ),
        (
            {
                "target_modules": ["q_proj", "lm_head"],
                "modules_to_save": ["lm_head"],
                "layers_to_transform": [0],
            },
            ["model.layers.0.self_attn.q_proj"],
        ),
        (
            {"modules_to_save": ["mlp"], "layers_to_transform": [0]},
            [f"model.layers.0.self_attn.{part}_proj" for part in ("q", "k", "v", "o")],
        ),
    ],
    ids=[
        "name",
        "layer",
        "expression for a layer",
        "expression",
        "trained in full instead",
        "inside a module trained in full",
    ],
)
def test_targets_are_found_in_the_order_of_the_model(
    lora: dict[str, Any], found: list[str], tmp_path: Path
) -> None:
    bare = build_empty(recipe_of("llama"))
    assert list(find_targets(lora_recipe(tmp_path, {"r": 4, **lora}), bare).modules) == found


def test_layers_of_gpt2_are_targets(tmp_path: Path) -> None:
    found = find_targets(
        lora_recipe(tmp_path, {"r": 4, "target_modules": ["c_attn"]}, "gpt2"), build_empty(recipe_of("gpt2"))
    )
    assert list(found.modules) == ["transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn"]


def test_parameters_are_found_by_their_last_parts_in_the_chosen_layers(tmp_path: Path) -> None:
    recipe = lora_recipe(
        tmp_path,
        {"r": 4, "target_parameters": ["mlp.experts.down_proj"], "layers_to_transform": [1]},
        "mixtral",
    )
    found = find_targets(recipe, build_empty(recipe_of("mixtral")))
    assert list(found.parameters) == ["model.layers.1.mlp.experts.down_proj"]
    # transformers' router holds a matrix, not a linear layer
    assert "model.layers.1.mlp.gate" not in found.modules


def test_all_linear_leaves_out_the_head(tmp_path: Path) -> None:
    found = find_targets(lora_recipe(tmp_path, {"r": 4}), build_empty(recipe_of("llama")))
    assert len(found.modules) == 14
    assert "lm_head" not in found.modules


def test_run_is_refused_as_the_base(tmp_path: Path) -> None:
    recipe = lora_recipe(tmp_path / "base", {"r": 4})
    (tmp_path / "model").mkdir()
    (tmp_path / "recipe.json").write_text("{}")
    of_run = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"name_or_path": str(tmp_path)})}
    )
    with pytest.raises(FsdpTuneError) as caught:
        inject_lora(of_run, build_empty(recipe_of("llama")), torch.float32)
    assert caught.value.problems[0].code == "lora-on-run"
    [way_out] = caught.value.problems[0].ways_out
    assert "merge-checkpoint" in way_out
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "config.json").write_text("{}")
    (tmp_path / "model" / "base.json").write_text("{}")
    with pytest.raises(FsdpTuneError) as caught:
        inject_lora(of_run, build_empty(recipe_of("llama")), torch.float32)
    on_merged, continued = caught.value.problems[0].ways_out
    assert ("merge-checkpoint" in on_merged, f"{tmp_path}/merged" in on_merged) == (False, True)
    assert f"lora.adapter: {tmp_path}`" in continued

"""A model that lets packed examples see each other is found before a rank starts, on its small form."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from fsdp_tune.core.families import limits_within
from fsdp_tune.model.loading import packing
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.packing import small_deviations
from fsdp_tune.recipe.schema.attention_kernels import TORCH_VARLEN
from tests.architectures.tiny import known
from tests.model.families import BART, COMMON, FAMILIES, OPENAI_GPT
from tests.model.recipes import recipe_of


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    fields = FAMILIES[family] | changes
    return AutoConfig.for_model(
        str(fields["model_type"]), **{name: value for name, value in fields.items() if name != "model_type"}
    )


def refusals(model: dict[str, Any], **data: Any) -> list[tuple[str, str, str]]:
    found = find_facts(
        recipe_of({"from_config": model}, data={"train": [{"path": "x"}], "max_length": 128} | data)
    )
    return [(problem.code, problem.message, str(problem.hint)) for problem in found.problems]


def needs(architecture: str) -> pytest.MarkDecorator:
    """The lowest version of transformers lacks the newest models."""
    return pytest.mark.skipif(not known(architecture), reason=f"transformers has no {architecture}")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (OPENAI_GPT, "lets packed examples see each other"),
        (BART, "takes no position ids, so a packed example differs"),
    ],
)
def test_recipe_that_packs_for_such_a_model_is_refused(model: dict[str, Any], reason: str) -> None:
    [(code, message, hint)] = refusals(model, packing=True)
    assert (code, hint) == ("packing-not-isolated", "--set data.packing=false")
    assert reason in message
    assert refusals(model) == []


@pytest.mark.parametrize("family", ["lfm2", "opt", "gpt_oss", "bloom"])
def test_mixers_and_masks_without_position_ids_are_no_reason_to_refuse(family: str) -> None:
    assert refusals(FAMILIES[family], packing=True) == []


def test_convolution_crosses_the_border_if_it_is_called_for_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "separate_documents", lambda _model: None)
    found = small_deviations(config_of("lfm2"), "eager")
    assert found is not None
    assert min(found.others, found.alone) > packing.ALLOWED_DEVIATION


@pytest.mark.parametrize("family", ["lfm2", "opt", "llama"])
def test_kernel_that_separates_examples_leaves_the_other_layers(family: str) -> None:
    found = small_deviations(config_of(family), TORCH_VARLEN)
    assert found is not None
    assert max(found.others, found.alone) <= packing.ALLOWED_DEVIATION


def test_form_that_is_too_large_or_cannot_be_built_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert small_deviations(PreTrainedConfig(), "sdpa") is None
    monkeypatch.setattr(packing, "MOST_PARAMETERS", 1000)
    assert small_deviations(config_of("opt"), "sdpa") is None


LLAMA4: dict[str, Any] = {
    "model_type": "llama4_text",
    **COMMON,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size_mlp": 48,
    "num_local_experts": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "no_rope_layers": [1, 0],
    "floor_scale": 8192,
    "attn_scale": 2.0,
}
MINIMAX_M3: dict[str, Any] = {
    "model_type": "minimax_m3_vl_text",
    **COMMON,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 8,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse"],
}


@needs("minimax_m3_vl_text")
@pytest.mark.parametrize(("longest", "is_refused"), [(128, False), (129, True)])
def test_blocks_of_keys_across_examples_are_found_where_rows_are_longer_than_a_block(
    longest: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MiniMax M3 without `separate_documents`: it chooses blocks of 128 keys by their place in the row."""
    monkeypatch.setattr(packing, "separate_documents", lambda _model: None)
    found = refusals(MINIMAX_M3 | {"index_block_size": 128}, packing=True, max_length=longest)
    assert [code for code, *_ in found] == ["packing-not-isolated"] * is_refused


@needs("minimax_m3_vl_text")
def test_blocks_of_keys_are_no_reason_to_refuse() -> None:
    assert refusals(MINIMAX_M3 | {"index_block_size": 128}, packing=True, max_length=1024) == []


@pytest.mark.parametrize(("longest", "is_refused"), [(8192, False), (8193, True)])
def test_scale_by_the_place_in_the_row_is_found_where_rows_reach_it(
    longest: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4 without `scale_queries_by_position`."""
    monkeypatch.setattr(packing, "scale_queries_by_position", lambda _model: [])
    found = refusals(LLAMA4 | {"max_position_embeddings": 20_000}, packing=True, max_length=longest)
    assert [code for code, *_ in found] == ["packing-not-isolated"] * is_refused
    assert all(
        "a packed example of Llama4ForCausalLM differs from the example alone" in message
        for _, message, _ in found
    )


def test_scale_by_position_is_no_reason_to_refuse() -> None:
    assert refusals(LLAMA4 | {"max_position_embeddings": 20_000}, packing=True, max_length=16384) == []


def test_packing_of_the_evaluation_alone_is_measured_too() -> None:
    [(code, _, hint)] = refusals(OPENAI_GPT, eval=[{"path": "y"}], eval_packing=True)
    assert (code, hint) == ("packing-not-isolated", "--set data.eval_packing=false")


@pytest.mark.parametrize(
    ("fields", "tokens", "found"),
    [
        ({"sliding_window": 512, "index_topk": 2048}, 1024, ["sliding_window"]),
        ({"sliding_window": 512, "index_topk": 2048}, 512, []),
        (
            {
                "moe_topk": 2,
                "topk_group": 2,
                "use_sliding_window": True,
                "max_window_layers": 3,
                "attention_chunk_size": None,
            },
            1024,
            [],
        ),
        (
            {"log_scaling_n_floor": 100, "mamba_chunk_size": 64, "window_size": [4, 4]},
            101,
            ["log_scaling_n_floor", "mamba_chunk_size"],
        ),
    ],
)
def test_limits_that_rows_reach_are_known_by_name(
    fields: dict[str, Any], tokens: int, found: list[str]
) -> None:
    assert limits_within(fields, tokens) == found

"""Active parameters of a mixture of experts."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from fsdp_tune.model.active_parameters import active_parameters
from fsdp_tune.model.loading.construct import build_full
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of


def counted(family: str, **changes: object) -> tuple[int | None, dict[str, int]]:
    """Active parameters, and the size of each parameter by name."""
    fields = {**FAMILIES[family], **changes}
    config = AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return active_parameters(config, model.named_parameters()), {
        name: p.numel() for name, p in model.named_parameters()
    }


def test_every_parameter_of_a_dense_model_is_active() -> None:
    active, sizes = counted("llama")
    assert active == sum(sizes.values())


def test_only_routed_experts_are_active() -> None:
    active, sizes = counted("mixtral", num_experts_per_tok=1)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert experts > 0
    assert active == sum(sizes.values()) - experts * 3 // 4, "one of four"


def test_shared_expert_counts_fully() -> None:
    active, sizes = counted("qwen2_moe")
    routed = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    assert any(".shared_expert." in name for name in sizes)
    assert active == sum(sizes.values()) - routed // 2, "two of four"


def test_unknown_expert_count_returns_none() -> None:
    assert (
        active_parameters(
            PreTrainedConfig(num_local_experts=4), [("layers.0.experts.up", torch.empty(4, 2, 2))]
        )
        is None
    )


def parameters_with_experts(
    small: PreTrainedConfig, large: PreTrainedConfig
) -> tuple[int | None, int | None]:
    """Active parameters of two models."""
    found = []
    for config in (small, large):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        found.append(active_parameters(config, model.named_parameters()))
    return found[0], found[1]


_SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}
_NAMED = {
    "ernie4_5_moe": (
        "moe_num_experts",
        "moe_k",
        {"num_attention_heads": 4, "moe_intermediate_size": 48, "moe_layer_start_index": 0},
    ),
    "jetmoe": ("num_local_experts", "num_experts_per_tok", {"kv_channels": 8}),
    "aria_text": ("moe_num_experts", "moe_topk", {"num_attention_heads": 4}),
    "granitemoe": ("num_local_experts", "num_experts_per_tok", {"num_attention_heads": 4}),
}


@pytest.mark.parametrize("family", _NAMED)
def test_more_experts_add_only_router_parameters(family: str) -> None:
    count, chosen, other = _NAMED[family]
    sizes = {
        n: AutoConfig.for_model(family, **_SIZES, **other, **{count: n, chosen: 2}, pad_token_id=0)
        for n in (4, 8)
    }
    few, many = parameters_with_experts(sizes[4], sizes[8])
    assert few is not None
    assert many is not None
    assert 0 < many - few <= 4 * 2 * (2 * 32 + 1), (
        "in each of 2 layers a row of each router, and its correction"
    )


def test_experts_missing_from_config_return_none() -> None:
    stacked = [("blocks.0.ffn.experts.mlp.w1", torch.empty(8, 32, device="meta"))]
    assert active_parameters(PreTrainedConfig(ffn_config={"moe_num_experts": 4}), stacked) is None
    assert active_parameters(PreTrainedConfig(num_experts=4, num_experts_per_tok=2), stacked) is None
    dense = [("layers.0.mlp.up.weight", torch.empty(8, 32, device="meta"))]
    assert active_parameters(PreTrainedConfig(num_experts=4, num_experts_per_tok=2), dense) is None


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 20), ("fp32", 18), ("fp32", 20)])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_of_any_width_have_the_numbers_of_the_loop_over_experts(
    family: str, dtype: str, width: int
) -> None:
    """torch's grouped product refuses rows of 40 and of 72 bytes: "strides should be multiple of 16
    bytes"."""
    model = build_full(
        recipe_of({"from_config": FAMILIES[family] | {"intermediate_size": width}, "dtype": dtype})
    )
    ids = torch.arange(24).reshape(2, 12)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return [
            loss.detach().float(),
            *(
                p.grad.float()
                for name, p in model.named_parameters()
                if ".experts." in name and p.grad is not None
            ),
        ]

    assert model.config._experts_implementation == "grouped_mm"
    found = gradients()
    model.set_experts_implementation("eager")
    allowed = 1e-5 if dtype == "fp32" else 3e-2
    assert len(found) > 2
    for one, other in zip(found, gradients(), strict=True):
        assert float((one - other).norm()) <= allowed * float(other.norm())

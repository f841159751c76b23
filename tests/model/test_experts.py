"""What of a mixture of experts one token meets."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from fsdp_tune.model.experts import active_parameters
from tests.model.families import FAMILIES


def counted(family: str, **changes: object) -> tuple[int | None, dict[str, int]]:
    """Active parameters, and the size of each parameter by name."""
    fields = {**FAMILIES[family], **changes}
    config = AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return active_parameters(config, model.named_parameters()), {name: p.numel() for name, p in model.named_parameters()}


def test_a_token_meets_every_parameter_of_a_dense_model() -> None:
    active, sizes = counted("llama")
    assert active == sum(sizes.values())


def test_of_experts_a_token_meets_those_that_it_is_sent_to() -> None:
    active, sizes = counted("mixtral", num_experts_per_tok=1)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert experts > 0
    assert active == sum(sizes.values()) - experts * 3 // 4, "one of four"


def test_an_expert_that_all_tokens_share_counts_whole() -> None:
    active, sizes = counted("qwen2_moe")
    routed = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    assert any(".shared_expert." in name for name in sizes)
    assert active == sum(sizes.values()) - routed // 2, "two of four"


def test_a_number_that_is_not_told_is_not_made_up() -> None:
    assert active_parameters(PreTrainedConfig(num_local_experts=4), [("layers.0.experts.up", torch.empty(4, 2, 2))]) is None

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_5 import modeling_qwen3_5

from fsdp_tune.model.kernels.class_kernels import choose_class_kernels, class_kernels, slow_kernel_notices
from tests.model.families import FAMILIES

HYBRIDS = {
    "qwen3_5_text": {"causal-conv1d", "flash-linear-attention"},
    "lfm2": {"causal-conv1d"},
    "falcon_h1": {"causal-conv1d", "mamba-ssm"},
    "kimi_linear": {"causal-conv1d", "flash-linear-attention"},
}


def empty(model_type: str, **fields: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **{"num_hidden_layers": 2, **fields})
        )


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_packages_of_a_hybrid_are_named_with_what_runs_without_them(model_type: str) -> None:
    model = empty(model_type)
    assert {kernel.distribution for kernel in class_kernels(model)} == HYBRIDS[model_type]
    (notice,) = slow_kernel_notices(model, choose_class_kernels(model, "cuda"))
    assert notice.code == "slow-kernels"
    assert all(name in notice.message and name in (notice.hint or "") for name in HYBRIDS[model_type])
    assert {choice.value for choice in choose_class_kernels(model, "cuda").values()} == {"missing"}


def test_installed_package_is_recorded_and_not_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    # a package that can be imported
    present = use_kernel_func_from_hub_with_fallback("dumps", "json")(lambda value: value)
    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        monkeypatch.setattr(modeling_qwen3_5, name, present)
    model = empty("qwen3_5_text")
    chosen = choose_class_kernels(model, "cuda")
    assert {name: choice.value for name, choice in chosen.items()} == {"json": "installed"}
    assert slow_kernel_notices(model, chosen) == []


def test_models_of_attention_alone_and_runs_on_the_cpu_have_none() -> None:
    assert (
        class_kernels(
            empty("llama", **{key: value for key, value in FAMILIES["llama"].items() if key != "model_type"})
        )
        == ()
    )
    hybrid = empty("lfm2")
    assert choose_class_kernels(hybrid, "cpu") == {}

"""A model that lets packed examples see each other is found before a rank starts, on its small form."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from fsdp_tune.model.kernels.attention import TORCH_VARLEN
from fsdp_tune.model.loading import packing
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.packing import small_deviation
from tests.architectures.tiny import known
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    fields = FAMILIES[family] | changes
    return AutoConfig.for_model(str(fields["model_type"]), **{name: value for name, value in fields.items() if name != "model_type"})


def refusals(family: str, **data: Any) -> list[tuple[str, str]]:
    model = {"from_config": FAMILIES[family]}
    found = find_facts(recipe_of(model, data={"train": [{"path": "x"}], "max_length": 128} | data))
    return [(problem.code, problem.hint or "") for problem in found.problems]


@pytest.mark.parametrize("family", ["lfm2", "opt", "gpt_oss"])
def test_recipe_that_packs_for_such_a_model_is_refused(family: str) -> None:
    [(code, hint)] = refusals(family, packing=True)
    assert (code, hint.partition(";")[0]) == ("packing-not-isolated", "--set data.packing=false")
    assert refusals(family) == []


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("lfm2_moe", {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 2}),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in known("jamba", "mamba", "qwen3_next")),
    ],
)
def test_recurrences_and_convolutions_cross_the_border(name: str, fields: dict[str, Any]) -> None:
    deviation = small_deviation(AutoConfig.for_model(name, **fields), "eager")
    assert deviation is not None
    assert deviation > packing.ALLOWED_DEVIATION


@pytest.mark.parametrize(("family", "crosses"), [("lfm2", True), ("opt", False), ("llama", False)])
def test_kernel_that_separates_examples_leaves_the_other_layers(family: str, crosses: bool) -> None:
    """OPT crosses the border by its mask alone, which a kernel with the lengths of the examples does not need."""
    deviation = small_deviation(config_of(family), TORCH_VARLEN)
    assert deviation is not None
    assert (deviation > packing.ALLOWED_DEVIATION) == crosses


def test_form_that_is_too_large_or_cannot_be_built_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert small_deviation(PreTrainedConfig(), "sdpa") is None
    monkeypatch.setattr(packing, "MOST_PARAMETERS", 1000)
    assert small_deviation(config_of("opt"), "sdpa") is None

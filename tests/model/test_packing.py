"""A model that lets packed examples see each other is found before a rank starts, on its small form."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from fsdp_tune.model.kernels.attention import TORCH_VARLEN
from fsdp_tune.model.loading import packing
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.packing import small_deviations
from tests.model.families import BART, FAMILIES, OPENAI_GPT
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

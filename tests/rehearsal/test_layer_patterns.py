"""Only indexes of decoder layers are mapped to a smaller model, and no later entry repeats an earlier one."""

from __future__ import annotations

import pytest

from fsdp_tune.rehearsal.layer_patterns import (
    map_group_patterns,
    map_layer_patterns,
    map_layer_regex,
    map_lora_names,
)


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.*.mlp.experts.3.*",
        "*.altup_projections.2.*",  # Gemma 3n
        "model.layers.99.*",
    ],
)
def test_index_of_another_list_is_kept(pattern: str) -> None:
    assert map_layer_patterns([pattern], 32, 2) == [pattern]


@pytest.mark.parametrize(
    ("pattern", "mapped"),
    [
        ("*.20.*", "*.1.*"),
        ("transformer.h.20.*", "transformer.h.1.*"),
        ("*layers.20.mlp.experts.3.*", "*layers.1.mlp.experts.3.*"),
    ],
)
def test_index_of_a_layer_is_mapped(pattern: str, mapped: str) -> None:
    assert map_layer_patterns([pattern], 32, 2) == [mapped]


@pytest.mark.parametrize(
    ("regex", "mapped"),
    [
        (r"model\.layers\.(9|20)\.mlp\.experts\.(3|4)", r"model\.layers\.(0|0)\.mlp\.experts\.(3|4)"),
        (r".*\.experts\.3", r".*\.experts\.3"),
        (r"model\.layers\.(3\.mlp|20\.self_attn)", r"model\.layers\.(0\.mlp|0\.self_attn)"),
        (r"(?:.*\.)?layers\.(?:20|21)\..*", r"(?:.*\.)?layers\.(?:1|1)\..*"),
        (r".*\.20\.mlp", r".*\.1\.mlp"),
    ],
)
def test_numbers_of_layers_in_a_regex_are_mapped(regex: str, mapped: str) -> None:
    assert map_layer_regex(regex, 32, 2) == mapped


def test_small_layer_belongs_to_the_first_entry() -> None:
    """A later entry that is hidden by an earlier one is an error in a recipe."""
    groups = [["model.layers.3.*"], ["model.layers.0.*", "lm_head.*"], ["model.layers.31.*"]]
    assert map_group_patterns(groups, 32, 2) == [
        ["model.layers.0.*"],
        ["lm_head.*"],
        ["model.layers.1.*"],
    ]
    assert map_group_patterns([["model.layers.1.*"], ["model.layers.0.*"]], 32, 2)[1] == []


def test_layers_in_the_names_of_an_adapter_are_mapped() -> None:
    lora = {
        "target_modules": ["q_proj", "layers.20.mlp.up_proj", "layers.21.mlp.up_proj"],
        "target_parameters": ["layers.20.mlp.experts.gate_up_proj"],
        "modules_to_save": ["lm_head"],
    }
    assert map_lora_names(lora, 32, 2) == {
        "target_modules": ["q_proj", "layers.1.mlp.up_proj"],
        "target_parameters": ["layers.1.mlp.experts.gate_up_proj"],
        "modules_to_save": ["lm_head"],
    }
    lora |= {"target_modules": r".*layers\.20\.self_attn\..*"}
    assert map_lora_names(lora, 32, 2)["target_modules"] == r".*layers\.1\.self_attn\..*"
    assert map_lora_names(lora | {"target_modules": "all-linear"}, 32, 2)["target_modules"] == "all-linear"

"""config.json of a trained model: what the base wrote stays, what the recipe changes has the spellings of
transformers 4 and 5."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from fsdp_tune.data.tokenise.exported_tokenizer import TokenizerOrigin
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.model_config import model_config
from fsdp_tune.model.model_files import ModelFacts, save_model_files
from tests.architectures.tiny import config_of
from tests.model.families import FAMILIES
from tests.model.recipes import facts_of_model, recipe_of
from tests.model.test_model_files import FakeTokenizer
from tests.model.test_weight_slices_bitsandbytes import NF4, RECIPE

COMMON = {
    "architectures": ["X"],
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.3",
    "some_tool": {"note": 1},
}
LINEAR = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
WRITTEN: dict[str, dict[str, Any]] = {
    "llama": LINEAR,
    "qwen2": {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "phi": {"rope_theta": 1e5, "partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 20000},
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 1e6,
        "rope_local_base_freq": 20000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gpt2": {},
    "mixtral": {
        "head_dim": 8,
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}


def write_base(folder: Path, family: str, **fields: Any) -> dict[str, Any]:
    written = FAMILIES[family] | COMMON | WRITTEN[family] | fields
    (folder / "config.json").write_text(json.dumps(written))
    return written


def document_of(folder: Path, **model: Any) -> ModelFacts:
    return facts_of_model(
        recipe_of({"name_or_path": str(folder), **model}, data={"train": [{"path": "x"}], "max_length": 64})
    )


@pytest.mark.parametrize("family", WRITTEN)
def test_config_of_an_unchanged_base_is_what_the_base_wrote(family: str, tmp_path: Path) -> None:
    written = write_base(tmp_path, family)
    assert document_of(tmp_path).exported_config == written


def read(config: dict[str, Any], folder: Path) -> Any:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("family", ["llama", "phi", "mixtral", "gemma3_text"])
def test_changed_scaling_has_both_spellings(family: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    written = write_base(
        base, family, **({"rope_scaling": None} if family in ("llama", "gemma3_text") else {})
    )
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    exported = document_of(base, rope_scaling=scaling).exported_config
    assert {name: exported["rope_scaling"][name] for name in scaling} == scaling
    assert exported["rope_theta"] == written["rope_theta"]
    assert exported.get("rope_local_base_freq") == written.get("rope_local_base_freq")
    assert exported["max_position_embeddings"] == 512
    assert (exported["some_tool"], exported["torch_dtype"]) == ({"note": 1}, "bfloat16")
    recipe = recipe_of(
        {"name_or_path": str(base), "rope_scaling": scaling},
        data={"train": [{"path": "x"}], "max_length": 64},
    )
    assert read(exported, tmp_path / "again").rope_parameters == model_config(recipe).rope_parameters


def test_overridden_field_replaces_its_other_name(tmp_path: Path) -> None:
    """`hidden_dropout_prob` of a base and `resid_pdrop` name other fields, `n_embd` and `hidden_size` one."""
    fields = {name: value for name, value in FAMILIES["gpt2"].items() if name != "n_embd"}
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(
        json.dumps(fields | {"hidden_size": 32, "transformers_version": "4.51.3"})
    )
    exported = document_of(base, config_overrides={"n_embd": 64, "resid_pdrop": 0.5}).exported_config
    again = read(exported, tmp_path / "again")
    assert (again.n_embd, again.resid_pdrop) == (64, 0.5)


def test_base_of_transformers_5_gets_the_older_fields_too(tmp_path: Path) -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 7e5,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    parameters |= {"original_max_position_embeddings": 64}
    written = FAMILIES["llama"] | {"rope_parameters": parameters, "transformers_version": "5.23.0"}
    (tmp_path / "config.json").write_text(json.dumps(written))
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    assert document_of(tmp_path).exported_config == written | {"rope_theta": 7e5, "rope_scaling": scaling}


def test_rotary_bases_of_modernbert_have_the_names_of_transformers_4(tmp_path: Path) -> None:
    parameters = {"full_attention": {"rope_theta": 54321.0}, "sliding_attention": {"rope_theta": 4321.0}}
    AutoConfig.for_model(**config_of("modernbert-decoder") | {"rope_parameters": parameters}).save_pretrained(
        tmp_path
    )
    exported = document_of(tmp_path).exported_config
    assert (exported["global_rope_theta"], exported["local_rope_theta"]) == (54321.0, 4321.0)


@pytest.mark.parametrize(
    ("family", "new", "old"),
    [("qwen3_moe", "num_local_experts", "num_experts"), ("xlm", "eos_token_id", "eos_index")],
)
def test_renamed_field_of_a_base_of_transformers_5_has_the_older_name_too(
    family: str, new: str, old: str, tmp_path: Path
) -> None:
    """`num_experts` was the default of transformers 4 for a Qwen3 mixture that has another number of
    experts."""
    AutoConfig.for_model(**config_of(family)).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert old not in written
    exported = document_of(tmp_path).exported_config
    assert exported[new] == exported[old] == written[new]
    (tmp_path / "config.json").write_text(json.dumps(exported))
    assert document_of(tmp_path).exported_config == exported


def test_model_without_a_base_has_both_spellings() -> None:
    parameters = {"rope_type": "linear", "rope_theta": 7e5, "factor": 2.0}
    recipe = recipe_of({"from_config": FAMILIES["llama"] | {"rope_parameters": parameters}})
    exported = facts_of_model(recipe).exported_config
    assert exported["rope_parameters"] == parameters
    assert (exported["rope_theta"], exported["rope_scaling"]) == (7e5, {"rope_type": "linear", "factor": 2.0})
    assert exported["use_cache"] is True


def test_generation_config_is_what_the_base_wrote(tmp_path: Path) -> None:
    write_base(tmp_path, "llama")
    written = {"temperature": 1.0, "top_k": 50, "eos_token_id": [1, 5], "transformers_version": "4.51.3"}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    assert document_of(tmp_path).generation_config == written


def test_quantisation_of_the_base_is_not_exported(tmp_path: Path) -> None:
    write_base(tmp_path, "llama", quantization_config=NF4, hidden_size=64)
    recipe = recipe_of({"name_or_path": str(tmp_path)}, **RECIPE)
    found = find_facts(recipe)
    assert found.facts is not None, found.problems
    assert "quantization_config" not in found.facts.exported_config


@pytest.mark.parametrize("written", [math.inf, {"__float__": "Infinity"}])
def test_infinity_of_a_base_is_read_and_exported_as_a_word_that_both_versions_read(
    written: Any, tmp_path: Path
) -> None:
    fields = config_of("mamba2") | {"time_step_limit": [0.0, written]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    document = document_of(tmp_path)
    assert read(document.exported_config, tmp_path / "again").time_step_limit == [0.0, math.inf]
    files = tmp_path / "files"
    files.mkdir()
    save_model_files(files, document, FakeTokenizer(), TokenizerOrigin())
    assert json.loads((files / "config.json").read_text())["time_step_limit"] == [0.0, math.inf]


def test_rotary_base_of_gpt_neox_has_the_names_of_transformers_4(tmp_path: Path) -> None:
    AutoConfig.for_model(
        **FAMILIES["gpt_neox"], rope_parameters={"rope_theta": 54321.0, "partial_rotary_factor": 0.5}
    ).save_pretrained(tmp_path)
    exported = document_of(tmp_path).exported_config
    assert (exported["rotary_emb_base"], exported["rotary_pct"]) == (54321.0, 0.5)
    assert read(exported, tmp_path / "again").rope_parameters["rope_theta"] == 54321.0

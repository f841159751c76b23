"""Tensors in, tensors out: bases in the layouts that are published, loaded in both ways, merged without
training, and loaded by others."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from fsdp_tune.answer.loaded_model import _published_names
from fsdp_tune.core.errors import FailedError
from fsdp_tune.merge.lora.adapt import merge_problems
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.run.base_model import BaseLayout, BaseRecord, describe_base
from tests.merge.published import KINDS, LAYOUTS, TEXT, Base, merge_untrained
from tests.model.recipes import recipe_of

FAST = {
    ("qwen3 fp8", "lora"),
    ("llama GPTQ", "lora"),
    ("llama AWQ", "full"),
    ("llama int4 + int8, zero points, g_idx (compressed-tensors)", "full"),
    ("deepseek_v3 fp8 + layer", "full"),
    ("qwen3_5 + visual + mtp", "lora"),
}
COMPOSITE = "qwen3_5 + visual + mtp"
CASES = [
    pytest.param(name, kind, marks=() if (name, kind) in FAST else pytest.mark.slow, id=f"{name}-{kind}")
    for name in LAYOUTS
    for kind in KINDS
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_each_tensor_of_a_base_is_in_the_merged_model_with_its_values(
    name: str, kind: str, tmp_path: Path
) -> None:
    outcome = merge_untrained(LAYOUTS[name](tmp_path / "base"), kind, tmp_path / "made")
    assert outcome.differing == ()
    assert outcome.reported == ()
    record = json.loads((tmp_path / "made" / "run" / "merged" / "merge.json").read_text())
    assert record["base_tensors"]["counts"] == outcome.counts


def config_of_merged(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "made" / "run" / "merged" / "config.json").read_text())


def test_parts_that_are_left_out_are_gone_from_weights_and_config(tmp_path: Path) -> None:
    base = LAYOUTS[COMPOSITE](tmp_path / "base")
    outcome = merge_untrained(base, "full", tmp_path / "made", leave_out=["mtp", "visual"])
    assert outcome.counts == {"trained": 28, "left out": 24}
    assert outcome.merged == 28
    assert outcome.reported == ()
    config = config_of_merged(tmp_path)
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["mtp_num_hidden_layers"] == 0
    assert "vision_config" not in config


def test_scales_of_a_cache_are_dropped_and_a_merge_needs_no_base_for_them(tmp_path: Path) -> None:
    """They calibrate a cache for the weights before training, and config.json loses the settings that use
    them."""
    base = LAYOUTS["llama, quantised cache (compressed-tensors)"](tmp_path / "base")
    notices = find_facts(recipe_of({"name_or_path": str(base.folder)})).notices
    assert ["4 tensors" in each.message for each in notices if each.code == "base-calibration-dropped"] == [
        True
    ]
    outcome = merge_untrained(base, "full", tmp_path / "made")
    assert outcome.counts == {"trained": 21, "dropped": 4}
    assert "quantization_config" not in config_of_merged(tmp_path)
    shutil.rmtree(base.folder)
    merge_checkpoint(tmp_path / "made" / "run", MergeOptions(overwrite=True))


def test_scales_of_a_cache_in_carried_parts_are_dropped_and_the_parts_kept(tmp_path: Path) -> None:
    base = LAYOUTS[COMPOSITE](tmp_path / "base")
    file, settings = base.folder / "model.safetensors", base.folder / "config.json"
    places = ("model.language_model.layers.1.self_attn", "mtp.layers.0.self_attn")
    save_file(
        load_file(file) | {f"{place}.k_scale": torch.tensor(0.1) for place in places},
        file,
        metadata={"format": "pt"},
    )
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"quantization_config": {"quant_method": "modelopt"}})
    )
    outcome = merge_untrained(base, "lora", tmp_path / "made")
    assert outcome.counts["dropped"] == 2
    assert outcome.differing == outcome.reported == ()
    assert config_of_merged(tmp_path)["text_config"]["mtp_num_hidden_layers"] == 1


def test_run_that_recorded_scales_of_a_cache_as_carried_is_merged(tmp_path: Path) -> None:
    """Earlier versions did, and the base of such a run has them still."""
    base = LAYOUTS["llama, quantised cache (compressed-tensors)"](tmp_path / "base")
    merge_untrained(base, "full", tmp_path / "made")
    record = tmp_path / "made" / "run" / "model" / "tensors.json"
    names = [f"model.layers.{layer}.self_attn.{part}_scale" for layer in (0, 1) for part in "kv"]
    BaseRecord(
        {"trained": 21, "carried": 4}, carried=tuple(names), base=describe_base(str(base.folder), None)
    ).write(record)
    merged = merge_checkpoint(tmp_path / "made" / "run", MergeOptions(overwrite=True)).output
    assert load_file(merged / "model.safetensors").keys() == base.plain.keys()


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_biases_of_zeros_next_to_codes_are_not_in_the_merged_model(kind: str, tmp_path: Path) -> None:
    """Old AutoGPTQ wrote one for each layer, also for those without a bias."""
    base = LAYOUTS["llama GPTQ"](tmp_path / "base")
    file = base.folder / "model.safetensors"
    stored = load_file(file)
    codes = {
        name.removesuffix("qweight"): value for name, value in stored.items() if name.endswith(".qweight")
    }
    save_file(
        stored | {f"{owner}bias": torch.zeros(value.shape[1]).half() for owner, value in codes.items()},
        file,
        {"format": "pt"},
    )
    outcome = merge_untrained(base, kind, tmp_path / "made")
    assert outcome.counts["dropped"] == len(codes)
    assert outcome.differing == outcome.reported == ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_parameter_with_the_name_of_a_scale_is_in_the_merged_model(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = LlamaAttention.__init__

    def with_scale(self: Any, *args: Any, **options: Any) -> None:
        built(self, *args, **options)
        self.k_scale = torch.nn.Parameter(torch.ones(1))

    base = LAYOUTS["llama, quantised cache (compressed-tensors)"](tmp_path / "base")
    monkeypatch.setattr(LlamaAttention, "__init__", with_scale)
    base.plain |= {
        name: value
        for name, value in load_file(base.folder / "model.safetensors").items()
        if name.endswith("k_scale")
    }
    outcome = merge_untrained(base, kind, tmp_path / "made")
    assert outcome.counts["dropped"] == 2
    assert outcome.differing == outcome.reported == ()


def foreign_adapter(base: Base, folder: Path, **changed: Any) -> Path:
    """Write an adapter of the query projections as PEFT does, without the files of a run."""
    width = TEXT["hidden_size"]
    owners = [f"base_model.model.model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    factors = {f"{owner}.lora_A.weight": torch.randn(4, width) for owner in owners}
    factors |= {f"{owner}.lora_B.weight": torch.randn(width, 4) for owner in owners}
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    config |= {"base_model_name_or_path": str(base.folder), "fan_in_fan_out": False, **changed}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("llama GPTQ", 0),
        ("llama, quantised cache (compressed-tensors)", 4),
        *(
            pytest.param(name, 0, marks=pytest.mark.slow)
            for name in ("llama AWQ", "qwen3 fp8", "llama int4 (compressed-tensors)")
        ),
    ],
)
def test_adapter_of_another_tool_over_a_quantised_base_becomes_a_plain_model_with_a_plain_config(
    name: str, dropped: int, tmp_path: Path
) -> None:
    base = LAYOUTS[name](tmp_path / "base")
    config = json.loads((base.folder / "config.json").read_text())
    nested = {"text_config": {"quantization_config": config["quantization_config"], "hidden_size": 64}}
    (base.folder / "config.json").write_text(json.dumps(config | nested))
    merged = merge_checkpoint(
        foreign_adapter(base, tmp_path / "adapter"), MergeOptions(output=tmp_path / "out", dtype="fp32")
    )
    written = json.loads((merged.output / "config.json").read_text())
    assert "quantization_config" not in written
    assert (
        written["text_config"].keys()
        == {"hidden_size", "dtype", "torch_dtype"} & written["text_config"].keys()
    )
    assert load_file(merged.output / "model.safetensors").keys() == base.plain.keys()
    assert [
        f"{dropped} tensors" in n.message for n in merged.notices if n.code == "base-calibration-dropped"
    ] == [True] * (dropped > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "foreign"),
    [("llama GPTQ", r"mlp\.down_proj\.bias"), ("qwen3_moe GPTQ", r"mlp\.experts\.0\.down_proj\.bias")],
)
def test_biases_of_zeros_are_dropped_under_an_adapter_of_another_tool(
    layout: str, foreign: str, tmp_path: Path
) -> None:
    """Those that the class has are kept: the query projections of this one have biases, and they are zero."""
    base = LAYOUTS[layout](tmp_path / "base")
    file, settings = base.folder / "model.safetensors", base.folder / "config.json"
    stored = load_file(file)
    codes = {
        name.removesuffix("qweight"): value for name, value in stored.items() if name.endswith(".qweight")
    }
    biases = {f"{owner}bias": torch.zeros(value.shape[1]).half() for owner, value in codes.items()}
    save_file(stored | biases, file, {"format": "pt"})
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"attention_bias": True}))
    options = MergeOptions(output=tmp_path / "out")
    merged = load_file(
        merge_checkpoint(foreign_adapter(base, tmp_path / "adapter"), options).output / "model.safetensors"
    )
    assert merged.keys() == base.plain.keys() | {name for name in biases if ".self_attn." in name}
    assert not any(name.endswith(".bias") and value.any() for name, value in merged.items())
    save_file(stored | {name: value + 1 for name, value in biases.items()}, file, {"format": "pt"})
    with pytest.raises(FailedError, match=rf"{foreign}` is a bias of a quantised layer"):
        merge_checkpoint(tmp_path / "adapter", MergeOptions(output=tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_adapter_of_conv1d_layers_over_gptq_is_refused_by_name(tmp_path: Path) -> None:
    """Decoded weights are [out, in], and would be written transposed; where they are square, nothing would
    report it."""
    base = LAYOUTS["llama GPTQ"](tmp_path / "base")
    adapter = foreign_adapter(base, tmp_path / "adapter", fan_in_fan_out=True)
    with pytest.raises(FailedError, match=r"q_proj\.weight` is decoded as \[out, in\]"):
        merge_checkpoint(adapter, MergeOptions(output=tmp_path / "out"))
    config = json.loads((base.folder / "config.json").read_text())
    (base.folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(FailedError, match="Conv1D") as caught:
        merge_checkpoint(foreign_adapter(base, tmp_path / "other"), MergeOptions(output=tmp_path / "out"))
    assert "qweight" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", [COMPOSITE, "deepseek_v3 + layer", "deepseek_v3 fp8 + layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_predict_further_tokens_can_be_left_out(name: str, kind: str, tmp_path: Path) -> None:
    outcome = merge_untrained(LAYOUTS[name](tmp_path / "base"), kind, tmp_path / "made", leave_out=["mtp"])
    assert outcome.counts["left out"] >= 3
    assert outcome.differing == ()
    config = config_of_merged(tmp_path)
    assert {
        config.get("num_nextn_predict_layers"),
        config.get("text_config", {}).get("mtp_num_hidden_layers"),
    } <= {0, None}
    assert (
        "visual" in str(load_file(tmp_path / "made" / "run" / "merged" / "model.safetensors").keys())
    ) == (name == COMPOSITE)


def test_base_that_changed_since_the_training_is_refused_by_name(tmp_path: Path) -> None:
    base = LAYOUTS["llama with rotary frequencies"](tmp_path / "base")
    merge_untrained(base, "full", tmp_path / "made")
    file = base.folder / "model.safetensors"
    tensors = load_file(file)
    for changed, says in (
        ({"x": torch.zeros(4)}, "its weights have changed"),
        ({}, "its weights have changed"),
    ):
        save_file(tensors | changed | {"lm_head.weight": tensors["lm_head.weight"] + 1}, file)
        with pytest.raises(FailedError, match=says) as caught:
            merge_checkpoint(tmp_path / "made" / "run", MergeOptions(overwrite=True))
        assert "rotary_emb.inv_freq" in str(caught.value)


def test_adapter_has_the_names_of_the_published_class_and_is_continued_and_loaded_by_them(
    tmp_path: Path,
) -> None:
    """vLLM and PEFT build the class of config.json, whose modules have longer names than those of the text
    alone."""
    base = LAYOUTS[COMPOSITE](tmp_path / "base")
    merge_untrained(base, "lora", tmp_path / "made")
    adapter = tmp_path / "made" / "run" / "adapter"
    names = load_file(adapter / "adapter_model.safetensors").keys()
    assert {name.partition(".layers.")[0] for name in names} == {"base_model.model.model.language_model"}
    targets = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    assert all(target.startswith("layers.") for target in targets)  # ends of names in either class
    lora = {**base.lora, "adapter": str(adapter)}
    continued = build_full(
        recipe_of(
            {"name_or_path": str(base.folder)}, lora=lora, data={"train": [{"path": "x"}], "max_length": 32}
        )
    )
    stored = load_file(adapter / "adapter_model.safetensors")
    own = {name: p.detach() for name, p in continued.named_parameters() if ".lora_" in name}
    assert len(own) == len(stored)
    for name, value in stored.items():
        ours = (
            name.removeprefix("base_model.model.")
            .replace("model.language_model.", "model.")
            .replace(".weight", ".default.weight")
        )
        assert torch.equal(own[ours], value)
    assert _published_names(continued, adapter) == {r"^model\.language_model\.": "model."}


@pytest.mark.slow
def test_adapter_of_a_composite_base_is_loaded_by_peft_onto_the_published_class_and_with_a_mapping_onto_its_text(  # noqa: E501
    tmp_path: Path,
) -> None:
    """docs/guide/adapters.md has the three combinations: the second one alone loses the adapter, which PEFT
    reports."""
    from peft import PeftModel

    base = LAYOUTS[COMPOSITE](tmp_path / "base")
    merge_untrained(base, "lora", tmp_path / "made")
    folder = tmp_path / "made" / "run" / "adapter"
    stored = load_file(folder / "adapter_model.safetensors")

    def loaded(kind: Any, **options: Any) -> tuple[int, int]:
        """Return (tensors of the adapter that the model has, warnings about missing ones)."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(kind.from_pretrained(base.folder), str(folder), **options)
        values = {name: value for name, value in model.state_dict().items() if ".lora_" in name}
        ends = {
            name.partition(".layers.")[2].replace(".default.", "."): value for name, value in values.items()
        }
        same = sum(
            torch.equal(ends[name.partition(".layers.")[2]], value)
            for name, value in stored.items()
            if ".lora_A" in name
        )
        return same, sum("missing adapter keys" in str(each.message) for each in caught)

    every = sum(".lora_A" in name for name in stored)
    published = getattr(
        transformers, json.loads((base.folder / "config.json").read_text())["architectures"][0]
    )
    assert loaded(published) == (every, 0)
    assert loaded(AutoModelForCausalLM) == (0, 1)
    assert loaded(AutoModelForCausalLM, key_mapping={r"^model\.language_model\.": "model."}) == (every, 0)


def test_adapter_that_a_merge_could_not_add_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    base = LAYOUTS[COMPOSITE](tmp_path / "base")
    sections: dict[str, Any] = {"lora": base.lora, "data": {"train": [{"path": "x"}], "max_length": 32}}
    recipe = recipe_of({"name_or_path": str(base.folder)}, **sections)
    facts = find_facts(recipe).facts
    assert facts is not None
    assert merge_problems(recipe, facts) == []
    # as before the layout had its names
    (problem, *_) = merge_problems(recipe, facts.model_copy(update={"base_layout": BaseLayout()}))
    assert "could not be merged" in problem.message
    assert "q_proj" in problem.message or "linear_attn" in problem.message
    alone = recipe.model_copy(update={"merge": recipe.merge.model_copy(update={"adapter": "adapter"})})
    assert merge_problems(alone, facts.model_copy(update={"base_layout": BaseLayout()})) == []

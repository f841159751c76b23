"""An adapter is evaluated, merged and continued on one base: in the precision and with the configuration that
it was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdp_tune.answer.find_model import find_model
from fsdp_tune.answer.loaded_model import load_model
from fsdp_tune.answer.model_requests import Request
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.tensors.peft_config import CONFIG_FILE
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.model_files import base_of
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import BASE_FILE, describe_base
from fsdp_tune.run.records import DOCUMENT_DIGEST
from tests.model.recipes import facts_of_model, recipe_of
from tests.parity.peft_adapters import make_adapter

UNTIED = {
    "model": {"config_overrides": {"tie_word_embeddings": False}},
    "lora": {"modules_to_save": ["lm_head"]},
}
# What a run changes about its base: sections of the recipe.
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "4 bits": {"quantization": {"load": "nf4"}},
    "4 bits, bf16 scales": {"quantization": {"load": "nf4", "scales": "bf16"}},
    "linear": {"model": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
    "llama3": {
        "model": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "quantization": {"load": "nf4"},
    },
    "override": {"model": {"config_overrides": {"rms_norm_eps": 0.1}}},
    "overrides of rotary frequencies": {
        "model": {"config_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}}
    },
    "untied": UNTIED,
    "untied in 4 bits": {**UNTIED, "quantization": {"load": "nf4"}},
}


FAST = ("4 bits, bf16 scales", "override", "untied in 4 bits")


def make_base(folder: Path, *, tied: bool = True) -> Path:
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=160, max_position_embeddings=64, tie_word_embeddings=tied, initializer_range=0.2, **sizes
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(120).view(2, 60)).logits


def evaluated(folder: Path, vocabulary: int = 160, dtype: str = "fp32") -> torch.Tensor:
    model = find_model(str(folder))
    request = Request([model], {}, vocabulary, 0, 1, "cpu", dtype)
    return logits(load_model(model, request))


def trained(
    base: Path, adapter: Path, sections: dict[str, Any], *, tied: bool = True
) -> tuple[Recipe, torch.Tensor]:
    """Write an adapter with what a run records about its base; return the recipe and the logits of the
    training."""
    lora = {"r": 4, **sections.get("lora", {})}
    is_untied = sections is UNTIED or sections.get("lora") == UNTIED["lora"]
    made = make_adapter(
        make_base(base.parent / "untied", tied=False) if is_untied and tied else base, lora, adapter
    )
    values = json.loads((made / CONFIG_FILE).read_text())
    (made / CONFIG_FILE).write_text(json.dumps(values | {"base_model_name_or_path": str(base)}))
    rest = {name: value for name, value in sections.items() if name not in ("lora", "model")}
    model = {"name_or_path": str(base), **sections.get("model", {})}
    recipe = recipe_of(
        model,
        lora={**lora, "adapter": str(made)},
        **rest,
        data={"train": [{"path": "hand-made"}], "max_length": 64},
    )
    base_of(recipe, facts_of_model(recipe)).write(made / BASE_FILE)
    return recipe, logits(build_full(recipe))


def notices_without(training: str, base: Path, adapter: Path) -> list[str]:
    """Return the notices of a recipe that continues an adapter without what its training changed about the
    base."""
    lora = {"r": 4, "adapter": str(adapter), **TRAININGS[training].get("lora", {})}
    plain = recipe_of(
        {"name_or_path": str(base)}, lora=lora, data={"train": [{"path": "hand-made"}], "max_length": 64}
    )
    return [notice.code for notice in find_facts(plain).notices]


def expected_notices(training: str, adapter: Path) -> list[str]:
    changed = json.loads((adapter / BASE_FILE).read_text())["config_changes"]
    differences = {
        "adapter-precision-differs": "quantization" in TRAININGS[training],
        "adapter-config-differs": changed,
    }
    return [code for code, differs in differences.items() if differs]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    "training", [pytest.param(one, marks=[] if one in FAST else pytest.mark.slow) for one in TRAININGS]
)
def test_adapter_is_evaluated_and_merged_on_the_base_that_it_was_trained_on(
    training: str, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base")
    recipe, wanted = trained(base, tmp_path / "adapter", TRAININGS[training])
    torch.testing.assert_close(evaluated(tmp_path / "adapter"), wanted, atol=1e-4, rtol=1e-4)
    merge_checkpoint(tmp_path / "adapter", MergeOptions(output=tmp_path / "merged", dtype="fp32"))
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), wanted, atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(evaluated(tmp_path / "merged"), wanted, atol=1e-4, rtol=1e-4)
    assert find_facts(recipe).notices == (), "it continues on the same base"

    if not training.startswith("untied"):
        assert notices_without(training, base, tmp_path / "adapter") == expected_notices(
            training, tmp_path / "adapter"
        )

    (tmp_path / "adapter" / BASE_FILE).unlink()
    if training not in ("plain", "untied"):
        assert (evaluated(tmp_path / "adapter") - wanted).abs().max() > 1e-3, (
            "another base than that of the training"
        )


@pytest.mark.parametrize("training", ["untied", "untied in 4 bits"])
def test_recipe_that_continues_an_adapter_on_an_untied_base_has_only_the_notice_of_its_precision(
    training: str, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base", tied=False)
    trained(base, tmp_path / "adapter", TRAININGS[training], tied=False)
    assert notices_without(training, base, tmp_path / "adapter") == expected_notices(
        training, tmp_path / "adapter"
    )


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_adapter_of_a_resized_embedding_is_evaluated(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = make_base(tmp_path / "base", tied=False)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(170)
    config = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
    )
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(
        evaluated(tmp_path / "adapter", vocabulary=170), logits(adapted), atol=1e-5, rtol=1e-5
    )


def test_base_in_4_bits_is_rounded_before_its_dtype_is_changed(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    _, wanted = trained(base, tmp_path / "adapter", TRAININGS["4 bits"])
    in_bf16 = evaluated(tmp_path / "adapter", dtype="auto")
    assert in_bf16.dtype == torch.bfloat16
    assert (in_bf16.float() - wanted).abs().mean() < 0.03
    (tmp_path / "adapter" / BASE_FILE).unlink()
    assert (evaluated(tmp_path / "adapter", dtype="auto").float() - wanted).abs().mean() > 0.1


def test_base_with_other_weights_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    trained(base, tmp_path / "adapter", {})
    make_base(base, tied=False)
    with pytest.raises(FsdpTuneError) as caught:
        find_model(str(tmp_path / "adapter"))
    assert caught.value.problems[0].code == "base-changed"


def test_base_that_was_moved_is_named(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    trained(base, tmp_path / "adapter", {})
    base.rename(tmp_path / "moved")
    with pytest.raises(FsdpTuneError, match="there is no directory"):
        find_model(str(tmp_path / "adapter"))
    values = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    (tmp_path / "adapter" / CONFIG_FILE).write_text(
        json.dumps(values | {"base_model_name_or_path": str(tmp_path / "moved")})
    )
    assert find_model(str(tmp_path / "adapter")).weights == str(tmp_path / "moved")


@pytest.mark.parametrize("content", ["[]", "{", ""])
def test_adapter_config_that_cannot_be_read_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(content)
    with pytest.raises(FsdpTuneError, match="cannot be read"):
        find_model(str(tmp_path))


def test_weights_in_4_bits_that_the_base_lacks_are_named(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    trained(base, tmp_path / "adapter", TRAININGS["4 bits"])
    record = json.loads((tmp_path / "adapter" / BASE_FILE).read_text())
    record["nf4_weights"] = ["model.layers.7.mlp.up_proj.weight"]
    (tmp_path / "adapter" / BASE_FILE).write_text(
        json.dumps({name: value for name, value in record.items() if name != DOCUMENT_DIGEST})
    )
    with pytest.raises(FsdpTuneError, match=r"no `model\.layers\.7"):
        evaluated(tmp_path / "adapter")


def test_adapter_on_the_hub_is_opened_with_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_base(tmp_path / "base")
    stored = tmp_path / "cache" / "models--org--adapter"
    _, wanted = trained(base, stored / "snapshots" / ("a" * 40), TRAININGS["4 bits"])
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert describe_base(str(base), None).digest is not None
    model = find_model("org/adapter")
    assert (model.name, model.weights) == ("org/adapter", str(base))
    torch.testing.assert_close(evaluated("org/adapter"), wanted, atol=1e-4, rtol=1e-4)  # type: ignore[arg-type]

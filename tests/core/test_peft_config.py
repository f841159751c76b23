"""Every field and initialisation of the installed PEFT has a known meaning for merging and continuing."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.tensors import peft_config
from fsdp_tune.core.tensors.peft_config import (
    CONFIG_FILE,
    INITIALISATIONS,
    KNOWN_FIELDS,
    unknown_field_notices,
)
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.model.loading.construct import build_empty
from fsdp_tune.model.loading.inspect import find_facts
from tests.model.recipes import recipe_of
from tests.parity.architectures import make_model


def test_every_field_of_peft_is_in_one_list() -> None:
    lists = (
        peft_config._OTHER_ARITHMETIC,
        peft_config._OTHER_TRAINING,
        peft_config._READ,
        peft_config._UNUSED,
    )
    assert [
        name for name, count in Counter(name for names in lists for name in names).items() if count > 1
    ] == []
    assert {field.name for field in dataclasses.fields(LoraConfig)} - KNOWN_FIELDS == set(), (
        f"new in PEFT {peft.__version__}"
    )


def test_every_initialisation_of_peft_is_known() -> None:
    hints = typing.get_type_hints(LoraConfig)["init_lora_weights"]
    texts = [text for each in typing.get_args(hints) for text in typing.get_args(each)]
    assert len(texts) > 5
    assert [text for text in texts if not text.startswith(INITIALISATIONS)] == []


def test_field_of_a_newer_peft_is_noticed(tmp_path: Path) -> None:
    assert unknown_field_notices({**LoraConfig().to_dict(), "new_variant": False}, tmp_path) == []
    (notice,) = unknown_field_notices({**LoraConfig().to_dict(), "new_variant": {"rank": 2}}, tmp_path)
    assert "`new_variant`" in notice.message
    (notice,) = unknown_field_notices({"init_lora_weights": "newest"}, tmp_path)
    assert "`init_lora_weights: newest`" in notice.message


TRAINED_OTHERWISE: dict[str, dict[str, Any]] = {
    "init_lora_weights: mica": {"init_lora_weights": "mica"},
    "velora_config": {"velora_config": {"num_groups": 2}},
    "lora_bias": {"lora_bias": True},
}


# PEFT takes `lora_B.bias` for a part of a sharded tensor
@pytest.mark.filterwarnings("ignore:Adapter 'default'")
@pytest.mark.parametrize("what", TRAINED_OTHERWISE)
def test_adapter_that_is_trained_otherwise_is_merged_and_not_continued(what: str, tmp_path: Path) -> None:
    base, adapter = make_model("gpt2", tmp_path / "base"), tmp_path / "adapter"
    targets = ["c_attn"]
    if "velora" in what:  # which does not adapt Conv1D
        base, targets = make_model("llama", tmp_path / "llama"), ["q_proj"]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    is_transposed = targets == ["c_attn"]
    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=targets, fan_in_fan_out=is_transposed, **TRAINED_OTHERWISE[what]
    )
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(adapter)
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter
    )
    merge_checkpoint(adapter, MergeOptions(output=tmp_path / "merged", dtype="fp32"))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        wanted = adapted.eval()(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=ids).logits
    torch.testing.assert_close(merged, wanted, atol=1e-4, rtol=1e-4)
    lora = {"r": 2, "lora_alpha": 4, "target_modules": targets, "adapter": str(adapter)}
    with pytest.raises(FsdpTuneError, match=f"it was trained with `{what}`"):
        build_empty(recipe_of({"name_or_path": str(base)}, lora=lora))


def test_run_that_continues_an_adapter_of_a_newer_peft_has_a_notice(tmp_path: Path) -> None:
    base = make_model("llama", tmp_path / "base")
    config = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"new_variant": True}))
    lora = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "adapter": str(tmp_path / "adapter")}
    recipe = recipe_of({"name_or_path": str(base)}, lora=lora)
    assert "adapter-field-unknown" in [notice.code for notice in find_facts(recipe).notices]
    result = merge_checkpoint(tmp_path / "adapter", MergeOptions(output=tmp_path / "merged"))
    assert "adapter-field-unknown" in [notice.code for notice in result.notices]

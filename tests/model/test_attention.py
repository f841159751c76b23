"""The attention kernel that `auto` selects, and the example lengths passed to kernels with variable
lengths."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AttentionMaskInterface, AutoConfig, Gemma3ForConditionalGeneration
from transformers.masking_utils import flash_attention_mask

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.store import RowStore
from fsdp_tune.model.kernels.attention import (
    choose_attention,
    has_variable_lengths,
    large_mask_notices,
    stands_for,
)
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.model_files import KernelChoice
from fsdp_tune.model.step import micro_batch_loss, model_inputs
from fsdp_tune.worker.rows.batches import Collator
from fsdp_tune.worker.setup import _collator
from tests.model.families import FAMILIES
from tests.model.flash import FLASH_STAND_IN, flash_stand_in
from tests.model.recipes import recipe_of
from tests.parity.store import make_store

BLACKWELL = {
    "NVIDIA B200": (10, 0),
    "NVIDIA GB200": (10, 0),
    "NVIDIA B300 SXM6 AC": (10, 3),
    "NVIDIA GeForce RTX 5090": (12, 0),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (12, 0),
}
"""Name → compute capability of GPUs later than Hopper."""


def choice(
    family: str = "llama",
    *,
    installed: tuple[int, ...] = (),
    device: str = "cuda",
    precision: str = "bf16",
    capability: tuple[int, int] = (9, 0),
    name: str = "NVIDIA H100",
    is_amd: bool = False,
    has_gpu: bool = False,
    packing: bool = False,
    asked: str = "auto",
    **fields: Any,
) -> KernelChoice:
    """The choice on a machine with these versions of FlashAttention."""
    base = recipe_of(
        family, data={"train": [{"path": "x"}], "packing": packing}, precision={"mixed_precision": precision}
    )
    model = base.model.model_copy(update={"attn_implementation": asked})
    recipe = base.model_copy(
        update={"launch": base.launch.model_copy(update={"device": device}), "model": model}
    )
    known = {key: value for key, value in {**FAMILIES[family], **fields}.items() if key != "model_type"}
    config = AutoConfig.for_model(FAMILIES[family]["model_type"], **known)
    with (
        patch("fsdp_tune.model.kernels.attention._is_installed", lambda flash: flash.version in installed),
        patch.object(torch.version, "hip", "7.0" if is_amd else None),
        patch.object(torch.cuda, "get_device_name", lambda: name),
        patch.object(torch.cuda, "get_device_capability", lambda: capability),
        patch.object(torch.cuda, "is_available", lambda: has_gpu),
    ):
        return choose_attention(recipe, config)


@pytest.mark.parametrize(
    ("given", "kernel", "reason"),
    [
        ({}, "torch_varlen", "flash-attn is not installed"),
        ({"packing": True}, "torch_varlen", "flash-attn is not installed"),
        (
            {"packing": True, "attention_dropout": 0.1},
            "sdpa",
            "no dropout, and the model's attention uses it; packed rows get a block-diagonal mask",
        ),
        ({"attn_logit_softcapping": 30.0}, "sdpa", "has no soft-cap, and LlamaForCausalLM uses one"),
        ({"family": "falcon"}, "sdpa", "FalconForCausalLM does not pass the lengths of examples"),
        ({"family": "gpt2"}, "sdpa", "has no dropout"),
        ({"packing": True, "has_gpu": True, "capability": (7, 5)}, "sdpa", "needs an Ampere GPU"),
        ({"has_gpu": True}, "torch_varlen", "flash-attn is not installed"),
        ({"installed": (2,)}, "flash_attention_2", "flash-attn is installed"),
        ({"installed": (3,)}, "flash_attention_3", "flash-attn-3 is installed"),
        ({"installed": (2, 3)}, "flash_attention_3", "flash-attn-3 is installed"),
        ({"installed": (2, 3, 4)}, "flash_attention_3", "flash-attn-3 is installed"),
        ({"installed": (2, 4)}, "flash_attention_4", "flash-attn-4 is installed"),
        (
            {"installed": (2, 4), "head_dim": 256},
            "flash_attention_2",
            "takes heads of width 128 at most, and the model's have 256",
        ),
        ({"installed": (2, 3), "packing": True}, "flash_attention_3", "flash-attn-3 is installed"),
        (
            {"installed": (2, 3), "capability": (8, 0)},
            "flash_attention_2",
            "FlashAttention 3 has kernels for Hopper",
        ),
        (
            {"installed": (3,), "capability": (8, 0)},
            "torch_varlen",
            "FlashAttention 3 has kernels for Hopper",
        ),
        *(
            (
                {"installed": (2, 3), "name": name, "capability": capability},
                "flash_attention_2",
                f"and {name} has compute capability",
            )
            for name, capability in BLACKWELL.items()
        ),
        (
            {"installed": (3,), "name": "NVIDIA B200", "capability": (10, 0)},
            "torch_varlen",
            "FlashAttention 3 has kernels for Hopper",
        ),
        (
            {"installed": (2, 3, 4), "name": "NVIDIA B200", "capability": (10, 0)},
            "flash_attention_4",
            "flash-attn-4 is installed",
        ),
        (
            {"installed": (2, 3, 4), "name": "NVIDIA B300", "capability": (10, 3)},
            "flash_attention_4",
            "flash-attn-4 is installed",
        ),
        (
            {"installed": (4,), "name": "NVIDIA GeForce RTX 5090", "capability": (12, 0)},
            "torch_varlen",
            "Hopper and Blackwell",
        ),
        (
            {"installed": (2,), "name": "a later GPU", "capability": (13, 0)},
            "torch_varlen",
            "a later GPU has compute capability 13.0",
        ),
        (
            {"installed": (2, 3, 4), "is_amd": True, "capability": (9, 4)},
            "flash_attention_2",
            "has no kernels for AMD",
        ),
        ({"installed": (3,), "is_amd": True, "capability": (9, 5)}, "torch_varlen", "has no kernels for AMD"),
        ({"installed": (2, 3), "attention_dropout": 0.1}, "flash_attention_2", "no dropout"),
        ({"installed": (2, 3), "device": "cpu"}, "sdpa", "the device is cpu"),
        ({"installed": (2, 3), "precision": "no"}, "sdpa", "bf16 and fp16 only"),
        ({"installed": (2,), "head_dim": 512}, "sdpa", "the model's have 512"),
        ({"installed": (2,), "family": "bloom"}, "eager", "has no other"),
        ({"installed": (2, 3), "asked": "eager"}, "eager", "set in the recipe"),
        ({"installed": (2, 3), "asked": "torch_varlen"}, "torch_varlen", "set in the recipe"),
        ({"installed": (2, 3), "asked": "sdpa_or_eager"}, "sdpa", "excludes FlashAttention"),
        ({"asked": "sdpa_or_eager", "packing": True}, "sdpa", "packed rows get a block-diagonal mask"),
        (
            {"installed": (2, 3), "asked": "sdpa_or_eager", "family": "gpt_oss"},
            "eager",
            "GptOssForCausalLM has no other",
        ),
    ],
    ids=str,
)
def test_auto_selects_the_fastest_correct_kernel(given: dict[str, Any], kernel: str, reason: str) -> None:
    found = choice(**given)
    assert found.value == kernel
    assert reason in found.reason


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"device": "cpu"}, "needs CUDA"),
        ({"precision": "no"}, "bf16 and fp16 only"),
        ({"attention_dropout": 0.1}, "has no dropout"),
        ({"family": "gpt_oss"}, "declares its own flash kernels"),
    ],
    ids=str,
)
def test_written_variable_length_attention_is_refused_with_the_reason(
    given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(FsdpTuneError, match=reason) as raised:
        choice(asked="torch_varlen", **given)
    assert raised.value.problems[0].code == "model-refused"


GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("fields", "kernel"),
    [({}, "sdpa"), ({"head_dim": 16, "global_head_dim": 16}, "torch_varlen")],
    ids=["published", "narrow"],
)
def test_model_whose_layers_differ_in_the_width_of_heads_gets_a_kernel_for_the_widest(
    fields: dict[str, int], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "gemma4", GEMMA4)
    found = choice("gemma4", **fields)
    assert found.value == kernel
    assert kernel != "sdpa" or "the model's have 512" in found.reason


def test_text_layers_of_a_composite_model_decide_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "gemma3", {"model_type": "gemma3"})
    # transformers 5.24 has none, for images
    monkeypatch.setattr(Gemma3ForConditionalGeneration, "_supports_flash_attn", True)
    text = {"head_dim": 512, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    assert "the model's have 512" in choice("gemma3", text_config=text).reason
    assert (
        choice("gemma3", text_config=text | {"head_dim": 16, "attn_logit_softcapping": 30.0}).value == "sdpa"
    )


def test_torch_without_windows_in_its_variable_length_attention_gets_sdpa(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fsdp_tune.model.kernels.varlen._OPTIONS", frozenset({"scale", "is_causal"}))
    found = choice()
    assert found.value == "sdpa"
    assert "variable-length attention without `window_size`" in found.reason


@pytest.mark.parametrize(
    ("tokens", "fsdp", "size"),
    [
        (4000, {}, None),
        (4096, {}, "1.02 GiB"),  # 16 MiB, and 32 MiB in each of 32 layers
        (4096, {"activation_checkpointing": "full"}, None),
        (32768, {"activation_checkpointing": "full"}, "3.00 GiB"),
        (32768, {"activation_checkpointing": "full", "activation_checkpointing_every": 2}, "35.00 GiB"),
    ],
    ids=str,
)
def test_large_masks_are_reported_with_the_longest_row(
    tokens: int, fsdp: dict[str, Any], size: str | None
) -> None:
    base = recipe_of(
        "llama",
        data={"train": [{"path": "x"}], "packing": True, "max_length": tokens},
        fsdp=fsdp,
        precision={"mixed_precision": "bf16"},
    )
    recipe = base.model_copy(update={"launch": base.launch.model_copy(update={"device": "cuda"})})
    found = large_mask_notices(recipe, AutoConfig.for_model("llama"), 32, KernelChoice("sdpa", "no dropout"))
    assert [notice.code for notice in found] == ([] if size is None else ["attention-mask-large"])
    if size is not None:
        assert size in found[0].message
        longest = int(str(found[0].hint).partition("max_length=")[2].partition("`")[0])
        assert 4000 < longest < tokens
        shorter = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": longest})})
        assert (
            large_mask_notices(shorter, AutoConfig.for_model("llama"), 32, KernelChoice("sdpa", "no dropout"))
            == []
        )
    assert (
        large_mask_notices(recipe, AutoConfig.for_model("llama"), 32, KernelChoice("torch_varlen", "")) == []
    )


def test_inspection_reports_large_masks() -> None:
    data = {"train": [{"path": "x"}], "packing": True, "max_length": 32768}
    base = recipe_of(
        {"from_config": FAMILIES["llama"], "attn_implementation": "sdpa"},
        data=data,
        precision={"mixed_precision": "bf16"},
    )
    recipe = base.model_copy(update={"launch": base.launch.model_copy(update={"device": "cuda"})})
    [notice] = [notice for notice in find_facts(recipe).notices if notice.code == "attention-mask-large"]
    assert "5.00 GiB on each GPU, with a float copy in 2 of 2 layers" in notice.message
    assert "leave `model.attn_implementation` at auto" in notice.hint


@pytest.mark.parametrize("family", FAMILIES)
def test_without_flash_every_model_gets_the_default_attention_of_transformers(family: str) -> None:
    recipe = recipe_of(family)
    model = build_empty(recipe)
    assert model.config._attn_implementation == choose_attention(recipe, model.config).value


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_examples_of_several_packed_rows_are_separated_by_lengths(family: str, tmp_path: Any) -> None:
    packed = RowStore(make_store(tmp_path / "store") / "train-packed")
    batch = Collator(pad_token_id=0, multiple_of=8, variable_lengths=True)([packed[0], packed[5], packed[9]])
    masked = build_full(recipe_of({"from_config": FAMILIES[family], "attn_implementation": "sdpa"}))
    with flash_stand_in(), torch.no_grad():
        told = build_full(recipe_of({"from_config": FAMILIES[family], "attn_implementation": FLASH_STAND_IN}))
        one, other = (
            masked(**model_inputs(without_lengths(batch.tensors))).logits,
            told(**model_inputs(batch.tensors)).logits,
        )
        loss, found = (
            micro_batch_loss(masked, without_lengths(batch.tensors))[0],
            micro_batch_loss(told, batch.tensors)[0],
        )
    seen = torch.tensor(
        [[at < sum(packed[index].lengths) for at in range(one.shape[1])] for index in (0, 5, 9)]
    )
    assert float((one - other)[seen].abs().max()) <= 1e-5
    assert float(found) == pytest.approx(float(loss), rel=1e-5)


def without_lengths(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "cu_seq_lens"}


def test_every_batch_of_a_kernel_with_variable_lengths_has_lengths(tmp_path: Any) -> None:
    """Also one whose rows are one example each: compiled layers have the same inputs in every batch."""
    store = make_store(tmp_path / "store")
    collator = Collator(pad_token_id=0, multiple_of=8, variable_lengths=True)
    assert collator([None]).tensors["cu_seq_lens"].tolist() == [0, 8]
    alone, packed = RowStore(store / "train")[0], RowStore(store / "train-packed")[0]
    for row in (alone, packed):
        batch = collator([row]).tensors
        assert batch["cu_seq_lens"].dtype == torch.int32
        assert batch["cu_seq_lens"].tolist()[1 : len(row.lengths) + 1] == list(
            itertools.accumulate(row.lengths)
        )
        assert batch["cu_seq_lens"][-1] == batch["input_ids"].shape[1]
    assert "cu_seq_lens" not in Collator(pad_token_id=0, multiple_of=8)([packed]).tensors


@pytest.mark.parametrize(
    ("packing", "eval_packing"), [(True, None), (True, False), (False, True), (False, None)], ids=str
)
def test_batches_have_lengths_if_training_or_evaluation_is_packed(
    packing: bool, eval_packing: bool | None
) -> None:
    data = {
        "train": [{"path": "x"}],
        "eval": {"fraction": 0.1},
        "packing": packing,
        "eval_packing": eval_packing,
    }
    recipe = recipe_of("llama", data=data)
    loaded: Any = SimpleNamespace(model=build_empty(recipe))
    loaded.model.config._attn_implementation = "torch_varlen"
    prepared: Any = SimpleNamespace(pad_token_id=0)
    assert _collator(recipe, prepared, loaded).variable_lengths is bool(packing or eval_packing)


@pytest.mark.parametrize(
    ("kernel", "variable"),
    [
        ("flash_attention_2", True),
        ("flash_attention_3", True),
        ("kernels-community/flash-attn2", True),
        ("kernels-community/vllm-flash-attn3@v1", True),
        ("paged|flash_attention_2", True),
        ("torch_varlen", True),
        ("sdpa", False),
        ("eager", False),
        ("flex_attention", False),
        (None, False),
    ],
)
def test_kernels_with_variable_lengths_are_known(kernel: str | None, variable: bool) -> None:
    assert has_variable_lengths(kernel) is variable


def test_kernel_with_the_mask_of_flash_separates_examples_by_lengths() -> None:
    """transformers registers hub kernels of any name with it."""
    AttentionMaskInterface.register("someone/attention", flash_attention_mask)
    try:
        assert has_variable_lengths("someone/attention")
    finally:
        del AttentionMaskInterface._global_mapping["someone/attention"]


@pytest.mark.parametrize(
    ("live", "requested", "stands"),
    [
        ("sdpa", "sdpa", True),
        ("kernels-community/flash-attn2", "flash_attention_2", True),
        ("flash_attention_2", "paged|flash_attention_2", True),
        ("eager", "sdpa", False),
        ("sdpa", "flash_attention_2", False),
    ],
)
def test_equivalent_flash_kernel_is_not_reported_as_a_difference(
    live: str, requested: str, stands: bool
) -> None:
    assert stands_for(live, requested) is stands

"""The smallest models of the architectures that are drawn: no dropout, so that one device computes the
same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.model.families import FAMILIES as DECODERS
from tests.session import made_once

VOCABULARY = 257
_NO_DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1},
    "opt": {"dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None},
    "falcon": {"bos_token_id": 0, "eos_token_id": 1},
    "bloom": {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None},
    "gpt_neox": {"bos_token_id": 0, "eos_token_id": 1},
}
_MORE: dict[str, dict[str, Any]] = {
    "granite": DECODERS["llama"] | {"model_type": "granite"},
    "olmo2": DECODERS["llama"] | {"model_type": "olmo2"},
    "stablelm": DECODERS["llama"] | {"model_type": "stablelm"},
    "starcoder2": DECODERS["llama"]
    | {"model_type": "starcoder2", "embedding_dropout": 0.0, "residual_dropout": 0.0},
    "cohere": DECODERS["llama"] | {"model_type": "cohere"},
}
FAMILIES: dict[str, dict[str, Any]] = {
    name: fields | _NO_DROPOUT.get(name, {}) for name, fields in (DECODERS | _MORE).items()
}
LAYERS = {
    **dict.fromkeys(("gpt2", "falcon", "bloom"), "transformer.h.*"),
    "gpt_neox": "gpt_neox.layers.*",
    "opt": "model.decoder.layers.*",
}
"""Pattern of the decoder layers' names where it is not `model.layers.*`."""
TAKES_FLASH = FAMILIES.keys() - {"mistral", "gemma3_text", "gpt_oss", "bloom", "falcon", "stablelm"}
"""Models that `tests.model.flash` computes as their own attention does: no window, no sinks, no ALiBi, no
attention class per kernel, and lengths of examples that reach the kernel (StableLM's layers drop them)."""
HAS_EAGER_ALONE = frozenset({"bloom", "gpt_oss"})
"""Models whose ALiBi or sinks have no other kernel in transformers."""
PACKED_EXAMPLES_MEET = frozenset({"bloom", "opt", "falcon", "lfm2", "gpt_oss"})
"""Models that cannot separate packed examples in transformers (tests/model/test_step_packed.py): runs of the
others must not be refused."""
EXPERTS = frozenset({"mixtral", "qwen2_moe", "gpt_oss"})


def make_model(family: str, overrides: dict[str, Any], kind: str = "models") -> Path:
    """Random weights as an ordinary model directory of the session, by transformers alone; made once for each
    `kind`."""

    def make(folder: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        fields = FAMILIES[family] | overrides
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(
            AutoConfig.for_model(fields.pop("model_type"), **fields)
        ).save_pretrained(folder)

    return made_once(f"{kind}/{'-'.join([family, *map(str, overrides)])}", make)

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from fsdp_tune.model.generate import generate, room

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17]]
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},  # learned positions
    "gemma2": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
    "mamba": {},  # no cache of keys and values
    "rwkv": {"attention_hidden_size": 32},  # ignores the attention mask
    "recurrent_gemma": {"num_attention_heads": 4, "lru_width": 32, "block_types": ["recurrent", "attention"]},
}


def tiny(kind: str, **options: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, **SIZES[kind], **options}
    config = AutoConfig.for_model(kind, vocab_size=97, pad_token_id=0, eos_token_id=2, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("kind", SIZES)
def test_padded_batch_equals_transformers_row_by_row(kind: str) -> None:
    model = tiny(kind)
    expected: list[list[int]] = []
    for prompt in PROMPTS:
        options = GenerationConfig(do_sample=False, max_new_tokens=8, eos_token_id=2, pad_token_id=0)
        ids = torch.tensor([prompt])
        expected.append(
            model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)[
                0, len(prompt) :
            ].tolist()
        )
    with torch.no_grad():
        found = generate(model, PROMPTS, max_new_tokens=8, end_ids={2}, pad_id=0, device=torch.device("cpu"))
    assert found == expected


@pytest.mark.parametrize("kind", [kind for kind in SIZES if kind not in ("mamba", "rwkv")])
def test_text_ends_at_the_last_position_in_any_batch(kind: str) -> None:
    """The longest prompt leaves two positions; the others must not end after two tokens."""
    model = tiny(kind, max_position_embeddings=9)
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "end_ids": (),
        "pad_id": 0,
        "device": torch.device("cpu"),
    }
    with torch.no_grad():
        together = generate(model, PROMPTS, **options)
        alone = [generate(model, [prompt], **options)[0] for prompt in PROMPTS]
    assert together == alone
    assert [len(tokens) for tokens in together] == [5, 7, 2]


def test_model_that_declares_no_limit_of_positions_has_room_for_all_tokens() -> None:
    """XLNet's `max_position_embeddings` is -1."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("xlnet", d_model=32, n_layer=1, n_head=2, d_inner=32)
        )
    assert room(model, 5, 20) == 20


def test_rows_end_at_first_end_token_and_loop_stops_by_agreement() -> None:
    model = tiny("llama")
    with torch.no_grad():
        free = generate(model, PROMPTS, max_new_tokens=8, end_ids=(), pad_id=0, device=torch.device("cpu"))
        end = free[0][2]
        votes: list[bool] = []
        stopped = generate(
            model,
            PROMPTS[:1],
            max_new_tokens=8,
            end_ids={end},
            pad_id=0,
            device=torch.device("cpu"),
            # another rank is not finished before
            all_finished=lambda mine: bool(votes.append(mine)) or len(votes) > 5,
        )
    assert stopped[0] == free[0][: free[0].index(end) + 1]
    assert votes[-1]
    assert len(votes) == 6

"""Greedy generation with a plain loop over a model's forward, sharded or not.

`transformers.generate` is not used: it takes unset options from the model's generation_config.json (Qwen's
repetition penalty), and it calls the model without its wrapper, which FSDP1 does not allow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_tune.core.families import family_of, max_positions
from fsdp_tune.model.kernels.varlen import attention_with_masks


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_ids: Collection[int],
    pad_id: int,
    device: torch.device,
    all_finished: Callable[[bool], bool] = bool,
) -> list[list[int]]:
    """Return the tokens that follow each prompt, up to and including the first of `end_ids`. Call it without
    gradients.

    A text also ends at the model's last position, whatever the other prompts of the batch. Prompts are padded
    on the left. Models that return a cache of keys and values run one token a forward, others the full text
    again. `all_finished` turns "every row of this rank is finished" into the same of all ranks, so that
    sharded models run as many forwards on each.
    """
    plain: Any = getattr(model, "module", model)
    if family_of(plain.config.model_type).reads_padding:
        return _generate_without_cache(model, prompts, max_new_tokens, end_ids, pad_id, device, all_finished)
    takes = inspect.signature(plain.forward).parameters
    # transformers 5.24 renamed the argument and the output
    cache_name = "cache" if "cache" in takes else "past_key_values"
    # Router logits of a forward with a cache do not fit the attention mask (transformers'
    # `load_balancing_loss_func`).
    options: dict[str, object] = {
        name: value
        for name, value in (("logits_to_keep", 1), ("output_router_logits", False))
        if name in takes
    }
    ids, mask = _padded(prompts, pad_id, device)
    ends = torch.tensor(sorted(end_ids), device=device)
    rooms = [room(plain, len(prompt), max_new_tokens) for prompt in prompts]
    limits = torch.tensor(rooms, device=device)
    finished = limits <= 0
    cache: object = None
    new: list[torch.Tensor] = []
    while len(new) < max_new_tokens and not all_finished(bool(finished.all())):
        inputs = ids if cache is None else ids[:, -1:]
        if "position_ids" in takes:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            options["position_ids"] = positions[:, -inputs.shape[1] :]
        if cache is not None:
            options[cache_name] = cache
        with attention_with_masks(plain.config):
            outputs = model(input_ids=inputs, attention_mask=mask, use_cache=True, **options)
        cache = _keys_and_values(outputs, cache_name)
        token = torch.where(finished, pad_id, outputs.logits[:, -1].argmax(-1))
        new.append(token)
        finished = finished | torch.isin(token, ends) | (len(new) >= limits)
        ids = torch.cat([ids, token[:, None]], dim=1)
        # positions of finished rows stay below the model's last
        mask = torch.cat([mask, (~finished).to(mask.dtype)[:, None]], dim=1)
    rows = torch.stack(new, dim=1).tolist() if new else [[] for _ in prompts]
    return [_until_end(row[:most], end_ids) for row, most in zip(rows, rooms, strict=True)]


def _keys_and_values(outputs: object, name: str) -> object:
    """Return the cache of a forward; None if it has none.

    Layers that are all recurrent count as none: with their states they would take the mask of the full text
    for that of one token.
    """
    cache = getattr(outputs, name, None)
    return None if cache is None or all(getattr(cache, "is_linear", [False])) else cache


def room(model: nn.Module, prompt_tokens: int, max_new_tokens: int) -> int:
    """Return how many tokens may follow a prompt: `max_new_tokens`, or what is left of the model's
    positions."""
    positions = max_positions(model.config)
    return max_new_tokens if positions is None else min(max_new_tokens, positions - prompt_tokens)


def _generate_without_cache(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_ids: Collection[int],
    pad_id: int,
    device: torch.device,
    all_finished: Callable[[bool], bool],
) -> list[list[int]]:
    """Run the full texts again for each token, padded on the right, where no causal layer sees the
    padding."""
    plain: Any = getattr(model, "module", model)
    texts = [list(prompt) for prompt in prompts]
    most = [len(prompt) + room(plain, len(prompt), max_new_tokens) for prompt in prompts]
    finished = [len(text) >= longest for text, longest in zip(texts, most, strict=True)]
    steps = 0
    while steps < max_new_tokens and not all_finished(all(finished)):
        width = max(map(len, texts))
        ids = torch.tensor([text + [pad_id] * (width - len(text)) for text in texts], device=device)
        mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts], device=device)
        with attention_with_masks(plain.config):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for row, text in enumerate(texts):
            if not finished[row]:
                text.append(int(logits[row, len(text) - 1].argmax()))
                finished[row] = text[-1] in end_ids or len(text) >= most[row]
        steps += 1
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def end_ids_of(model: nn.Module) -> set[int]:
    """Return the tokens that end a text by the model's generation config: several in Llama 3, none if it
    names none."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return set(found) if isinstance(found, list) else set() if found is None else {found}


def _padded(
    prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask, int64 [prompts, longest], with padding on the left."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device
    )
    return ids, mask


def _until_end(tokens: list[int], end_ids: Collection[int]) -> list[int]:
    return tokens[: next((at + 1 for at, token in enumerate(tokens) if token in end_ids), len(tokens))]

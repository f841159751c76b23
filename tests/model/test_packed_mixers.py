"""Mixers compute the documents of packed rows: logits and gradients equal those of one example at a time."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model import packed_mixers
from fsdp_tune.model.internals.transformers_internals import (
    KernelWithFallback,
    attention_of,
    kernel_with_fallback,
)
from fsdp_tune.model.packed_documents import packing_known
from fsdp_tune.model.packed_mixers import (
    call_by_documents,
    choose_packing,
    find_mixers,
    groups_of_lengths,
    separate_documents,
    takes_lengths,
)
from tests.architectures.tiny import config_of, known
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

LENGTHS = ((7, 11, 4, 2), (13, 8, 3))
"""Examples of two rows of 24 tokens. Some are computed together, padded."""
_RECURRENT = known(
    *(
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "inkling2_text",
        "inkling_text",
        "jamba",
        "kimi_linear",
    ),
    *(
        "lfm2_moe",
        "lfm3",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
    ),
    *("recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya"),
)
_MASKED = known(
    *("afmoe", "biogpt", "bloom", "falcon", "gpt_oss", "mpt", "opt", "xglm"),
    # an indexer takes the cache, and is attention
    *(
        "axk2",
        "deepseek_v32",
        "dots3_note_text",
        "glm_moe_dsa",
        "hy_v4",
    ),
)
_FAST = known("lfm2_moe", "gpt_oss", "mamba")


def model_of(fields: dict[str, Any], kernel: str | None = None) -> Any:
    config = AutoConfig.for_model(
        fields["model_type"], **{name: value for name, value in fields.items() if name != "model_type"}
    )
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=kernel).train()


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, logits.shape[-1]).sin()
    return (logits.float().log_softmax(-1) @ weights).sum()


def deviations(model: Any) -> tuple[float, float]:
    """Return how far logits and gradients of packed rows are from those of one example at a time,
    relative."""
    ids = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(3))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])

    def gradients() -> torch.Tensor:
        found = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
        )
        model.zero_grad()
        return found

    with packing_known(positions, attention_of(model.config)):
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss_of(packed).backward()
    of_packed, furthest = gradients(), 0.0
    for row, lengths in enumerate(LENGTHS):
        for start, length in zip((0, *torch.tensor(lengths).cumsum(0).tolist()), lengths, strict=False):
            alone = model(input_ids=ids[row : row + 1, start : start + length], use_cache=False).logits
            loss_of(alone).backward()
            difference = (
                alone[0] - packed[row, start : start + length]
            ).detach().norm() / alone.detach().norm()
            furthest = max(furthest, float(difference))
    of_alone = gradients()
    return furthest, float((of_packed - of_alone).norm() / of_alone.norm())


@pytest.mark.parametrize(
    "family",
    [
        *_FAST,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in [*_RECURRENT, *_MASKED]
            if name not in _FAST
        ),
    ],
)
def test_logits_and_gradients_of_packed_rows_equal_those_of_single_examples(family: str) -> None:
    model = model_of(config_of(family))
    assert bool(separate_documents(model)) == (family in _RECURRENT)
    assert max(deviations(model)) <= 1e-5


_POOLED: dict[str, dict[str, Any]] = {
    "minimax_m3_vl_text": {
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "deepseek_v4": {
        "index_topk": 2,
        "sliding_window": 4,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
}
"""Attention whose keys are chosen by blocks, or pooled, by a module that takes no mask; smaller than the
examples."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kernel"),
    [("minimax_m3_vl_text", "sdpa"), ("minimax_m3_vl_text", "eager"), ("deepseek_v4", "eager")],
)
def test_attention_with_keys_of_several_examples_is_called_by_example(family: str, kernel: str) -> None:
    if not known(family):
        pytest.skip(f"transformers has no {family}")
    model = model_of(config_of(family) | _POOLED[family], kernel)
    assert min(deviations(model)) > 1e-3
    assert set(separate_documents(model)) <= {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert max(deviations(model)) <= 1e-5


def test_part_of_a_mask_hides_padding_and_has_the_rows_of_its_document() -> None:
    mixer, seen = nn.Identity(), list[torch.Tensor]()

    def forward(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen.append(mask)
        return hidden

    mixer.forward = forward  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_mixers, "_reads_without_mask", lambda _module: True)
        call_by_documents(mixer, multiple_of=4)
    mask = torch.ones(5, 5).tril().bool()
    mask[3:, :3] = False
    with packing_known(torch.tensor([[0, 1, 2, 0, 1]]), "sdpa"):
        mixer(torch.randn(1, 5, 7), mask[None, None])
        mixer(torch.randn(1, 5, 7), mask[None, None].logical_not() * -100.0)
    of_three = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]).bool()
    of_two = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]).bool()
    assert [each.shape for each in seen] == [(2, 1, 4, 4)] * 2, "both documents at once"
    assert torch.equal(seen[0][0, 0], of_three)
    assert torch.equal(seen[0][1, 0], of_two)
    assert torch.equal(seen[1][:, 0] > -1.0, torch.stack([of_three, of_two]))


def test_convolution_that_is_called_for_the_row_differs() -> None:
    assert min(deviations(model_of(FAMILIES["lfm2"]))) > 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "opt"])
def test_attention_is_not_a_mixer(family: str) -> None:
    with torch.device("meta"):
        assert find_mixers(model_of(FAMILIES[family])) == {}


def test_documents_of_similar_length_are_computed_together() -> None:
    lengths = [100, 3, 90, 50, 2, 1000, 49, 101]
    groups = groups_of_lengths(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        tokens = [lengths[index] for index in group]
        assert max(tokens) * len(tokens) <= (1 + packed_mixers.MOST_PADDING) * sum(tokens)
    assert groups[:2] == [[5], [7, 0, 2, 3]]


class Heads(nn.Module):
    """Returns a state and states by head, with as many heads as the longest document has tokens."""

    def forward(self, hidden_states: torch.Tensor, cache: Any = None) -> Any:
        by_head = hidden_states.cumsum(1)[:, None].expand(-1, 3, -1, -1)
        return by_head, hidden_states, hidden_states.sum(1), cache


def test_tokens_are_found_in_outputs_by_head_and_states_are_left_out() -> None:
    mixer, hidden = Heads(), torch.randn(1, 6, 5)
    call_by_documents(mixer)
    with packing_known(torch.tensor([[0, 1, 2, 0, 1, 2]]), "sdpa"):
        by_head, same, state, cache = mixer(hidden)
    assert torch.equal(same, hidden)
    expected = torch.cat([hidden[:, :3].cumsum(1), hidden[:, 3:].cumsum(1)], 1)[:, None].expand(-1, 3, -1, -1)
    assert torch.equal(by_head, expected)
    assert (state, cache) == (None, None)


class Scores(nn.Module):
    """Returns a state [rows, tokens, features], and scores [rows, tokens, tokens]."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.lengths.append(hidden_states.shape[1])
        assert len(self.lengths) < 10, "the call is repeated for ever"
        return hidden_states, hidden_states @ hidden_states.mT


@pytest.mark.parametrize(("features", "lengths"), [(5, [3, 4]), (3, [3, 4]), (4, [3, 4, 5])])
def test_output_with_tokens_in_two_dimensions_ends_the_search_for_them(
    features: int, lengths: list[int]
) -> None:
    mixer, hidden = Scores(), torch.randn(1, 5, features)
    call_by_documents(mixer)
    with packing_known(torch.tensor([[0, 1, 2, 0, 1]]), "sdpa"):
        same, _ = mixer(hidden)
    assert torch.equal(same, hidden)
    assert mixer.lengths == lengths


def test_documents_are_padded_to_the_multiple_that_fp8_needs() -> None:
    mixer, seen = nn.Identity(), list[tuple[int, ...]]()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(hidden.shape))
        return hidden

    mixer.forward = forward  # type: ignore[method-assign]
    call_by_documents(mixer, multiple_of=16)
    hidden = torch.randn(1, 24, 5)
    with packing_known(torch.cat([torch.arange(20), torch.arange(4)])[None], "sdpa"):
        assert torch.equal(mixer(hidden), hidden)
    assert seen == [(1, 32, 5), (1, 16, 5)]


def test_choice_names_the_mixers_and_compilation_is_refused() -> None:
    with torch.device("meta"):
        model = model_of(FAMILIES["lfm2"])
    packed = {"train": [{"path": "x"}], "packing": True}
    choice = choose_packing(recipe_of("lfm2", data=packed), model)["data.packing"]
    assert choice.value == "by example"
    assert choice.reason.startswith("Lfm2ShortConv computes each example alone")
    assert choose_packing(recipe_of("lfm2"), model) == {}
    with pytest.raises(FsdpTuneError, match="another graph for every set of lengths"):
        choose_packing(recipe_of("lfm2", data=packed, kernels={"compile": True}), model)


@pytest.mark.slow
def test_kernels_of_packages_get_the_lengths_and_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for `fla` and `causal_conv1d` that compute each document with transformers' own functions."""
    hub = pytest.importorskip("transformers.integrations.hub_kernels")
    model = model_of(config_of("qwen3_next"))
    [mixer] = find_mixers(model).values()
    module = sys.modules[type(mixer).__module__]
    if packed_mixers.kernel_with_fallback(getattr(module, "causal_conv1d_fn", None)) is None:
        pytest.skip("this version chooses its kernels in another way")
    given: list[list[int]] = []

    def conv(
        hidden_states: Any, weight: Any, bias: Any = None, activation: Any = None, seq_idx: Any = None
    ) -> Any:
        lengths = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
        given.append(lengths)
        return torch.cat(
            [own_conv(part, weight, bias, activation) for part in hidden_states.split(lengths, 2)], 2
        )

    def rule(
        query: Any,
        key: Any,
        value: Any,
        g: Any = None,
        beta: Any = None,
        cu_seqlens: Any = None,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> Any:
        lengths = cu_seqlens.diff().tolist()
        given.append(lengths)
        parts = zip(*(each.split(lengths, 1) for each in (query, key, value, g, beta)), strict=True)
        taken = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return torch.cat(
            [own_rule(q, k, v, g=decay, beta=b, **taken)[0] for q, k, v, decay, b in parts], 1
        ), None

    own_conv, own_rule = module.causal_conv1d_fn.__wrapped__, module.torch_chunk_gated_delta_rule.__wrapped__
    for package, names in (
        ("causal_conv1d", {"causal_conv1d_fn": conv}),
        ("fla", {"chunk_gated_delta_rule": rule}),
    ):
        stand_in = ModuleType(package)
        stand_in.__dict__.update(names)
        monkeypatch.setitem(sys.modules, package, stand_in)
    monkeypatch.setattr(hub, "_KERNELS_INTERNAL_PATH_MAPPINGS", {})
    made = hub.use_kernel_func_from_hub_with_fallback
    monkeypatch.setattr(module, "causal_conv1d_fn", made("causal_conv1d_fn", "causal_conv1d")(own_conv))
    monkeypatch.setattr(
        module, "torch_chunk_gated_delta_rule", made("chunk_gated_delta_rule", "fla")(own_rule)
    )
    assert takes_lengths(mixer)
    separate_documents(model)
    monkeypatch.setattr(
        mixer,
        "forward",
        only_when_packed(mixer.forward, type(mixer).forward.__get__(mixer), module, own_conv, own_rule),
    )
    assert max(deviations(model)) <= 1e-5
    assert given == [[7, 11, 4, 2, 13, 8, 3]] * 2


@pytest.mark.parametrize(("family", "passes_on"), [("kimi_linear", False), ("qwen3_next", True)])
def test_lengths_are_taken_only_where_the_code_passes_them_on(
    family: str, passes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kimi Linear calls its kernel with `**kwargs`, of which the kernel's wrapper keeps nothing."""
    [name] = known(family)
    [mixer, *_] = find_mixers(model_of(config_of(name))).values()
    kinds = {"causal_conv1d_fn": frozenset({"seq_idx"})}

    def installed(function: Any) -> KernelWithFallback | None:
        if (found := kernel_with_fallback(function)) is None:
            return None
        return KernelWithFallback(
            found.function, found.package, True, kinds.get(found.function, frozenset({"cu_seqlens"}))
        )

    monkeypatch.setattr(packed_mixers, "kernel_with_fallback", installed)
    assert takes_lengths(mixer) == passes_on


@pytest.mark.parametrize(
    ("policy", "ranks", "is_refused"),
    [("SIZE_BASED_WRAP", 2, True), ("SIZE_BASED_WRAP", 1, False), ("TRANSFORMER_BASED_WRAP", 2, False)],
)
def test_unit_inside_a_mixer_is_refused_where_ranks_would_gather_it_in_different_numbers(
    policy: str, ranks: int, is_refused: bool
) -> None:
    [name] = known("nemotron_h")
    model = model_of(config_of(name))
    recipe = recipe_of(
        {"from_config": config_of(name)},
        ranks,
        fsdp={"auto_wrap_policy": policy},
        data={"train": [{"path": "x"}], "packing": True, "max_length": 64},
    )
    if is_refused:
        with pytest.raises(FsdpTuneError, match="ranks would gather in different numbers"):
            choose_packing(recipe, model)
    else:
        assert choose_packing(recipe, model)["data.packing"].value == "by example"


def only_when_packed(packed: Any, own: Any, module: Any, own_conv: Any, own_rule: Any) -> Any:
    """Return a forward that computes single examples, in which stand-ins get no lengths, with transformers'
    functions."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if packed_mixers.known_documents() is not None:
            return packed(*args, **kwargs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "causal_conv1d_fn", own_conv)
            patch.setattr(module, "torch_chunk_gated_delta_rule", own_rule)
            return own(*args, **kwargs)

    return forward

"""torch's variable-length attention on the CPU, by kernels of the same contract: numbers, recomputation,
compilation, generation."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from fsdp_tune.data.store import RowStore
from fsdp_tune.model.generate import generate
from fsdp_tune.model.kernels import varlen as attention
from fsdp_tune.model.loading.assemble import load
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.loading.model_config import model_config
from fsdp_tune.model.sequence_parallel import rows_known
from fsdp_tune.model.shard.process_groups import join_groups
from fsdp_tune.model.step import micro_batch_loss, model_inputs
from fsdp_tune.recipe.schema.attention_kernels import TORCH_VARLEN
from fsdp_tune.worker.rows.batches import Collator
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of
from tests.model.test_recompute import Operators
from tests.model.varlen import varlen_allowed
from tests.parity.store import make_store
from tests.ranks import Ranks

PHI3 = {**FAMILIES["llama"], "model_type": "phi3"}
ODD_WIDTH = {**FAMILIES["llama"], "head_dim": 12}  # padded to 16 for the kernel
TESTED: dict[str, dict[str, Any]] = {
    **{name: FAMILIES[name] for name in ("llama", "qwen3", "mistral", "gemma3_text", "gpt2")},
    "phi3": PHI3,
    "llama with heads of 12": ODD_WIDTH,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("data") / "store")


def batch_of(store: Path, rows: tuple[int, ...], kind: str = "train-packed") -> dict[str, torch.Tensor]:
    stored = RowStore(store / kind)
    return Collator(pad_token_id=0, multiple_of=8, variable_lengths=kind == "train-packed")(
        [stored[row] for row in rows]
    ).tensors


def model_of(config: dict[str, Any], kernel: str = TORCH_VARLEN, **sections: dict[str, Any]) -> Any:
    config = config | (NO_DROPOUT if config["model_type"] == "gpt2" else {})
    with varlen_allowed():
        return build_full(
            recipe_of({"from_config": config, "attn_implementation": kernel}, **sections)
        ).train()


def loss_and_gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    with rows_known(model, batch):
        loss, _ = micro_batch_loss(model, batch)
    loss.backward()
    return float(loss.detach()), torch.cat(
        [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    )


@pytest.mark.parametrize("kind", ["train-packed", "train"])
@pytest.mark.parametrize("family", TESTED)
def test_logits_and_gradients_are_those_of_the_mask(family: str, kind: str, store: Path) -> None:
    """Rows of several examples, and padded rows of one."""
    batch = batch_of(store, (0, 5, 9), kind)
    masked, found = model_of(TESTED[family], "sdpa"), model_of(TESTED[family])
    expected = masked(
        **model_inputs({name: tensor for name, tensor in batch.items() if name != "cu_seq_lens"}),
        use_cache=False,
    ).logits
    logits = found(**model_inputs(batch), use_cache=False).logits
    read = batch["input_ids"] != 0
    assert float((logits - expected).detach()[read].abs().max()) <= 1e-5
    (one, expected_gradient), (other, gradient) = (
        loss_and_gradients(masked, batch),
        loss_and_gradients(found, batch),
    )
    assert other == pytest.approx(one, rel=1e-5)
    assert float((gradient - expected_gradient).norm() / expected_gradient.norm()) <= 1e-5


def test_key_heads_are_repeated_for_a_torch_without_grouped_queries(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(store, (0, 5))
    model = model_of(FAMILIES["llama"])
    grouped = loss_and_gradients(model, batch)
    shapes = []

    def without_groups(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
        shapes.append((query.shape, key.shape))
        assert "enable_gqa" not in options
        return kernel(query, key, *rest, **options)

    kernel = attention.varlen_attn
    monkeypatch.setattr(attention, "varlen_attn", without_groups)
    monkeypatch.setattr(attention, "_OPTIONS", attention._OPTIONS - {"enable_gqa"})
    loss, gradient = loss_and_gradients(model, batch)
    assert shapes
    assert all(query == key for query, key in shapes)
    assert loss == pytest.approx(grouped[0], rel=1e-6)
    assert float((gradient - grouped[1]).norm() / grouped[1].norm()) <= 1e-6


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"attention_mask": torch.ones(1, 4)}, "a mask"),
        ({"softcap": 30.0}, "a soft-cap"),
        ({"s_aux": torch.zeros(2)}, "sinks"),
        ({"dropout": 0.1}, "dropout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_arguments_are_refused(given: dict[str, Any], name: str) -> None:
    states = [torch.zeros(1, 2, 4, 8)] * 3
    with pytest.raises(ValueError, match=name):
        attention.torch_varlen_attention(None, *states, given.pop("attention_mask", None), **given)


@pytest.mark.parametrize(("way", "runs"), [("none", 2), ("full", 4), ("selective", 2)])
def test_selective_recomputation_saves_variable_length_attention(way: str, runs: int, store: Path) -> None:
    from fsdp_tune.model.shard.recompute import recompute_activations

    batch = batch_of(store, (0, 5))
    plain = model_of(FAMILIES["llama"])
    recomputed = copy.deepcopy(plain)
    recompute_activations(recipe_of("llama", fsdp={"activation_checkpointing": way}), recomputed)
    with Operators() as operators:
        loss, gradient = loss_and_gradients(recomputed, batch)
    assert operators.counts["_varlen_attn"] == runs
    expected_loss, expected = loss_and_gradients(plain, batch)
    assert loss == expected_loss
    assert torch.equal(gradient, expected)


def sharded_gradients(kernel: str, store: Path) -> tuple[float, torch.Tensor, list[str]]:
    """On each rank: loss and full gradients of a model under FSDP2 with selective recomputation, each rank
    with rows of its own."""
    import torch.distributed as dist

    section = {"from_config": FAMILIES["qwen3"], "attn_implementation": kernel}
    recipe = recipe_of(
        section, fsdp={"activation_checkpointing": "selective", "sharding_strategy": "FULL_SHARD"}
    )
    with varlen_allowed():
        loaded = load(recipe, model_config(recipe), torch.device("cpu"), vocabulary=None)
    loaded.wrapped.train()
    batch = batch_of(store, ((0, 5), (9, 3))[dist.get_rank()])
    with rows_known(loaded.wrapped, batch):
        loss, _ = micro_batch_loss(loaded.wrapped, batch)
    with Operators() as operators:
        loss.backward()
    gradients = torch.cat([p.grad.full_tensor().flatten() for p in loaded.wrapped.parameters()])
    return (
        float(loss.detach()),
        gradients,
        sorted(name for name in operators.counts if name.startswith("_varlen_attn")),
    )


@pytest.mark.ranks
def test_sharded_and_recomputed_gradients_are_those_of_the_mask(on_ranks: Ranks, store: Path) -> None:
    masked, found = (
        on_ranks.run(2, sharded_gradients, "sdpa", store),
        on_ranks.run(2, sharded_gradients, TORCH_VARLEN, store),
    )
    for (expected_loss, expected, _), (loss, gradient, operators) in zip(masked, found, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert float((gradient - expected).norm() / expected.norm()) <= 1e-5
        assert operators == ["_varlen_attn_backward"]  # the forward is not repeated


def gradients_of_shared_rows(store: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """On each rank: summed gradients of rows that two ranks share (Ulysses), and those of the complete rows
    on one."""
    import torch.distributed as dist

    batch, model = batch_of(store, (0, 5)), model_of(FAMILIES["qwen3"])
    _, expected = loss_and_gradients(model, batch)
    model.zero_grad()
    join_groups(model, {"sequence": dist.group.WORLD})
    with rows_known(model, batch):
        loss, _ = micro_batch_loss(model, batch)
        loss.backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(found)
    return expected, found


@pytest.mark.ranks
def test_rows_shared_by_a_sequence_group_have_the_gradients_of_complete_rows(
    on_ranks: Ranks, store: Path
) -> None:
    for expected, found in on_ranks.run(2, gradients_of_shared_rows, store):
        assert float((found - expected).norm() / expected.norm()) <= 1e-5


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_one_graph_serves_all_numbers_of_examples(store: Path) -> None:
    from torch._dynamo.testing import CompileCounter

    from fsdp_tune.model.kernels import compiled

    torch._dynamo.reset()
    counter = CompileCounter()
    model = model_of(FAMILIES["llama"])
    eager = copy.deepcopy(model)
    rows = [(0, 5), (1, 2), (3, 9)]
    batches = [batch_of(store, each) for each in rows]
    width = max(batch["input_ids"].shape[1] for batch in batches)
    stored = RowStore(store / "train-packed")
    batches = [
        Collator(0, width, variable_lengths=True)([stored[row] for row in each]).tensors for each in rows
    ]
    assert len({len(batch["cu_seq_lens"]) for batch in batches}) > 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiled, "BACKEND", counter)
        compiled.compile_layers(recipe_of("llama", kernels={"compile": True}), model)
    for batch in batches:
        loss, gradient = loss_and_gradients(model, batch)
        expected_loss, expected = loss_and_gradients(eager, batch)
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert float((gradient - expected).norm() / expected.norm()) <= 1e-5
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_generation_uses_masks_and_restores_the_kernel(store: Path) -> None:
    prompts, settings = (
        [[5, 6, 7, 8], [9, 10]],
        {"max_new_tokens": 6, "end_ids": (), "pad_id": 0, "device": torch.device("cpu")},
    )
    with torch.no_grad():
        expected = generate(model_of(FAMILIES["mistral"], "sdpa").eval(), prompts, **settings)
        model = model_of(FAMILIES["mistral"]).eval()
        assert generate(model, prompts, **settings) == expected
    assert model.config._attn_implementation == TORCH_VARLEN


def test_saved_configuration_does_not_name_the_kernel(tmp_path: Path) -> None:
    model = model_of(FAMILIES["llama"])
    assert model.config._attn_implementation == TORCH_VARLEN
    model.save_pretrained(tmp_path)
    assert TORCH_VARLEN not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    assert AutoConfig.from_pretrained(tmp_path)._attn_implementation != TORCH_VARLEN

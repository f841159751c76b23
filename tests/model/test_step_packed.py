"""Packed examples are isolated, by logits and by loss, and models that cannot isolate them are refused."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, masking_utils, modeling_flash_attention_utils

from fsdp_tune.data.store import IGNORE_INDEX, Row, RowStore
from fsdp_tune.model import packed_documents
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.packed_documents import packing_known
from fsdp_tune.model.packed_mixers import separate_documents
from fsdp_tune.model.step import micro_batch_loss, shift_labels
from fsdp_tune.worker.readback import isolation
from fsdp_tune.worker.readback.isolation import (
    ALLOWED,
    Deviations,
    deviations,
    not_causal,
    not_isolated,
    packed_row,
    rows_to_check,
)
from fsdp_tune.worker.rows.batches import Batch, Collator
from tests.model.families import BART, BERT, FAMILIES, OPENAI_GPT, XLNET
from tests.model.flash import FLASH_STAND_IN, flash_stand_in
from tests.model.recipes import recipe_of
from tests.parity.store import make_store

CACHE = (
    "cache"
    if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters
    else "past_key_values"
)
ISOLATED = [
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma3_text",
    "phi",
    "gpt_neox",
    "mixtral",
    "qwen2_moe",
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> RowStore:
    return RowStore(make_store(tmp_path_factory.mktemp("data") / "store") / "train-packed")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> RowStore:
    return RowStore(make_store(tmp_path_factory.mktemp("data") / "store") / "train")


def examples_of(row: Row) -> list[Row]:
    cuts = np.cumsum(row.lengths)[:-1]
    parts = zip(np.split(row.input_ids, cuts), np.split(row.labels, cuts), strict=True)
    return [Row(ids, labels, (len(ids),), row.row_id) for ids, labels in parts]


def batch_of(rows: list[Row]) -> Batch:
    return Collator(pad_token_id=0, multiple_of=8)(rows)


def logits_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    inputs = {name: tensor for name, tensor in batch.tensors.items() if name != "labels"}
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ISOLATED)
def test_packed_logits_equal_unpacked_logits(family: str, kernel: str, packed: RowStore) -> None:
    model = build_full(recipe_of({"from_config": FAMILIES[family], "attn_implementation": kernel})).eval()
    assert model.config._attn_implementation == kernel
    rows = [packed[0], packed[5], packed[9]]  # rows of several examples, padded to one width
    together = logits_of(model, batch_of(rows))
    for row, logits in zip(rows, together, strict=True):
        assert len(row.lengths) > 1
        start = 0
        for example in examples_of(row):
            alone = logits_of(model, batch_of([example]))[0, : len(example.input_ids)]
            difference = (
                logits[start : start + len(example.input_ids)] - alone
            ).abs().max() / alone.abs().max()
            assert float(difference) <= 1e-5
            start += len(example.input_ids)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_masks_of_known_documents_equal_those_of_transformers(kernel: str, packed: RowStore) -> None:
    """Of full attention and of a window, and without waiting for the device: transformers does not look for
    packed rows."""
    config = AutoConfig.for_model("mistral", sliding_window=4, attn_implementation=kernel)
    batch = batch_of([packed[row] for row in (0, 5, 9)])
    inputs = {
        "config": config,
        "inputs_embeds": torch.zeros(*batch.tensors["input_ids"].shape, 4),
        "attention_mask": None,
        CACHE: None,
    }
    for make in (masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask):
        expected = make(**inputs, position_ids=batch.tensors["position_ids"])
        with packing_known(batch.tensors["position_ids"], kernel):
            assert torch.equal(make(**inputs, position_ids=batch.tensors["position_ids"]), expected)
            assert torch.equal(make(**inputs), expected)
            assert masking_utils.find_packed_sequence_indices(batch.tensors["position_ids"]) is None
    assert masking_utils.find_packed_sequence_indices(batch.tensors["position_ids"]) is not None


def test_rows_of_one_example_are_not_searched_for_packed_ones(packed: RowStore) -> None:
    assert "position_ids" not in batch_of(examples_of(packed[0])[:1]).tensors
    with packing_known(None, "sdpa"):
        assert masking_utils.find_packed_sequence_indices(torch.arange(8)[None]) is None
        assert modeling_flash_attention_utils._is_packed_sequence(torch.arange(8)[None], 1) is False
    assert not modeling_flash_attention_utils._is_packed_sequence(torch.arange(8)[None], 1)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_packed_row_loss_and_gradient_are_sums_over_examples(family: str, packed: RowStore) -> None:
    model = build_full(
        recipe_of({"from_config": FAMILIES[family], "config_overrides": NO_DROPOUT.get(family, {})})
    ).train()

    def gradient(batches: list[Batch]) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        losses = [micro_batch_loss(model, batch.tensors)[0] for batch in batches]
        torch.stack(losses).sum().backward()
        return sum(float(loss.detach()) for loss in losses), torch.cat(
            [p.grad.flatten() for p in model.parameters()]
        )

    rows = [packed[3], packed[4]]
    loss, one = gradient([batch_of(rows)])
    alone, other = gradient([batch_of([example]) for row in rows for example in examples_of(row)])
    assert loss == pytest.approx(alone, rel=1e-5)
    assert float((one - other).norm() / other.norm()) <= 1e-5


NO_DROPOUT = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}


def test_no_target_crosses_an_example_boundary(packed: RowStore) -> None:
    for index in range(len(packed)):
        row = packed[index]
        targets = shift_labels(batch_of([row]).tensors["labels"])[0]
        ends = np.cumsum(row.lengths) - 1
        assert (targets[ends] == IGNORE_INDEX).all()
        inside = np.setdiff1d(np.arange(len(row.input_ids)), ends)
        supervised = targets[inside] != IGNORE_INDEX
        assert (
            targets[inside][supervised]
            == torch.from_numpy(row.input_ids.astype(np.int64))[inside + 1][supervised]
        ).all()


def refusals(model: dict[str, Any]) -> list[str]:
    problems = find_facts(
        recipe_of({"from_config": model}, data={"train": [{"path": "x"}], "packing": True, "max_length": 128})
    ).problems
    return [problem.code for problem in problems]


def test_model_without_position_ids_is_refused_for_packing() -> None:
    assert refusals(BART) == ["packing-not-isolated"]


def leak(family: str, kernel: str, row: Row) -> float:
    """By how much the logits of later examples move when the tokens of the first one change."""
    model = build_full(recipe_of({"from_config": FAMILIES[family], "attn_implementation": kernel})).eval()
    first = row.lengths[0]
    other = Row(
        np.where(np.arange(len(row.input_ids)) < first, 7, row.input_ids).astype(np.int32),
        row.labels,
        row.lengths,
        row.row_id,
    )
    before, after = (
        logits_of(model, batch_of([each]))[0, first : len(row.input_ids)] for each in (row, other)
    )
    return float((before - after).abs().max())


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ISOLATED)
def test_packed_examples_are_bitwise_independent(family: str, kernel: str, packed: RowStore) -> None:
    assert leak(family, kernel, packed[9]) == 0.0


def measured(model: dict[str, Any], rows: list[Row], packed: Row | None = None) -> Deviations:
    recipe = recipe_of({"from_config": model, "attn_implementation": "eager"})
    built = build_full(recipe)
    separate_documents(built)
    return deviations(recipe, built, rows, Collator(0, multiple_of=8), torch.device("cpu"), packed)


def test_model_that_ignores_example_boundaries_is_refused(packed: RowStore) -> None:
    """It takes position ids and has a mask of its own, so that nothing but its logits shows it."""
    found = measured(OPENAI_GPT, rows_to_check(packed, 2))
    assert found.packed is not None
    assert found.packed > ALLOWED["fp32"] >= found.later


# gpt_oss, OPT and Bloom make their masks without position ids, and LFM2 has convolutions.
@pytest.mark.parametrize("family", [*ISOLATED, "gpt_oss", "opt", "bloom", "falcon", "lfm2"])
def test_model_that_isolates_examples_may_be_packed(family: str, packed: RowStore) -> None:
    assert refusals(FAMILIES[family]) == []
    found = measured(FAMILIES[family], rows_to_check(packed, 3), packed_row(packed))
    assert found.packed is not None
    assert max(found.packed, found.later) <= ALLOWED["fp32"]


_XLM = {"model_type": "xlm", "vocab_size": 257, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_langs": 1}
SEES_LATER: dict[str, dict[str, Any]] = {
    "xlnet": XLNET,
    "electra": {**BERT, "model_type": "electra", "embedding_size": 32},
    "xlm": _XLM,
    "bert": BERT,
}


@pytest.mark.parametrize("family", SEES_LATER)
def test_noncausal_model_is_refused(family: str, unpacked: RowStore) -> None:
    found = measured(SEES_LATER[family], rows_to_check(unpacked, 1))
    assert found.later > ALLOWED["fp32"]
    assert found.packed is None


@pytest.mark.parametrize(
    "model", [{**BERT, "is_decoder": True}, {**_XLM, "causal": True}, FAMILIES["opt"], FAMILIES["gpt_oss"]]
)
def test_causal_model_passes(model: dict[str, Any], unpacked: RowStore) -> None:
    assert measured(model, rows_to_check(unpacked, 2)) == Deviations(0.0, None)


@pytest.mark.parametrize(
    ("family", "hint"), [("bert", "is_decoder=true"), ("xlm", "causal=true"), ("xlnet", "train a decoder")]
)
def test_refusal_names_the_model_and_the_field_that_helps(family: str, hint: str) -> None:
    problem = not_causal(0.15, "SomeModel", AutoConfig.for_model(SEES_LATER[family]["model_type"])).problems[
        0
    ]
    assert problem.message.startswith("SomeModel sees later tokens: logits move by 15.00%")
    assert hint in str(problem.hint)


def stored(*rows: Row) -> Any:
    return list(rows)


def test_rows_to_check_are_as_many_as_a_micro_batch_and_of_unequal_lengths(packed: RowStore) -> None:
    for micro_batch, count in ((1, 2), (2, 2), (5, 5)):
        rows = rows_to_check(packed, micro_batch)
        assert len(rows) == count
        assert all(len(row.lengths) == 2 for row in rows)
        assert len({row.lengths for row in rows[:2]}) == 2
    ids = np.arange(20, dtype=np.int32)
    one = rows_to_check(stored(Row(ids, ids, (9, 9), 1)), 1)
    assert [row.row_id for row in one] == [1, 1]


def test_rows_to_check_are_cut_to_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of whole rows may not fit on a device that trains in slices."""
    monkeypatch.setattr(isolation, "BATCH_TOKENS", 24)
    ids = np.arange(40, dtype=np.int32)
    row, other = rows_to_check(stored(Row(ids, ids, (40,), 0), Row(ids, ids, (15, 20, 5), 1)), 2)
    assert (row.input_ids.tolist(), row.labels.tolist(), row.lengths, row.row_id) == (
        [*range(4), *range(15, 23)],
    ) * 2 + ((4, 8), 1)
    assert (other.input_ids.tolist(), other.lengths) == ([*range(8), *range(15, 19)], (8, 4))
    assert sum(len(row.input_ids) for row in rows_to_check(stored(Row(ids, ids, (40,), 0)), 2)) == 24


def test_no_rows_to_check_where_every_row_is_one_token() -> None:
    ids = np.arange(1, dtype=np.int32)
    assert rows_to_check(stored(Row(ids, ids, (1,), 0)), 2) == []


@pytest.mark.parametrize("variable_lengths", [True, False])
def test_flash_kernel_that_reads_position_ids_of_single_rows_is_refused(
    variable_lengths: bool, packed: RowStore
) -> None:
    """As transformers' flash path does where nothing gives it `cu_seq_lens`."""
    recipe = recipe_of({"from_config": FAMILIES["llama"]})
    with flash_stand_in():
        model = build_full(
            recipe_of({"from_config": FAMILIES["llama"], "attn_implementation": FLASH_STAND_IN})
        )
        collator = Collator(pad_token_id=0, multiple_of=8, variable_lengths=variable_lengths)
        found = deviations(recipe, model, rows_to_check(packed, 2), collator, torch.device("cpu"))
    assert found.packed is not None
    assert (found.packed <= ALLOWED["fp32"]) is variable_lengths


def test_refusal_of_packing_has_a_remedy() -> None:
    assert (
        not_isolated(0.1, "SomeModel", AutoConfig.for_model("llama")).problems[0].hint
        == "--set data.packing=false"
    )


def drawn_row(*lengths: int) -> Row:
    ids = np.random.default_rng(3).integers(2, 250, sum(lengths)).astype(np.int32)
    return Row(ids, ids.copy(), lengths, 0)


@pytest.mark.parametrize(
    ("numbers", "row"),
    [
        (lambda number, position: number.clamp(max=1), drawn_row(9, 7, 8, 6)),  # all but the first are one
        (lambda number, position: number - (position >= 16).int(), drawn_row(30, 20)),  # long ones see back
    ],
    ids=["beyond the second border", "in long examples"],
)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_leak_anywhere_in_a_complete_row_is_measured(
    family: str, numbers: Any, row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that are cut to two short examples need not show it."""
    known = packed_documents.example_numbers
    monkeypatch.setattr(packed_documents, "example_numbers", lambda given: numbers(known(given), given))
    monkeypatch.setattr(isolation, "BATCH_TOKENS", 24)  # so that logits of a part of the row are compared
    rows = rows_to_check(stored(row), 2)
    found = measured(FAMILIES[family], rows, packed_row(stored(row)))
    assert found.packed is not None
    assert found.packed > ALLOWED["fp32"] >= found.later


def test_watched_tokens_of_long_examples_are_those_after_the_border_and_some_up_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation, "BATCH_TOKENS", 8)
    first, second = isolation._watched(drawn_row(3, 100))
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [3, 4, 5, 102]


def test_row_whose_borders_are_measured_is_the_first_with_several_examples() -> None:
    rows = [drawn_row(5), drawn_row(4, 3, 2), drawn_row(1, 2)]
    assert packed_row(stored(*rows)) is rows[1]
    assert packed_row(stored(rows[0])) is None

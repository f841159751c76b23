"""Data sets of torchtune's configurations prepare the rows that torchtune trains, with the same tokens
trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.migrate.importing import ImportedRecipe
from fsdp_tune.migrate.tools.torchtune import resolve_references
from tests.data.support import CHATML, ByteEncoder, marked, prepared, rows_of, write_jsonl
from tests.migrate.imports import TORCHTUNE_STEP, from_text, row

OPENAI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
CHAT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "yo<|im_end|>"
ALL = f"<|im_start|>[{CHAT.removeprefix('<|im_start|>')}{ANSWER}\n]"
TRAINED = {None: f"{CHAT}[{ANSWER}]\n", False: f"{CHAT}[{ANSWER}]\n", True: ALL}


def trained(directory: Path, keys: str, rows: dict[str, Any]) -> str:
    """Return the row that the imported recipe prepares, with what is trained in brackets."""
    path = write_jsonl(directory / "rows.jsonl", [rows])
    text = TORCHTUNE_STEP.format("torch.optim.AdamW", "")
    text = text.replace(
        "{_component_: torchtune.datasets.alpaca_dataset}",
        f"{{source: json, data_files: {path}, split: train, {keys}}}",
    )
    found = from_text(directory, text)
    (source,) = found.recipe.data.train
    assert [each.key for each in found.rows if each.fate.value == "question"] == []
    encoder = ByteEncoder(template=CHATML, eos="<|im_end|>")
    return marked(
        rows_of(prepared(directory, source.model_dump(exclude_unset=True), encoder=encoder, max_length=256))[
            0
        ],
        encoder,
    )


@pytest.mark.parametrize("on_input", [None, False, True])
@pytest.mark.parametrize("column", ["conversations", "messages", "dialogue"])
@pytest.mark.parametrize("style", ["openai", "sharegpt"])
def test_chats_of_each_style_and_column_are_prepared(
    tmp_path: Path, style: str, column: str, on_input: bool | None
) -> None:
    keys = (
        f"_component_: torchtune.datasets.chat_dataset, conversation_column: {column}, "
        f"conversation_style: {style}"
    )
    keys += "" if on_input is None else f", train_on_input: {str(on_input).lower()}"
    assert trained(tmp_path, keys, {column: OPENAI if style == "openai" else SHAREGPT}) == TRAINED[on_input]


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        (
            "_component_: torchtune.datasets.instruct_dataset, train_on_input: false",
            {"input": "hi", "output": "yo"},
        ),
        (
            "_component_: torchtune.datasets.instruct_dataset, column_map: {input: q, output: a}",
            {"q": "hi", "a": "yo"},
        ),
        (
            "_component_: torchtune.datasets.chat_dataset, column_map: {conversations: c}, "
            "conversation_style: sharegpt",
            {"c": SHAREGPT},
        ),
        (  # torchtune reads two columns, whatever the others are
            "_component_: torchtune.datasets.instruct_dataset, column_map: {input: q, output: a}",
            {"q": "hi", "a": "yo", "input": "no", "system": "no", "instruction": "no"},
        ),
        (
            "_component_: torchtune.datasets.instruct_dataset",
            {"input": "hi", "output": "yo", "instruction": "no", "history": [["no", "no"]]},
        ),
        (
            "_component_: torchtune.datasets.chat_dataset, conversation_column: c, "
            "conversation_style: sharegpt",
            {"c": SHAREGPT, "system": "no", "tools": "[]"},
        ),
        (
            "_component_: torchtune.datasets.slimorca_dataset, train_on_input: false",
            {"conversations": SHAREGPT},
        ),
    ],
)
def test_prompts_and_named_columns_are_prepared(tmp_path: Path, keys: str, rows: dict[str, Any]) -> None:
    assert trained(tmp_path, keys, rows) == TRAINED[False]


def test_unknown_style_is_a_question(tmp_path: Path) -> None:
    text = TORCHTUNE_STEP.format("torch.optim.AdamW", "").replace(
        "alpaca_dataset}", "chat_dataset, source: a, conversation_style: chatml}"
    )
    assert row(from_text(tmp_path, text), "dataset.conversation_style")[0] == "question"


def test_reference_that_the_file_does_not_have_is_kept() -> None:
    found = resolve_references({"a": {"b": 1}, "c": "${a.b}", "d": "${x}/y", "e": "${x}"})
    assert found == {"a": {"b": 1}, "c": 1, "d": "${x}/y", "e": "${x}"}


HEADER, UNTRAINED_STOP = "torchtune also trains the header of each answer", "trains the last token of no row"


def with_tokenizer(directory: Path, tokenizer: str, keys: str, more: str = "") -> ImportedRecipe:
    text = TORCHTUNE_STEP.format("torch.optim.AdamW", "").replace(
        "{_component_: torchtune.datasets.alpaca_dataset}", f"{{{keys}}}"
    )
    return from_text(
        directory, f"{text}tokenizer: {{_component_: torchtune.models.x.{tokenizer}, path: p{more}}}\n"
    )


CHAT_SET = "_component_: torchtune.datasets.chat_dataset, source: a, conversation_style: openai"
TEXT_SET = "_component_: torchtune.datasets.text_completion_dataset, source: a"


@pytest.mark.parametrize(
    ("tokenizer", "keys", "said_at"),
    [
        ("qwen2_5_tokenizer", f"{CHAT_SET}, train_on_input: false", "train_on_input"),
        ("qwen2_5_tokenizer", CHAT_SET, "_component_"),
        ("llama3_tokenizer", CHAT_SET, "_component_"),
        ("phi4_tokenizer", "_component_: torchtune.datasets.samsum_dataset", "_component_"),
        ("qwen2_5_tokenizer", f"{CHAT_SET}, train_on_input: true", None),
        # trains the prompts too
        (
            "qwen2_5_tokenizer",
            "_component_: torchtune.datasets.alpaca_dataset",
            None,
        ),
        ("qwen2_5_tokenizer", TEXT_SET, None),
        ("mistral_tokenizer", CHAT_SET, None),  # writes no header
    ],
)
def test_header_of_an_answer_that_torchtune_trains_is_reported(
    tokenizer: str, keys: str, said_at: str | None, tmp_path: Path
) -> None:
    found = with_tokenizer(tmp_path, tokenizer, keys)
    assert [each.key for each in found.rows if HEADER in each.reason] == (
        [f"dataset.{said_at}"] if said_at else []
    )


@pytest.mark.parametrize(
    ("tokenizer", "keys", "is_said"),
    [
        ("qwen2_5_tokenizer", CHAT_SET, True),
        ("qwen2_tokenizer", f"{CHAT_SET}, train_on_input: true", True),
        ("qwen2_5_tokenizer", TEXT_SET, False),
        # the last token is another one than the one that ends the turn
        (
            "llama3_tokenizer",
            CHAT_SET,
            False,
        ),
    ],
)
def test_stop_token_that_torchtune_does_not_train_is_reported(
    tokenizer: str, keys: str, is_said: bool, tmp_path: Path
) -> None:
    found = with_tokenizer(tmp_path, tokenizer, keys, ", max_seq_len: 64")
    assert (row(found, "tokenizer.max_seq_len")[0], found.recipe.data.max_length) == ("converted", 64)
    assert (UNTRAINED_STOP in row(found, "tokenizer.max_seq_len")[1]) == is_said
    assert UNTRAINED_STOP not in with_tokenizer(tmp_path, tokenizer, keys, ", max_seq_len: null").text


def test_length_of_rows_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    text = TORCHTUNE_STEP.format("torch.optim.AdamW", "").replace(
        "llama3_2_1b}", "llama3_2_1b, max_seq_len: 512}"
    )
    found = from_text(tmp_path, f"{text}tokenizer: {{path: p, max_seq_len: 256}}\n")
    assert found.recipe.data.max_length == 256
    assert [row(found, f"{name}.max_seq_len")[0] for name in ("model", "tokenizer")] == [
        "dropped",
        "converted",
    ]


def test_sizes_of_a_generic_builder_are_those_of_the_models_files(tmp_path: Path) -> None:
    sizes = (
        "vocab_size: 429, num_layers: 2, num_heads: 4, num_kv_heads: 2, embed_dim: 64, intermediate_dim: "
        "128, norm_eps: 1.0e-6"
    )
    text = TORCHTUNE_STEP.format("torch.optim.AdamW", "")
    found = from_text(
        tmp_path,
        text.replace(
            "llama3_2.llama3_2_1b}", f"qwen2.qwen2, {sizes}, rope_base: 10000.0, attn_dropout: 0.1}}"
        ),
    )
    fates = {each.key: each.fate.value for each in found.rows if each.key.startswith("model.")}
    assert [key for key, fate in fates.items() if fate != "dropped"] == ["model.attn_dropout"]
    assert "config.json" in row(found, "model.vocab_size")[1]

"""Data sets of torchtune's configurations prepare the rows that torchtune trains, with the same tokens trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
    text = text.replace("{_component_: torchtune.datasets.alpaca_dataset}", f"{{source: json, data_files: {path}, split: train, {keys}}}")
    found = from_text(directory, text)
    (source,) = found.recipe.data.train
    assert [each.key for each in found.rows if each.fate.value == "question"] == []
    encoder = ByteEncoder(template=CHATML, eos="<|im_end|>")
    return marked(rows_of(prepared(directory, source.model_dump(exclude_unset=True), encoder=encoder, max_length=256))[0], encoder)


@pytest.mark.parametrize("on_input", [None, False, True])
@pytest.mark.parametrize("column", ["conversations", "messages", "dialogue"])
@pytest.mark.parametrize("style", ["openai", "sharegpt"])
def test_chats_of_each_style_and_column_are_prepared(tmp_path: Path, style: str, column: str, on_input: bool | None) -> None:
    keys = f"_component_: torchtune.datasets.chat_dataset, conversation_column: {column}, conversation_style: {style}"
    keys += "" if on_input is None else f", train_on_input: {str(on_input).lower()}"
    assert trained(tmp_path, keys, {column: OPENAI if style == "openai" else SHAREGPT}) == TRAINED[on_input]


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ("_component_: torchtune.datasets.instruct_dataset, train_on_input: false", {"input": "hi", "output": "yo"}),
        ("_component_: torchtune.datasets.instruct_dataset, column_map: {input: q, output: a}", {"q": "hi", "a": "yo"}),
        ("_component_: torchtune.datasets.chat_dataset, column_map: {conversations: c}, conversation_style: sharegpt", {"c": SHAREGPT}),
        (  # torchtune reads two columns, whatever the others are
            "_component_: torchtune.datasets.instruct_dataset, column_map: {input: q, output: a}",
            {"q": "hi", "a": "yo", "input": "no", "system": "no", "instruction": "no"},
        ),
        (
            "_component_: torchtune.datasets.instruct_dataset",
            {"input": "hi", "output": "yo", "instruction": "no", "history": [["no", "no"]]},
        ),
        (
            "_component_: torchtune.datasets.chat_dataset, conversation_column: c, conversation_style: sharegpt",
            {"c": SHAREGPT, "system": "no", "tools": "[]"},
        ),
        ("_component_: torchtune.datasets.slimorca_dataset, train_on_input: false", {"conversations": SHAREGPT}),
    ],
)
def test_prompts_and_named_columns_are_prepared(tmp_path: Path, keys: str, rows: dict[str, Any]) -> None:
    assert trained(tmp_path, keys, rows) == TRAINED[False]


def test_unknown_style_is_a_question(tmp_path: Path) -> None:
    text = TORCHTUNE_STEP.format("torch.optim.AdamW", "").replace("alpaca_dataset}", "chat_dataset, source: a, conversation_style: chatml}")
    assert row(from_text(tmp_path, text), "dataset.conversation_style")[0] == "question"


def test_reference_that_the_file_does_not_have_is_kept() -> None:
    found = resolve_references({"a": {"b": 1}, "c": "${a.b}", "d": "${x}/y", "e": "${x}"})
    assert found == {"a": {"b": 1}, "c": 1, "d": "${x}/y", "e": "${x}"}

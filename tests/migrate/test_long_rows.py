"""Rows that are longer than a tool's limit become in a recipe what they become in the tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.support import CHATML, ByteEncoder, prepared, rows_of, write_jsonl
from tests.migrate.imports import from_text, imported, row

LONG = "word " * 60
TEXT = {"text": LONG}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": LONG}]}
FACTORY = (
    "model_name_or_path: m\nstage: {}\nfinetuning_type: full\ndataset: rows\ndataset_dir: .\ncutoff_len: 64\n"
)
TRL = "model_name_or_path: m\ndataset_name: {path}\nmax_length: 64\n"
SWIFT = "model: m\ntuner_type: full\ndataset: [{path}]\nmax_length: 64\nsplit_dataset_ratio: 0\n"
AXOLOTL = "base_model: m\nsequence_len: 64\n{}: [{{path: {{path}}, type: {}}}]\nmax_steps: 1\n"
TUNE = (
    "checkpointer: {{checkpoint_dir: m}}\ntokenizer: {{max_seq_len: 64}}\n"
    "dataset: {{_component_: torchtune.datasets.{}, source: {{path}}{}}}\n"
)
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "LLaMA-Factory, pt without packing": (FACTORY.format("pt") + "packing: false\n", TEXT, "cut"),
    "LLaMA-Factory, pt": (FACTORY.format("pt"), TEXT, "all"),
    "LLaMA-Factory, sft": (FACTORY.format("sft"), CHAT, "cut"),
    "LLaMA-Factory, sft with packing": (FACTORY.format("sft") + "neat_packing: true\n", CHAT, "cut"),
    "TRL, text": (TRL, TEXT, "cut"),
    "TRL, text with packing": (TRL + "packing: true\n", TEXT, "cut"),
    "TRL, text with bfd_split": (TRL + "packing: true\npacking_strategy: bfd_split\n", TEXT, "all"),
    "TRL, bfd_split without packing": (TRL + "packing_strategy: bfd_split\n", TEXT, "cut"),
    "TRL, text with wrapped": (TRL + "packing: true\npacking_strategy: wrapped\n", TEXT, "all"),
    "TRL, chat": (TRL, CHAT, "cut"),
    "TRL, chat with wrapped": (
        TRL + "packing: true\npacking_strategy: wrapped\nassistant_only_loss: true\n",
        CHAT,
        "all",
    ),
    "ms-swift, text": (SWIFT, TEXT, "none"),
    "ms-swift, chat": (SWIFT, CHAT, "none"),
    "ms-swift, chat cut": (SWIFT + "truncation_strategy: right\n", CHAT, "cut"),
    "axolotl, text": (AXOLOTL.format("datasets", "completion"), TEXT, "all"),
    "axolotl, text packed": (
        AXOLOTL.format("datasets", "completion") + "sample_packing: true\n",
        TEXT,
        "all",
    ),
    "axolotl, chat": (AXOLOTL.format("datasets", "chat_template"), CHAT, "none"),
    "axolotl, chat packed": (
        AXOLOTL.format("datasets", "chat_template") + "sample_packing: true\n",
        CHAT,
        "none",
    ),
    "torchtune, text": (TUNE.format("text_completion_dataset", ""), TEXT, "cut"),
    "torchtune, text packed": (TUNE.format("text_completion_dataset", ", packed: true"), TEXT, "cut"),
    "torchtune, chat": (
        TUNE.format(
            "chat_dataset", ", conversation_column: messages, conversation_style: openai, packed: true"
        ),
        CHAT,
        "cut",
    ),
}
TOKENS = {"none": (0, 0), "cut": (1, 63), "all": (290, 400)}
"""Trained tokens of one row of 300 bytes, at a limit of 64: the least and the most."""


@pytest.mark.parametrize("name", CASES)
def test_long_row_keeps_as_many_tokens_as_in_the_tool(tmp_path: Path, name: str) -> None:
    text, rows, kept = CASES[name]
    short = (
        {"text": "a short one"}
        if "text" in rows
        else CHAT | {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "yo"}]}
    )
    path = write_jsonl(tmp_path / "rows.jsonl", [short, rows])
    columns = {"prompt": "text"} if "text" in rows else {"messages": "messages"}
    entry = {"file_name": path.name, "columns": columns} | (
        {} if "text" in rows else {"formatting": "sharegpt", "tags": {"role_tag": "role"}}
    )
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": entry}))
    found = from_text(tmp_path, text.replace("{path}", str(path)), tool=name.partition(",")[0])
    data = found.recipe.data
    source = data.train[0].model_dump(exclude_unset=True)
    options = {
        key: getattr(data, key)
        for key in ("max_length", "overlong", "packing", "packing_strategy", "loss_on")
    }
    encoder = ByteEncoder(template=CHATML)

    trained = sum(
        int((each.labels != -100).sum())
        for each in rows_of(prepared(tmp_path, source, encoder=encoder, **options))
    )

    least, most = TOKENS[kept]
    assert least <= trained - 3 <= most + 12, (trained, data.overlong)


def test_texts_of_a_pretraining_stream_of_axolotl_are_cut(tmp_path: Path) -> None:
    found = from_text(
        tmp_path, AXOLOTL.format("pretraining_dataset", "pretrain").replace("{path}", "a"), tool="axolotl"
    )
    assert found.recipe.data.overlong == "truncate"


def test_run_clm_keeps_every_token(tmp_path: Path) -> None:
    found = from_text(
        tmp_path, "python run_clm.py --model_name_or_path m --train_file a.txt --block_size 64\n", "run.sh"
    )
    assert (found.recipe.data.overlong, found.recipe.data.packing_strategy) == ("split", "wrapped")


def test_automodel_without_a_limit_is_a_decision(tmp_path: Path) -> None:
    assert "data.overlong" in dict(imported(tmp_path, "automodel").decisions)


def test_rows_drawn_at_random_are_a_question(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('{"rows": {"file_name": "a.json", "num_samples": 1000}}')
    found = from_text(tmp_path, FACTORY.format("sft"))
    assert row(found, "dataset_info.json.rows.num_samples")[0] == "question"
    assert found.recipe.data.train[0].max_rows is None

"""Options of LLaMA-Factory that mean something of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.migrate.importing import import_file
from fsdp_tune.migrate.tools.llama_factory_templates import LINE_ENDS
from tests.migrate.imports import from_text, row
from tests.migrate.tool_keys import line_ends, main

FILE = (
    "model_name_or_path: m\nstage: {}\nfinetuning_type: lora\ndataset: rows\ndataset_dir: .\ncutoff_len: 64\n"
)
TRAINED_THERE = "LLaMA-Factory also trains the line end"


@pytest.mark.parametrize(
    ("template", "fate", "is_said"),
    [
        ("chatml", "converted", True),
        ("llama3", "converted", False),
        ("phi4", "converted", False),
        ("gemma3", "converted", True),
        ("qwen", "question", True),
        ("default", "question", True),
        ("mistral", "question", False),
        ("falcon", "question", False),  # its line end is before the token that ends the turn
    ],
)
def test_line_end_that_a_template_trains_after_an_answer_is_reported(
    template: str, fate: str, is_said: bool, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{FILE.format('sft')}template: {template}\n")
    found = row(
        import_file(file, templates=("chatml", "llama3", "phi4", "gemma3", "qwen2.5", "mistral")), "template"
    )
    assert (found[0], TRAINED_THERE in found[1]) == (fate, is_said)


def test_line_end_of_the_tokenizers_template_is_reported_if_no_template_is_named(tmp_path: Path) -> None:
    assert "Without `template`" in row(from_text(tmp_path, FILE.format("sft")), "stage")[1]
    assert (
        "Without `template`"
        not in row(from_text(tmp_path, FILE.format("sft") + "template: llama3\n"), "stage")[1]
    )


def test_line_end_of_the_tokenizers_template_is_reported_where_the_file_leaves_the_stage_to_its_default(
    tmp_path: Path,
) -> None:
    bare = FILE.replace("stage: {}\n", "")
    assert "Without `template`" in row(from_text(tmp_path, bare), "dataset")[1]
    for more in ("template: llama3\n", "train_on_prompt: true\n", "stage: sft\n"):
        assert "Without `template`" not in row(from_text(tmp_path, bare + more), "dataset")[1]
    (tmp_path / "dataset_info.json").write_text('{"rows": {"file_name": "rows.json"}}')
    assert "Without `template`" in row(from_text(tmp_path, bare), "dataset")[1]


def test_line_end_is_no_difference_where_every_token_is_trained(tmp_path: Path) -> None:
    everything = FILE.format("sft") + "train_on_prompt: true\n"
    assert TRAINED_THERE not in row(from_text(tmp_path, everything + "template: chatml\n"), "template")[1]
    assert "Without `template`" not in row(from_text(tmp_path, everything), "stage")[1]
    assert (
        TRAINED_THERE not in row(from_text(tmp_path, FILE.format("pt") + "template: chatml\n"), "template")[1]
    )


SOURCE = """
register_template(name="chatml", format_assistant=StringFormatter(slots=["{{content}}<|im_end|>\\n"]), stop_words=["<|im_end|>"])
register_template(name="default", format_assistant=StringFormatter(slots=["{{content}}", {"eos_token"}, "\\n"]))
register_template(name="falcon", format_assistant=StringFormatter(slots=["{{content}}\\n"]), efficient_eos=True)
register_template(name="llama3", format_assistant=StringFormatter(slots=["{{content}}<|eot_id|>"]))
register_template(name="mistral", efficient_eos=True)
"""  # noqa: E501


def test_templates_with_a_line_end_are_read_from_the_source_of_the_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    source = tmp_path / "data" / "template.py"
    source.write_text(SOURCE)
    assert line_ends("LLaMA-Factory", tmp_path) == {"chatml", "default"} <= LINE_ENDS
    source.write_text(SOURCE.replace("chatml", "later"))
    assert main(["--check", f"LLaMA-Factory={tmp_path}"]) == 1
    assert "template `later`" in capsys.readouterr().err

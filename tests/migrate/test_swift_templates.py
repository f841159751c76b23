"""The line end that ms-swift's templates train after an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.migrate.importing import import_file
from fsdp_tune.migrate.tools.swift_templates import LINE_ENDS
from tests.migrate.imports import row
from tests.migrate.tool_keys import line_ends, main

TRAINED_THERE = "ms-swift also trains the line end"


def reasons(directory: Path, options: str, command: str = "sft") -> tuple[tuple[str, str], str]:
    """Return what became of `template` and why, and the remark about the model."""
    file = directory / "train.sh"
    file.write_text(f"swift {command} --model acme/m --dataset rows.jsonl --tuner_type full {options}\n")
    found = import_file(file, templates=("chatml", "llama3", "phi4", "qwen2.5"))
    has_template = any(each.key == "template" for each in found.rows)
    return row(found, "template") if has_template else ("", ""), row(found, "model")[1]


@pytest.mark.parametrize(
    ("template", "fate", "is_said"),
    [
        ("chatml", "converted", True),
        ("qwen2_5", "converted", True),
        ("qwen3_thinking", "question", True),
        ("gemma4", "question", True),
        ("llama3", "converted", False),
        ("phi4", "converted", False),  # ends with <|im_end|> alone
        ("gemma3", "question", False),
        ("kimi_k2", "question", False),
    ],
)
def test_line_end_that_a_template_trains_after_an_answer_is_reported(
    template: str, fate: str, is_said: bool, tmp_path: Path
) -> None:
    (became, reason), of_model = reasons(tmp_path, f"--template {template}")
    assert (became, TRAINED_THERE in reason) == (fate, is_said)
    assert "Without `template`" not in of_model


def test_line_end_of_the_models_template_is_reported_if_none_is_named(tmp_path: Path) -> None:
    assert "Without `template`" in reasons(tmp_path, "")[1]


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ("--loss_scale all", "sft"),
        ("--use_chat_template false", "sft"),
        ("", "pt"),
        ("--loss_scale default", "pt"),
    ],
)
def test_line_end_is_no_difference_where_every_token_is_trained(
    options: str, command: str, tmp_path: Path
) -> None:
    assert TRAINED_THERE not in reasons(tmp_path, f"--template chatml {options}", command)[0][1]
    assert "Without `template`" not in reasons(tmp_path, options, command)[1]


SOURCE = """
class TemplateMeta:
    suffix: Prompt = field(default_factory=lambda: [['eos_token_id']])
class ChatmlTemplateMeta(TemplateMeta):
    suffix: Prompt = field(default_factory=lambda: ['<|im_end|>\\n'])
class QwenTemplateMeta(ChatmlTemplateMeta):
    auto_add_bos: bool = False
register_template(ChatmlTemplateMeta(LLMTemplateType.chatml))
register_template(QwenTemplateMeta(template_type=LLMTemplateType.qwen, suffix=['<|im_end|>\\n']))
register_template(QwenTemplateMeta('qwen3'))
register_template(QwenTemplateMeta(LLMTemplateType.gme, suffix=['<|endoftext|>']))
register_template(TemplateMeta(LLMTemplateType.default))
"""


def test_templates_with_a_line_end_are_read_from_the_source_of_the_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "template" / "templates").mkdir(parents=True)
    names = "class LLMTemplateType:\n" + "".join(
        f"    {name} = '{name}'\n" for name in ("chatml", "qwen", "gme", "default")
    )
    (tmp_path / "template" / "constant.py").write_text(names)
    source = tmp_path / "template" / "templates" / "qwen.py"
    source.write_text(SOURCE)
    assert line_ends("ms-swift", tmp_path) == {"chatml", "qwen", "qwen3"} <= LINE_ENDS
    source.write_text(SOURCE.replace("'qwen3'", "'later'"))
    assert main(["--check", f"ms-swift={tmp_path}"]) == 1
    assert "template `later`" in capsys.readouterr().err

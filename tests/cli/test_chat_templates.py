"""`templates` as a command, and errors of chats that lead to a command which works."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from fsdp_tune.cli.app import app
from fsdp_tune.data.format.templates import BUNDLED, bundled_text
from fsdp_tune.data.read.file_access import builtin_tokenizer

CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
PLAIN = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
WITH_CALL = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}], "tools": [TOOL]}


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def prepared(folder: Path, rows: list[dict[str, Any]], *options: str, template: str | None = "chatml") -> tuple[int, dict[str, Any]]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "model": {
            "from_config": {"model_type": "gpt2"},
            "tokenizer": "builtin:arithmetic",
            "tokens": {"add": ["<|im_start|>", "<|im_end|>"]},
        },
        "data": {
            "train": [{"path": str(folder / "rows.jsonl")}],
            "max_length": 2000,
            "cache_dir": str(folder / "cache"),
            "chat_template": template,
        },
        "launch": {"device": "cpu", "num_processes": 1},
    }
    (folder / "r.yaml").write_text(json.dumps(recipe))
    code, out, _ = run("prepare", str(folder / "r.yaml"), "--json", *options)
    return code, json.loads(out)


def options_of(hint: str) -> list[str]:
    """The options that a hint offers."""
    return re.findall(r"--set|(?<=--set )[^ `]+", hint)


@pytest.mark.parametrize("arguments", [["templates"], ["templates", "list"]])
def test_templates_are_listed_with_what_they_render(arguments: list[str]) -> None:
    code, out, _ = run(*arguments)
    assert code == 0
    assert all(name in out for name in BUNDLED)
    code, out, _ = run(*arguments, "--json")
    listed = {entry["name"]: entry for entry in json.loads(out)["templates"]}
    assert (code, list(listed)) == (0, list(BUNDLED))
    assert listed["qwen3"] == {
        "name": "qwen3",
        "for": "Qwen 3",
        "system": True,
        "tools": True,
        "thinking": True,
        "tokens": ["<|im_start|>", "<|im_end|>"],
    }
    assert (listed["chatml"]["system"], listed["chatml"]["tools"]) == (True, False)


def test_templates_that_fit_a_tokenizer_are_marked() -> None:
    code, out, _ = run("templates", "--tokenizer", "builtin:arithmetic", "--json")
    fits = [entry["name"] for entry in json.loads(out)["templates"] if entry["fits"]]
    assert (code, fits) == (0, ["phi3", "plain", "plain-tools"])
    code, out, _ = run("templates", "list", "--tokenizer", "builtin:arithmetic")
    assert (code, "fits" in out) == (0, True)
    code, _, err = run("templates", "--tokenizer", "./missing")
    assert (code, "there is no tokenizer directory" in err) == (2, True)


@pytest.mark.parametrize("name", BUNDLED)
def test_shown_text_is_the_template(name: str, tmp_path: Path) -> None:
    code, out, _ = run("templates", "show", name)
    assert (code, out.rstrip("\n")) == (0, bundled_text(name).rstrip("\n"))
    code, out, _ = run("templates", "show", name, "--json")
    assert (code, json.loads(out)["text"]) == (0, bundled_text(name))


def test_unknown_template_is_reported_with_those_that_are_meant(tmp_path: Path) -> None:
    code, _, err = run("templates", "show", "qwen")
    assert code == 2
    assert "did you mean `qwen3` or `qwen2.5`?" in err
    code, document = prepared(tmp_path, [PLAIN], "--set", "data.chat_template=qwen")
    (error,) = document["errors"]
    assert (code, error["code"]) == (2, "no-such-template")
    assert "did you mean `qwen3` or `qwen2.5`?" in error["hint"]
    assert "hf download" not in error["hint"]


def test_conversations_without_a_template_name_those_that_fit_the_vocabulary(tmp_path: Path) -> None:
    backend = builtin_tokenizer("builtin:arithmetic")  # with the tokens of Phi 3
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|pad|>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")  # pyright: ignore[reportUnknownMemberType]
    code, document = prepared(tmp_path, [PLAIN], "--set", f"model.tokenizer={tmp_path / 'tokenizer'}", template=None)
    (error,) = document["errors"]
    assert (code, error["code"]) == (2, "no-chat-template")
    assert error["hint"].startswith("set `data.chat_template: phi3`")
    assert "`chatml`" in error["hint"]
    code, document = prepared(tmp_path, [PLAIN], "--set", f"model.tokenizer={tmp_path / 'tokenizer'}", template="phi3")
    assert (code, document["report"]["rows_kept"]) == (0, 1)


@pytest.mark.parametrize("template", ["chatml", "plain"])
def test_rows_with_calls_name_a_template_that_works(tmp_path: Path, template: str) -> None:
    code, document = prepared(tmp_path, [PLAIN, WITH_CALL], template=template)
    assert code == 2
    row, total = document["errors"]
    assert (row["code"], row["line"], total["code"]) == ("bad-row", 2, "bad-rows")
    found = re.search(r"`data.chat_template: (\S+)` renders this row", row["hint"])
    assert found is not None
    code, document = prepared(tmp_path, [PLAIN, WITH_CALL], template=found[1])
    assert (code, document["report"]["rows_bad"]["rows"]) == (0, 0)


@pytest.mark.parametrize(("bad", "good"), [(1, 5), (11, 5), (30, 1), (700, 500), (900, 4000), (1, 1200)])
@pytest.mark.parametrize("begin", ["error", "skip"])
def test_hints_about_bad_rows_never_lead_in_a_circle(tmp_path: Path, bad: int, good: int, begin: str) -> None:
    """The options of a hint, taken as they are, prepare the other rows."""
    rows = [*[WITH_CALL] * bad, *[PLAIN] * good]
    code, document = prepared(tmp_path, rows, "--set", f"data.on_bad_row={begin}")
    if code == 0:
        assert (begin, bad) in {("skip", 1)}
        return
    options = options_of(document["errors"][-1]["hint"])
    mode = [] if any("on_bad_row" in option for option in options) else ["--set", f"data.on_bad_row={begin}"]
    code, document = prepared(tmp_path, rows, *mode, *options)
    assert code == 0, document
    assert document["report"]["rows_bad"]["rows"] == bad


@pytest.mark.parametrize("begin", ["error", "skip"])
def test_skipping_is_not_offered_where_no_row_would_be_left(tmp_path: Path, begin: str) -> None:
    code, document = prepared(tmp_path, [WITH_CALL] * 20, "--set", f"data.on_bad_row={begin}")
    assert code == 2
    assert "on_bad_row" not in document["errors"][-1]["hint"]
    assert "max_bad_share" not in document["errors"][-1]["hint"]
    assert "chatml-tools` renders this row" in document["errors"][0]["hint"]

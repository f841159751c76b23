"""`templates` as a command, and errors of chats that lead to a command which works."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from fsdp_tune.data.bad_rows import exceeds_bad_share, too_many
from fsdp_tune.data.format.templates import BUNDLED, bundled_text
from fsdp_tune.data.read.file_access import builtin_tokenizer
from tests.cli.in_process import answer, errors, invoke
from tests.cli.small_runs import write_rows

CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
PLAIN = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
WITH_CALL = {
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ],
    "tools": [TOOL],
}


def prepared(
    folder: Path, rows: list[dict[str, Any]], *options: str, template: str | None = "chatml"
) -> tuple[int, dict[str, Any]]:
    write_rows(folder / "rows.jsonl", rows)
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
    done = invoke("prepare", folder / "r.yaml", "--json", *options)
    return done.exit_code, json.loads(done.stdout)


def options_of(hint: str) -> list[str]:
    """The options that a hint offers."""
    return re.findall(r"--set|(?<=--set )[^ `]+", hint)


@pytest.mark.parametrize("words", [["templates"], ["templates", "list"]])
def test_templates_are_listed_with_what_they_render(words: list[str]) -> None:
    shown = invoke(*words)
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in BUNDLED)
    listed = {entry["name"]: entry for entry in answer(*words)["templates"]}
    assert list(listed) == list(BUNDLED)
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
    listed = answer("templates", "--tokenizer", "builtin:arithmetic")["templates"]
    assert [entry["name"] for entry in listed if entry["fits"]] == ["phi3", "plain", "plain-tools"]
    assert "fits" in invoke("templates", "list", "--tokenizer", "builtin:arithmetic").stdout
    missing = invoke("templates", "--tokenizer", "./missing")
    assert (missing.exit_code, "there is no tokenizer directory" in missing.stderr) == (2, True)


def test_shown_text_is_the_template() -> None:
    for name in BUNDLED:
        assert invoke("templates", "show", name).stdout.rstrip("\n") == bundled_text(name).rstrip("\n")
        assert answer("templates", "show", name)["text"] == bundled_text(name)


def test_unknown_template_is_reported_with_those_that_are_meant(tmp_path: Path) -> None:
    (error,) = errors("templates", "show", "qwen")
    assert error["hint"].startswith("did you mean `qwen3` or `qwen2.5`?")
    code, document = prepared(tmp_path, [PLAIN], "--set", "data.chat_template=qwen")
    (error,) = document["errors"]
    assert (code, error["code"]) == (2, "no-such-template")
    assert "did you mean `qwen3` or `qwen2.5`?" in error["hint"]
    assert "hf download" not in error["hint"]


def test_conversations_without_a_template_name_those_that_fit_the_vocabulary(tmp_path: Path) -> None:
    backend = builtin_tokenizer("builtin:arithmetic")  # with the tokens of Phi 3
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|pad|>"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")  # pyright: ignore[reportUnknownMemberType]
    code, document = prepared(
        tmp_path, [PLAIN], "--set", f"model.tokenizer={tmp_path / 'tokenizer'}", template=None
    )
    (error,) = document["errors"]
    assert (code, error["code"]) == (2, "no-chat-template")
    assert error["hint"].startswith("set `data.chat_template: phi3`")
    assert "`chatml`" in error["hint"]
    code, document = prepared(
        tmp_path, [PLAIN], "--set", f"model.tokenizer={tmp_path / 'tokenizer'}", template="phi3"
    )
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


@pytest.mark.parametrize(("bad", "good"), [(1, 5), (11, 5), (30, 1), (1, 1200)])
@pytest.mark.parametrize("begin", ["error", "skip"])
def test_hints_about_bad_rows_never_lead_in_a_circle(tmp_path: Path, bad: int, good: int, begin: str) -> None:
    """The options of a hint, taken as they are, prepare the other rows."""
    rows = [*[WITH_CALL] * bad, *[PLAIN] * good]
    code, document = prepared(tmp_path, rows, "--set", f"data.on_bad_row={begin}")
    if code == 0:
        assert (begin, bad, good) == ("skip", 1, 1200)
        return
    options = options_of(document["errors"][-1]["hint"])
    mode = [] if any("on_bad_row" in option for option in options) else ["--set", f"data.on_bad_row={begin}"]
    code, document = prepared(tmp_path, rows, *mode, *options)
    assert code == 0, document
    assert document["report"]["rows_bad"]["rows"] == bad


def test_share_that_a_hint_names_admits_the_bad_rows() -> None:
    draw = random.Random(0)
    for bad, good in [
        (700, 500),
        (900, 4000),
        *((draw.randint(1, 3000), draw.randint(1, 3000)) for _ in range(100)),
    ]:
        option = re.search(r"max_bad_share=([\d.]+)", str(too_many(bad, bad + good, 0.01, "fix them").hint))
        assert option is not None
        assert not exceeds_bad_share(bad, bad + good, float(option[1])), (bad, good)


@pytest.mark.parametrize("begin", ["error", "skip"])
def test_skipping_is_not_offered_where_no_row_would_be_left(tmp_path: Path, begin: str) -> None:
    code, document = prepared(tmp_path, [WITH_CALL] * 20, "--set", f"data.on_bad_row={begin}")
    assert code == 2
    assert "on_bad_row" not in document["errors"][-1]["hint"]
    assert "max_bad_share" not in document["errors"][-1]["hint"]
    assert "chatml-tools` renders this row" in document["errors"][0]["hint"]

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from fsdp_tune.cli.prepare import of_bos, prepare
from fsdp_tune.data.report import BeginTokens
from tests.data.real_templates import PUBLISHED

app = typer.Typer()
app.command()(prepare)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
model: {{from_config: {{model_type: gpt2}}, tokenizer: builtin:arithmetic}}
data:
  train: [{{path: "builtin:arithmetic"}}]
  eval: [{{path: "builtin:arithmetic", split: test, label: held_out}}]
  max_length: 32
  cache_dir: {tmp_path / "cache"}
precision: {{mixed_precision: no}}
launch: {{device: cpu, num_processes: 1}}
"""
    )
    return path


def test_prepare_prints_account_and_marked_rows(recipe: Path) -> None:
    done = CliRunner().invoke(app, ["--config", str(recipe), "--show", "2"])
    assert done.exit_code == 0
    assert "889" in done.output
    assert "end of sequence `<|endoftext|>` trained in 1,000 of 1,000 examples" in done.output
    assert "twenty five plus one is⟦ twenty six<|endoftext|>⟧" in done.output


def test_json_is_one_document(recipe: Path) -> None:
    done = CliRunner().invoke(app, [str(recipe), "--json", "--show", "1"])
    document = json.loads(done.stdout)
    assert document["report"]["sets"]["train"]["rows"] == 889
    assert document["shown"][0][0]["runs"][1][1] is True
    assert document["reused"] is False
    again = CliRunner().invoke(app, [str(recipe), "--json"])
    assert json.loads(again.stdout)["reused"] is True


def test_control_characters_of_a_row_are_printed_escaped(recipe: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "clear \x1b[2J", "completion": " now"}) + "\n")
    done = CliRunner().invoke(app, [str(recipe), "--set", f"data.train=[{{path: {rows}}}]", "--show", "1"])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert "clear \\x1b[2J⟦ now" in done.output


def test_ids_of_shown_rows_are_printed_by_part(recipe: Path) -> None:
    done = CliRunner().invoke(app, [str(recipe), "--json", "--show", "1"])
    [[example]] = json.loads(done.stdout)["shown"]
    done = CliRunner().invoke(app, [str(recipe), "--show", "1", "--ids"])
    for kind, ids in zip(("context", "trained"), example["ids"], strict=True):
        assert f"  {kind}: {' '.join(map(str, ids))}" in done.output
    assert "context:" in CliRunner().invoke(app, [str(recipe), "--ids"]).output


def test_page_shows_rows_by_source_and_escapes_them(recipe: Path, tmp_path: Path) -> None:
    evil = "</pre><script>alert('x')</script>\u202e"
    rows, other, page = tmp_path / "rows.jsonl", tmp_path / "other.jsonl", tmp_path / "page.html"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"{evil}{number}", "completion": " now"}) + "\n" for number in range(30)
        )
    )
    other.write_text(
        json.dumps({"prompt": "plus " * 60, "completion": " two"})
        + "\n"
        + json.dumps({"prompt": "a", "completion": " b"})
        + "\n"
    )
    train = f"data.train=[{{path: {rows}, label: <b>}}, {{path: {other}}}]"
    done = CliRunner().invoke(
        app, [str(recipe), "--set", train, "--set", "data.max_length=128", "--html", str(page)]
    )
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "<script" not in text
    assert "http" not in text
    assert "\u202e" not in text
    assert text.count("&lt;/pre&gt;&lt;script&gt;") == 10
    assert "<h2>&lt;b&gt;</h2>" in text
    assert "<mark> now&lt;|endoftext|&gt;</mark>" in text
    assert f"{other}:2: " in text
    assert "<td>&lt;b&gt;</td><td>30</td>" in text


def test_page_has_the_account_of_keys(recipe: Path, tmp_path: Path) -> None:
    rows, held_out, page = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl", tmp_path / "page.html"
    row = {"prompt": "a", "completion": " b", "source": "web", "<i>": 1}
    rows.write_text(
        "".join(json.dumps(row | ({"id": number} if number else {})) + "\n" for number in range(9))
    )
    held_out.write_text(json.dumps(row | {"weight": 1}) + "\n")
    sets = (
        f"data.train=[{{path: {rows}}}]",
        f"data.eval=[{{path: {held_out}, label: e}}]",
        "data.ignore_columns=[<i>]",
    )
    options = [word for each in sets for word in ("--set", each)]
    done = CliRunner().invoke(
        app, [str(recipe), *options, "--set", "training.eval_strategy=epoch", "--html", str(page)]
    )
    assert done.exit_code == 0, done.output
    text = page.read_text()
    for path, key, use, count in (
        (rows, "prompt", "read", 9),
        (rows, "id", "ignored as metadata", 8),
        (rows, "&lt;i&gt;", "ignored by `data.ignore_columns`", 9),
        (held_out, "source", "ignored as metadata", 1),
    ):
        assert f"<tr><td>{path}</td><td>{key}</td><td>{use}</td><td>{count}</td></tr>" in text
    assert f"<td>{held_out}</td><td>weight</td><td>read as " in text


def test_bad_row_exits_2_with_its_line(recipe: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    done = CliRunner().invoke(app, [str(recipe), "--set", f"data.train=[{{path: {rows}}}]", "--json"])
    assert done.exit_code == 2
    first = json.loads(done.stdout)["errors"][0]
    assert (first["file"], first["line"], first["code"]) == (str(rows), 2, "bad-row")


def test_duplicates_are_printed_with_the_key_that_leaves_them_out(recipe: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": "one plus", "completion": text}) + "\n"
            for text in (" two", " three", " two")
        )
    )
    arguments = [str(recipe), "--set", f"data.train=[{{path: {rows}}}]", "--set", "data.eval=null"]
    words = " ".join(CliRunner().invoke(app, arguments).output.split())
    assert (
        "1 training rows have the tokens and targets of an earlier one (`data.drop_duplicates: true` "
        "leaves them out)" in words
    )
    done = CliRunner().invoke(app, [*arguments, "--set", "data.drop_duplicates=true", "--json"])
    assert json.loads(done.stdout)["report"]["sets"]["train"]["dropped_duplicates"] == {
        "rows": 1,
        "first": [f"{rows}:3"],
    }
    assert (
        "3 rows read, 1 left out"
        in CliRunner().invoke(app, [*arguments, "--set", "data.drop_duplicates=true"]).output
    )


def test_rows_emptied_by_truncation_are_counted_as_left_out(recipe: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": "one plus " * times, "completion": " two"}) + "\n" for times in (1, 99, 2)
        )
    )
    done = CliRunner().invoke(
        app, [str(recipe), "--set", f"data.train=[{{path: {rows}}}]", "--set", "data.eval=null"]
    )
    assert "3 rows read, 1 left out, 1 cut at max_length" in done.output
    assert f"the first: {rows}:2" in done.output
    assert "trained in 3 of 3 examples, before the cut" in done.output


def test_answers_that_begin_with_white_space_follow_the_tokens_of_the_generation_prompt(
    recipe: Path, tmp_path: Path
) -> None:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    line_end = "\u010a"  # of a byte-level tokenizer
    vocabulary = {**letters, 2 * line_end: 256, 3 * line_end: 257, "\u0120\u0120": 258}
    merges = [(line_end, line_end), (2 * line_end, line_end), ("\u0120", "\u0120")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<pad>"])  # pyright: ignore[reportUnknownMemberType]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    answers = ["\n\nHello.", " Hello.", "    x = 1", "\n    x = 1", "\n\n```py\nx\n```", "Hello.\n\n"]
    rows = tmp_path / "rows.jsonl"
    chats = [
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}] for answer in answers
    ]
    rows.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    settings = [
        f"data.train=[{{path: {rows}}}]",
        "data.eval=null",
        "data.max_length=99",
        f"model.tokenizer={tmp_path / 'tokenizer'}",
        "data.chat_template=chatml",
    ]
    options = [option for setting in settings for option in ("--set", setting)]
    done = CliRunner().invoke(app, [str(recipe), "--json", "--show", "9", "--ids", *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["report"]["rows_bad"]["rows"] == 0
    (notice,) = (notice for notice in found["notices"] if notice["code"] == "tokenised-apart")
    prompt = tokenizer("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n").input_ids
    trained: list[str] = []
    for (example,) in found["shown"]:
        (context, not_trained), (answer, is_trained), *_ = example["runs"]
        assert (not_trained, is_trained) == (False, True)
        assert example["ids"][0] == prompt
        trained.append(answer.removesuffix("<|im_end|>"))
        assert context.endswith("assistant\n")
    assert sorted(trained) == sorted(answers)
    assert "answers of chats (3 rows)" in notice["message"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "gemma 4",
            [
                "<|channel>thought\n<channel|>⟦<|tool_call>call:add{a:1}<tool_call|><|tool_response>⟧",
                "<tool_response|>⟦a2<turn|>⟧",
            ],
        ),
        (
            "glm 4.5 whose calls are special",
            ["</tool_call><|observation|>⟧", "⟦\n<think></think>\na2<|endoftext|>⟧"],
        ),
        ("diffusion gemma training", ["<|tool_response>⟧", "⟦<|turn>model\na2<turn|>⟧"]),
    ],
)
def test_calls_of_tools_are_trained_to_the_end_of_their_turn(
    recipe: Path, tmp_path: Path, name: str, expected: list[str]
) -> None:
    PUBLISHED[name].encoder().tokenizer.save_pretrained(tmp_path / "tokenizer")  # pyright: ignore[reportUnknownMemberType]
    template, rows = tmp_path / "template.jinja", tmp_path / "rows.jsonl"
    template.write_text(PUBLISHED[name].text(), encoding="utf-8")
    call = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "2"}
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    messages = [{"role": "user", "content": "q1"}, answer, result, {"role": "assistant", "content": "a2"}]
    rows.write_text(json.dumps({"messages": messages, "tools": [tool]}))
    settings = [
        *(f"data.train=[{{path: {rows}}}]", "data.eval=null", "data.max_length=2000"),
        *(f"model.tokenizer={tmp_path / 'tokenizer'}", f"data.chat_template={template}"),
    ]
    options = [option for setting in settings for option in ("--set", setting)]
    done = CliRunner().invoke(app, [str(recipe), "--json", "--show", "9", *options])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)["shown"]
    text = "".join(
        f"⟦{run}⟧" if trained else run for row in shown for example in row for run, trained in example["runs"]
    )
    assert all(part in text for part in expected)


@pytest.mark.parametrize(
    ("account", "words"),
    [
        (None, "none in this tokenizer"),
        (BeginTokens(59, 0, 59), "once in all 59 examples"),
        (BeginTokens(0, 59, 59), "more than once in all 59 examples"),
        (BeginTokens(50, 9, 59), "once in 50, more than once in 9 of 59 examples"),
        (BeginTokens(0, 0, 59), "not at all in all 59 examples"),
        (BeginTokens(1, 2, 1000), "once in 1, more than once in 2, not at all in 997 of 1,000 examples"),
    ],
)
def test_beginnings_of_sequences_are_described_without_counts_of_zero(
    account: BeginTokens | None, words: str
) -> None:
    assert of_bos(account) == words

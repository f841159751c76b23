"""Every key of a row is read, is metadata, is ignored by the recipe, or the row is refused and the key
named."""

from __future__ import annotations

import io
import json
import random
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.account import key_lines
from fsdp_tune.data.format.formats import Chat, FormatSettings, Ids, matching_formats
from fsdp_tune.data.format.row_account import METADATA, NESTED_METADATA, KeyUse
from fsdp_tune.data.format.row_marks import MARKS, TOKEN_MASKS
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.data.read.row_files import RowError
from fsdp_tune.data.report import KeyAccount
from fsdp_tune.recipe.schema.row_formats import ROW_FORMATS
from tests.data.support import CHATML, ByteEncoder, marked, prepared, rows_of, write_jsonl

USER, ANSWER = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
]


def copied(row: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in which no two messages are one object."""
    return json.loads(json.dumps(row))


def settings(
    format_: str, *, template: str | None = CHATML, ignored: tuple[str, ...] = (), **more: Any
) -> FormatSettings:
    return FormatSettings(
        format_,
        ROW_FORMATS[format_].loss_on[0],
        template,
        "",
        append_eos=True,
        vocabulary_size=100,
        ignored=tuple(sorted(ignored)),
        **more,
    )


def read(format_: str, row: dict[str, Any], **given: Any) -> tuple[Any, dict[str, KeyUse]]:
    uses: set[KeyUse] = set()
    example = settings(format_, **given).example(copied(row), uses)
    return example, {use.key: use for use in uses}


def refusal(format_: str, row: dict[str, Any], **given: Any) -> RowError:
    with pytest.raises(RowError) as caught:
        read(format_, row, **given)
    return caught.value


def chats_of(found: Prepared, encoder: ByteEncoder) -> list[str]:
    return [marked(row, encoder) for row in rows_of(found)]


@pytest.mark.parametrize("path", ["alpaca", "query"])
def test_system_and_history_of_llama_factory_and_swift_are_the_messages_of_a_chat(
    tmp_path: Path, path: str
) -> None:
    row = {"system": "Be a pirate.", "history": [["Oslo?", "Mild."], ["Sure?", "Yes."]]}
    names = ("instruction", "output") if path == "alpaca" else ("query", "response")
    row |= dict(zip(names, ("And in winter?", "Cold."), strict=True))
    turns = ["Oslo?", "Mild.", "Sure?", "Yes.", "And in winter?", "Cold."]
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]
    chat = {"messages": [{"role": "system", "content": "Be a pirate."}, *messages]}
    encoder = ByteEncoder(template=CHATML, eos="<|im_end|>")
    one = prepared(
        tmp_path / "one", write_jsonl(tmp_path / "one.jsonl", [row]), encoder=encoder, max_length=512
    )
    other = prepared(
        tmp_path / "other", write_jsonl(tmp_path / "other.jsonl", [chat]), encoder=encoder, max_length=512
    )
    assert chats_of(one, encoder) == chats_of(other, encoder)
    (line,) = key_lines(one.report)
    assert "`system` read as the system message" in line
    assert "`history` read as earlier turns" in line


def test_last_answer_of_alpaca_rows_can_be_trained_alone() -> None:
    row = {"instruction": "c?", "output": "d", "history": [["a?", "b"]]}
    found = FormatSettings(
        "alpaca", "last_assistant", CHATML, "", append_eos=True, vocabulary_size=100
    ).example(row)
    assert isinstance(found, Chat)
    assert found.trained == (False, False, False, True)


@pytest.mark.parametrize("column", ["system", "history"])
def test_system_and_history_of_alpaca_rows_without_a_chat_template_are_refused(column: str) -> None:
    row = {
        "instruction": "c?",
        "output": "d",
        column: {"system": "Be brief.", "history": [["a?", "b"]]}[column],
    }
    error = refusal("alpaca", row, template=None)
    assert str(error) == f"column `{column}` needs a chat template, and the tokenizer has none"
    assert "`data.chat_template`" in (error.hint or "")
    read("alpaca", row | {column: ""}, template=None)


@pytest.mark.parametrize("history", [[["a?"]], [["a?", None]], [["a?", " "]], "a?", 7, [{"a?": "b"}]])
def test_malformed_history_is_refused(history: Any) -> None:
    assert "column `history` holds" in str(
        refusal("alpaca", {"instruction": "c?", "output": "d", "history": history})
    )


def test_turns_of_question_and_answer_in_one_object_are_two_messages() -> None:
    row = {
        "system": "s",
        "conversation": [{"human": "a?", "assistant": "b"}, {"human": "c?", "assistant": "d"}],
    }
    example, _ = read("sharegpt", row)
    assert [message["content"] for message in example.messages] == ["s", "a?", "b", "c?", "d"]
    assert example.trained == (False, False, True, False, True)


def test_turns_of_from_and_value_are_read_under_any_column() -> None:
    turns = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]
    pygmalion = [{"role": "user", "value": "a?"}, {"role": "assistant", "value": "b"}]
    assert read("messages", {"messages": turns})[0].messages == [USER, ANSWER]
    assert read("sharegpt", {"conversations": pygmalion})[0].messages == [USER, ANSWER]
    assert "message 1 has both `value` and `content`" in str(
        refusal("sharegpt", {"conversations": [USER | {"value": "c?"}, ANSWER]})
    )


@pytest.mark.parametrize(
    ("format_", "row", "names"),
    [
        ("text", {"text": "a", "system": "b"}, ["system"]),
        ("text", {"text": "a", "images": ["a.png"]}, ["images"]),
        ("prompt_completion", {"prompt": "a", "completion": "b", "history": [["c", "d"]]}, ["history"]),
        ("prompt_completion", {"prompt": "a", "completion": "b", "label": False}, ["label"]),
        ("prompt_completion", {"prompt": "a", "completion": "b", "rejected": "c"}, ["rejected"]),
        ("alpaca", {"instruction": "a", "output": "b", "context": "c"}, ["context"]),
        ("alpaca", {"query": "a", "response": "b", "input": "c"}, ["input"]),
        ("messages", {"messages": [USER, ANSWER], "history": [["c", "d"]]}, ["history"]),
        (
            "messages",
            {"messages": [USER, ANSWER], "images": ["a.png"], "objects": {"bbox": [[1, 2]]}},
            ["images", "objects"],
        ),
        ("messages", {"messages": [USER, ANSWER | {"stars": 5}], "grade": 1}, ["grade", "messages.stars"]),
        (
            "messages",
            {"messages": [USER, ANSWER | {"tool_calls": [CALL | {"custom": {}, "server": "s"}]}]},
            ["messages.tool_calls.server"],
        ),
        (
            "messages",
            {
                "messages": [
                    USER,
                    ANSWER | {"tool_calls": [{"function": {"name": "f", "parameters": {"x": 1}}}]},
                ]
            },
            ["messages.tool_calls.function.parameters"],
        ),
        (
            "messages",
            {"messages": [USER | {"content": [{"type": "text", "text": "a", "bold": True}]}, ANSWER]},
            ["messages.content.bold"],
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "grade": 1}]},
            ["conversations.grade"],
        ),
        ("tokenized", {"input_ids": [1, 2], "pixel_values": [[1.0]]}, ["pixel_values"]),
        ("tokenized", {"input_ids": [1, 2], "cu_seqlens": [0, 1, 2]}, ["cu_seqlens"]),
    ],
)
def test_key_that_is_not_read_is_refused_by_name(format_: str, row: dict[str, Any], names: list[str]) -> None:
    error = refusal(format_, row)
    for name in names:
        assert f"`{name}`" in str(error)
    assert error.hint
    read(format_, row, ignored=tuple(names))


def test_packed_token_rows_are_refused_and_single_ones_are_read() -> None:
    ids = {"input_ids": [1, 2, 3]}
    read("tokenized", ids | {"position_ids": [0, 1, 2], "seq_lengths": [3], "token_type_ids": [0, 0, 0]})
    for packed in ({"position_ids": [0, 1, 0]}, {"seq_lengths": [2, 1]}, {"position_ids": [1, 2, 3]}):
        assert "the row is packed" in str(refusal("tokenized", ids | packed))


def test_keys_without_content_are_no_keys() -> None:
    """Arrow gives each row the keys of all others."""
    row = {
        "messages": [USER | {"stars": None}, ANSWER],
        "images": [],
        "history": None,
        "note": "",
        "objects": {},
    }
    example, uses = read("messages", row)
    assert example.messages == [USER, ANSWER]
    assert set(uses) == {"messages", "messages.role", "messages.content"}


def test_field_that_the_chat_template_reads_is_passed_on() -> None:
    row = {"messages": [USER | {"mood": "glad"}, ANSWER]}
    example, uses = read(
        "messages", row, template=CHATML.replace("{{ m.role }}", "{{ m.role }} {{ m.mood }}")
    )
    assert example.messages[0]["mood"] == "glad"
    assert uses["messages.mood"].meaning == "a field of the chat template"
    assert "`messages.mood` is not read" in str(refusal("messages", row))


def test_column_that_the_chat_template_reads_is_named_as_a_variable() -> None:
    template = "{% for d in documents %}{{ d }}{% endfor %}" + CHATML
    error = refusal("messages", {"messages": [USER, ANSWER], "documents": ["d"]}, template=template)
    assert '`chat_template_kwargs: {"documents": …}`' in (error.hint or "")


def test_account_names_what_is_read_and_ignored(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "source": "web", "stars": 5, "messages": [USER, ANSWER | {"id": "m"}]},
        {
            "id": 2,
            "source": "web",
            "system": "Be brief.",
            "messages": [USER | {"content": "c?", "grade": 1}, ANSWER],
        },
    ]
    encoder = ByteEncoder(template=CHATML, eos="<|im_end|>")
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    found = prepared(
        tmp_path, file, encoder=encoder, max_length=256, ignore_columns=["stars", "messages.grade"]
    )
    assert key_lines(found.report) == [
        f"{file}: `messages` read; `system` read as the system message; `id`, `messages.id`, `source` "
        "ignored as metadata; `messages.grade`, `stars` ignored by `data.ignore_columns`"
    ]
    (account,) = found.report.inputs
    assert KeyAccount("stars", "ignored", "", 1) in account.keys
    assert KeyAccount("id", "metadata", "", 2) in account.keys
    assert not any("grade" in text or "stars" in text for text in chats_of(found, encoder))


@pytest.mark.parametrize("skips", [False, True])
def test_hint_of_unread_columns_names_those_of_all_rows_and_works(tmp_path: Path, *, skips: bool) -> None:
    rows = [{"text": f"text {number}", f"extra{number % 7}": 1} for number in range(40)]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    given: dict[str, Any] = {"on_bad_row": "skip"} if skips else {}
    with pytest.raises(FsdpTuneError) as caught:
        prepared(tmp_path, file, ignore_columns=["other"], **given)
    hint = caught.value.problems[-1].hint or ""
    names = hint.partition("data.ignore_columns=[")[2].partition("]")[0].split(",")
    assert set(names) == {"other", *(f"extra{number}" for number in range(7))}
    found = prepared(tmp_path, file, ignore_columns=names)
    assert found.report.rows_kept == 40
    assert [notice["code"] for notice in found.notices if "`other`" in notice["message"]] == [
        "nothing-to-ignore"
    ]


def test_refused_rows_count_against_the_share_of_bad_rows(tmp_path: Path) -> None:
    rows = [{"text": f"text {number}"} | ({"stars": 5} if number < 3 else {}) for number in range(1000)]
    found = prepared(tmp_path, write_jsonl(tmp_path / "rows.jsonl", rows), on_bad_row="skip")
    assert found.report.rows_bad.rows == 3


def test_ignored_column_is_no_sign_of_a_format(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b", "text": "ab"}])
    with pytest.raises(FsdpTuneError, match="looks like text and like prompt_completion"):
        prepared(tmp_path, file)
    found = prepared(tmp_path, file, ignore_columns=["text"])
    assert found.report.inputs[0].format == "prompt_completion"
    (line,) = key_lines(prepared(tmp_path, file, format="prompt_completion").report)
    assert "`text` ignored: another format reads them" in line


def test_ignored_columns_have_their_names_in_the_file(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"q": "a", "a": "b", "stars": 5, "note": "c"}])
    entry = {"path": str(file), "rename_columns": {"q": "prompt", "a": "completion", "note": "stars2"}}
    found = prepared(tmp_path, entry, ignore_columns=["note", "stars"])
    assert [each.key for each in found.report.inputs[0].keys] == ["a", "q", "note", "stars"]


def test_option_that_ignores_keys_is_quoted_for_shell_and_yaml(tmp_path: Path) -> None:
    names = [
        "plain",
        "a b",
        "x: y",
        "0",
        "1e3",
        "on",
        "null",
        "it's",
        'say "hi"',
        "[x]",
        "#",
        "-",
        "größe",
        ".cls",
        "a,b",
        "~",
        "*a",
        "{",
    ]
    file = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"} | dict.fromkeys(names, 1)])
    with pytest.raises(FsdpTuneError) as caught:
        prepared(tmp_path, file)
    option = (caught.value.problems[-1].hint or "").partition("`--set ")[2].rstrip("`")
    ((key, _, value),) = (word.partition("=") for word in shlex.split(option))
    assert (key, yaml.safe_load(value)) == ("data.ignore_columns", names)


def test_indexes_of_pandas_are_metadata(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",Unnamed: 0,text\n0,1,hello\n1,2,world\n")
    assert prepared(tmp_path, path).report.rows_kept == 2


def test_other_members_of_an_archive_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in (("1.json", b'{"text": "<image> a"}'), ("1.jpg", b"\xff\xd8")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    with pytest.raises(FsdpTuneError, match=r"`\.jpg` is not read by the format text"):
        prepared(tmp_path, path)
    assert prepared(tmp_path, path, ignore_columns=[".jpg"]).report.rows_kept == 1


def test_documentation_lists_the_metadata(repository: Path) -> None:
    text = (repository / "docs/guide/data-formats.md").read_text(encoding="utf-8")
    _, _, rest = text.partition("### Metadata")
    listed = rest.partition("\n### ")[0]
    assert {name for name in METADATA | NESTED_METADATA if name and f"`{name}`" not in listed} == set()


DOCUMENTED: list[tuple[str, str, dict[str, Any]]] = [
    ("TRL language modeling", "text", {"text": "The sky is blue."}),
    ("TRL prompt-completion", "prompt_completion", {"prompt": "The sky is", "completion": " blue."}),
    (
        "TRL conversational",
        "messages",
        {"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": False}},
    ),
    ("TRL conversational prompt-completion", "prompt_completion", {"prompt": [USER], "completion": [ANSWER]}),
    (
        "TRL tool calling",
        "messages",
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}], "tools": TOOLS},
    ),
    ("TRL tokenized", "tokenized", {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}),
    ("axolotl alpaca", "alpaca", {"instruction": "a?", "input": "", "output": "b"}),
    ("axolotl gpteacher", "alpaca", {"instruction": "a?", "input": "x", "response": "b"}),
    ("axolotl chat_template", "sharegpt", {"conversations": [USER, ANSWER]}),
    (
        "axolotl pygmalion",
        "sharegpt",
        {"conversations": [{"role": "user", "value": "a?"}, {"role": "assistant", "value": "b"}]},
    ),
    (
        "axolotl input_output",
        "segments",
        {
            "segments": [
                {"label": True, "text": "<s>Hi "},
                {"label": False, "text": "you"},
                {"label": True, "text": "</s>"},
            ]
        },
    ),
    ("axolotl tokenized", "tokenized", {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [-100, 2]}),
    (
        "LLaMA-Factory alpaca",
        "alpaca",
        {"instruction": "a?", "input": "", "output": "b", "system": "s", "history": [["c?", "d"]]},
    ),
    (
        "LLaMA-Factory sharegpt",
        "sharegpt",
        {
            "conversations": [
                {"from": "human", "value": "a?"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "b"},
            ],
            "system": "s",
            "tools": '[{"name": "f"}]',
        },
    ),
    (
        "ms-swift query-response",
        "alpaca",
        {"system": "s", "query": "a?", "response": "b", "history": [["c?", "d"]]},
    ),
    ("ms-swift sharegpt", "sharegpt", {"system": "s", "conversation": [{"human": "a?", "assistant": "b"}]}),
    (
        "unsloth sharegpt",
        "sharegpt",
        {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]},
    ),
    (
        "verl multi-turn",
        "messages",
        {"messages": [USER, ANSWER | {"loss_mask": 1}], "tools": TOOLS, "enable_thinking": True},
    ),
    ("SkyRL tokenized", "tokenized", {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}),
    (
        "ms-swift loss",
        "messages",
        {"messages": [USER, ANSWER | {"loss": False}, USER, ANSWER | {"loss": True}]},
    ),
    (
        "axolotl train",
        "sharegpt",
        {
            "conversations": [
                {"from": "human", "value": "a?", "train": False},
                {"from": "gpt", "value": "b", "train": True},
            ]
        },
    ),
    ("SkyRL chat", "messages", {"messages": [USER, ANSWER, USER, ANSWER]}),
    (
        "OpenAI fine-tuning",
        "messages",
        {"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER | {"weight": 1}]},
    ),
    (
        "OpenAI functions",
        "messages",
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
                {"role": "function", "name": "f", "content": "2"},
                ANSWER,
            ],
            "functions": [{"name": "f", "parameters": {}}],
        },
    ),
    (
        "ms-swift agent",
        "messages",
        {
            "messages": [
                USER,
                {"role": "tool_call", "content": '{"name": "f", "arguments": {"x": 1}}'},
                {"role": "tool_response", "content": "2"},
                ANSWER,
            ],
            "tools": json.dumps(TOOLS),
        },
    ),
    ("ms-swift pre-training", "messages", {"messages": [ANSWER]}),
    (
        "LLaMA-Factory v1",
        "messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "a?"}], "loss_weight": 0.0},
                {"role": "assistant", "content": [{"type": "text", "value": "b"}], "loss_weight": 1.0},
            ],
        },
    ),
    (
        "OpenAI parts",
        "messages",
        {"messages": [USER | {"content": [{"type": "text", "text": "a?"}]}, ANSWER]},
    ),
]
MEANT = frozenset(
    [
        *(
            "system",
            "history",
            "images",
            "videos",
            "audios",
            "objects",
            "label",
            "kto_tag",
            "reward_model",
            "documents",
        ),
        *(
            "rejected",
            "chosen",
            "rejected_response",
            "rejected_messages",
            "tools",
            "functions",
            "chat_template_kwargs",
        ),
        *(
            "enable_thinking",
            "position_ids",
            "seq_lengths",
            "token_type_ids",
            "labels",
            "attention_mask",
            "loss_mask",
        ),
        *("completion_mask", "assistant_masks", "segments", "train_detail", "recipient", "mood"),
    ]
)
"""Keys that other tools read; whether a format reads them here or not, none may vanish."""
EXTRA = {
    "a key that no tool documents": ["stars", "extra key", "Weight", "x" * 40],
    "metadata": sorted(METADATA & NESTED_METADATA),
    "a key that means something": sorted(MEANT),
    "a mark": ["mask", "masked", "weights", "trained", *MARKS, *TOKEN_MASKS],
}
VALUES: list[Any] = [
    True,
    False,
    0,
    1,
    0.0,
    1.0,
    0.5,
    -1,
    "x",
    [0, 1],
    [[1]],
    {"a": 1},
    "false",
    [["e?", "f"]],
    {"enable_thinking": True},
]


def objects_of(format_: str, row: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and value of each object in a row to which a key may be added."""
    yield "", row
    yield from (("segments.", segment) for segment in (row["segments"] if format_ == "segments" else []))
    for column in (
        "messages",
        "conversations",
        "conversation",
        *(("prompt", "completion") if format_ == "prompt_completion" else ()),
    ):
        for message in row.get(column) or [] if isinstance(row.get(column), list) else []:
            yield f"{column}.", message
            for name in ("content", "value"):
                for part in message.get(name) if isinstance(message.get(name), list) else []:
                    yield f"{column}.{name}.", part
            for call in message.get("tool_calls") or []:
                yield f"{column}.tool_calls.", call
                yield f"{column}.tool_calls.function.", call["function"]


def with_extra_keys(
    format_: str, row: dict[str, Any], drawn: random.Random
) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of the row with up to three keys more, and the paths of these."""
    row, added = copied(row), list[str]()
    for _ in range(drawn.randint(1, 3)):
        path, place = drawn.choice(list(objects_of(format_, row)))
        key = drawn.choice(EXTRA[drawn.choice(list(EXTRA))])
        if key not in place:
            place[key] = drawn.choice(VALUES)
            added.append(path + key)
    return row, added


@pytest.mark.parametrize(
    ("format_", "row"), [pytest.param(format_, row, id=name) for name, format_, row in DOCUMENTED]
)
def test_documented_row_is_read(format_: str, row: dict[str, Any]) -> None:
    _, uses = read(format_, row)
    assert {use.how for use in uses.values()} == {"read"}
    assert matching_formats(row) == [format_]


@pytest.mark.parametrize("seed", range(12))
def test_no_key_vanishes(seed: int) -> None:
    """The account has each key of an accepted row, and the error of a refused row names a key."""
    drawn = random.Random(seed)
    accepted = 0
    for _ in range(100):
        _, format_, base = drawn.choice(DOCUMENTED)
        row, added = with_extra_keys(format_, base, drawn)
        expected, _ = read(format_, base)
        try:
            example, uses = read(format_, row)
        except RowError as error:
            blamed = str(error)
            assert any(f"`{name}`" in blamed or f"`{name.rpartition('.')[2]}`" in blamed for name in added), (
                row,
                blamed,
            )
            continue
        accepted += 1
        assert [name for name in added if name not in uses] == []
        if all(uses[name].how == "metadata" for name in added):
            assert example == expected, row
    assert accepted > 2


def test_rows_of_all_formats_with_extra_keys_are_kept_excluded_or_refused(tmp_path: Path) -> None:
    """Through a preparation: nothing else becomes of a row, and the account has every key of those that are
    kept."""
    drawn = random.Random(7)
    encoder = ByteEncoder(template=CHATML, eos="<|im_end|>")
    for format_ in ROW_FORMATS:
        bases = [
            row
            for _, each, row in DOCUMENTED
            if each == format_ and "tools" not in row and "functions" not in row
        ]
        drawn_rows = [with_extra_keys(format_, drawn.choice(bases), drawn) for _ in range(60)]
        file = write_jsonl(tmp_path / f"{format_}.jsonl", [row for row, _ in drawn_rows])
        given: dict[str, Any] = {
            "on_bad_row": "skip",
            "max_bad_share": 1.0,
            "format": format_,
            "max_length": 512,
        }
        found = prepared(tmp_path, file, encoder=encoder, **given)
        report = found.report
        assert report.rows_bad.rows + report.rows_untrained.rows + report.rows_kept == report.rows_read == 60
        refused = {
            json.loads(line)["row"] for line in (Path(found.path) / "bad_rows.jsonl").read_text().splitlines()
        }
        accepted = {
            key for number, (_, added) in enumerate(drawn_rows, 1) if number not in refused for key in added
        }
        assert accepted - {each.key for each in report.inputs[0].keys} == set()


def is_obeyed(format_: str, row: dict[str, Any], path: str, name: str, *, expected: Any) -> bool:
    """Return whether a mark of 0 or 1 at a place of a row has the effect that its tools document."""
    place = next(place for at, place in objects_of(format_, row) if at == path and name in place)
    example, _ = read(format_, row)
    if place[name]:
        return example == expected
    if not path:
        return example == Ids([], [])
    if (
        not isinstance(example, Chat)
        or not isinstance(expected, Chat)
        or example.trained is None
        or expected.trained is None
    ):
        return False
    given = [
        message
        for column in ("prompt", "messages", "conversations", "completion")
        for message in row.get(column) or []
    ]
    at = next(
        index
        for index, message in enumerate(given)
        if message is place or any(part is place for part in message.get("content") or [])
    )
    at += len(example.messages) - len(given)  # the column `system` is the first message
    return example.trained == tuple(flag and index != at for index, flag in enumerate(expected.trained))


@pytest.mark.parametrize(
    ("format_", "row"), [pytest.param(format_, row, id=name) for name, format_, row in DOCUMENTED]
)
def test_marks_at_every_place_are_obeyed_or_refused_by_name(format_: str, row: dict[str, Any]) -> None:
    expected, _ = read(format_, row)
    for number, (path, _) in enumerate(list(objects_of(format_, row))):
        for name in (*MARKS, *TOKEN_MASKS, "mask", "weights", "trained", "train_detail"):
            for value in (True, False, 0, 1, 0.5):
                changed = copied(row)
                place = list(objects_of(format_, changed))[number][1]
                if any(mark in place for mark in MARKS) or name in place:
                    continue
                place[name] = value
                try:
                    read(format_, changed)
                except RowError as caught:
                    error = str(caught)
                else:
                    assert is_obeyed(format_, changed, path, name, expected=expected), (changed, path, name)
                    continue
                assert f"`{name}`" in error or f"`{path}{name}`" in error
                has_meaning = (
                    name in MARKS
                    and value != 0.5
                    and not path.endswith(("tool_calls.", "function.", "content."))
                    and path not in ("conversation.", "segments.")
                )
                assert not has_meaning or (format_ == "tokenized" and name in TOKEN_MASKS)


def test_names_in_comments_of_a_template_are_not_read_by_it() -> None:
    template = "{#- the prompt, message.grade and 'tone' -#}" + CHATML
    row = {"messages": [USER, ANSWER], "chat_template_kwargs": {"prompt": 1}}
    settings = FormatSettings("messages", "assistant", template, "", append_eos=True, vocabulary_size=100)
    (note,) = settings.example(row).notes
    assert note.kind == "not-rendered"
    with pytest.raises(RowError, match=r"`prompt`, `messages\.grade` are not read") as caught:
        settings.example({"messages": [USER | {"grade": 1}, ANSWER], "prompt": "a?"})
    assert "the chat template reads" not in (caught.value.hint or "")

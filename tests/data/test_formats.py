from __future__ import annotations

import json
from typing import Any

import pytest

from fsdp_tune.data.format.formats import Chat, FormatSettings, Ids, LabelledText, Text, matching_formats
from fsdp_tune.data.format.row_notes import Note
from fsdp_tune.data.read.row_files import RowError

USER, ANSWER = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}


def example(
    format_: str,
    row: dict[str, Any],
    loss_on: str = "completion",
    template: str | None = None,
    separator: str = "",
) -> Any:
    return FormatSettings(
        format_, loss_on, template, separator, append_eos=True, vocabulary_size=100
    ).example(row)


def refused(format_: str, row: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(RowError) as caught:
        example(format_, row, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("columns", "formats"),
    [
        ("text", ["text"]),
        ("prompt completion id", ["prompt_completion"]),
        ("instruction input output", ["alpaca"]),
        ("instruction output", ["alpaca"]),
        ("messages tools", ["messages"]),
        ("conversations system", ["sharegpt"]),
        ("input_ids labels", ["tokenized"]),
        ("instruction output text", ["text", "alpaca"]),
        ("question answer", []),
    ],
)
def test_format_is_found_by_its_columns(columns: str, formats: list[str]) -> None:
    assert matching_formats(columns.split()) == formats


def test_every_token_of_plain_text_is_trained() -> None:
    assert example("text", {"text": "abc"}) == Text("", "abc", train_prompt=False)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(None, "null"), (7, "a number"), (["a"], "a list"), (True, "true or false"), ({}, "an object")],
)
def test_non_text_value_is_refused_by_column(value: object, kind: str) -> None:
    assert refused("text", {"text": value}) == f"column `text` holds {kind} instead of text"


def test_prompt_and_completion_are_joined_with_the_separator_on_the_untrained_side() -> None:
    row = {"prompt": "2+2", "completion": "4"}
    assert example("prompt_completion", row, separator=" = ") == Text("2+2 = ", "4", train_prompt=False)
    assert example("prompt_completion", row, loss_on="all").train_prompt


@pytest.mark.parametrize("completion", ["", " \n"])
def test_empty_completion_is_refused(completion: str) -> None:
    assert (
        refused("prompt_completion", {"prompt": "a", "completion": completion}) == "the completion is empty"
    )


def test_missing_column_of_one_row_is_named() -> None:
    assert refused("prompt_completion", {"completion": "b"}) == "it has no column `prompt`"


def test_conversational_prompt_and_completion_become_a_chat_that_trains_the_completion() -> None:
    row = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    assert example("prompt_completion", row).trained == (False, False, False, True)


def test_alpaca_without_template_uses_stanford_prompts() -> None:
    with_input = example("alpaca", {"instruction": "Add {x}", "input": "{y}", "output": "z"})
    assert with_input.prompt.startswith("Below is an instruction that describes a task, paired with an input")
    assert with_input.prompt.endswith("### Instruction:\nAdd {x}\n\n### Input:\n{y}\n\n### Response:")
    without = example("alpaca", {"instruction": "Add", "input": "", "output": "z"})
    assert without.prompt.endswith("request.\n\n### Instruction:\nAdd\n\n### Response:")
    assert "Input" not in without.prompt
    separated = example("alpaca", {"instruction": "Add", "input": "", "output": "z"}, separator="\n")
    assert separated.prompt == without.prompt + "\n"


def test_alpaca_with_template_is_a_chat() -> None:
    chat = example("alpaca", {"instruction": "Add", "input": "1 1", "output": "2"}, template="t")
    assert chat == Chat(
        [{"role": "user", "content": "Add\n\n1 1"}, {"role": "assistant", "content": "2"}], (False, True)
    )


@pytest.mark.parametrize(
    ("loss_on", "trained"),
    [
        ("assistant", (False, True, False, True)),
        ("last_assistant", (False, False, False, True)),
        ("all", None),
    ],
)
def test_chat_trains_the_requested_turns(loss_on: str, trained: tuple[bool, ...] | None) -> None:
    assert example("messages", {"messages": [USER, ANSWER, USER, ANSWER]}, loss_on=loss_on).trained == trained


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"train": False, "weight": 0}]
)
def test_message_marked_untrained_is_masked_and_mark_removed(mark: dict[str, Any]) -> None:
    chat = example(
        "messages", {"messages": [USER, ANSWER | mark, USER, ANSWER | {"weight": 1}]}, loss_on="assistant"
    )
    assert chat.trained == (False, False, False, True)
    assert chat.messages == [USER, ANSWER, USER, ANSWER]
    turns = [
        {"from": "human", "value": "a?"},
        {"from": "gpt", "value": "b"} | mark,
        {"from": "gpt", "value": "b"},
    ]
    assert example("sharegpt", {"conversations": turns}, loss_on="assistant").trained == (False, False, True)


def test_train_marks_apply_to_conversational_completions() -> None:
    row = {"prompt": [USER], "completion": [ANSWER | {"train": False}, USER, ANSWER]}
    assert example("prompt_completion", row).trained == (False, False, False, True)


def test_train_mark_on_untrained_message_gives_a_notice() -> None:
    chat = example("messages", {"messages": [USER | {"train": True}, ANSWER]}, loss_on="assistant")
    assert chat.trained == (False, True)
    assert chat.notes == (Note("mark-without-effect", "`user`"),)


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ({"weight": 0.5}, "message 2: `weight` is 0.5; it is 0 or 1"),
        ({"train": "false"}, "message 2: `train` is 'false'; it is true or false"),
        ({"train": True, "weight": 0}, "message 2: `train` and `weight` contradict each other"),
    ],
)
def test_invalid_train_marks_are_refused(mark: dict[str, Any], says: str) -> None:
    assert refused("messages", {"messages": [USER, ANSWER | mark]}, loss_on="assistant") == says


def test_train_mark_false_contradicts_loss_on_all() -> None:
    assert "`loss_on: all` trains every message" in refused(
        "messages", {"messages": [USER, ANSWER | {"train": False}]}, loss_on="all"
    )


@pytest.mark.parametrize(
    ("loss_on", "trained"), [("assistant", (False, True)), ("last_assistant", (False, True))]
)
def test_turns_after_the_last_answer_are_dropped_and_noted(loss_on: str, trained: tuple[bool, ...]) -> None:
    chat = example("messages", {"messages": [USER, ANSWER, USER, USER]}, loss_on=loss_on)
    assert (chat.messages, chat.trained) == ([USER, ANSWER], trained)
    assert chat.notes == (Note("unanswered-turns", "`user`"),)


def test_loss_on_all_keeps_the_turns_after_the_last_answer() -> None:
    chat = example("messages", {"messages": [USER, ANSWER, USER]}, loss_on="all")
    assert (len(chat.messages), chat.trained, chat.notes) == (3, None, ())


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "an empty list instead of a list of messages"),
        ("hello", "text instead of a list of messages"),
        ([USER, "b"], "message 2 is text instead of an object"),
        ([USER], "no message is from the assistant: there is no answer to train on"),
        ([{"role": "wizard", "content": "x"}, ANSWER], "message 1 has the unknown role `wizard`"),
        ([USER, {"role": "assistant", "content": " "}], "message 2: the answer is empty"),
        ([USER, {"role": "assistant", "content": None}], "message 2: `content` holds null instead of text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, ANSWER],
            "message 1: part 2 of `content` is of type `image_url`",
        ),
        ([{"role": "tool", "content": "2"}, ANSWER], "message 1: the result of a tool is the first message"),
        (
            [USER, {"role": "tool", "content": "2"}, ANSWER],
            "message 2: the result of a tool follows a message from `user`",
        ),
    ],
)
def test_broken_conversation_is_refused_with_the_message(messages: Any, says: str) -> None:
    assert says in refused("messages", {"messages": messages}, loss_on="assistant")


def test_content_parts_are_joined_and_arrow_nulls_removed() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = example(
        "messages",
        {"messages": [{"role": "user", "content": parts, "tool_calls": None}, ANSWER]},
        loss_on="assistant",
    )
    assert chat.messages[0] == {"role": "user", "content": "ab"}


def test_answer_may_be_a_tool_call_and_tools_may_be_json_text() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    chat = example("messages", {"messages": [USER, call], "tools": '[{"name": "f"}]'}, loss_on="assistant")
    assert chat.messages[1]["content"] == ""
    assert chat.tools == [{"name": "f"}]
    assert "not JSON" in refused("messages", {"messages": [USER, ANSWER], "tools": "["}, loss_on="assistant")


def test_sharegpt_speakers_become_roles_and_a_system_column_comes_first() -> None:
    row = {
        "system": "be brief",
        "conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}],
    }
    assert example("sharegpt", row, loss_on="assistant").messages == [
        {"role": "system", "content": "be brief"},
        USER,
        ANSWER,
    ]
    assert "message 1 has the unknown role `bing`" in refused(
        "sharegpt", {"conversations": [{"from": "bing", "value": "b"}]}, loss_on="assistant"
    )
    assert example("sharegpt", {"conversations": [USER, ANSWER]}, loss_on="assistant").messages == [
        USER,
        ANSWER,
    ]


def test_system_column_of_messages_comes_first() -> None:
    row = {"system": "be brief", "messages": [USER, ANSWER]}
    assert example("messages", row, loss_on="assistant").messages == [
        {"role": "system", "content": "be brief"},
        USER,
        ANSWER,
    ]
    row = {"system": "be brief", "prompt": [USER], "completion": [ANSWER]}
    chat = example("prompt_completion", row, loss_on="assistant")
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]


def test_sharegpt_function_call_is_an_answer_with_tool_calls() -> None:
    call = {"name": "weather", "arguments": {"city": "Rome", "unit": None}}
    turns = [
        {"from": "human", "value": "a?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "{}"},
        {"from": "gpt", "value": "b"},
    ]
    chat = example(
        "sharegpt", {"conversations": turns, "tools": '[{"name": "weather"}]'}, loss_on="assistant"
    )
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]
    assert chat.messages[1] == {"role": "assistant", "content": "", "tool_calls": calls}
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.trained == (False, True, False, True)
    two = example(
        "sharegpt",
        {"conversations": [turns[0], turns[1] | {"value": json.dumps([call, call])}]},
        loss_on="assistant",
    )
    assert two.messages[1]["tool_calls"] == calls * 2


@pytest.mark.parametrize("text", ["weather()", '{"arguments": {}}', "[]", "7"])
def test_malformed_function_call_is_refused(text: str) -> None:
    turns = [{"from": "human", "value": "a?"}, {"from": "function_call", "value": text}]
    assert "message 2: a function call is JSON with `name` and `arguments`" in refused(
        "sharegpt", {"conversations": turns}
    )


def test_recipe_roles_extend_and_override_known_roles() -> None:
    settings = FormatSettings(
        "sharegpt",
        "assistant",
        None,
        "",
        append_eos=True,
        vocabulary_size=9,
        roles={"bing": "assistant", "tool": "user"},
    )
    turns = [{"from": "tool", "value": "a?"}, {"from": "bing", "value": "b"}]
    assert settings.example({"conversations": turns}).messages == [USER, ANSWER]
    settings = FormatSettings(
        "messages", "assistant", None, "", append_eos=True, vocabulary_size=9, roles={"model": "assistant"}
    )
    assert settings.example({"messages": [USER, {"role": "model", "content": "b"}]}).messages == [
        USER,
        ANSWER,
    ]


def test_system_column_that_contradicts_the_conversation_is_refused() -> None:
    turns = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "a?"},
        {"from": "gpt", "value": "b"},
    ]
    assert (
        len(example("sharegpt", {"system": "be brief", "conversations": turns}, loss_on="assistant").messages)
        == 3
    )
    assert "differs from the first message" in refused(
        "sharegpt", {"system": "be long", "conversations": turns}, loss_on="assistant"
    )


def test_nulls_are_removed_at_every_depth_of_messages_and_tools() -> None:
    call = {
        "type": "function",
        "function": {"name": "f", "arguments": {"query": "x", "a": None, "b": {"c": None, "d": [1, None]}}},
    }
    row = {
        "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call | {"id": None}]}],
        "tools": [{"name": "f", "parameters": {"default": None, "type": "object"}}],
    }
    chat = example("messages", row, loss_on="assistant")
    wanted = {
        "type": "function",
        "function": {"name": "f", "arguments": {"query": "x", "b": {"d": [1, None]}}},
    }
    assert chat.messages[1]["tool_calls"] == [wanted]
    assert chat.tools == [{"name": "f", "parameters": {"type": "object"}}]
    assert (
        example("messages", row | {"tools": json.dumps(row["tools"])}, loss_on="assistant").tools
        == chat.tools
    )


def test_tokenized_rows_define_trained_tokens() -> None:
    assert example("tokenized", {"input_ids": [1, 2, 3]}) == Ids([1, 2, 3], [True] * 3)
    assert example("tokenized", {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}).trained == [
        False,
        True,
        True,
    ]
    assert example(
        "tokenized", {"input_ids": [1, 2], "completion_mask": [0, 1], "attention_mask": [1, 1]}
    ).trained == [False, True]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"input_ids": [1, 100]}, "`input_ids` holds 100, and the tokenizer has 100 tokens"),
        ({"input_ids": [1, -1]}, "holds -1"),
        ({"input_ids": 1}, "instead of a list of whole numbers"),
        ({"input_ids": [1, "a"]}, "holds text at position 1: all entries must be whole numbers"),
        (
            {"input_ids": [1, 2], "labels": [2, -100]},
            "at position 0 where `input_ids` holds 1: labels are the same ids",
        ),
        ({"input_ids": [1, 2], "labels": [1]}, "holds 1 numbers, and `input_ids` holds 2"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "leave the padding out"),
        (
            {"input_ids": [1, 2, 3], "attention_mask": [1, 2, 2]},
            "`attention_mask` holds 2: the row is packed",
        ),
    ],
)
def test_malformed_token_rows_are_refused(row: dict[str, Any], says: str) -> None:
    assert says in refused("tokenized", row)


WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "get_time", "arguments": {}}}],
}


def test_call_of_a_function_that_tools_does_not_define_is_refused() -> None:
    row = {"messages": [USER, CALL], "tools": [WEATHER]}
    assert "message 2 calls `get_time`, which `tools` does not define" in refused(
        "messages", row, loss_on="assistant"
    )
    flat = {"name": "get_time", "parameters": {}}
    assert (
        example("messages", {"messages": [USER, CALL], "tools": [WEATHER, flat]}, loss_on="assistant").notes
        == ()
    )


def test_calls_in_a_row_without_tools_are_noted() -> None:
    for loss_on in ("assistant", "last_assistant", "all"):
        chat = example(
            "messages",
            {"messages": [USER, CALL, {"role": "tool", "content": "9:00"}, ANSWER]},
            loss_on=loss_on,
        )
        assert [note.kind for note in chat.notes] == ["tools-missing"], loss_on


@pytest.mark.parametrize("calls", [[], "[]", "null", " ", None])
def test_empty_tool_calls_are_absent_calls(calls: Any) -> None:
    """Templates test whether a message has the key, and Arrow stores a column of lists without nulls."""
    chat = example(
        "messages",
        {"messages": [USER | {"tool_calls": calls}, ANSWER | {"tool_calls": calls}]},
        loss_on="assistant",
    )
    assert chat.messages == [USER, ANSWER]


@pytest.mark.parametrize("kind", ["image", "image_url"])
def test_part_that_is_not_text_is_refused_though_arrow_gives_it_an_empty_text(kind: str) -> None:
    parts = [{"type": kind, "text": ""}, {"type": "text", "text": "a"}]
    says = refused(
        "messages", {"messages": [{"role": "user", "content": parts}, ANSWER]}, loss_on="assistant"
    )
    assert f"message 1: part 1 of `content` is of type `{kind}`" in says


def test_text_parts_of_openai_responses_are_text() -> None:
    row = {
        "messages": [
            USER | {"content": [{"type": "input_text", "text": "a?"}]},
            ANSWER | {"content": [{"type": "output_text", "text": "b"}]},
        ]
    }
    assert example("messages", row, loss_on="assistant").messages == [USER, ANSWER]


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        ({"enable_thinking": False, "x": None}, {"enable_thinking": False}),
        ('{"a": 1}', {"a": 1}),
        (None, {}),
        ("", {}),
    ],
)
def test_template_variables_are_an_object_or_its_json_text(given: Any, variables: dict[str, Any]) -> None:
    chat = example(
        "messages", {"messages": [USER, ANSWER], "chat_template_kwargs": given}, loss_on="assistant"
    )
    assert chat.variables == variables


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([1], "column `chat_template_kwargs` holds a list instead of an object"),
        ("{", "column `chat_template_kwargs` holds text that is not JSON"),
        (
            {"add_generation_prompt": True},
            "sets `add_generation_prompt`, which is not a variable of chat templates",
        ),
    ],
)
def test_malformed_template_variables_are_refused(given: Any, says: str) -> None:
    assert says in refused(
        "messages", {"messages": [USER, ANSWER], "chat_template_kwargs": given}, loss_on="assistant"
    )


def test_parts_may_hold_their_text_as_value() -> None:
    """As in LLaMA-Factory's messages."""
    row = {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "value": "a"}, {"type": "text", "text": "?"}],
                "loss_weight": 0.0,
            },
            {
                "role": "assistant",
                "content": [{"type": "reasoning", "value": "r"}, {"type": "text", "value": "b"}],
                "loss_weight": 1.0,
            },
        ]
    }
    chat = example("messages", row, loss_on="assistant")
    assert chat.messages == [USER, ANSWER | {"reasoning_content": "r"}]
    assert chat.trained == (False, True)


@pytest.mark.parametrize(
    "value", [{"name": "f", "arguments": {"x": 1}}, '{"name": "f", "arguments": {"x": 1}}']
)
def test_calls_of_parts_and_of_openai_functions_are_tool_calls(value: Any) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    wanted = {"role": "assistant", "content": "b", "tool_calls": calls}
    result = {"role": "function", "name": "f", "content": "2"}
    of_part = {
        "role": "assistant",
        "content": [{"type": "text", "text": "b"}, {"type": "tool_call", "value": value}],
    }
    for answer in (of_part, ANSWER | {"function_call": value}):
        row = {"messages": [USER, answer, result, ANSWER], "functions": [{"name": "f", "parameters": {}}]}
        chat = example("messages", row, loss_on="assistant")
        assert chat.messages == [USER, wanted, {"role": "tool", "name": "f", "content": "2"}, ANSWER]
        assert chat.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        assert chat.trained == (False, True, False, True)
    assert (
        example("messages", row | {"functions": json.dumps(row["functions"])}, loss_on="assistant").tools
        == chat.tools
    )


def test_calls_in_a_row_of_messages_are_made_together_as_in_swift() -> None:
    call, result = (
        {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'},
        {"role": "tool_response", "content": "2"},
    )
    chat = example("messages", {"messages": [USER, call, call, result, result, ANSWER]}, loss_on="assistant")
    assert [message["role"] for message in chat.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert len(chat.messages[1]["tool_calls"]) == 2
    marked = [USER, call | {"loss": False}, call | {"loss": False}, result, ANSWER]
    assert example("messages", {"messages": marked}, loss_on="assistant").trained == (
        False,
        False,
        False,
        True,
    )
    assert "messages 2 and 3 are one answer" in refused(
        "messages", {"messages": [USER, call | {"loss": False}, call, result, ANSWER]}
    )


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            {"content": [{"type": "text", "text": "a", "value": "b"}]},
            "part 1 of `content` has both `text` and `value`",
        ),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "reasoning", "value": "b"}]},
            "part 2 of `content` is of type `reasoning`, after",
        ),
        (
            {"content": [{"type": "reasoning", "value": "b"}], "reasoning_content": "c"},
            "has `reasoning_content`, and a part",
        ),
        ({"content": [{"type": "tool_call", "value": "f()"}]}, "a function call is JSON"),
        ({"content": [{"type": "text", "text": 7}]}, "part 1 of `content` is not text"),
        ({"content": [{"type": "tools", "value": "[]"}]}, "is of type `tools`"),
        (
            {
                "content": "b",
                "function_call": {"name": "f", "arguments": {}},
                "tool_calls": [{"function": {"name": "f"}}],
            },
            "has both `function_call` and `tool_calls`",
        ),
        ({"content": "b", "function_call": "auto"}, "a function call is JSON"),
        (
            {"content": "b", "function_call": {"name": "f", "arguments": {}, "server": "s"}},
            "`messages.function_call.server` is not read",
        ),
    ],
)
def test_answer_that_means_two_things_is_refused(answer: dict[str, Any], says: str) -> None:
    assert says in refused(
        "messages", {"messages": [USER, {"role": "assistant"} | answer]}, loss_on="assistant"
    )


def test_tools_and_functions_in_one_row_are_refused() -> None:
    row = {"messages": [USER, ANSWER], "tools": [{"name": "f"}], "functions": [{"name": "f"}]}
    assert "column `functions` means the same as the column `tools`" in refused(
        "messages", row, loss_on="assistant"
    )
    assert "column `functions` holds an object" in refused(
        "messages", row | {"tools": None, "functions": {"a": 1}}, loss_on="assistant"
    )


@pytest.mark.parametrize(("format_", "column"), [("messages", "messages"), ("sharegpt", "conversations")])
def test_messages_may_be_json_text(format_: str, column: str) -> None:
    messages = [
        USER | {"content": [{"type": "text", "text": "a?"}]},
        ANSWER | {"content": None, "tool_calls": [{"function": {"name": "f"}}]},
    ]
    as_text = example(
        format_, {column: json.dumps(messages), "tools": '[{"name": "f"}]'}, loss_on="assistant"
    )
    assert as_text == example(format_, {column: messages, "tools": [{"name": "f"}]}, loss_on="assistant")
    assert "text that is not JSON" in refused(format_, {column: str(messages)}, loss_on="assistant")
    assert "holds text instead of a list" in refused(format_, {column: "hello"}, loss_on="assistant")


def test_segments_are_trained_by_their_label_and_neighbours_joined() -> None:
    parts = [("a", True), ("b", True), ("c", False), ("", False), ("d", 1)]
    row = {"segments": [{"text": text, "label": label} for text, label in parts]}
    assert example("segments", row, loss_on="labels") == LabelledText(
        [("ab", True), ("c", False), ("d", True)]
    )


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        ([], "column `segments` holds an empty list instead of"),
        ("a", "column `segments` holds text instead of"),
        (["a"], "segment 1 is text instead of an object"),
        ([{"text": "a"}], "segment 1: `text` is text and `label` true or false; they are text and None"),
        ([{"text": "a", "label": 0.5}], "they are text and 0.5"),
        ([{"text": 7, "label": True}], "they are a number and True"),
        ([{"text": "a", "label": True, "weight": 0}], "`segments.weight` is not read by the format segments"),
    ],
)
def test_malformed_segments_are_refused(segments: Any, says: str) -> None:
    assert says in refused("segments", {"segments": segments}, loss_on="labels")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_may_be_a_list_of_parts(name: str) -> None:
    parts = [
        {"type": "text", "text": "r"},
        {"type": "text", "content": "s"},
        {"type": "thinking", "thinking": "t"},
    ]
    row = {"messages": [USER, ANSWER | {name: parts}]}
    assert example("messages", row, loss_on="assistant", template="{{ m.content }}").messages[1] == ANSWER | {
        name: "rst"
    }
    says = refused(
        "messages", {"messages": [USER, ANSWER | {name: [{"type": "text", "text": 7}]}]}, loss_on="assistant"
    )
    assert (
        says == f"message 2: part 1 of `{name}` is not text; only text is supported, so leave such rows out"
    )
    says = refused(
        "messages",
        {"messages": [USER, ANSWER | {name: [{"type": "tool_call", "value": "{}"}]}]},
        loss_on="assistant",
    )
    assert f"part 1 of `{name}` is of type `tool_call`" in says
    assert (
        example("messages", {"messages": [USER, ANSWER | {name: []}]}, loss_on="assistant").messages[1]
        == ANSWER
    )
    assert f"`{name}` holds an object instead of text" in refused(
        "messages", {"messages": [USER, ANSWER | {name: {"a": 1}}]}
    )


def test_text_of_a_part_may_be_its_content() -> None:
    parts = [{"type": "text", "content": "a"}, {"type": "text", "text": "?"}]
    assert (
        example(
            "messages", {"messages": [{"role": "user", "content": parts}, ANSWER]}, loss_on="assistant"
        ).messages[0]
        == USER
    )


@pytest.mark.parametrize(
    ("key", "says"),
    [("content", "both `text` and `content`"), ("name", "`messages.content.name` is not read")],
)
def test_key_of_a_part_is_not_read_because_the_template_reads_it_of_messages(key: str, says: str) -> None:
    """Parts are joined to text, so no template receives their keys."""
    question = {"role": "user", "content": [{"type": "text", "text": "a?", key: "lost"}]}
    assert says in refused(
        "messages",
        {"messages": [question, ANSWER]},
        loss_on="assistant",
        template="{{ m.content }}{{ m.name }}",
    )


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": " "}])
@pytest.mark.parametrize("kind", ["tool_calls", "bare tool_calls", "function_call"])
def test_call_without_arguments_has_an_empty_object(kind: str, arguments: dict[str, Any]) -> None:
    """Templates write the text of arguments as it is: `"arguments": }` would be trained."""
    function = {"name": "f"} | arguments
    given = {
        "tool_calls": {"tool_calls": [{"type": "function", "function": function}]},
        "bare tool_calls": {"tool_calls": [function]},
        "function_call": {"function_call": {"name": "f", "arguments": ""} | arguments},
    }[kind]
    row = {"messages": [USER, {"role": "assistant", "content": None} | given], "tools": [{"name": "f"}]}
    (call,) = example("messages", row, loss_on="assistant").messages[1]["tool_calls"]
    assert call.get("function", call) == {"name": "f", "arguments": {}}


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.mark.parametrize(
    "tools",
    [
        [json.dumps(TOOL)],
        json.dumps([json.dumps(TOOL)]),
        [{"type": "function", "function": {"name": "f", "parameters": json.dumps(SCHEMA)}}],
        [{"type": "function", "function": json.dumps(TOOL["function"])}],
        json.dumps([{"type": "function", "function": {"name": "f", "parameters": json.dumps(SCHEMA)}}]),
    ],
)
def test_tools_may_have_json_text_inside(tools: Any) -> None:
    """As in ms-swift (each function) and axolotl (its parameters), against columns of one type in Arrow."""
    row = {"messages": [USER, ANSWER], "tools": tools}
    assert example("messages", row, loss_on="assistant").tools == [TOOL]


def test_parameters_of_functions_may_be_json_text() -> None:
    row = {"messages": [USER, ANSWER], "functions": [{"name": "f", "parameters": json.dumps(SCHEMA)}]}
    assert example("messages", row, loss_on="assistant").tools == [TOOL]
    flat = {"messages": [USER, ANSWER], "tools": [{"name": "f", "parameters": json.dumps(SCHEMA)}]}
    assert example("messages", flat, loss_on="assistant").tools == [TOOL["function"]]


@pytest.mark.parametrize("tools", [["get_weather()"], [{"name": "f", "parameters": "{"}], ["[]"], ["7"], [7]])
def test_tool_that_is_not_an_object_is_refused(tools: Any) -> None:
    says = refused("messages", {"messages": [USER, ANSWER], "tools": tools}, loss_on="assistant")
    assert "column `tools`" in says
    assert "at position 1" in says


def test_text_before_a_swift_call_and_the_call_are_one_answer() -> None:
    """ms-swift joins messages of the assistant in a row; two turns would train the end of the turn before the
    call."""
    call, result = (
        {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'},
        {"role": "tool_response", "content": "2"},
    )
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    thought = ANSWER | {"loss": True}
    for first, second in ((ANSWER, call), (thought, call | {"loss": True})):
        chat = example(
            "messages", {"messages": [USER, first, second, call, result, ANSWER]}, loss_on="assistant"
        )
        assert chat.messages[1] == ANSWER | {"tool_calls": calls * 2}
        assert chat.trained == (False, True, False, True)
    says = refused(
        "messages", {"messages": [USER, ANSWER, call | {"loss": False}, result, ANSWER]}, loss_on="assistant"
    )
    assert says == "messages 2 and 3 are one answer, and one of them is marked as not trained"
    older = {"role": "assistant", "content": "b", "tool_calls": calls}
    apart = example(
        "messages", {"messages": [USER, older, result, call, result, ANSWER]}, loss_on="assistant"
    )
    assert [message["role"] for message in apart.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]


@pytest.mark.parametrize(
    ("role", "wanted"),
    [
        *((role, "user") for role in ("user", "human")),
        *((role, "assistant") for role in ("assistant", "gpt", "chatgpt", "model", "bot")),
        *(
            (role, "tool")
            for role in (
                "tool",
                "function",
                "observation",
                "observations",
                "tool_response",
                "function_response",
                "ipython",
            )
        ),
        *((role, role) for role in ("system", "developer")),
    ],
)
@pytest.mark.parametrize(("speaker", "text"), [("role", "content"), ("from", "value"), ("role", "value")])
def test_roles_of_other_tools_are_known_under_both_names(
    role: str, wanted: str, speaker: str, text: str
) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    chat = example(
        "messages", {"messages": [USER, call, {speaker: role, text: "x"}, ANSWER]}, loss_on="assistant"
    )
    assert chat.messages[2] == {"role": wanted, "content": "x"}
    assert chat.trained[2] is (wanted == "assistant")


@pytest.mark.parametrize(
    ("given", "note"),
    [
        ({"x": 1}, None),
        ('{"x": 1}', None),
        ("", None),
        ("{'x': 1}", "text that is not JSON"),
        ("print(1)", "text that is not JSON"),
        ('{"x": 1', "text that is not JSON"),
        ('["x"]', "JSON text of a list"),
        ("1", "JSON text of a number"),
        ([1], "a list"),
    ],
)
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
@pytest.mark.parametrize("kind", ["tool_calls", "function_call", "turn"])
def test_arguments_that_are_not_an_object_are_noted(
    given: Any, note: str | None, loss_on: str, kind: str
) -> None:
    function = {"name": "f", "arguments": given}
    answers: dict[str, dict[str, Any]] = {
        "tool_calls": {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        "function_call": {"role": "assistant", "content": "", "function_call": function},
        "turn": {"role": "tool_call", "content": json.dumps(function)},
    }
    row = {"messages": [{"role": "user", "content": "q"}, answers[kind]], "tools": [{"name": "f"}]}
    chat = example("messages", row, loss_on=loss_on)
    assert [each.detail for each in chat.notes if each.kind == "arguments-not-an-object"] == (
        [] if note is None else [note]
    )


USE = {"type": "tool_use", "id": "u1", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "u1", "content": "7"}
INPUT_SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
ADDER = {"name": "f", "description": "d", "parameters": INPUT_SCHEMA}


def test_calls_and_results_of_anthropics_parts_are_read() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
    row = {
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "f", "description": "d", "input_schema": INPUT_SCHEMA}],
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [thinking, {"type": "text", "text": "so"}, USE, USE | {"id": "u2", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    RESULT | {"is_error": False},
                    RESULT | {"tool_use_id": "u2", "content": [{"type": "text", "text": "8"}]},
                    {"type": "text", "text": "and?"},
                ],
            },
            ANSWER,
        ],
    }
    chat = example("messages", row, loss_on="assistant")
    calls = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": given}}
        for name, given in (("u1", {"x": 1}), ("u2", {}))
    ]
    assert chat.messages == [
        {"role": "system", "content": "s"},
        USER,
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "7", "tool_call_id": "u1"},
        {"role": "tool", "content": "8", "tool_call_id": "u2"},
        {"role": "user", "content": "and?"},
        ANSWER,
    ]
    assert chat.tools == [{"type": "function", "function": ADDER}]
    assert chat.trained == (False, False, True, False, False, False, True)
    assert chat.notes == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([USE | {"input": "x"}], "is a call: `name` must be text, and `input` an object"),
        ([{"type": "tool_use", "input": {}}], "is a call: `name` must be text, and `input` an object"),
        ([USE | {"caller": {"type": "direct"}}], "`messages.content.caller` is not read"),
        ([USE, {"type": "text", "text": "so"}], "reasoning, text and calls have this order"),
        ([{"type": "redacted_thinking", "data": "x"}, USE], "is of type `redacted_thinking`"),
    ],
)
def test_anthropics_calls_that_cannot_be_read_are_refused(content: list[Any], says: str) -> None:
    row = {"messages": [USER, {"role": "assistant", "content": content}], "tools": [ADDER]}
    assert says in refused("messages", row, loss_on="assistant")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([RESULT | {"is_error": True}], "`messages.content.is_error` is not read"),
        ([{"type": "text", "text": "b"}, RESULT], "the result of a tool follows a message from `user`"),
        ([RESULT | {"content": [{"type": "image", "source": {}}]}], "is of type `image`"),
    ],
)
def test_anthropics_results_that_cannot_be_read_are_refused(content: list[Any], says: str) -> None:
    row = {
        "messages": [
            USER,
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": content},
            ANSWER,
        ]
    }
    assert says in refused("messages", row, loss_on="assistant")


@pytest.mark.parametrize("tools", [[ADDER], json.dumps([ADDER])])
def test_tools_of_alpaca_rows_are_read_with_a_chat_template(tools: Any) -> None:
    row = {"instruction": "a?", "output": "b", "tools": tools, "enable_thinking": False}
    chat = example("alpaca", row, template="{{ tools }}{{ enable_thinking }}")
    assert (chat.tools, chat.variables, chat.messages) == (
        [ADDER],
        {"enable_thinking": False},
        [USER, ANSWER],
    )
    assert "column `tools` needs a chat template" in refused("alpaca", row)

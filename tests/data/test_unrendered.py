"""Content that a chat template omits is an error if it would be trained, and a note if it is context."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fsdp_tune.data.format.formats import Chat
from fsdp_tune.data.read.row_files import RowError
from fsdp_tune.data.tokenise.chat import render_chat
from tests.data.support import CHATML, ByteEncoder

USER, ANSWER = (
    {"role": "user", "content": "What is the weather in Rome?"},
    {"role": "assistant", "content": "Sunny."},
)
ARGUMENTS = {"city": 'Ro"me\n', "days": 2, "where": ["é", {"deep": "value"}]}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "function": {"name": "get_weather", "arguments": ARGUMENTS}}],
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "The weather."}}]
WITH_CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role "
    "}}\n{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}<call>{{ CALL }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AS_JSON = WITH_CALLS.replace("CALL", "call.function | tojson")
AS_XML = WITH_CALLS.replace(
    "{{ CALL }}",
    "{{ call.function.name }}{% for k, v in call.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}",
)
AS_NAME = WITH_CALLS.replace("CALL", "call.function.name")


def chat(*messages: dict[str, Any], trained: bool | None = True, tools: list[Any] | None = None) -> Chat:
    flags = (
        None if trained is None else tuple(trained and message["role"] == "assistant" for message in messages)
    )
    return Chat(list(messages), flags, tools)


def notes(template: str, *messages: dict[str, Any], **given: Any) -> list[str]:
    rendered = render_chat(chat(*messages, **given), template, ByteEncoder(), check_repeat=False)
    return [note.detail for note in rendered.notes]


def refused(template: str, *messages: dict[str, Any], **given: Any) -> str:
    with pytest.raises(RowError) as caught:
        notes(template, *messages, **given)
    return str(caught.value)


@pytest.mark.parametrize("template", [AS_JSON, AS_XML])
def test_complete_template_gives_no_notes(template: str) -> None:
    assert (
        notes(
            template,
            USER,
            CALL,
            {"role": "tool", "content": " 31 degrees "},
            ANSWER,
            tools=TOOLS if template == AS_JSON else None,
        )
        == []
    )


def test_json_text_arguments_are_found_raw_and_quoted() -> None:
    function = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
    call = CALL | {"tool_calls": [{"function": function}]}
    assert notes(AS_JSON, USER, call) == []
    assert notes(WITH_CALLS.replace("CALL", "call.function.name ~ call.function.arguments"), USER, call) == []


@pytest.mark.parametrize("trained", [True, None])
def test_trained_tool_call_that_the_template_ignores_is_refused(trained: bool | None) -> None:
    assert refused(CHATML, USER, CALL, trained=trained) == "message 2: the chat template omits 'get_weather'"
    assert "omits 'city'" in refused(AS_NAME, USER, CALL, trained=trained)


def test_text_next_to_a_tool_call_that_the_template_drops_is_refused() -> None:
    either = AS_JSON.replace("{{ m.content | trim }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}")
    assert (
        refused(either, USER, CALL | {"content": "I look it up."})
        == "message 2: the chat template omits 'I look it up.'"
    )


def test_reasoning_that_the_template_cuts_from_a_trained_answer_is_refused() -> None:
    cut = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    assert "omits 'It is June" in refused(
        cut, USER, {"role": "assistant", "content": "It is June.</think>Sunny."}
    )


def test_text_of_the_question_is_not_taken_for_the_answer() -> None:
    silent = CHATML.replace("{{ m.content }}", "{% if m.role == 'user' %}{{ m.content }}{% endif %}")
    assert "omits 'Rome?'" in refused(silent, USER, {"role": "assistant", "content": "Rome?"})


def test_answer_part_in_generation_prompt_counts_as_rendered() -> None:
    thinking = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    )
    assert notes(thinking, USER, {"role": "assistant", "content": "<think>June.</think>Sunny."}) == []


def test_unrendered_context_gives_a_note() -> None:
    no_system = CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")
    assert notes(no_system, {"role": "system", "content": "Be brief."}, USER, ANSWER) == [
        "content of `system` messages"
    ]
    assert notes(CHATML, USER, CALL, trained=False) == ["tool calls of `assistant` messages"]
    assert notes(CHATML, USER, ANSWER, tools=TOOLS) == ["tools"]


def test_fields_that_the_template_does_not_read_are_noted() -> None:
    assert notes(CHATML, USER | {"name": "Anna", "rating": 5}, ANSWER) == [
        "`name` of `user` messages",
        "`rating` of `user` messages",
    ]
    with_name = CHATML.replace("{{ m.role }}", "{{ m.role }}{{ m.name or '' }}{{ m.rating or '' }}")
    assert notes(with_name, USER | {"name": "Anna", "rating": 5}, ANSWER) == []


def test_reasoning_that_the_template_reads_under_another_name_is_rendered() -> None:
    """transformers gives `reasoning_content` and `thinking` the same value, so a template names one of
    them."""
    thinking = CHATML.replace("{{ m.content }}", "{{ m['think' ~ 'ing'] }} {{ m.content }}")
    answer = ANSWER | {"thinking": "It is June."}
    assert notes(thinking, USER, answer) == []
    assert "omits 'It is June.'" in refused(CHATML, USER, answer)


def calling(content: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    "answer",
    [
        calling("I search by query for cats.", "search", query="cats"),
        calling("search", "search"),
        calling("", "im"),  # as in `<|im_end|>`
        calling("1", "n", start=1),
    ],
)
def test_call_whose_words_occur_elsewhere_is_missed_if_the_template_omits_it(answer: dict[str, Any]) -> None:
    function = answer["tool_calls"][0]["function"]
    assert f"omits {function['name']!r}" in refused(CHATML, USER, answer)
    as_text = answer | {
        "tool_calls": [{"function": function | {"arguments": json.dumps(function["arguments"])}}]
    }
    assert f"omits {function['name']!r}" in refused(CHATML, USER, as_text)
    for template in (AS_JSON, AS_XML):
        assert notes(template, USER, answer) == []


def test_argument_that_occurs_in_the_content_is_missed_if_the_template_omits_it() -> None:
    assert "omits 'cats'" in refused(
        AS_NAME + "{# query #}", USER, calling("I search by query for cats", "search", query="cats")
    )


def test_content_that_occurs_in_the_call_is_missed_if_the_template_omits_it() -> None:
    template = AS_JSON.replace("{{ m.content | trim }}", "{{ m.content | trim if not m.tool_calls else '' }}")
    assert "omits 'cats'" in refused(template, USER, calling("cats", "search", query="cats"))


def test_reasoning_that_occurs_in_the_content_is_missed_if_the_template_omits_it() -> None:
    answer = {"role": "assistant", "content": "It is sunny.", "reasoning_content": "It is"}
    assert "omits 'It is'" in refused(CHATML, USER, answer)
    template = CHATML.replace("{{ m.content }}", "{{ m.reasoning_content or '' }}{{ m.content }}")
    assert notes(template, USER, answer) == []
    assert notes(template, USER, answer | {"thinking": "It is"}) == []  # the same under another name
    assert "omits 'Really'" in refused(template, USER, answer | {"thinking": "Really"})

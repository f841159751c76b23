"""Chats: the trained tokens are those that the model must generate after the generation prompt."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.format.formats import Chat
from fsdp_tune.data.read.row_files import RowError
from fsdp_tune.data.tokenise import chat as chat_module
from fsdp_tune.data.tokenise.chat import render_chat
from fsdp_tune.data.tokenise.conversations import ChatTokens, chat_tokens
from tests.data.support import CHATML, ByteEncoder

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% endif %}"
    "{% if m.role == 'assistant' %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
# as Qwen3: earlier answers lose the block, and reasoning switched off puts an empty one into the prompt
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif "
    "%}{% endif %}"
)


def conversation(*turns: str, trained: tuple[bool, ...] | str | None = "assistant") -> Chat:
    roles = ["user" if index % 2 == 0 else "assistant" for index in range(len(turns))]
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
    answers = tuple(role == "assistant" for role in roles)
    last = tuple(index == len(turns) - 1 for index in range(len(turns)))
    wanted = {"assistant": answers, "last": last}
    return Chat(messages, wanted[trained] if isinstance(trained, str) else trained)


def examples(chat: Chat, template: str, encoder: ByteEncoder, *, append_eos: bool = True) -> list[ChatTokens]:
    rendered = render_chat(chat, template, encoder, check_repeat=True)
    return [
        tokens
        for text in rendered.examples
        for tokens in chat_tokens(text, encoder.encode(text.pieces), encoder, append_eos=append_eos)
    ]


def tokenised(chat: Chat, template: str, encoder: ByteEncoder, *, append_eos: bool = True) -> ChatTokens:
    (tokens,) = examples(chat, template, encoder, append_eos=append_eos)
    return tokens


def shown(tokens: ChatTokens, encoder: ByteEncoder) -> str:
    parts: list[str] = []
    for token, trained, before in zip(tokens.ids, tokens.trained, [False, *tokens.trained], strict=False):
        parts.append(
            ("[" if trained and not before else "]" if before and not trained else "")
            + encoder.decode([token])
        )
    return "".join(parts) + ("]" if tokens.trained[-1] else "")


def refused(chat: Chat, template: str, encoder: ByteEncoder | None = None) -> str:
    with pytest.raises(RowError) as caught:
        tokenised(chat, template, encoder or ByteEncoder())
    return str(caught.value)


def test_answers_are_trained_from_the_generation_prompt_to_the_end_of_sequence() -> None:
    encoder = ByteEncoder(eos="<|im_end|>")
    tokens = tokenised(conversation("a", "b", "c", "d"), CHATML, encoder)
    assert shown(tokens, encoder) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[d<|im_end|>]\n"
    )
    assert not tokens.eos_appended


def test_ids_equal_those_of_the_full_conversation_at_inference() -> None:
    encoder = ByteEncoder(eos="<|im_end|>")
    chat = conversation("a", "b", "c", "d")
    whole = encoder.render(chat.messages, CHATML, tools=None, generation_prompt=False)
    assert tokenised(chat, CHATML, encoder).ids == encoder.encode([whole])[0]


def test_template_without_a_generation_prompt_trains_the_text_after_the_question() -> None:
    encoder = ByteEncoder()
    tokens = tokenised(conversation("a", "b", "c", "d"), LLAMA2, encoder)
    assert shown(tokens, encoder) == "<s>[INST] a [/INST][ b </s>]<s>[INST] c [/INST][ d </s>]"


def test_end_of_sequence_is_added_once_where_the_template_ends_answers_otherwise() -> None:
    encoder = ByteEncoder(eos="</s>")
    tokens = tokenised(conversation("a", "b"), CHATML, encoder)
    assert shown(tokens, encoder).endswith("assistant\n[b<|im_end|>\n</s>]")
    assert tokens.eos_appended
    assert tokens.ids.count(encoder.eos_id) == 1
    assert not tokenised(conversation("a", "b"), CHATML, encoder, append_eos=False).eos_appended


def test_generation_prompt_tokens_are_not_trained() -> None:
    encoder = ByteEncoder(eos="<|im_end|>")
    tokens = tokenised(conversation("a", "b"), REASONING, encoder)
    assert shown(tokens, encoder).endswith("assistant\n<think>\n\n</think>\n\n[b<|im_end|>]\n")


def test_template_that_rewrites_earlier_answers_gives_an_example_for_each_answer() -> None:
    encoder = ByteEncoder(eos="<|im_end|>")
    split = [
        shown(tokens, encoder) for tokens in examples(conversation("a", "b", "c", "d"), REASONING, encoder)
    ]
    assert split == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[b<|im_end|>]\n",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n[d<|im_end|>]\n",
    ]
    last = tokenised(conversation("a", "b", "c", "d", trained="last"), REASONING, encoder)
    assert shown(last, encoder) == split[1]


def test_variables_of_the_row_reach_the_template_and_decide_the_reasoning() -> None:
    encoder = ByteEncoder(eos="<|im_end|>")
    template = REASONING.replace(
        "{% if m.role == 'assistant' and loop.last %}",
        "{% if m.role == 'assistant' and loop.last and date %}",
    )
    chat = replace(conversation("a", "b"), variables={"date": True, "enable_thinking": True})
    assert shown(tokenised(chat, template, encoder), encoder).endswith(
        "assistant\n[<think>\n\n</think>\n\nb<|im_end|>]\n"
    )
    chat = replace(chat, variables={"date": True, "enable_thinking": False})
    assert shown(tokenised(chat, template, encoder), encoder).endswith(
        "assistant\n<think>\n\n</think>\n\n[b<|im_end|>]\n"
    )
    assert shown(tokenised(conversation("a", "b"), template, encoder), encoder).endswith(
        "assistant\n[b<|im_end|>]\n"
    )


def test_variables_of_the_row_reach_a_template_with_generation_markers() -> None:
    encoder = ByteEncoder(eos="<|im_end|>")
    template = MARKED.replace(
        "MARKED", "{% generation %}{{ m.content }}{{ mood or '' }}<|im_end|>{% endgeneration %}"
    )
    chat = replace(conversation("a", "b"), variables={"mood": "!"})
    assert shown(tokenised(chat, template, encoder), encoder).endswith("assistant\n[b!<|im_end|>]\n")


def test_half_of_a_surrogate_pair_in_json_text_of_a_row_is_refused() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    chat = Chat(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
        (False, True),
    )
    function = "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}{{ k }}{{ v }}{% endfor %}"
    values = "{% for c in m.tool_calls or [] %}" + function + "{% endfor %}"
    assert "contains `\\ud800`, half of a surrogate pair" in refused(
        chat, CHATML.replace("{{ m.content }}", values)
    )


def test_conversation_with_too_long_contexts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "MOST_CHARACTERS", 100)
    assert (
        "the conversation needs 2 examples, each with the context of its answer at inference, with 2"
        in refused(conversation("a", "b", "c", "d"), REASONING)
    )
    assert tokenised(conversation("a", "b" * 200), REASONING, ByteEncoder()).ids


def test_untrained_last_answer_adds_no_example() -> None:
    encoder = ByteEncoder(eos="<|im_end|>")
    chat = conversation("a", "b", "c", "d", trained=(False, True, False, False))
    (tokens,) = examples(chat, REASONING, encoder)
    assert shown(tokens, encoder).endswith("[b<|im_end|>]\n")


def test_end_of_sequence_of_the_conversation_is_not_part_of_earlier_turns() -> None:
    """Phi 3 ends the conversation, and not each turn, with the end of sequence."""
    template = CHATML.replace(
        "{% if add", "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}{% if add"
    )
    encoder = ByteEncoder(eos="</s>")
    tokens = tokenised(conversation("a", "b", "c", "d"), template, encoder)
    assert shown(tokens, encoder) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[d<|im_end|>\n</s>]"
    )


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}MARKED{% else "
    "%}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "marked",
    [
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}",
        # the end of the turn is trained all the same
        "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>",
        "{% generation %}{{ m.content[:1] }}{% endgeneration %}{% generation %}{{ m.content[1:] "
        "}}<|im_end|>{% endgeneration %}",
    ],
)
def test_generation_markers_give_the_answers_of_prefix_rendering(marked: str) -> None:
    encoder = ByteEncoder(eos="<|im_end|>")
    chat = conversation("a", "be", "c", "de")
    assert tokenised(chat, MARKED.replace("MARKED", marked), encoder) == tokenised(chat, CHATML, encoder)


def test_generation_markers_around_the_generation_prompt_do_not_train_it() -> None:
    encoder = ByteEncoder(eos="<|im_end|>")
    header = "<|im_start|>{{ m.role }}\n"
    template = CHATML.replace(header, "{% generation %}" + header).replace(
        "{% endfor %}", "{% endgeneration %}{% endfor %}"
    )
    chat = conversation("a", "b", "c", "d")
    assert tokenised(chat, template, encoder) == tokenised(chat, CHATML, encoder)


@pytest.mark.parametrize(
    ("marked", "excluded"),
    [
        (
            "{{ m.content[:1] }}{% generation %}{{ m.content[1:] }}<|im_end|>{% endgeneration %}",
            "be<|im_end|>",
        ),
        (
            "{% generation %}{{ m.content[:1] }}{% endgeneration %}{{ m.content[1:] }}<|im_end|>",
            "e<|im_end|>",
        ),
        (
            "{{ m.content }}<|im_end|>{% if false %}{% generation %}{% endgeneration %}{% endif %}",
            "be<|im_end|>",
        ),
    ],
)
def test_generation_markers_that_exclude_a_part_of_an_answer_are_refused(marked: str, excluded: str) -> None:
    says = refused(
        conversation("a", "be", "c", "de"), MARKED.replace("MARKED", marked), ByteEncoder(eos="<|im_end|>")
    )
    assert f"message 2: the generation markers of the chat template exclude '{excluded}'" in says


def test_template_whose_prompt_is_not_a_prefix_of_the_answer_is_refused() -> None:
    template = CHATML.replace("assistant\n{% endif %}", "Assistant:{% endif %}")
    assert "not prefix-stable" in refused(conversation("a", "b"), template)


SPANS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt "
    "%}assistant:{% endif %}"
)


def test_token_that_would_span_prompt_and_answer_is_divided_as_at_inference() -> None:
    encoder = ByteEncoder(merges=[": "])
    tokens = tokenised(conversation("a", "b"), SPANS, encoder)
    assert shown(tokens, encoder) == shown(tokenised(conversation("a", "b"), SPANS, ByteEncoder()), encoder)
    prompt = encoder.encode(["user: a</s>assistant:"])[0]
    assert tokens.ids == [*prompt, *encoder.encode([" b</s>"])[0]]
    assert [note.kind for note in tokens.notes] == ["tokenised-apart"]
    assert tokenised(conversation("a", "b"), SPANS, ByteEncoder()).notes == ()


@pytest.mark.parametrize(
    "answer",
    ["\n\nb", "\nb", " b", "    b", "\n    b", "\tb", "\r\nb", "\u00a0b", "\n\n```py\nb\n```", "b", "b\n\n"],
)
@pytest.mark.parametrize("header", ["assistant\n", "assistant\n\n", "assistant ", "assistant:"])
@pytest.mark.parametrize("turns", [1, 3])
def test_every_answer_has_the_ids_of_the_generation_prompt_before_it(
    answer: str, header: str, turns: int
) -> None:
    """Whatever white space an answer begins with, and however the tokenizer joins it with that of the
    template."""
    spaces = [
        left + right
        for left in ("\n", "\n\n", " ", ":")
        for right in ("\n", "\n\n", " ", "    ", "\t", "\r\n", "\u00a0")
    ]
    encoder = ByteEncoder(eos="<|im_end|>", merges=sorted({*spaces, "\n\n", "    "}, key=len, reverse=True))
    template = CHATML.replace(
        "{{ m.role }}\n", "{{ header if m.role == 'assistant' else 'user\\n' }}"
    ).replace("assistant\n", "{{ header }}")
    template = template.replace("{% for", "{% set header = " + repr(header) + " %}{% for", 1)
    chat = conversation(*(text for _ in range(turns) for text in ("a", answer)))
    prompts = [
        encoder.encode([encoder.render(chat.messages[:index], template, tools=None, generation_prompt=True)])[
            0
        ]
        for index in range(1, 2 * turns, 2)
    ]
    found: list[list[int]] = []
    for tokens in examples(chat, template, encoder):
        flags = [False, *tokens.trained, False]
        begins = [at for at in range(len(tokens.ids)) if flags[at + 1] and not flags[at]]
        ends = [at for at in range(1, len(flags) - 1) if flags[at] and not flags[at + 1]]
        found += [tokens.ids[:begin] for begin in begins]
        assert {encoder.decode(tokens.ids[begin:end]) for begin, end in zip(begins, ends, strict=True)} == {
            answer + "<|im_end|>"
        }
    assert sorted(found) == sorted(prompts)


def test_answer_that_needs_a_divided_token_does_not_change_the_context_of_the_next() -> None:
    encoder = ByteEncoder(eos="<|im_end|>", merges=["\n\n"])
    first, last = examples(conversation("a", "\nb", "c", "d"), CHATML, encoder)
    assert shown(first, encoder) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[\nb<|im_end|>]\n"
    assert shown(last, encoder).endswith(
        "assistant\n\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[d<|im_end|>]\n"
    )
    (only,) = examples(conversation("a", "b", "c", "\nd"), CHATML, encoder)
    assert shown(only, encoder).count("[") == 2
    # no end of sequence but that of the answer
    chat = conversation("a", "\nb", "c", "d", trained=(False, True, False, False))
    (alone,) = examples(chat, CHATML, encoder)
    assert shown(alone, encoder) == shown(first, encoder)


def test_divided_token_leaves_the_end_of_sequence_as_it_is_elsewhere() -> None:
    encoder = ByteEncoder(merges=["\n\n"])
    tokens = tokenised(conversation("a", "\nb"), CHATML, encoder)
    assert shown(tokens, encoder).endswith("assistant\n[\nb<|im_end|>\n</s>]")
    assert tokens.eos_appended


class LeadingSpaceEncoder(ByteEncoder):
    """Writes a space before each text, as SentencePiece tokenizers do: parts do not add up to the whole."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        return super().encode([f" {text}" if text else "" for text in texts])


def test_space_adding_tokenizer_is_checked_from_first_character() -> None:
    encoder = LeadingSpaceEncoder()
    tokens = tokenised(conversation("a", "b", "c", "d"), LLAMA2, encoder)
    assert shown(tokens, encoder) == " <s>[INST] a [/INST][ b </s>]<s>[INST] c [/INST][ d </s>]"


NEXT_ROLE = (  # as GLM 4: the token of the next role ends a turn
    "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<s>' }}{{ m.content }}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name }}</call>{% endfor %}{% endfor %}{% if "
    "add_generation_prompt %}<s>{% endif %}"
)


class CallTokens(ByteEncoder):
    SPECIAL = (*ByteEncoder.SPECIAL, "<call>", "</call>")


@pytest.mark.parametrize("encoder", [ByteEncoder(), CallTokens()], ids=["text", "special"])
def test_turn_of_a_call_ends_where_the_template_ends_it(encoder: ByteEncoder) -> None:
    """Whether or not the tokenizer marks the end of a call as special."""
    messages = conversation("a", "", "c", "d").messages
    messages[1]["tool_calls"] = [{"function": {"name": "f"}}]
    chat = Chat(messages, (False, True, False, True))
    assert (
        shown(tokenised(chat, NEXT_ROLE, encoder), encoder)
        == "<|im_start|>a<s>[<call>f</call><|im_start|>]c<s>[d</s>]"
    )
    ended = NEXT_ROLE.replace(
        "{% endfor %}{% endfor %}", "{% endfor %}{{ '<|im_end|>' if m.role != 'user' }}{% endfor %}"
    )
    assert "[<call>f</call><|im_end|>]<|im_start|>c" in shown(tokenised(chat, ended, encoder), encoder)
    ended = ended.replace("<|im_end|>", "[END]\n")  # several tokens, none of them special
    assert "[<call>f</call>[END]]\n<|im_start|>c" in shown(tokenised(chat, ended, encoder), encoder)


def test_special_token_that_ends_the_content_does_not_end_the_turn() -> None:
    encoder = CallTokens()
    text = shown(tokenised(conversation("a", "b</call>", "c", "d</call>"), NEXT_ROLE, encoder), encoder)
    assert text == "<|im_start|>a<s>[b</call><|im_start|>]c<s>[d</call></s>]"
    spaces = NEXT_ROLE.replace("{% endfor %}{% endfor %}", "{% endfor %}\n\n{% endfor %}").replace(
        "<|im_start|>", "user:"
    )
    text = shown(tokenised(conversation("a", "b</call>", "c", "d</call>"), spaces, encoder), encoder)
    # the line end is all that the template writes
    assert text == "user:a\n<s>[b</call>\n]user:c\n<s>[d</call>\n</s>]"


@pytest.mark.parametrize(
    "block",
    [
        "<think>\n\n</think>\n\n",
        "<|channel>thought\n<channel|>",
        "[THINK][/THINK]",
        "</think>",
        "<|t|></|t|>",
    ],
)
def test_closed_block_of_the_generation_prompt_precedes_each_answer(block: str) -> None:
    encoder = ByteEncoder(eos="<|im_end|>")
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n{{ " + repr(block) + " }}{% endif %}")
    first, last = examples(conversation("a", "b", "c", "d"), template, encoder)
    assert (
        shown(first, encoder)
        == f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{block}[b<|im_end|>]\n"
    )
    assert shown(last, encoder).endswith(
        f"assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n{block}[d<|im_end|>]\n"
    )


def test_answer_with_reasoning_after_a_closed_block_is_refused() -> None:
    template = CHATML.replace(
        "assistant\n{% endif %}",
        "assistant\n{% if not enable_thinking %}<think></think>\n{% endif %}{% endif %}",
    )
    chat = conversation("a", "<think>r</think>b")
    assert "`chat_template_kwargs: {enable_thinking: true}`" in refused(
        chat, template.replace("not enable_thinking", "true or enable_thinking")
    )
    encoder = ByteEncoder(eos="<|im_end|>")
    on = replace(chat, variables={"enable_thinking": True})
    assert shown(tokenised(on, template, encoder), encoder).endswith(
        "assistant\n[<think>r</think>b<|im_end|>]\n"
    )


@pytest.mark.parametrize("prompt", ["<think>\n", "<think>", "</think", "Sure: ", "<think></think>Sure"])
def test_open_block_that_the_conversation_lacks_is_refused(prompt: str) -> None:
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n" + prompt + "{{ '' }}{% endif %}")
    assert "not prefix-stable" in refused(conversation("a", "b"), template)


def test_header_outside_of_the_markers_is_trained_where_no_prompt_supplies_it() -> None:
    marked = MARKED.replace("MARKED", "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}")
    template = marked.replace(
        "{% if add_generation_prompt %}", "{% if add_generation_prompt and messages[-1].role == 'user' %}"
    )
    encoder = ByteEncoder(eos="<|im_end|>")
    chat = Chat(
        [
            *conversation("a", "b").messages,
            {"role": "tool", "content": "c"},
            {"role": "assistant", "content": "d"},
        ],
        (False, True, False, True),
    )
    text = shown(tokenised(chat, template, encoder), encoder)
    assert text.endswith(
        "[b<|im_end|>]\n<|im_start|>tool\nc<|im_end|>\n[<|im_start|>assistant\nd<|im_end|>]\n"
    )


def test_loss_on_all_trains_every_token() -> None:
    tokens = tokenised(conversation("a", "b", trained=None), CHATML, ByteEncoder())
    assert all(tokens.trained)


def test_conversation_starting_with_the_assistant_follows_what_the_template_writes_first() -> None:
    chat = Chat([{"role": "assistant", "content": "hi"}, {"role": "user", "content": "a"}], (True, False))
    default = "{% if messages[0].role != 'system' %}<|im_start|>system\ns<|im_end|>\n{% endif %}" + CHATML
    assert shown(tokenised(chat, default, ByteEncoder()), ByteEncoder()).startswith(
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>assistant\n[hi<|im_end|>]\n<|im_start|>user\na"
    )


def test_conversation_starting_with_the_assistant_is_refused_without_a_generation_prompt_before_it() -> None:
    silent = CHATML.replace(
        "<|im_start|>{{ m.role }}", "{% if not loop.first %}<|im_start|>{{ m.role }}{% endif %}"
    )
    alone = Chat([{"role": "assistant", "content": "hi"}], (True,))
    assert "message 1: the conversation begins with the assistant" in refused(alone, silent)


def test_template_error_message_is_passed_on() -> None:
    assert "roles must alternate" in refused(
        conversation("a", "b"), "{{ raise_exception('roles must alternate') }}" + CHATML
    )
    assert "'nothing' is undefined" in refused(conversation("a", "b"), "{{ nothing.there }}")


def test_nondeterministic_template_is_refused() -> None:
    template = "{{ range(100000) | random }}" + CHATML
    assert "differently each time" in refused(conversation("a", "b"), template)


def test_template_cannot_escape_its_sandbox() -> None:
    assert "unsafe" in refused(conversation("a", "b"), "{{ cycler.__init__.__globals__ }}")
    assert "Range too big" in refused(conversation("a", "b"), "{% for x in range(10**10) %}{% endfor %}")


def test_template_time_limit_counts_own_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class WaitingEncoder(ByteEncoder):
        def render(self, *given: Any, **named: Any) -> str:
            time.sleep(0.2)  # as a process that gets no CPU
            return super().render(*given, **named)

    monkeypatch.setattr(chat_module, "TEMPLATE_SECONDS", 0.1)
    assert tokenised(conversation("a", "b"), CHATML, WaitingEncoder()).ids


def test_endless_template_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "TEMPLATE_SECONDS", 0.3)
    endless = "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}"
    began = time.process_time()
    assert "runs for more than" in refused(conversation("a", "b"), endless)
    assert time.process_time() - began < 5
    assert signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_rendering_outside_the_main_thread_is_a_usage_error() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(FsdpTuneError, match="main thread"):
        pool.submit(tokenised, conversation("a", "b"), CHATML, ByteEncoder()).result()

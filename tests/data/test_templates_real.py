"""Chat templates of published models: the rendered text and the trained tokens, written in `⟦⟧`, are those of
the table.

The rows were checked by hand against the documentation of each model. Templates with generation markers are
also compared with transformers' `return_assistant_tokens_mask`. `⏎` is a line end, and a row that begins with
`…` shows the end of the text.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from fsdp_tune.data.format.formats import Chat, FormatSettings
from fsdp_tune.data.read.row_files import RowError
from fsdp_tune.data.tokenise.chat import render_chat
from fsdp_tune.data.tokenise.conversations import ChatTokens, chat_tokens
from fsdp_tune.data.tokenise.rows import RawRow, Tokeniser
from fsdp_tune.data.tokenise.tokenizer import TokenizerEncoder
from tests.data.real_templates import PUBLISHED, Published

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A."}}},
    },
}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1}}}

CALL_AS_TEXT = {"type": "function", "function": {"name": "add", "arguments": '{"a": "ü"}'}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


TURNS = [user("q1"), assistant("a1"), user("q2"), assistant("a2")]
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "turns": (TURNS, None),
    "system": ([{"role": "system", "content": "sys"}, *TURNS], None),
    "reasoning": (
        [
            user("q1"),
            assistant("a1", reasoning_content="r1"),
            user("q2"),
            assistant("a2", reasoning_content="r2"),
        ],
        None,
    ),
    "thinking": (
        [user("q1"), assistant("a1", thinking="r1"), user("q2"), assistant("a2", thinking="r2")],
        None,
    ),
    "think": (
        [
            user("q1"),
            assistant("<think>\nr1\n</think>\n\na1"),
            user("q2"),
            assistant("<think>\nr2\n</think>\n\na2"),
        ],
        None,
    ),
    "tools": (
        [
            user("q1"),
            assistant("", tool_calls=[CALL]),
            {"role": "tool", "name": "add", "content": "2", "tool_call_id": "abcdefghi"},
            assistant("a2"),
        ],
        [ADD],
    ),
    "arguments as text": (
        [
            user("q1"),
            assistant("", tool_calls=[CALL_AS_TEXT]),
            {"role": "tool", "content": "2"},
            assistant("a2"),
        ],
        [ADD],
    ),
    "agent": (
        [
            user("q1"),
            assistant("", thinking="r1", tool_calls=[CALL]),
            {"role": "tool", "content": '{"r": 2}'},
            assistant("a2", thinking="r2"),
        ],
        [ADD],
    ),
    "in a row": ([user("q1"), assistant("a1"), assistant("a2")], None),
}

EXPECTED = [
    ("llama 2", "system", ["<s> [INST] <<SYS>>⏎sys⏎<</SYS>>⏎⏎q1 " "[/INST]⟦ a1 " "</s>⟧<s> [INST] " "q2 [/INST]⟦ " "a2 </s>⟧"]),  # noqa: E501
    ("llama 3", "turns", [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>⏎⏎q1<|eot_id|><|start_header_id|>assistant<|end_header_id|>⏎⏎⟦a1<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>⏎⏎q2<|eot_id|><|start_header_id|>assistant<|end_header_id|>⏎⏎⟦a2<|eot_id|>⟧"
    ]),
    ("llama 3.1", "system", [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>⏎⏎Cutting Knowledge Date: " "December 2023⏎Today Date: 26 Jul " "2024⏎⏎sys"  # noqa: E501
            "<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>⏎⏎q1<|eot_id|><|start_header_id|>assistant<|end_header_id|>⏎⏎⟦a1<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>⏎⏎q2<|eot_id|><|start_header_id|>assistant<|end_header_id|>⏎⏎⟦a2<|eot_id|>⟧"
    ]),
    ("llama 3.1", "tools", [
        '…q1<|eot_id|><|start_header_id|>assistant<|end_header_id|>⏎⏎⟦{"name": ' '"add", "parameters": ' '{"a": 1}}<|eot_id|>⟧'  # noqa: E501
        '<|start_header_id|>ipython<|end_header_id|>⏎⏎"2"<|eot_id|><|start_header_id|>assistant<|end_header_id|>⏎⏎⟦a2<|eot_id|>⟧'
    ]),
    ("llama 3.1", "in a row", [
        "…q1<|eot_id|><|start_header_id|>assistant<|end_header_id|>⏎⏎⟦a1<|eot_id|>⟧<|start_header_id|>assistant<|end_header_id|>⏎⏎⟦a2<|eot_id|>⟧"
    ]),
    ("llama 4", "system", [
        "<|begin_of_text|><|header_start|>system<|header_end|>⏎⏎sys<|eot|><|header_start|>user<|header_end|>⏎⏎q1<|eot|>"
        "<|header_start|>assistant<|header_end|>⏎⏎⟦a1<|eot|>⟧<|header_start|>user<|header_end|>⏎⏎q2<|eot|>"
        "<|header_start|>assistant<|header_end|>⏎⏎⟦a2<|eot|>⟧"
    ]),
    ("chatml", "system", [
        "<|im_start|>system⏎sys<|im_end|>⏎<|im_start|>user⏎q1<|im_end|>⏎<|im_start|>assistant⏎⟦a1<|im_end|>⟧⏎"
        "<|im_start|>user⏎q2<|im_end|>⏎<|im_start|>assistant⏎⟦a2<|im_end|>⟧⏎"
    ]),
    ("chatml", "think", [
        "<|im_start|>user⏎q1<|im_end|>⏎<|im_start|>assistant⏎⟦<think>⏎r1⏎</think>⏎⏎a1<|im_end|>⟧⏎"
        "<|im_start|>user⏎q2<|im_end|>⏎<|im_start|>assistant⏎⟦<think>⏎r2⏎</think>⏎⏎a2<|im_end|>⟧⏎"
    ]),
    ("qwen 2.5", "turns", [
        "<|im_start|>system⏎You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>⏎"
        "<|im_start|>user⏎q1<|im_end|>⏎<|im_start|>assistant⏎⟦a1<|im_end|>⟧⏎<|im_start|>user⏎q2<|im_end|>⏎<|im_start|>assistant⏎⟦a2<|im_end|>⟧⏎"
    ]),
    ("qwen 2.5", "tools", [
        '…<|im_start|>user⏎q1<|im_end|>⏎<|im_start|>assistant⏎⟦<tool_call>⏎{"name": "add", ' '"arguments": {"a": ' '1}}⏎</tool_call><|im_end|>⟧⏎'  # noqa: E501
        "<|im_start|>user⏎<tool_response>⏎2⏎</tool_response><|im_end|>⏎<|im_start|>assistant⏎⟦a2<|im_end|>⟧⏎"
    ]),
    ("qwen 2.5", "arguments as text", [  # the template quotes arguments, so it must receive an object
        '…q1<|im_end|>⏎<|im_start|>assistant⏎⟦<tool_call>⏎{"name": "add", ' '"arguments": {"a": ' '"ü"}}⏎</tool_call><|im_end|>⟧⏎'  # noqa: E501
        "<|im_start|>user⏎<tool_response>⏎2⏎</tool_response><|im_end|>⏎<|im_start|>assistant⏎⟦a2<|im_end|>⟧⏎"
    ]),
    ("qwen 3", "turns", [  # with reasoning switched off, the prompt supplies an empty block
        "<|im_start|>user⏎q1<|im_end|>⏎<|im_start|>assistant⏎<think>⏎⏎</think>⏎⏎⟦a1<|im_end|>⟧⏎",
        "<|im_start|>user⏎q1<|im_end|>⏎<|im_start|>assistant⏎a1<|im_end|>⏎<|im_start|>user⏎q2<|im_end|>⏎"
        "<|im_start|>assistant⏎<think>⏎⏎</think>⏎⏎⟦a2<|im_end|>⟧⏎",
    ]),
    ("qwen 3", "reasoning", [
        "<|im_start|>user⏎q1<|im_end|>⏎<|im_start|>assistant⏎⟦<think>⏎r1⏎</think>⏎⏎a1<|im_end|>⟧⏎",
        "<|im_start|>user⏎q1<|im_end|>⏎<|im_start|>assistant⏎a1<|im_end|>⏎<|im_start|>user⏎q2<|im_end|>⏎"
        "<|im_start|>assistant⏎⟦<think>⏎r2⏎</think>⏎⏎a2<|im_end|>⟧⏎",
    ]),
    ("qwen 3", "in a row", [
        "<|im_start|>user⏎q1<|im_end|>⏎<|im_start|>assistant⏎<think>⏎⏎</think>⏎⏎⟦a1<|im_end|>⟧⏎"
        "<|im_start|>assistant⏎<think>⏎⏎</think>⏎⏎⟦a2<|im_end|>⟧⏎"
    ]),
    ("qwen 3 instruct", "turns", [
        "<|im_start|>user⏎q1<|im_end|>⏎<|im_start|>assistant⏎⟦a1<|im_end|>⟧⏎<|im_start|>user⏎q2<|im_end|>⏎<|im_start|>assistant⏎⟦a2<|im_end|>⟧⏎"
    ]),
    ("qwen 3.5", "reasoning", [  # the prompt supplies `<think>`
        "<|im_start|>user⏎q1<|im_end|>⏎<|im_start|>assistant⏎<think>⏎⟦r1⏎</think>⏎⏎a1<|im_end|>⟧⏎",
        "<|im_start|>user⏎q1<|im_end|>⏎<|im_start|>assistant⏎a1<|im_end|>⏎<|im_start|>user⏎q2<|im_end|>⏎"
        "<|im_start|>assistant⏎<think>⏎⟦r2⏎</think>⏎⏎a2<|im_end|>⟧⏎",
    ]),
    ("qwen 3.5", "tools", [  # both answers follow the same question, so neither loses its block
        "…q1<|im_end|>⏎<|im_start|>assistant⏎<think>⏎⏎</think>⏎⏎⟦<tool_call>⏎<function=add>⏎<parameter=a>⏎1⏎</parameter>⏎</function>⏎</tool_call>"
        "<|im_end|>⟧⏎<|im_start|>user⏎<tool_response>⏎2⏎</tool_response><|im_end|>⏎<|im_start|>assistant⏎<think>⏎⏎</think>⏎⏎⟦a2<|im_end|>⟧⏎"
    ]),
    ("qwen 3.5", "arguments as text", [
        "…<think>⏎⏎</think>⏎⏎⟦<tool_call>⏎<function=add>⏎<parameter=a>⏎ü⏎</parameter>⏎</function>⏎</tool_call><|im_end|>⟧⏎"
        "<|im_start|>user⏎<tool_response>⏎2⏎</tool_response><|im_end|>⏎<|im_start|>assistant⏎<think>⏎⏎</think>⏎⏎⟦a2<|im_end|>⟧⏎"
    ]),
    ("mistral v1", "system", ["<s>  [INST] sys⏎⏎q1 [/INST]⟦ a1</s>⟧  [INST] q2 [/INST]⟦ a2</s>⟧"]),
    ("mistral v3", "turns", ["<s>[INST]  q1[/INST]⟦  a1</s>⟧[INST]  q2[/INST]⟦  a2</s>⟧"]),
    ("mistral v3 tekken", "system", [  # the system prompt is in the last user message
        "<s>[INST]sys⏎⏎q1[/INST]⟦a1</s>⟧",
        "<s>[INST]q1[/INST]a1</s>[INST]sys⏎⏎q2[/INST]⟦a2</s>⟧",
    ]),
    ("mistral v3 tekken", "tools", [
        '…[/AVAILABLE_TOOLS][INST]q1[/INST]⟦[TOOL_CALLS][{"name": "add", ' '"arguments": {"a": 1}, ' '"id": "abcdefghi"}]</s>⟧'  # noqa: E501
        '[TOOL_RESULTS]{"content": 2, "call_id": "abcdefghi"}[/TOOL_RESULTS]⟦a2</s>⟧'
    ]),
    ("mistral v7 tekken", "system", ["<s>[SYSTEM_PROMPT]sys[/SYSTEM_PROMPT][INST]q1[/INST]⟦a1</s>⟧[INST]q2[/INST]⟦a2</s>⟧"]),  # noqa: E501
    ("gemma 2", "turns", [
        "<bos><start_of_turn>user⏎q1<end_of_turn>⏎<start_of_turn>model⏎⟦a1<end_of_turn>⟧⏎"
        "<start_of_turn>user⏎q2<end_of_turn>⏎<start_of_turn>model⏎⟦a2<end_of_turn>⟧⏎"
    ]),
    ("gemma 3", "system", [
        "<bos><start_of_turn>user⏎sys⏎⏎q1<end_of_turn>⏎<start_of_turn>model⏎⟦a1<end_of_turn>⟧⏎"
        "<start_of_turn>user⏎q2<end_of_turn>⏎<start_of_turn>model⏎⟦a2<end_of_turn>⟧⏎"
    ]),
    ("gemma 4", "turns", [  # the prompt supplies a closed block that earlier turns lack
        "<bos><|turn>user⏎q1<turn|>⏎<|turn>model⏎<|channel>thought⏎<channel|>⟦a1<turn|>⟧⏎",
        "<bos><|turn>user⏎q1<turn|>⏎<|turn>model⏎a1<turn|>⏎<|turn>user⏎q2<turn|>⏎<|turn>model⏎<|channel>thought⏎<channel|>⟦a2<turn|>⟧⏎",
    ]),
    ("gemma 4", "tools", [
        "…<|turn>user⏎q1<turn|>⏎<|turn>model⏎<|channel>thought⏎<channel|>⟦<|tool_call>call:add{a:1}<tool_call|><|tool_response>⟧",
        "…<|turn>user⏎q1<turn|>⏎<|turn>model⏎<|tool_call>call:add{a:1}<tool_call|><|tool_response>"
        'response:add{value:<|"|>2<|"|>}<tool_response|>⟦a2<turn|>⟧⏎',
    ]),
    # no prompt after the result of a tool, so the model must generate the header, without markers
    ("diffusion gemma training", "tools", [
        "…<|turn>user⏎q1<turn|>⏎<|turn>model⏎⟦<|tool_call>call:add{a:1}<tool_call|><|tool_response>⟧"
        'response:add{value:<|"|>2<|"|>}<tool_response|>⟦<|turn>model⏎a2<turn|>⟧⏎'
    ]),
    ("phi 3", "system", [  # its special tokens include the line ends after them
        "<|system|>sys<|end|><|user|>q1<|end|><|assistant|>⟦a1<|end|>⟧<|user|>q2<|end|><|assistant|>⟦a2<|end|><|endoftext|>⟧"
    ]),
    ("phi 3.5", "turns", ["<|user|>⏎q1<|end|>⏎<|assistant|>⏎⟦a1<|end|>⟧⏎<|user|>⏎q2<|end|>⏎<|assistant|>⏎⟦a2<|end|>⏎<|endoftext|>⟧"]),  # noqa: E501
    ("phi 3.5 that stops at <|end|>", "turns", [  # the template writes the end of sequence once more
        "<|user|>⏎q1<|end|>⏎<|assistant|>⏎⟦a1<|end|>⟧⏎<|user|>⏎q2<|end|>⏎<|assistant|>⏎⟦a2<|end|>⟧⏎<|end|>"
    ]),
    ("phi 4", "system", [
        "<|im_start|>system<|im_sep|>sys<|im_end|><|im_start|>user<|im_sep|>q1<|im_end|><|im_start|>assistant<|im_sep|>⟦a1<|im_end|>⟧"
        "<|im_start|>user<|im_sep|>q2<|im_end|><|im_start|>assistant<|im_sep|>⟦a2<|im_end|>⟧"
    ]),
    ("deepseek v3", "system", [
        "<｜begin▁of▁sentence｜>sys<｜User｜>q1<｜Assistant｜>⟦a1<｜end▁of▁sentence｜>⟧<｜User｜>q2<｜Assistant｜>⟦a2<｜end▁of▁sentence｜>⟧"
    ]),
    ("deepseek v3", "tools", [  # takes arguments as JSON text
        '…q1<｜Assistant｜>⟦<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add⏎```json⏎{"a": 1}⏎```<｜tool▁call▁end｜>'  # noqa: E501
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>⟧<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>2<｜tool▁output▁end｜>"
        "<｜tool▁outputs▁end｜>⟦a2<｜end▁of▁sentence｜>⟧"
    ]),
    ("deepseek r1 training", "think", [  # the prompt supplies `<think>`
        "<｜begin▁of▁sentence｜><｜User｜>q1<｜Assistant｜><think>⏎⟦r1⏎</think>⏎⏎a1<｜end▁of▁sentence｜>⟧"
        "<｜User｜>q2<｜Assistant｜><think>⏎⟦r2⏎</think>⏎⏎a2<｜end▁of▁sentence｜>⟧"
    ]),
    ("gpt-oss", "thinking", [  # a conversation ends with <|return|>, and a turn inside one with <|end|>
        "…<|start|>user<|message|>q1<|end|><|start|>assistant⟦<|channel|>analysis<|message|>r1<|end|>"
        "<|start|>assistant<|channel|>final<|message|>a1<|return|>⟧",
        "…<|start|>user<|message|>q1<|end|><|start|>assistant<|channel|>final<|message|>a1<|end|><|start|>user<|message|>q2<|end|>"
        "<|start|>assistant⟦<|channel|>analysis<|message|>r2<|end|><|start|>assistant<|channel|>final<|message|>a2<|return|>⟧",
    ]),
    ("gpt-oss", "tools", [
        '…<|start|>user<|message|>q1<|end|><|start|>assistant⟦ ' 'to=functions.add<|channel|>commentary ' 'json<|message|>{"a": 1}<|call|>⟧'  # noqa: E501
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant'
            "⟦<|channel|>final<|message|>a2<|return|>⟧"
    ]),
    # the reasoning of a call is dropped once the final answer follows, and the model still receives it before
    ("gpt-oss", "agent", [
        "…<|start|>user<|message|>q1<|end|><|start|>assistant⟦<|channel|>analysis<|message|>r1<|end|>"
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>⟧'
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"{\\"r\\": 2}"<|end|>'
        "<|start|>assistant⟦<|channel|>analysis<|message|>r2<|end|><|start|>assistant<|channel|>final<|message|>a2<|return|>⟧"
    ]),
    ("glm 4", "system", ["[gMASK]<sop><|system|>⏎sys<|user|>⏎q1<|assistant|>⟦⏎a1<|user|>⟧⏎q2<|assistant|>⟦⏎a2<|endoftext|>⟧"]),  # noqa: E501
    ("glm 4", "tools", ['[gMASK]<sop><|user|>⏎q1<|assistant|>⟦add⏎{"a": ' '1}<|observation|>⟧⏎2<|assistant|>⟦⏎a2<|endoftext|>⟧']),  # noqa: E501
    ("glm 4", "in a row", ["[gMASK]<sop><|user|>⏎q1<|assistant|>⟦⏎a1⟧<|assistant|>⟦⏎a2<|endoftext|>⟧"]),
    ("glm 4.5", "reasoning", [
        "[gMASK]<sop><|user|>⏎q1<|assistant|>⟦⏎<think>r1</think>⏎a1<|endoftext|>⟧",
        "[gMASK]<sop><|user|>⏎q1<|assistant|>⏎<think></think>⏎a1<|user|>⏎q2<|assistant|>⟦⏎<think>r2</think>⏎a2<|endoftext|>⟧",
    ]),
    # `<|observation|>` ends the turn, not the token that ends the call
    ("glm 4.5 whose calls are special", "tools", [
        "…<|user|>⏎q1<|assistant|>⟦⏎<think></think>⏎<tool_call>add⏎<arg_key>a</arg_key>⏎<arg_value>1</arg_value>⏎</tool_call>"
        "<|observation|>⟧⏎<tool_response>⏎2⏎</tool_response><|assistant|>⟦⏎<think></think>⏎a2<|endoftext|>⟧"
    ]),
    ("granite", "system", [
        "<|start_of_role|>system<|end_of_role|>sys<|end_of_text|>⏎<|start_of_role|>user<|end_of_role|>q1<|end_of_text|>⏎"
        "<|start_of_role|>assistant<|end_of_role|>⟦a1<|end_of_text|>⟧⏎<|start_of_role|>user<|end_of_role|>q2<|end_of_text|>⏎"
        "<|start_of_role|>assistant<|end_of_role|>⟦a2<|end_of_text|>⟧⏎"
    ]),
    ("granite", "tools", [
        '…q1<|end_of_text|>⏎<|start_of_role|>assistant<|end_of_role|>⟦<|tool_call|>[{"name": "add", ' '"arguments": {"a": 1}}]'  # noqa: E501
            "<|end_of_text|>⟧⏎"
        "<|start_of_role|>tool<|end_of_role|>2<|end_of_text|>⏎<|start_of_role|>assistant<|end_of_role|>⟦a2<|end_of_text|>⟧⏎"
    ]),
    ("smollm 2", "turns", [
        "<|im_start|>system⏎You are a helpful AI " "assistant " "named SmolLM, trained by Hugging " "Face<|im_end|>⏎<|im_start|>user⏎q1<|im_end|>⏎"  # noqa: E501
        "<|im_start|>assistant⏎⟦a1<|im_end|>⟧⏎<|im_start|>user⏎q2<|im_end|>⏎<|im_start|>assistant⏎⟦a2<|im_end|>⟧⏎"
    ]),
    ("smollm 3", "think", [
        "<|im_start|>system⏎## " "Metadata⏎⏎Reasoning Mode: " "/think⏎⏎## Custom " "Instructions⏎⏎⏎⏎<|im_end|>⏎<|im_start|>user⏎q1<|im_end|>⏎"  # noqa: E501
        "<|im_start|>assistant⏎⟦<think>⏎r1⏎</think>⏎⏎a1<|im_end|>⟧⏎<|im_start|>user⏎q2<|im_end|>⏎"
        "<|im_start|>assistant⏎⟦<think>⏎r2⏎</think>⏎⏎a2<|im_end|>⟧⏎"
    ]),
    ("command r", "turns", [
        "…q1<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>⟦a1<|END_RESPONSE|><|END_OF_TURN_TOKEN|>⟧"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>q2<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>"
        "⟦a2<|END_RESPONSE|><|END_OF_TURN_TOKEN|>⟧"
    ]),
    ("command a without tools", "turns", [
        "…q1<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>⟦a1<|END_RESPONSE|><|END_OF_TURN_TOKEN|>⟧"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>q2<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>"
        "⟦a2<|END_RESPONSE|><|END_OF_TURN_TOKEN|>⟧<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    ]),
    ("command a", "turns", [  # writes the prompt after the last answer in any case
        "…q1<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦<|START_RESPONSE|>a1<|END_RESPONSE|><|END_OF_TURN_TOKEN|>⟧"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>q2<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
        "⟦<|START_RESPONSE|>a2<|END_RESPONSE|><|END_OF_TURN_TOKEN|>⟧<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    ]),
]  # fmt: skip

REFUSED = [
    ("gemma 2", "system", "System role not supported"),
    ("mistral v1", "in a row", "conversation roles must alternate"),
    (
        "deepseek r1",
        "think",
        "before message 2 the model receives '<think>\\n' where the conversation with that message "
        "has '\\n\\na1",
    ),
    ("llama 3", "tools", "message 2: the chat template omits 'add'"),
    ("qwen 2.5", "reasoning", "message 2: the chat template omits 'r1'"),
]

EMPTY_BLOCK = "<think>⏎⏎</think>⏎⏎"
MARKED = [
    ("llama 3", "trl/llama3_training", "system", []),
    # the last character of the header, and the line end after the turn
    (
        "qwen 2.5",
        "trl/qwen2_5_training",
        "tools",
        ["⏎", "⏎", "⏎", "⏎"],
    ),
    ("qwen 3", "trl/qwen3_training", "reasoning", ["⏎", "⏎"]),
    ("qwen 3", "trl/qwen3_training", "tools", [EMPTY_BLOCK, "⏎", EMPTY_BLOCK, "⏎"]),
    ("qwen 3.5", "trl/qwen3_5_think_training", "think", ["<think>⏎", "⏎", "<think>⏎", "⏎"]),
    ("gemma 2", "trl/gemma_training", "turns", ["⏎", "⏎"]),
    ("gemma 3", "trl/gemma3_training", "system", ["⏎", "⏎"]),
    ("phi 3", "trl/phi3_training", "system", []),
    ("phi 4", "axolotl/phi_4", "system", []),
    (
        "deepseek r1",
        "trl/deepseek_r1_distill_training",
        "think",
        ["<｜Assistant｜><think>⏎", "<｜Assistant｜><think>⏎"],
    ),
    ("gpt-oss", "trl/gptoss_training", "tools", ["<|start|>assistant", "<|start|>assistant"]),
    ("glm 4.5", "trl/glm4moe_training", "tools", []),
    ("command r", "trl/cohere2_training", "turns", []),
    ("smollm 3", "smollm3", "turns", ["<|im_start|>assistant⏎", "⏎", "<|im_start|>assistant⏎", "⏎"]),
]
"""Model, template, conversation, and what the markers include and is not trained: the generation prompt, and
white space after a turn."""


def tokenised(
    published: Published, conversation: str, *, append_eos: bool = True
) -> tuple[TokenizerEncoder, list[ChatTokens]]:
    messages, tools = CONVERSATIONS[conversation]
    encoder = published.encoder()
    chat = Chat(messages, tuple(message["role"] == "assistant" for message in messages), tools)
    rendered = render_chat(chat, published.text(), encoder, check_repeat=True)
    return encoder, [
        tokens
        for text in rendered.examples
        for tokens in chat_tokens(text, encoder.encode(text.pieces), encoder, append_eos=append_eos)
    ]


def marked(tokens: ChatTokens, encoder: TokenizerEncoder) -> str:
    """Return the text with what is trained in `⟦⟧`. Decodes from the beginning each time, because of
    SentencePiece's spaces."""
    shown, done = "", ""
    ends = [
        at
        for at in range(1, len(tokens.ids) + 1)
        if at == len(tokens.ids) or tokens.trained[at] != tokens.trained[at - 1]
    ]
    for end in ends:
        text = encoder.decode(tokens.ids[:end])
        shown += f"⟦{text[len(done) :]}⟧" if tokens.trained[end - 1] else text[len(done) :]
        done = text
    return shown.replace("\n", "⏎")


@pytest.mark.parametrize(
    ("name", "conversation", "expected"),
    EXPECTED,
    ids=[f"{name}, {conversation}" for name, conversation, _ in EXPECTED],
)
def test_text_and_trained_tokens_are_those_of_the_table(
    name: str, conversation: str, expected: list[str]
) -> None:
    encoder, examples = tokenised(PUBLISHED[name], conversation)
    for tokens, text in zip(examples, expected, strict=True):
        shown = marked(tokens, encoder)
        assert shown[-len(text[1:]) :] == text[1:] if text.startswith("…") else shown == text
        assert shown.count("⟦") == text.count("⟦")


@pytest.mark.parametrize(("name", "conversation", "reason"), REFUSED)
def test_conversation_that_cannot_be_exact_is_refused(name: str, conversation: str, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        tokenised(PUBLISHED[name], conversation)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("name", "template", "conversation", "excluded"), MARKED, ids=[f"{row[1]}, {row[2]}" for row in MARKED]
)
def test_generation_markers_agree_with_prefix_rendering(
    name: str, template: str, conversation: str, excluded: list[str]
) -> None:
    encoder, (tokens,) = tokenised(
        replace(PUBLISHED[name], template=template), conversation, append_eos=False
    )
    messages, tools = CONVERSATIONS[conversation]
    text = replace(PUBLISHED[name], template=template).text()
    given: Any = encoder.tokenizer.apply_chat_template(
        messages,
        tools=tools,
        chat_template=text,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert given["input_ids"] == tokens.ids
    both = zip(tokens.ids, given["assistant_masks"], tokens.trained, strict=True)
    runs = [
        (key, [number for number, _, _ in run])
        for key, run in groupby(both, key=lambda token: (bool(token[1]), token[2]))
    ]
    assert not any(is_trained and not is_marked for (is_marked, is_trained), _ in runs)
    assert [encoder.decode(ids).replace("\n", "⏎") for key, ids in runs if key == (True, False)] == excluded


AS_GIVEN = [
    row[:2] for row in EXPECTED if row[1] != "arguments as text" and row[:2] != ("deepseek v3", "tools")
]


@pytest.mark.parametrize(("name", "conversation"), AS_GIVEN, ids=map(", ".join, AS_GIVEN))
def test_context_of_each_answer_has_the_ids_of_inference(name: str, conversation: str) -> None:
    encoder, examples = tokenised(PUBLISHED[name], conversation)
    messages, tools = CONVERSATIONS[conversation]
    prompts: list[list[int]] = []
    for index in (index for index, message in enumerate(messages) if message["role"] == "assistant"):
        for mode in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            prompt: Any = encoder.tokenizer.apply_chat_template(
                messages[:index],
                tools=tools,
                chat_template=PUBLISHED[name].text(),
                add_generation_prompt=True,
                return_dict=False,
                **mode,
            )
            prompts.append(prompt)
    for tokens in examples:
        begins = [at for at in range(1, len(tokens.ids)) if tokens.trained[at] and not tokens.trained[at - 1]]
        assert begins
        assert all(tokens.ids[:begin] in prompts for begin in begins)


@pytest.mark.parametrize(
    "answer", ["\n\na1", " a1", "    a1", "\n    a1", "\n\n\n\n\na1", ":\n a1", "a1\n\n"]
)
@pytest.mark.parametrize("name", sorted(set(PUBLISHED) - {"deepseek r1", "deepseek r1 training"}))
def test_context_of_answers_that_begin_with_white_space_has_the_ids_of_inference(
    name: str, answer: str
) -> None:
    """With a tokenizer that would join it with the end of the generation prompt."""
    encoder, template = PUBLISHED[name].encoder(joins_spaces=True), PUBLISHED[name].text()
    messages = [user("q1"), assistant(answer), user("q2"), assistant(answer)]
    rendered = render_chat(Chat(messages, (False, True, False, True)), template, encoder, check_repeat=True)
    prompts = {
        index: [
            encoder.encode(
                [encoder.render(messages[:index], template, tools=None, generation_prompt=True, **mode)]
            )[0]
            for mode in ({}, {"enable_thinking": False}, {"enable_thinking": True})
        ]
        for index in (1, 3)
    }
    contexts: list[list[int]] = []
    for text in rendered.examples:
        for tokens in chat_tokens(text, encoder.encode(text.pieces), encoder, append_eos=True):
            flags = [False, *tokens.trained]
            contexts += [tokens.ids[:at] for at in range(len(tokens.ids)) if flags[at + 1] and not flags[at]]
    assert [any(context in prompts[index] for context in contexts) for index in (1, 3)] == [True, True]
    assert len(contexts) == 2


TOOLS_V3 = (
    '[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "add", "description": "Add.", '
    '"parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": '
    '"A."}}}}}][/AVAILABLE_TOOLS]'
)
CALL_V3 = (
    '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>[TOOL_RESULTS] {"content": '
    '2, "call_id": "abcdefghi"}[/TOOL_RESULTS]'
)
MISTRAL_COMMON = [
    (
        "mistral v1",
        "system",
        ["<s> [INST] sys\n\nq1 [/INST]", "<s> [INST] sys\n\nq1 [/INST] a1</s> [INST] q2 [/INST]"],
    ),
    (
        "mistral v3",
        "system",
        ["<s>[INST] sys\n\nq1[/INST]", "<s>[INST] q1[/INST] a1</s>[INST] sys\n\nq2[/INST]"],
    ),
    ("mistral v3", "tools", [f"<s>{TOOLS_V3}[INST] q1[/INST]", f"<s>{TOOLS_V3}[INST] q1[/INST]{CALL_V3}"]),
    (
        "mistral v3 tekken",
        "system",
        ["<s>[INST]sys\n\nq1[/INST]", "<s>[INST]q1[/INST]a1</s>[INST]sys\n\nq2[/INST]"],
    ),
]
"""Requests up to each question, as the tokenizers v1, v3 and tekken of mistral-common 1.13.1 encode them."""


@pytest.mark.parametrize(("name", "conversation", "contexts"), MISTRAL_COMMON)
def test_contexts_are_the_requests_of_mistral_common(
    name: str, conversation: str, contexts: list[str]
) -> None:
    messages, tools = CONVERSATIONS[conversation]
    chat = Chat(messages, tuple(message["role"] == "assistant" for message in messages), tools)
    rendered = render_chat(chat, PUBLISHED[name].text(), PUBLISHED[name].encoder(), check_repeat=False)
    assert [text.whole[:begin] for text in rendered.examples for begin, _ in text.answers or ()] == contexts


def controls(published: Published, text: str) -> tuple[list[int], list[int], set[str]]:
    """Special tokens of a conversation whose messages hold `text`, those of them that are trained, and the
    kinds of notes."""
    encoder = published.encoder()
    turns = [
        user(f"q {text}"),
        assistant(f"a {text}"),
        user("q2"),
        assistant(text),
        user("q3"),
        assistant(f"{text} a3"),
    ]
    settings = FormatSettings(
        "messages",
        "assistant",
        published.text(),
        "",
        append_eos=True,
        vocabulary_size=encoder.vocabulary_size,
    )
    done = Tokeniser(encoder, (settings,)).chunk([RawRow(0, 0, 1, {"messages": turns})])
    assert done.bad == []
    special = {token.id for token in encoder.special_tokens}
    tokens = [
        (number, is_trained)
        for number, is_trained in zip(done.tokens.tolist(), done.trained.tolist(), strict=True)
        if number in special
    ]
    return (
        [number for number, _ in tokens],
        [number for number, is_trained in tokens if is_trained],
        set(done.notes.report(["rows"])),
    )


@pytest.mark.parametrize("name", sorted(set(PUBLISHED) - {"deepseek r1", "deepseek r1 training"}))
def test_special_tokens_in_messages_change_no_special_token_of_the_template(name: str) -> None:
    published = PUBLISHED[name]
    ids, trained, notes = controls(published, published.eos)
    plain_ids, plain_trained, _ = controls(published, "x")
    assert notes == {"special-tokens-as-text"}
    assert ids == plain_ids
    assert trained == plain_trained


WITHOUT_FIRST_PROMPT = {
    "llama 2",
    "mistral v7 tekken",
    "phi 3",
    "phi 3.5",
    "phi 3.5 that stops at <|end|>",
    "deepseek r1",
    "deepseek r1 training",
    "gemma 4",
    "command a",
}
REJECTS_FIRST_ANSWER = {
    "qwen 3.5",
    "mistral v1",
    "mistral v3",
    "mistral v3 tekken",
    "gemma 2",
    "gemma 3",
    "command r",
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_first_message_of_the_assistant_is_trained_after_the_generation_prompt_or_the_hint_works(
    name: str,
) -> None:
    published, messages = PUBLISHED[name], [assistant("Hello there!"), user("Q?"), assistant("A.")]
    encoder, template = published.encoder(), published.text()

    def runs(messages: list[dict[str, Any]], *trained: bool) -> list[str]:
        rendered = render_chat(Chat(messages, trained), template, encoder, check_repeat=False)
        pieces = [[encoder.encode([piece])[0] for piece in text.pieces] for text in rendered.examples]
        examples = [
            chat_tokens(text, ids, encoder, append_eos=True)
            for text, ids in zip(rendered.examples, pieces, strict=True)
        ]
        return sorted(
            run.partition("⟧")[0] for (tokens,) in examples for run in marked(tokens, encoder).split("⟦")[1:]
        )

    if name in REJECTS_FIRST_ANSWER | WITHOUT_FIRST_PROMPT:
        with pytest.raises(RowError) as caught:
            runs(messages, True, False, True)
        assert (caught.value.hint is None) == (name in REJECTS_FIRST_ANSWER)
        # which rejects all answers without reasoning
        if caught.value.hint is not None and not name.startswith("deepseek r1"):
            assert "data.loss_on=last_assistant" in caught.value.hint
            assert len(runs(messages, False, False, True)) == 1
        return
    assert runs(messages, True, False, True) == runs([user("x"), *messages], False, True, False, True)


def test_every_published_template_has_a_row() -> None:
    assert {name for name, *_ in [*EXPECTED, *REFUSED]} == set(PUBLISHED)

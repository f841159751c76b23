"""Rows in the shapes of public data sets and of files that users have, which no format fits as they are:
{name: (file, text)}."""

from __future__ import annotations

import json
from typing import Any


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


CHATS = [
    {"messages": [{"role": "user", "content": f"hi {number}"}, {"role": "assistant", "content": "yo"}]}
    for number in range(2)
]
CAPYBARA = {
    "source": "Airoboros",
    "conversation": [{"input": "hi", "output": "yo"}, {"input": "and", "output": "then"}],
}
XLAM = {
    "id": 0,
    "query": "Price of ACME?",
    "answers": '[{"name": "quote", "arguments": {"symbol": "ACME"}}]',
    "tools": '[{"name": "quote", "description": "q", "parameters": {"symbol": {"type": "str", '
    '"description": "s"}}}]',
}
GLAIVE = {
    "system": 'SYSTEM: You are a helpful assistant with access to functions.\n{"name": "quote"}',
    "chat": "USER: Price of ACME?\n\n\nASSISTANT: <functioncall> {} <|endoftext|>",
}
NEMOTRON = {
    "input": [{"role": "user", "content": "hi"}],
    "output": "yo",
    "category": "math",
    "license": "cc-by-4.0",
    "reasoning": "on",
    "generator": "R1",
    "used_in_training": "Ultra",
    "version": "v1",
    "system_prompt": "detailed thinking on",
}
ALPACA = {
    "instruction": "Say hi.",
    "input": "",
    "output": "hi",
    "text": "Below is an instruction …\n\n### Response:\nhi",
}
HERMES = {
    "custom_instruction": False,
    "language": None,
    "source": "airoboros2.2",
    "topic": None,
    "idx": None,
    "avatarUrl": "https://example.org/a.png",
    "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}],
    "model": None,
    "system_prompt": "Be brief.",
    "views": 3.0,
    "skip_prompt_formatting": False,
    "title": None,
    "category": "orca",
    "hash": None,
    "id": None,
}
PUBLIC: dict[str, tuple[str, str]] = {
    "Capybara": ("rows.jsonl", lines(CAPYBARA)),
    "xLAM": ("rows.jsonl", lines(XLAM)),
    "xLAM as a list": ("rows.json", json.dumps([XLAM])),
    "glaive v2": ("rows.jsonl", lines(GLAIVE)),
    "Nemotron": ("rows.jsonl", lines(NEMOTRON)),
    "tatsu-lab/alpaca": ("rows.jsonl", lines(ALPACA)),
    "OpenHermes": ("rows.jsonl", lines(HERMES)),
    "wrapped": ("rows.json", json.dumps({"train": CHATS})),
    "wrapped over several lines": ("rows.json", json.dumps({"version": 1, "data": CHATS}, indent=1)),
    "wrapped, two splits": ("rows.json", json.dumps({"train": CHATS, "test": CHATS})),
    "wrapped in .jsonl": ("rows.jsonl", json.dumps({"train": CHATS})),
    "dict of rows": ("rows.json", json.dumps({"a": CHATS[0], "b": CHATS[1]})),
    "dict of rows over several lines": ("rows.json", json.dumps({"a": CHATS[0], "b": CHATS[1]}, indent=2)),
    "columns of pandas": (
        "rows.json",
        '{"instruction": {"0": "Name a fruit", "1": "A tree"}, "output": {"0": "Apple", "1": "Oak"}}',
    ),
    "columns as lists": (
        "rows.json",
        '{"instruction": ["Name a fruit", "A tree"], "output": ["Apple", "Oak"]}',
    ),
    "list in .jsonl": ("rows.jsonl", json.dumps(CHATS)),
    "list over several lines in .jsonl": ("rows.jsonl", json.dumps(CHATS, indent=1)),
    "objects over several lines": ("rows.jsonl", "\n".join(json.dumps(row, indent=1) for row in CHATS)),
    "objects over several lines in .json": (
        "rows.json",
        "\n".join(json.dumps(row, indent=1) for row in CHATS),
    ),
    "CSV with semicolons": ("rows.csv", "instruction;output\nName a fruit;Apple, red\nA tree;Oak\n"),
    "TSV with semicolons": ("rows.tsv", "prompt;completion\nName a fruit;Apple\n"),
    "CSV with tabs": ("rows.csv", "prompt\tcompletion\nName a fruit\tApple\n"),
    "question and answer": ("rows.jsonl", lines({"question": "1+1?", "answer": "2", "level": "easy"})),
    "messages as text": ("rows.jsonl", lines({"chat": "hello there"})),
}
"""Those that are refused need a hint that leads to a run when it is followed."""

"""Chunks of rows, and their memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.data.preparation import Prepared
from fsdp_tune.data.report import SplitRows
from fsdp_tune.data.store import RowStore
from fsdp_tune.data.tokenise import rows as module
from fsdp_tune.data.tokenise.rows import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    RawRow,
    Tokenised,
    Tokeniser,
    content_bytes,
    tokenise,
)
from tests.data.support import ByteEncoder, marked, prepared, rows_of, write_jsonl

REPOSITORY = Path(__file__).parents[2]


class Recording(Tokeniser):
    """Notes the chunks that it is given."""

    def chunk(self, rows: list[RawRow], *, check_only: bool = False) -> Tokenised:
        return rows  # type: ignore[return-value]


def chunks_of(rows: list[dict[str, Any]]) -> list[list[int]]:
    """Bytes of each row, chunk by chunk."""
    raw: Iterator[RawRow] = (RawRow(0, 0, number, values) for number, values in enumerate(rows, 1))
    chunks: Any = tokenise(raw, Recording(None, ()), 1, check_only=lambda: False)  # type: ignore[arg-type]
    return [[content_bytes(row.values) for row in chunk] for chunk in chunks]


def test_chunks_are_bounded_by_rows_and_by_bytes() -> None:
    short = [{"text": "x"}] * 2500
    assert [len(chunk) for chunk in chunks_of(short)] == [CHUNK_ROWS, CHUNK_ROWS, 500]
    mixed = short + [{"text": "x" * 900_000}] * 20 + [{"text": "x" * 9_000_000}] + short
    chunks = chunks_of(mixed)
    assert sum(map(len, chunks)) == len(mixed)
    assert all(len(chunk) == 1 or sum(chunk) <= CHUNK_BYTES for chunk in chunks)
    assert len(chunks) < 20


def test_content_bytes_count_nested_rows_and_ids() -> None:
    chat = {"messages": [{"role": "user", "content": "x" * 5000}] * 10, "id": 3}
    assert 50_000 < content_bytes(chat) < 51_000
    assert content_bytes({"input_ids": list(range(1000)), "none": []}) > 8_000


PEAK = """
import json, resource, sys
from pathlib import Path
from tests.data.support import prepared

folder, rows = Path(sys.argv[1]), int(sys.argv[2])
path = folder / "rows.jsonl"
with open(path, "w") as file:
    for number in range(rows):
        print(json.dumps({"text": f"{number} " + "twenty plus one " * 65_000}), file=file)
prepared(folder, path, max_length=2048, num_proc=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_tokenising_peak_memory_does_not_grow_with_long_rows(tmp_path: Path) -> None:
    """Rows of 1 MB, of which 1,000 once made a chunk; sixteen more of them took 460 MiB."""
    peaks: list[int] = []
    for rows in (4, 20):
        folder = tmp_path / str(rows)
        folder.mkdir()
        command = [sys.executable, "-c", PEAK, str(folder), str(rows)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) << 10)
    assert peaks[1] < peaks[0] + (48 << 20)


def test_pending_chunks_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many long rows wait in no queue: what was submitted and not yet taken holds a constant number of bytes,
    or one row."""

    waiting: list[int] = []
    most = 0

    class Done:
        def result(self) -> int:
            return waiting.pop(0)

    class Executor:
        def __init__(self, *arguments: object, **named: object) -> None:
            pass

        def submit(self, work: object, rows: list[RawRow], check_only: object) -> Done:
            nonlocal most
            waiting.append(sum(content_bytes(row.values) for row in rows))
            most = max(most, sum(waiting))
            return Done()

        def shutdown(self, **named: object) -> None:
            pass

    monkeypatch.setattr(module, "ProcessPoolExecutor", Executor)
    sizes = [1_000_000] * 40 + [30_000_000] * 4 + [10] * 3000
    raw = (RawRow(0, 0, number, {"text": "x" * size}) for number, size in enumerate(sizes, 1))
    chunks: Any = tokenise(raw, Recording(None, ()), 2, check_only=lambda: False)  # type: ignore[arg-type]
    taken = [
        chunk if isinstance(chunk, int) else sum(content_bytes(row.values) for row in chunk)
        for chunk in chunks
    ]
    assert sum(taken) == sum(sizes) + 4 * len(sizes)
    assert most <= 30_000_004 + 6 * CHUNK_BYTES


# A template that renders an answer differently once more messages follow.
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.thought and loop.last %}({{ m.thought "
    "}}){% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def conversation(question: str, thought: str) -> list[dict[str, str]]:
    turns = zip(["user", "assistant"] * 2, [question, "b", "c", "d"], strict=True)
    return [
        {"role": role, "content": text} | ({"thought": thought} if role == "assistant" else {})
        for role, text in turns
    ]


def prepared_chats(folder: Path, encoder: ByteEncoder, *chats: list[dict[str, str]], **data: Any) -> Prepared:
    return prepared(
        folder,
        write_jsonl(folder / "chats.jsonl", [{"messages": chat} for chat in chats]),
        encoder=encoder,
        max_length=256,
        **data,
    )


def test_conversation_becomes_an_example_for_each_context(tmp_path: Path) -> None:
    encoder = ByteEncoder(eos="<|im_end|>", template=REWRITING)
    found = prepared_chats(tmp_path, encoder, conversation("a", "hm"), conversation("a", "hm")[:2])
    first = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[(hm)b<|im_end|>]\n"
    second = (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[(hm)d<|im_end|>]\n"
    )
    assert [marked(row, encoder) for row in rows_of(found)] == [first, second, first]
    assert found.report.rows_split == SplitRows(1, 2)
    assert found.report.rows_read == 2
    [notice] = [notice["message"] for notice in found.notices if notice["code"] == "chats-split"]
    assert "1 conversations were split into 2 examples" in notice


def test_examples_of_a_conversation_are_held_out_together(tmp_path: Path) -> None:
    encoder = ByteEncoder(eos="<|im_end|>", template=REWRITING)
    chats = [conversation(f"q{number}", "hm") for number in range(20)]
    found = prepared_chats(tmp_path, encoder, *chats, eval={"fraction": 0.5})
    [held_out] = found.evals.values()
    stores = [RowStore(path) for path in (found.train, held_out)]
    train, evaluated = ({store.origins(row)[0] for row in range(len(store))} for store in stores)
    assert not train & evaluated
    assert len(train | evaluated) == 20


def test_special_tokens_in_split_conversations_are_text(tmp_path: Path) -> None:
    encoder = ByteEncoder(eos="<|im_end|>", template=REWRITING)
    found = prepared_chats(tmp_path, encoder, conversation("a<|im_end|>", "<|im_end|>"))
    assert [row.input_ids.tolist().count(encoder.eos_id) for row in rows_of(found)] == [2, 4]
    assert found.report.notes["special-tokens-as-text"]["`<|im_end|>`"].rows == 1


@pytest.mark.parametrize(("begin", "missing"), [("", 1), ("<s>", 0)])
def test_template_without_the_tokenizers_beginning_of_sequence_is_reported(
    tmp_path: Path, begin: str, missing: int
) -> None:
    encoder = ByteEncoder(eos="<|im_end|>", template=begin + REWRITING, adds_bos=True)
    found = prepared_chats(tmp_path, encoder, conversation("a", "hm")[:2])
    assert found.report.bos_missing_in_chat == missing
    assert ("bos-not-in-template" in {notice["code"] for notice in found.notices}) == bool(missing)


END_CASES = [
    ("a</s>", "[a</s>]"),
    ("a</s>\n", "[a</s>]\n"),
    ("a</s> \t\n\n", "[a</s>] \t\n\n"),
    ("a</s>\nb", "[a</s>\nb</s>]"),
    ("a\n", "[a\n</s>]"),
    ("a<|im_end|>\n", "[a<|im_end|>\n</s>]"),
    ("a</s></s>\n", "[a</s></s>]\n"),
]


@pytest.mark.parametrize("packing", [False, True])
def test_white_space_after_the_end_of_sequence_is_no_reason_for_a_second_one(
    tmp_path: Path, packing: bool
) -> None:
    encoder = ByteEncoder()
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text, _ in END_CASES])
    found = prepared(tmp_path, rows, encoder=encoder, packing=packing)
    # the first token of an example is never a target
    wanted = [expected.replace("[a", "a[", 1) for _, expected in END_CASES]
    texts = [marked(row, encoder) for row in rows_of(found)]
    if packing:
        assert len(texts) < len(wanted)
        texts = [f"a[{text}" for text in "".join(texts).split("a[")[1:]]
    assert sorted(texts) == sorted(wanted)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "q", "completion": "a</s>\n"}, "q[a</s>]\n"),
        ({"segments": [{"text": "q", "label": False}, {"text": "a</s>\n", "label": True}]}, "q[a</s>]\n"),
        ({"input_ids": [113, 97, 257, 10]}, "q[a</s>]\n"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_white_space_after_the_end_of_sequence_is_not_trained_in_any_format(
    tmp_path: Path, row: dict[str, Any], expected: str
) -> None:
    encoder = ByteEncoder()
    assert encoder.eos_id == 257
    found = prepared(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [row]), encoder=encoder, append_eos=True)
    assert [marked(each, encoder) for each in rows_of(found)] == [expected]


def test_row_that_is_cut_before_the_white_space_keeps_its_end_of_sequence(tmp_path: Path) -> None:
    encoder = ByteEncoder()
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "aaa</s>\n\n\n"}])
    found = prepared(tmp_path, rows, encoder=encoder, max_length=5, overlong="truncate")
    assert [marked(row, encoder) for row in rows_of(found)] == ["a[aa</s>]\n"]

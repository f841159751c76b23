"""Prepare data from files to packed rows, with the account."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where
from fsdp_tune.data.account import mean_tokens
from fsdp_tune.data.preparation import Prepared, decoded_rows, prepare
from fsdp_tune.data.read import sources
from fsdp_tune.data.report import BeginTokens, NamedRows, ReportedExample, Spread
from fsdp_tune.data.store import RowStore
from fsdp_tune.data.stream.units import StreamUnit, refuse_changed_files
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.data.support import CHATML, ByteEncoder, marked, prepared, recipe_for, rows_of, write_jsonl

PAIRS = [{"prompt": f"{n}+1 is", "completion": f" {n + 1}"} for n in range(20)]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "pairs.jsonl", PAIRS)


def problems(folder: Path, *entries: Any, encoder: ByteEncoder | None = None, **data: Any) -> list[Problem]:
    with pytest.raises(FsdpTuneError) as caught:
        prepared(folder, *entries, encoder=encoder, **data)
    assert caught.value.exit_code == 2
    assert not list((folder / "cache").rglob("tokens.int32")), "nothing is left of data that cannot be used"
    return list(caught.value.problems)


def told(found: Prepared) -> dict[str, str]:
    return {notice.code: notice.message for notice in found.as_notices()}


def shown(found: Prepared, encoder: ByteEncoder | None = None) -> list[str]:
    return [marked(row, encoder or ByteEncoder()) for row in rows_of(found)]


def test_completion_and_eos_are_trained_and_prompt_is_not(tmp_path: Path, pairs: Path) -> None:
    found = prepared(tmp_path, pairs)
    assert shown(found)[:2] == ["0+1 is[ 1</s>]", "1+1 is[ 2</s>]"]
    assert told(found) == {}


def test_loss_on_all_trains_the_prompt_too(tmp_path: Path, pairs: Path) -> None:
    assert shown(prepared(tmp_path, pairs, loss_on="all"))[0] == "0[+1 is 1</s>]"


def test_bos_token_occurs_once_and_is_never_trained(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "abc"}, {"text": "<s>abc"}])
    encoder = ByteEncoder(adds_bos=True)
    found = prepared(tmp_path, rows, encoder=encoder)
    assert shown(found, encoder) == ["<s>[abc</s>]", "<s>[abc</s>]"]
    assert found.report.bos == BeginTokens(2, 0, 2)


def test_beginning_of_sequence_inside_a_text_is_counted(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "ab<s>c"}, {"text": "d"}])
    found = prepared(tmp_path, rows, encoder=ByteEncoder(adds_bos=True))
    assert found.report.bos == BeginTokens(1, 1, 2)
    assert "bos-twice" in told(found)


def test_end_of_sequence_is_never_doubled_and_can_be_left_out(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a ", "completion": "b</s>"}])
    assert shown(prepared(tmp_path, rows)) == ["a [b</s>]"]
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"prompt": "a ", "completion": "b"}])
    found = prepared(tmp_path, plain, append_eos=False)
    assert shown(found) == ["a [b]"]
    assert "1 of 1 examples do not train the token" in told(found)["eos-untrained"]


def test_tokenized_rows_are_unchanged_unless_eos_is_requested(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": [97, 98, 99], "labels": [-100, 98, -100]}])
    assert shown(prepared(tmp_path, rows)) == ["a[b]c"]
    assert shown(prepared(tmp_path, rows, append_eos=True)) == ["a[b]c[</s>]"]


def test_prompt_tokens_do_not_depend_on_completion(tmp_path: Path) -> None:
    """`:` and a space would become one token across the border, which the model never sees when it is given
    the prompt."""
    encoder = ByteEncoder(merges=[": ", "ab"])
    rows = write_jsonl(
        tmp_path / "rows.jsonl",
        [{"prompt": "ab:", "completion": " ab"}, {"prompt": "ab", "completion": " ab"}],
    )
    found = prepared(tmp_path, rows, encoder=encoder)
    first = rows_of(found)[0].input_ids.tolist()
    assert first[:2] == encoder.encode(["ab:"])[0]
    assert first == [encoder.id("ab"), ord(":"), ord(" "), encoder.id("ab"), encoder.eos_id]
    assert "prompts and completions (1 row)" in told(found)["tokenised-apart"]


def test_missing_white_space_between_prompt_and_completion_is_reported(tmp_path: Path) -> None:
    rows = write_jsonl(
        tmp_path / "rows.jsonl", [{"prompt": "a?", "completion": "b"}, {"prompt": "a?\n", "completion": "b"}]
    )
    assert "in 1 of 2 rows" in told(prepared(tmp_path, rows))["no-space"]
    assert "no-space" not in told(prepared(tmp_path, rows, separator="\n"))


def test_alpaca_notice_shows_the_prompt_format(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"instruction": "Add", "output": "2"}])
    without = prepared(tmp_path, rows, max_length=400)
    assert told(without) == {"alpaca-prompt": "alpaca rows are formatted with Stanford's two prompts"}
    assert shown(without)[0].endswith("### Response:[2</s>]")
    encoder = ByteEncoder(template=CHATML, eos="<|im_end|>")
    chat = prepared(tmp_path, rows, encoder=encoder, max_length=400)
    assert told(chat) == {"alpaca-prompt": "alpaca rows are formatted with the chat template"}
    assert shown(chat, encoder)[0].endswith("assistant\n[2<|im_end|>]\n")
    none = prepared(tmp_path, {"path": str(rows), "chat_template": "none"}, encoder=encoder, max_length=400)
    assert shown(none, encoder) == [text.replace("</s>", "<|im_end|>") for text in shown(without)]


def test_chats_ending_with_a_token_other_than_eos_are_reported(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows = write_jsonl(tmp_path / "rows.jsonl", [chat])
    found = prepared(tmp_path, rows, encoder=ByteEncoder(template=CHATML), max_length=200)
    assert "`</s>`" in told(found)["eos-not-in-template"]
    assert problems(tmp_path / "other", rows)[0].code == "no-chat-template"


def test_template_that_writes_the_beginning_of_sequence_itself_is_not_reported(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns * 2}])
    found = prepared(
        tmp_path,
        rows,
        encoder=ByteEncoder(template=CHATML, eos="<|im_end|>", bos="<|im_start|>"),
        max_length=200,
    )
    assert found.report.bos == BeginTokens(0, 1, 1)
    assert told(found) == {}


def test_omissions_of_a_template_are_reported_once_with_counts(tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    chats = [
        {"messages": [user | {"name": "Anna"}, answer]},
        {"messages": [user, answer], "tools": [{"name": "f"}]},
    ] * 2
    chats.append({"messages": [user, answer | {"train": True}, user]})
    rows = write_jsonl(tmp_path / "rows.jsonl", chats)
    found = prepared(tmp_path, rows, encoder=ByteEncoder(template=CHATML, eos="<|im_end|>"), max_length=200)
    assert found.train_rows == 5
    assert told(found) == {
        "not-rendered": "the chat template omits: `name` of `user` messages (2 rows), tools (2 rows)",
        "unanswered-turns": "turns after the last answer were left out, in conversations that end with: "
        "`user` (1 row)",
    }
    assert found.report.notes["not-rendered"]["tools"] == NamedRows(2, (f"{rows}:2", f"{rows}:4"))


def test_ignored_tool_call_error_names_its_row(tmp_path: Path) -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "get_weather", "arguments": {}}}],
    }
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "a"}, call]}])
    first, _ = problems(tmp_path, rows, encoder=ByteEncoder(template=CHATML), max_length=200)
    assert (first.where.line, first.message) == (1, "message 2: the chat template omits 'get_weather'")


def test_roles_of_the_recipe_map_the_speakers_of_the_rows(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "bing", "value": "b"}]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"conversations": turns}])
    encoder = ByteEncoder(template=CHATML, eos="<|im_end|>")
    first, _ = problems(tmp_path, rows, encoder=encoder)
    assert "the unknown role `bing`" in first.message
    assert "`data.roles` maps others" in first.message
    assert (
        "assistant\n[b<|im_end|>]"
        in shown(
            prepared(tmp_path, rows, encoder=encoder, roles={"bing": "assistant"}, max_length=200), encoder
        )[0]
    )


def test_tool_calls_have_the_same_tokens_from_json_lines_parquet_and_saved_sets(tmp_path: Path) -> None:
    """Arrow gives every call the arguments of all others, as nulls."""
    from datasets import Dataset

    template = CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
    )
    arguments: list[dict[str, Any]] = [{"query": "x", "c": None}, {"a": 1, "b": {"deep": "y"}}]
    calls = [[{"type": "function", "function": {"name": "f", "arguments": given}}] for given in arguments]
    chats = [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": call},
            ],
            "tools": call,
        }
        for call in calls
    ]
    Dataset.from_list(chats).save_to_disk(str(tmp_path / "saved"))
    Dataset.from_list(chats).to_parquet(str(tmp_path / "rows.parquet"))
    encoder = ByteEncoder(template=template, eos="<|im_end|>")
    from_lines, *others = (
        shown(prepared(tmp_path, path, encoder=encoder, max_length=300), encoder)
        for path in (
            write_jsonl(tmp_path / "rows.jsonl", chats),
            tmp_path / "rows.parquet",
            tmp_path / "saved",
        )
    )
    assert "null" not in "".join(from_lines)
    assert others == [from_lines, from_lines]


def test_rows_without_targets_are_dropped_and_listed(tmp_path: Path) -> None:
    rows = write_jsonl(
        tmp_path / "rows.jsonl",
        [{"input_ids": [1, 2], "labels": [-100, -100]}, {"input_ids": [1, 2]}, {"input_ids": [7]}],
    )
    found = prepared(tmp_path, rows)
    assert found.train_rows == 1
    assert found.report.rows_untrained == NamedRows(2, (f"{rows}:1", f"{rows}:3"))
    assert "2 of 3 rows" in told(found)["rows-untrained"]


def test_data_without_targets_is_an_error_with_counts(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": [1, 2], "labels": [-100, -100]}] * 3)
    (found,) = problems(tmp_path, rows)
    assert found.code == "no-supervised-tokens"
    assert "3 were read" in found.message
    assert "3 are empty or entirely masked" in found.message
    assert f"{rows}:1" in (found.hint or "")


def test_rows_truncated_to_no_targets_are_dropped_and_all_is_an_error(tmp_path: Path) -> None:
    long, short = {"prompt": "x" * 100, "completion": " y"}, {"prompt": "x", "completion": " y"}
    found = prepared(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [short, long]), max_length=50)
    assert found.train_rows == 1
    assert "1 row left out: all trained tokens come after" in told(found)["rows-dropped"]
    assert (
        problems(tmp_path / "other", write_jsonl(tmp_path / "long.jsonl", [long]), max_length=50)[0].code
        == "no-supervised-tokens"
    )


def test_set_without_rows_is_refused_for_what_left_it_empty(tmp_path: Path) -> None:
    long, masked = {"prompt": "x", "completion": " " + "y" * 100}, {"input_ids": [1], "labels": [-100]}
    train = write_jsonl(tmp_path / "train.jsonl", [{"prompt": "a", "completion": " b"}])
    (dropped,) = problems(
        tmp_path, write_jsonl(tmp_path / "long.jsonl", [long]), max_length=50, overlong="drop"
    )
    assert "`overlong: drop` leaves out examples of more than 50 tokens" in dropped.message
    evaluated = [{"path": str(write_jsonl(tmp_path / "empty.jsonl", [masked])), "label": "held"}]
    (empty,) = problems(tmp_path, train, max_length=50, eval=evaluated)
    assert "the set `held` has no row that can be used" in empty.message
    assert "max_length" not in (empty.hint or "")


def test_truncated_rows_are_counted_and_train_no_eos(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": " " + "b" * 30}])
    found = prepared(tmp_path, rows, max_length=10)
    assert shown(found) == ["a[ bbbbbbbb]"]
    assert "1 row truncated at data.max_length (10 tokens)" in told(found)["rows-truncated"]
    assert (
        next(notice for notice in found.notices if notice["code"] == "rows-truncated")["hint"]
        == f"the first: {rows}:1"
    )


def test_text_is_split_by_default_and_has_one_eos_token(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "abcdefghij"}])
    assert shown(prepared(tmp_path, rows, max_length=4)) == ["a[bcd]", "e[fgh]", "i[j</s>]"]


def test_bad_rows_are_named_with_line_and_column_and_all_are_counted(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    good = json.dumps(PAIRS[0])
    lines = [good] * 10_000 + ['{"prompt": "cut', '{"prompt": 5, "completion": "b"}', *["7"] * 10]
    rows.write_text("\n".join(lines) + "\n")
    *first, total = problems(tmp_path, rows)
    assert [(found.where.source, found.where.line, found.where.column) for found in first[:2]] == [
        (str(rows), 10_001, 12),
        (str(rows), 10_002, None),
    ]
    assert first[1].message == "column `prompt` holds a number instead of text"
    assert first[2].message.endswith("(as in 9 more rows)")
    assert len(first) == 3
    assert total.message == "12 of 10,012 rows cannot be used"
    assert "on_bad_row=skip" in (total.hint or "")


def test_skipped_rows_are_counted_and_listed_in_a_file(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(PAIRS[0]) + '\n{"prompt": \n{"prompt": "a", "completion": ""}\n')
    found = prepared(tmp_path, rows, on_bad_row="skip", max_bad_share=0.7)
    assert found.train_rows == 1
    assert found.report.rows_bad == NamedRows(2, (f"{rows}:2", f"{rows}:3"))
    listed = [json.loads(line) for line in (Path(found.path) / "bad_rows.jsonl").read_text().splitlines()]
    assert listed[1] == {"file": str(rows), "row": 3, "column": None, "reason": "the completion is empty"}
    assert "2 of 3 rows" in told(found)["bad-rows-skipped"]


def test_file_without_valid_rows_lists_bad_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{\n{\n")
    assert [
        (found.where.line, "(as in 1 more row)" in found.message) for found in problems(tmp_path, rows)
    ] == [(1, True)]
    rows.write_text("")
    assert problems(tmp_path, rows)[0].code == "no-rows"


def test_columns_are_kept_and_renamed(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"question": "a ", "answer": "b", "text": "no"}])
    entry = {
        "path": str(rows),
        "columns": ["question", "answer"],
        "rename_columns": {"question": "prompt", "answer": "completion"},
    }
    assert shown(prepared(tmp_path, entry)) == ["a [b</s>]"]
    wrong = problems(tmp_path / "x", {"path": str(rows), "rename_columns": {"questoin": "prompt"}})
    assert wrong[0].hint == "did you mean `question`?"
    twice = problems(tmp_path / "x", {"path": str(rows), "rename_columns": {"question": "answer"}})
    assert twice[0].code == "column-twice"
    assert "two columns have the name `" in twice[0].message


def test_later_row_that_has_the_new_name_too_is_bad(tmp_path: Path) -> None:
    """Either of its two columns could be meant, and the order of its keys would decide."""
    rows = [
        {"question": "a ", "answer": "b"},
        {"prompt": "p ", "question": "q ", "answer": "r"},
        {"question": "q ", "answer": "r", "prompt": "p "},
    ]
    entry = {
        "path": str(write_jsonl(tmp_path / "rows.jsonl", rows)),
        "rename_columns": {"question": "prompt", "answer": "completion"},
    }
    *found, _ = problems(tmp_path, entry)
    assert [(problem.where.line, problem.message) for problem in found] == [
        (2, "after `rename_columns` two columns have the name `prompt` (as in 1 more row)")
    ]


def test_bad_row_is_reported_with_the_column_names_of_its_file(tmp_path: Path) -> None:
    good = {"question": "a ", "answer": "b"}
    rows = write_jsonl(
        tmp_path / "rows.jsonl", [good, {"question": "a ", "answer": None}, {"question": "a ", "anser": "b"}]
    )
    *found, _ = problems(
        tmp_path, {"path": str(rows), "rename_columns": {"question": "prompt", "answer": "completion"}}
    )
    assert [(problem.where.line, problem.message) for problem in found] == [
        (2, "column `answer` holds null instead of text"),
        (3, "it has no column `answer`; it has question, anser"),
    ]


def test_csv_separator_error_differs_from_wrong_column_name(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("question;answer\na;b\n")
    (found,) = problems(
        tmp_path, {"path": str(rows), "rename_columns": {"question": "prompt", "answer": "completion"}}
    )
    assert "not by `;`" in (found.hint or "")


def test_two_formats_are_an_error_that_names_both(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"instruction": "a", "output": "b", "text": "c"}])
    (found,) = problems(tmp_path, rows)
    assert "looks like text and like alpaca" in found.message
    assert shown(prepared(tmp_path, rows, format="text"))[0] == "c[</s>]"


def test_unknown_format_and_missing_columns_are_errors(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b"}])
    assert "rename_columns" in (problems(tmp_path, rows)[0].hint or "")
    assert (
        "`prompt`, which the format prompt_completion needs"
        in problems(tmp_path, rows, format="prompt_completion")[0].message
    )


def test_loss_on_must_fit_the_format(tmp_path: Path, pairs: Path) -> None:
    assert problems(tmp_path, pairs, loss_on="assistant")[0].code == "loss-on"


def test_manifest_among_files_below_the_home_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", PAIRS)
    (folder / "manifest.json").write_text('{"version": 1}')
    monkeypatch.setenv("HOME", str(tmp_path))
    (found,) = problems(tmp_path, Path("~/data"))
    assert found.message == "it does not hold rows like those of a.jsonl"
    assert found.hint == "read only the files with rows: `path: ~/data/*.jsonl`"


def test_files_with_differing_columns_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", PAIRS)
    write_jsonl(folder / "b.jsonl", [{"text": "x"}])
    (found,) = problems(tmp_path, folder)
    assert found.code == "columns-differ"
    assert found.where.source == str(folder / "b.jsonl")
    assert found.message == f"its columns are text, and those of {folder / 'a.jsonl'} are prompt, completion"


def test_all_wrong_entries_are_reported_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, tmp_path / "one.jsonl", tmp_path / "two.jsonl")
    assert [problem.code for problem in found] == ["data-not-found"] * 2


def test_held_out_rows_are_not_trained_and_do_not_depend_on_the_tokenizer(
    tmp_path: Path, pairs: Path
) -> None:
    found = prepared(tmp_path, pairs, eval={"rows": 5})
    other = prepared(tmp_path, pairs, eval={"rows": 5}, packing=True, encoder=ByteEncoder(adds_bos=True))
    evals = [RowStore(store.evals["held_out"]) for store in (found, other)]
    held_out = [{origin for row in range(len(store)) for origin in store.origins(row)} for store in evals]
    assert held_out[0] == held_out[1]
    assert len(held_out[0]) == 5
    train = RowStore(found.train)
    assert not held_out[0] & {origin for row in range(len(train)) for origin in train.origins(row)}


def test_held_out_rows_of_each_source_are_a_set(tmp_path: Path, pairs: Path) -> None:
    other = tmp_path / "code.jsonl"
    other.write_text(
        "".join(json.dumps({"prompt": f"f({number}", "completion": ")"}) + "\n" for number in range(30))
    )
    found = prepared(tmp_path, pairs, {"path": str(other), "label": "code"}, eval={"rows": 25}, packing=True)
    assert list(found.evals) == ["pairs", "code"]
    stores = {label: RowStore(path) for label, path in found.evals.items()}
    origins = {
        label: [origin for row in range(len(store)) for origin in store.origins(row)]
        for label, store in stores.items()
    }
    assert {file for file, _ in origins["pairs"]} == {str(pairs)}
    assert {file for file, _ in origins["code"]} == {str(other)}
    assert len(origins["pairs"]) + len(origins["code"]) == 25


def test_best_model_by_a_source_without_held_out_rows_is_refused(tmp_path: Path, pairs: Path) -> None:
    small = tmp_path / "small.jsonl"
    small.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    raw = recipe_for(tmp_path, pairs, small, eval={"rows": 3}).model_dump(by_alias=True)
    recipe = Recipe.model_validate(
        {**raw, "training": {"metric_for_best_model": "small_loss", "gradient_accumulation_steps": 1}}
    )
    with pytest.raises(FsdpTuneError) as caught:
        prepare(recipe, ByteEncoder())
    (problem,) = caught.value.problems
    assert problem.code == "metric-not-measured"
    assert "pairs_loss" in str(problem.hint), "the only source that has held-out rows is measured by its name"


def test_empty_split_is_an_error_with_the_counts(tmp_path: Path, pairs: Path) -> None:
    (found,) = problems(tmp_path, pairs, eval={"fraction": 1e-9})
    assert found.code == "empty-split"
    assert "holds out 0 of 20 rows" in found.message


def test_eval_sets_have_labels_and_duplicates_are_refused(tmp_path: Path, pairs: Path) -> None:
    entry = {"path": str(pairs), "max_rows": 3}
    found = prepared(tmp_path, pairs, eval=[entry | {"label": "b"}, entry | {"label": "a"}])
    assert list(found.evals) == ["b", "a"], "in the order of the recipe"
    assert {label: len(RowStore(path)) for label, path in found.evals.items()} == {"b": 3, "a": 3}
    assert problems(tmp_path / "x", pairs, eval=[entry | {"label": "a"}] * 2)[0].code == "label-twice"


def test_packed_rows_hold_unsplit_examples_within_max_length(tmp_path: Path, pairs: Path) -> None:
    found = prepared(
        tmp_path,
        pairs,
        packing=True,
        max_length=40,
        eval=[{"path": str(pairs), "label": "e"}],
        eval_packing=False,
    )
    rows = rows_of(found)
    assert sum(len(row.lengths) for row in rows) == 20
    assert all(len(row.input_ids) <= 40 for row in rows)
    account = found.report.sets["train"]
    assert account.fill == pytest.approx(account.tokens / (len(rows) * 40))
    assert found.report.sets["e"].rows == 20, "eval_packing: false"


def test_wrapped_packing_cuts_and_fills(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "abcdef"}, {"text": "ghi"}])
    found = prepared(tmp_path, rows, packing=True, packing_strategy="wrapped", max_length=5)
    assert [(row.lengths, marked(row, ByteEncoder())) for row in rows_of(found)] == [
        ((5,), "a[bcde]"),
        ((2, 3), "f[</s>]g[hi]"),
        ((1,), "</s>"),
    ]


@pytest.mark.parametrize("max_length", [4, 5, 7, 1000])
def test_wrapped_packing_counts_the_tokens_that_are_trained(
    tmp_path: Path, pairs: Path, max_length: int
) -> None:
    """A target whose predecessor is in the previous row is not trained."""
    found = prepared(
        tmp_path, pairs, packing=True, packing_strategy="wrapped", max_length=max_length, overlong="split"
    )
    rows = rows_of(found)
    account = found.report.sets["train"]
    assert account.supervised_tokens == sum(int((row.labels != -100).sum()) for row in rows)
    assert account.tokens == sum(len(row.input_ids) for row in rows)
    assert (account.cut_by_packing > 0) == (max_length < 1000)


def test_data_that_are_reused_have_the_labels_of_the_recipe(tmp_path: Path, pairs: Path) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", PAIRS[:2])
    for label in ("sums", "facts"):
        found = prepared(tmp_path, {"path": str(pairs), "label": label}, {"path": str(other)})
        assert [account.label for account in found.report.inputs] == [label, None]
    assert found.reused


def test_data_that_are_reused_name_their_rows_by_the_files_of_the_recipe(tmp_path: Path) -> None:
    """Files that were renamed, also one into the name of another, are not prepared again."""
    rows = [{"text": f"{number} {'x' * 40}"} for number in range(3)]
    one, other = write_jsonl(tmp_path / "a.jsonl", rows), write_jsonl(tmp_path / "b.jsonl", [rows[0]])
    options: dict[str, Any] = {
        "max_length": 32,
        "overlong": "truncate",
        "eval": [{"path": str(other), "label": "held"}],
    }
    before = prepared(tmp_path, one, **options)
    one.rename(tmp_path / "new:1.jsonl")
    other.rename(one)
    renamed = {str(one): str(tmp_path / "new:1.jsonl"), str(other): str(one)}
    options["eval"][0]["path"] = str(one)
    found = prepared(tmp_path, tmp_path / "new:1.jsonl", **options)
    assert (found.reused, found.key) == (True, before.key)
    assert before.report.sets["train"].first_truncated[0] == f"{one}:1"
    account = found.report.sets["train"]
    assert account.first_truncated == tuple(f"{renamed[str(one)]}:{row}" for row in (1, 2, 3))
    assert found.report.sets["held"].also_trained.first == (f"{one}:1",)
    assert found.report.example is not None
    assert found.report.example.where == f"{renamed[str(one)]}:2"
    stores = found.training_store(), found.store(found.evals["held"])
    names = {path for store in stores for path, _ in store.origins(0)}
    assert names == set(renamed.values())
    told = " ".join(f"{notice.message} {notice.hint}" for notice in found.as_notices())
    assert f"{one}:1" in told
    assert str(other) not in told
    found.write(tmp_path / "data.json")
    assert Prepared.read(tmp_path / "data.json") == found


def test_account_has_rows_tokens_share_and_repeats_of_each_source(tmp_path: Path) -> None:
    long = write_jsonl(
        tmp_path / "long.jsonl", [{"prompt": "x " * 20, "completion": f"{n}"} for n in range(3)]
    )
    short = write_jsonl(tmp_path / "short.jsonl", [{"prompt": "", "completion": f"{n}"} for n in range(10)])
    found = prepared(tmp_path, {"path": str(long), "weight": 0.7}, {"path": str(short), "weight": 0.3})
    first, second = found.report.inputs
    assert (first.rows, first.rows_drawn, first.tokens) == (3, 23, 23 * 42)
    assert first.repeats == pytest.approx(23 / 3)
    assert first.share == pytest.approx(23 * 42 / (23 * 42 + 20))
    assert (second.rows, second.rows_drawn, second.repeats, second.tokens) == (10, 10, 1.0, 20)
    assert first.tokens + second.tokens == found.report.sets["train"].tokens
    assert told(found)["source-repeated"] == (
        f"`{long}`: each of its 3 rows is drawn 7.7 times an epoch; the source makes up 98% of the "
        "training tokens"
    )
    streamed = prepared(
        tmp_path,
        {"path": str(long), "weight": 0.7},
        {"path": str(short), "weight": 0.3},
        streaming=True,
        stream_lanes=1,
    )
    few = prepared(
        tmp_path,
        {"path": str(long), "weight": 0.99},
        {"path": str(short), "weight": 0.01},
        mixture={"stopping_strategy": "first_exhausted"},
    )
    assert told(few)["source-not-drawn"].startswith(f"`{short}`: none of its 10 rows is drawn")
    assert "source-repeated" not in told(streamed), "only the first rows of a stream are known"
    assert mean_tokens(streamed.report) == [42, 2], "a row counts once, however often it is drawn"
    by_tokens = prepared(
        tmp_path,
        {"path": str(long), "weight": 0.7},
        {"path": str(short), "weight": 0.3},
        mixture={"weight_by": "tokens"},
    )
    assert by_tokens.report.inputs[0].share == pytest.approx(0.7, abs=0.02)
    assert by_tokens.key != found.key


def test_token_shares_are_measured_after_truncation(tmp_path: Path) -> None:
    long = write_jsonl(tmp_path / "long.jsonl", [{"prompt": "", "completion": "x" * 500}] * 4)
    short = write_jsonl(tmp_path / "short.jsonl", [{"prompt": "", "completion": "y" * 9}] * 40)
    entries = [{"path": str(path), "weight": 0.5} for path in (long, short)]
    found = prepared(tmp_path, *entries, mixture={"weight_by": "tokens"}, max_length=50, overlong="truncate")
    assert found.report.inputs[0].share == pytest.approx(0.5, abs=0.02)


def test_eval_rows_in_training_set_are_counted_and_named(tmp_path: Path, pairs: Path) -> None:
    rows = [
        PAIRS[3],
        {"prompt": "100+1 is", "completion": " 101"},
        {"completion": PAIRS[7]["completion"], "prompt": PAIRS[7]["prompt"]},
    ]
    other = write_jsonl(tmp_path / "eval.jsonl", rows)
    found = prepared(tmp_path, pairs, eval=[{"path": str(other), "label": "new", "loss_on": "all"}])
    assert found.report.sets["new"].also_trained == NamedRows(2, (f"{other}:1", f"{other}:3"))
    assert told(found)["eval-rows-trained"].startswith(
        "new: 2 rows with the content or the tokens of a training row"
    )
    assert "eval-rows-trained" not in told(prepared(tmp_path, pairs, eval={"rows": 5}))


def test_split_depends_only_on_row_content(tmp_path: Path) -> None:
    chats = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}] for n in range(60)
    ]
    reversed_keys = [[dict(reversed(message.items())) for message in chat] for chat in chats]
    null_keys = [[message | {"name": None} for message in chat] for chat in chats]

    def split(name: str, rows: list[Any], **data: Any) -> list[int]:
        options: dict[str, Any] = {"encoder": ByteEncoder(template=CHATML), "eval": {"fraction": 0.3}, **data}
        found = prepared(tmp_path, _chats(tmp_path, name, rows), **options)
        return [origin for _, origin in _origins(found.evals["held_out"])]

    plain = split("plain", chats)
    assert len(plain) > 10
    assert (
        split("plain", chats, loss_on="all")
        == split("keys", reversed_keys)
        == split("nulls", null_keys)
        == plain
    )


def _chats(folder: Path, name: str, chats: list[Any]) -> Path:
    return write_jsonl(folder / f"{name}.jsonl", [{"messages": chat} for chat in chats])


def _origins(path: str) -> list[tuple[str, int]]:
    store = RowStore(path)
    return [origin for row in range(len(store)) for origin in store.origins(row)]


def test_mixture_weights_repeat_rows(tmp_path: Path, pairs: Path) -> None:
    few = write_jsonl(tmp_path / "few.jsonl", [{"prompt": "x ", "completion": "y"}])
    found = prepared(tmp_path, {"path": str(pairs), "weight": 0.5}, {"path": str(few), "weight": 0.5})
    assert shown(found).count("x [y</s>]") == 20
    assert found.train_rows == 40


def test_fewer_rows_than_a_global_batch_is_an_error_with_the_counts(tmp_path: Path, pairs: Path) -> None:
    recipe = recipe_for(tmp_path, pairs, packing=True)
    recipe = recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"per_device_train_batch_size": 8})}
    )
    with pytest.raises(
        FsdpTuneError,
        match=r"there are \d+ rows to train on, packed from 20 examples \(20 were read\), and one "
        r"step takes 8",
    ):
        prepare(recipe, ByteEncoder())
    assert prepare(recipe, ByteEncoder(), check_rows=False).train_rows < 8


def test_account_totals_match_rows(tmp_path: Path, pairs: Path) -> None:
    found = prepared(tmp_path, pairs)
    rows = rows_of(found)
    account = found.report.sets["train"]
    assert account.tokens == sum(len(row.input_ids) for row in rows)
    assert account.supervised_tokens == sum(int((row.labels != -100).sum()) for row in rows)
    assert account.supervised_tokens_per_example == Spread(3, 4.0, 4)
    assert found.report.eos.supervised == found.report.rows_kept == found.report.rows_read == 20


def test_decoded_rows_show_what_is_trained(tmp_path: Path, pairs: Path) -> None:
    found = prepared(tmp_path, pairs)
    assert found.report.example == ReportedExample(f"{pairs}:11", [("10+1 is", False), (" 11</s>", True)])
    rows = decoded_rows(found.store(), ByteEncoder(), 50)
    assert [example.where for (example,) in rows] == [f"{pairs}:{line}" for line in range(1, 21)]


def test_prepared_data_round_trip_through_json(tmp_path: Path, pairs: Path) -> None:
    found = prepared(tmp_path, pairs, eval={"rows": 2})
    found.write(tmp_path / "data.json")
    again = Prepared.read(tmp_path / "data.json")
    assert again is not None
    assert again.train == found.train
    assert again.content() == found.content()


def test_several_processes_give_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_tune.data.tokenise.rows.CHUNK_ROWS", 50)
    rows = write_jsonl(
        tmp_path / "rows.jsonl", [{"prompt": f"{n} ", "completion": str(n)} for n in range(700)]
    )
    alone = prepared(tmp_path / "alone", rows)
    several = prepared(tmp_path / "several", rows, num_proc=2)
    assert alone.key == several.key
    for name in ("tokens.int32", "trained.uint8", "origins.int64", "train/rows.int64"):
        assert (Path(alone.path) / name).read_bytes() == (Path(several.path) / name).read_bytes()


@pytest.mark.parametrize("packing", [False, True])
def test_duplicates_over_all_sources_are_counted_and_dropped_with_the_key(
    tmp_path: Path, packing: bool
) -> None:
    """A duplicate has the tokens and the targets of an earlier row; the same text with another trained part
    is none."""
    first = write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": "", "completion": text} for text in ("x", "xyz", "x")]
    )
    second = write_jsonl(
        tmp_path / "b.jsonl", [{"prompt": "", "completion": "xyz"}, {"prompt": "xy", "completion": "z"}]
    )
    third = write_jsonl(
        tmp_path / "c.jsonl", [{"input_ids": [*b"x", 257], "labels": [-100, 257]}, {"input_ids": [*b"xyz"]}]
    )
    entries = (first, second, third)
    copies = NamedRows(3, (f"{first}:3", f"{second}:1", f"{third}:1"))
    counted = prepared(tmp_path, *entries, packing=packing)
    dropped = prepared(tmp_path, *entries, packing=packing, drop_duplicates=True)
    assert (counted.report.sets["train"].repeated, counted.report.sets["train"].dropped) == (copies, 0)
    account = dropped.report.sets["train"]
    assert (account.dropped_duplicates, account.repeated, account.dropped) == (copies, NamedRows(), 3)
    left = [(first, 1), (first, 2), (second, 2), (third, 2)]
    store = RowStore(dropped.train)
    assert sorted(origin for row in range(len(store)) for origin in store.origins(row)) == [
        (str(path), row) for path, row in left
    ]
    assert [account.rows for account in dropped.report.inputs] == [2, 1, 1]
    assert (counted.key != dropped.key, counted.report.rows_kept, dropped.report.rows_kept) == (True, 7, 4)


def test_evaluation_rows_are_never_dropped_as_duplicates(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ("x", "y", "x")])
    evaluated = write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [*b"x", 257]}])
    found = prepared(tmp_path, train, eval=[{"path": str(evaluated)}], drop_duplicates=True)
    account = found.report.sets["eval"]
    assert (account.rows, account.dropped, account.also_trained) == (1, 0, NamedRows(1, (f"{evaluated}:1",)))
    assert "data.drop_duplicates" not in told(found)["eval-rows-trained"]


@pytest.mark.parametrize("split", [{"fraction": 0.5}, {"rows": 6}])
def test_rows_that_two_formats_write_are_not_on_both_sides_of_a_split(
    tmp_path: Path, split: dict[str, Any]
) -> None:
    """A split is by content, duplicates are by tokens; the loss on held-out rows must not be on rows that
    were trained."""
    texts = [f"text {number}" for number in range(12)]
    one = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    other = write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [*text.encode(), 257]} for text in texts])
    counted = prepared(tmp_path, one, other, eval=split)
    overlap = sum(account.also_trained.rows for account in counted.report.sets.values())
    assert overlap
    hints = {notice.code: str(notice.hint) for notice in counted.as_notices()}
    assert "`data.drop_duplicates: true` leaves out the training rows" in hints["eval-rows-trained"]
    found = prepared(tmp_path, one, other, eval=split, drop_duplicates=True)
    sides = [
        {tuple(store[row].input_ids.tolist()) for row in range(len(store))}
        for store in (RowStore(found.train), *map(RowStore, found.evals.values()))
    ]
    assert not sides[0] & set().union(*sides[1:])
    assert len(set().union(*sides)) == len(texts)
    accounts = found.report.sets
    assert (
        sum(account.also_trained.rows for account in accounts.values()),
        "eval-rows-trained" in told(found),
    ) == (0, False)
    assert found.report.rows_kept == sum(account.examples for account in accounts.values())
    assert accounts["train"].dropped_duplicates.rows == 24 - found.report.rows_kept


def test_weighted_shares_are_of_the_rows_without_duplicates(tmp_path: Path) -> None:
    many = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}] * 30)
    few = write_jsonl(tmp_path / "b.jsonl", [{"text": text} for text in ("a", "b", "x")])
    entries = [{"path": str(path), "weight": 1.0} for path in (many, few)]
    assert [each.rows_drawn for each in prepared(tmp_path, *entries, drop_duplicates=True).report.inputs] == [
        2,
        2,
    ]


def test_rows_of_a_stream_are_counted_once_for_files_that_do_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"row {number}"} for number in range(70)])
    counted = StreamUnit.counted
    found: list[StreamUnit] = []
    monkeypatch.setattr(StreamUnit, "counted", lambda unit: found.append(unit) or counted(unit))
    first, again = (prepared(tmp_path, path, streaming=True, stream_lanes=2) for _ in range(2))
    assert sum(first.unit_rows.values()) == 70
    assert (again.unit_rows, len(found)) == (first.unit_rows, len(first.unit_rows))
    write_jsonl(path, [{"text": f"row {number}"} for number in range(71)])
    assert sum(prepared(tmp_path, path, streaming=True, stream_lanes=2).unit_rows.values()) == 71


def test_stream_of_a_saved_data_set_that_is_rewritten_is_other_data(tmp_path: Path) -> None:
    """Its rows are counted again, and its files are compared when a run that reads them is resumed."""
    from datasets import Dataset

    def save(count: int) -> Prepared:
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        Dataset.from_list([{"text": f"row {number} of {count}"} for number in range(count)]).save_to_disk(
            tmp_path / "saved"
        )
        return prepared(tmp_path, tmp_path / "saved", streaming=True, stream_lanes=2)

    few, many = save(24), save(40)
    assert [sum(found.unit_rows.values()) for found in (few, many)] == [24, 40]
    assert few.key != many.key
    with pytest.raises(FsdpTuneError, match="changed since the run started"):
        refuse_changed_files(few.stamps, many.stamps)


def test_sources_of_a_stream_without_files_are_known_by_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loaders of the same name have their own rows, and so have the two splits of the example data."""

    class Extension:
        def load(self, where: Where) -> Any:
            return lambda path, options: [
                {"text": f"{word} {number}"} for number, word in enumerate(options["words"])
            ]

    monkeypatch.setattr(sources, "find_extension", lambda *_: Extension())

    def of(*words: str) -> Prepared:
        texts = [
            {"path": "sales", "weight": 1, "loader": "mine", "loader_options": {"words": each.split()}}
            for each in words
        ]
        return prepared(tmp_path, *texts, streaming=True, stream_lanes=2)

    found = of("a b c", "d")
    assert of("a b c", "d").key == found.key
    assert found.key not in {of("a b x", "d").key, of("a b c", "x").key}
    splits = [
        prepared(tmp_path, {"path": "builtin:arithmetic", "split": split}, streaming=True, stream_lanes=2)
        for split in ("train", "test")
    ]
    assert [sum(found.unit_rows.values()) for found in splits] == [889, 111]


@pytest.mark.parametrize(("packing", "known"), [(False, r"for 75 steps"), (True, r"for about \d+ steps")])
def test_stream_with_fewer_rows_than_the_run_needs_is_reported(
    tmp_path: Path, packing: bool, known: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * (5 + number % 20)}) + "\n" for number in range(300)))
    entry = {"path": str(path), "repeats": 2}
    options: dict[str, Any] = {"streaming": True, "stream_lanes": 2, "packing": packing, "max_length": 64}

    def notices(steps: int, **source: Any) -> list[Notice]:
        recipe = recipe_for(tmp_path, entry | source, **options)
        training = {"global_batch_size": 8, "gradient_accumulation_steps": 8, "max_steps": steps}
        return prepare(
            recipe.model_validate(recipe.model_dump(by_alias=True) | {"training": training}), ByteEncoder()
        ).as_notices()

    (found,) = [notice for notice in notices(2000) if notice.code == "stream-short"]
    assert re.search(known, found.message)
    enough = int(re.search(r"max_steps=(\d+)", found.hint or "")[1])  # type: ignore[index]
    assert not [
        notice
        for steps in (enough, enough // 2)
        for notice in notices(steps)
        if notice.code == "stream-short"
    ]
    assert not [notice for notice in notices(2000, repeats=None) if notice.code == "stream-short"]
    path.write_text(json.dumps({"text": "x"}) + "\n")
    (none,) = [notice for notice in notices(2000) if notice.code == "stream-short"]
    assert "for 0 steps" in none.message.replace("about ", "")
    assert "max_steps" not in (none.hint or "")


def test_segments_are_trained_by_their_label(tmp_path: Path) -> None:
    """As in axolotl's `input_output`: nothing is added, and special tokens are control tokens."""
    segments = [("<s>Hello\n", True), ("hi. ", True), ("goodbye ", False), ("farewell</s>", True)]
    row = {"segments": [{"text": text, "label": label} for text, label in segments]}
    encoder = ByteEncoder(adds_bos=True, merges=(" f", "ef"))
    found = prepared(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [row]), encoder=encoder)
    (only,) = rows_of(found)
    assert marked(only, encoder) == "<s>[Hello\nhi. ]goodbye [farewell</s>]"
    assert (
        only.input_ids.tolist()
        == encoder.encode(["<s>Hello\nhi. goodbye "])[0] + encoder.encode(["farewell</s>"])[0]
    )
    assert [notice["code"] for notice in found.notices] == ["special-tokens-as-control", "tokenised-apart"]
    as_text = prepared(tmp_path, tmp_path / "rows.jsonl", encoder=encoder, special_tokens_in_content="text")
    assert encoder.id("</s>") not in rows_of(as_text)[0].input_ids.tolist()
    assert "special-tokens-as-text" in [notice["code"] for notice in as_text.notices]

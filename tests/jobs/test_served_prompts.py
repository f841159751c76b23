"""Prompts of a run that are sent to a server, and what the server's endpoints contradict."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.answer.model_requests import ReferenceAnswer, ReferenceTokens
from fsdp_tune.comparison.openai_server import RefusedError, ServedAnswer, ServedPrompt
from fsdp_tune.core.errors import FsdpTuneError, Where
from fsdp_tune.jobs import served as job
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed, CompareOptions
from fsdp_tune.recipe.schema.recipe import Recipe


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose first source is rows.jsonl."""
    recipe = Recipe.model_validate({"data": {"train": [{"path": str(tmp_path / "rows.jsonl")}]}})
    monkeypatch.setattr(job, "run_of", lambda path: path)
    monkeypatch.setattr(job, "read_resolved", lambda _run: recipe)
    return tmp_path


def rows(run: Path, *lines: object) -> None:
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    (run / "rows.jsonl").write_text(text)


def test_first_rows_of_a_run_are_its_prompts(run: Path) -> None:
    rows(run, *({"prompt": f"row {number}", "completion": "x"} for number in range(1, 30)))
    found = job._prompts_of_run(str(run), Allowed())
    assert [each.shown for each in found] == [f"row {number}" for number in range(1, 9)]
    assert [(each.where.source, each.where.line) for each in found] == [
        (str(run / "rows.jsonl"), number) for number in range(1, 9)
    ]


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        ([{"prompt": "a", "completion": "b"}, "torn"], 2, "the rows of the run cannot be sent as prompts: "),
        ([{"question": "a"}], 1, "it has no `messages`, `prompt` or `text`; it has question"),
        ([{"prompt": 7}], 1, "cannot be sent as prompts: `prompt` "),
    ],
    ids=["no JSON", "no prompt", "no text"],
)
def test_row_that_cannot_be_sent_is_named(run: Path, lines: list[object], line: int, words: str) -> None:
    rows(run, *lines)
    with pytest.raises(FsdpTuneError) as caught:
        job._prompts_of_run(str(run), Allowed())
    (problem,) = caught.value.problems
    assert (problem.code, problem.where.source, problem.where.line) == (
        "compare-prompts",
        str(run / "rows.jsonl"),
        line,
    )
    assert words in problem.message
    assert "`--prompts FILE`" in str(problem.hint)


def test_source_without_rows_has_no_prompts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = SimpleNamespace(read=lambda: iter([]), names=[])
    monkeypatch.setattr(job, "find_source", lambda *_: empty)
    with pytest.raises(FsdpTuneError, match="has no rows") as caught:
        job._prompts_of_run(str(run), Allowed())
    assert caught.value.problems[0].code == "compare-prompts"


@pytest.mark.parametrize("a", ["http://127.0.0.1:1/v1", "HTTPS://host/v1"])
def test_server_is_the_second_side(a: str) -> None:
    with pytest.raises(FsdpTuneError, match="A is a server") as caught:
        job.compare_with_server(a, "http://127.0.0.1:2/v1", CompareOptions(), Observer())
    assert caught.value.problems[0].hint == "fsdp-tune compare RUN http://127.0.0.1:2/v1"


SPECIAL = ReferenceTokens("<s>", 0, "</s>", {})
REFERENCE = ReferenceAnswer([1, 2, 3], "one", None, None, {}, "two", [], [], is_ended=True)


class Server:
    """Reads a prompt as these ids, and counts so many in its answer."""

    def __init__(self, ids: tuple[int, ...] | None, count: int | None, *, takes_ids: bool = True) -> None:
        self.ids, self.count, self.takes_ids = ids, count, takes_ids
        self.sent: list[tuple[str, object]] = []

    def text_prompt(self, text: str) -> ServedPrompt:
        return ServedPrompt(text, self.ids)

    def complete(self, text: str, max_tokens: int) -> ServedAnswer:
        self.sent.append(("text", max_tokens))
        return ServedAnswer("two", "stop", self.count)

    def chat_prompt(self, messages: object, extra: object) -> ServedPrompt:
        self.sent.append(("prompt", extra))
        return ServedPrompt(None, self.ids)

    def chat(self, messages: object, extra: object, max_tokens: int) -> ServedAnswer:
        self.sent.append(("chat", extra))
        return ServedAnswer("two", "stop", self.count)

    def complete_ids(self, ids: list[int], max_tokens: int) -> ServedAnswer:
        if not self.takes_ids:
            raise RefusedError(422, "prompt must be a string")
        return ServedAnswer("two", "stop", len(ids))


def exchanged(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(job, "_score", lambda *_: None)
    model: Any = SimpleNamespace(refer=lambda prompts, _most: (SPECIAL, [REFERENCE] * len(prompts)))
    prompts: Any = [
        SimpleNamespace(shown="one", where=Where("a.jsonl", 1)),
        SimpleNamespace(shown="one", where=Where()),
    ]
    return job._exchanges(model, server, prompts, 8, Observer())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "count", "kept", "is_refused"),
    [
        ((1, 2, 3), 3, (1, 2, 3), False),
        ((1, 2, 3), None, (1, 2, 3), False),
        (None, 3, None, False),
        ((1, 2, 3), 4, None, True),
    ],
)
def test_ids_that_the_servers_own_count_contradicts_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
    ids: tuple[int, ...] | None,
    count: int | None,
    kept: tuple[int, ...] | None,
    is_refused: bool,
) -> None:
    found = exchanged(Server(ids, count), monkeypatch)
    assert [each.prompt.ids for each in found.exchanges] == [kept] * 2
    assert [each.name for each in found.exchanges] == ["prompt 1 (a.jsonl:1)", "prompt 2"]
    assert len(found.refused) == 2 * is_refused
    for line in found.refused:
        assert line.endswith("the server's endpoint for them returns 3, and it answered 4")


def test_server_that_takes_no_ids_is_compared_by_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, _), _, refused = exchanged(Server((1, 2, 3), 3, takes_ids=False), monkeypatch)
    assert (first.same, first.refused, refused) == (None, "prompt must be a string", [])


@pytest.mark.parametrize(
    ("tools", "variables", "extra"),
    [
        (None, {}, {}),
        ([{"type": "function"}], {}, {"tools": [{"type": "function"}]}),
        (None, {"thinking": False}, {"chat_template_kwargs": {"thinking": False}}),
    ],
)
def test_conversation_is_sent_with_its_tools_and_variables(
    tools: list[object] | None, variables: dict[str, object], extra: dict[str, object]
) -> None:
    reference = ReferenceAnswer([1], "one", [{"role": "user"}], tools, variables, "", [], [], is_ended=True)
    server = Server(None, None)
    job._asked(server, reference, 8)  # type: ignore[arg-type]
    assert server.sent == [("prompt", extra), ("chat", extra)]

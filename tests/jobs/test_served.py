"""A server's planted differences from the model are found, with their cause; what it does not return is never
equal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fsdp_tune
from fsdp_tune.answer.answering import Answering, StopFlag
from fsdp_tune.answer.find_model import find_model
from fsdp_tune.answer.model_requests import AnswerSettings, ModelsRequest
from fsdp_tune.answer.server_reference import Reference
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.read import sources
from fsdp_tune.jobs import served as job
from fsdp_tune.jobs.compare_answer import CompareAnswer
from fsdp_tune.jobs.evaluated_recipes import recipe_of_model
from fsdp_tune.jobs.generate import AnsweringModel
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed, CompareOptions, GenerateOptions
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.comparison.small_server import BOS, EOS, WITH_SYSTEM, Planted, SmallServer, serving, write_model

TOKENS = 8
PROMPTS = "one plus two\nthirty seven plus four is\n"


class InProcess(AnsweringModel):
    """In place of the child process, whose start takes seconds."""

    def __init__(self, folder: Path, dtype: str) -> None:
        model = find_model(str(folder))
        recipe = recipe_of_model(model, Allowed()).model_dump(mode="json", by_alias=True)
        settings = AnswerSettings(32, 0.0, 1.0, 0, shows_special_tokens=False)
        request = ModelsRequest([model], False, recipe, None, settings, "cpu", dtype, trust_remote_code=False)
        self._reference = Reference(Answering.load(request, StopFlag(), lambda _: None))
        self._answered: list[str] = []

    def _send(self, line: str) -> None:
        self._reference.reply(json.loads(line), lambda each: self._answered.append(json.dumps(each)))

    def _lines(self) -> Iterator[dict[str, Any]]:
        while self._answered:
            yield json.loads(self._answered.pop(0))


opened = cache(InProcess)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    write_model(root / "model")
    write_model(root / "other", seed=1)
    write_model(root / "bytes", whole_characters=False)
    (root / "prompts.txt").write_text(PROMPTS)
    (root / "text.jsonl").write_text(json.dumps({"text": "one plus two"}) + "\n")
    return root


@pytest.fixture(autouse=True)
def in_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)

    @contextmanager
    def open_model(name: str, options: GenerateOptions, **_: Any) -> Iterator[InProcess]:
        yield opened(Path(name).resolve(), options.dtype)

    monkeypatch.setattr(job, "open_model", open_model)


def compared(
    planted: Planted, *, weights: str = "model", model: str = "model", **options: Any
) -> tuple[CompareAnswer, SmallServer]:
    with serving(Path(weights), planted) as (url, server):
        return fsdp_tune.compare(
            model, url, CompareOptions(**{"prompts": Path("prompts.txt"), "max_new_tokens": TOKENS} | options)
        ), server


def status(found: CompareAnswer) -> dict[str, str]:
    return {stage.name: stage.status for stage in found.stages}


EQUAL = [
    (
        Planted("llama.cpp"),
        ["special_tokens", "template", "prompt_tokens", "logprobs", "same_tokens", "answers"],
        [],
    ),
    (
        Planted("vLLM", echoes=True),
        ["prompt_tokens", "logprobs", "same_tokens", "answers"],
        ["special_tokens"],
    ),
    (
        Planted("plain", returns_logprobs=False, takes_ids=False),
        ["prompt_counts", "answers"],
        ["special_tokens", "template", "prompt_tokens", "logprobs", "same_tokens"],
    ),
]


@pytest.mark.parametrize(("planted", "equal", "without"), EQUAL, ids=lambda each: getattr(each, "kind", ""))
def test_server_of_the_model_is_equal_in_what_it_returns(
    planted: Planted, equal: list[str], without: list[str]
) -> None:
    found, _ = compared(planted)
    assert status(found) == dict.fromkeys(equal, "equal") | dict.fromkeys(without, "not_compared")
    assert (found.equal, found.first, found.cause) == (True, None, None)
    assert found.served is not None
    if "logprobs" in equal:
        assert (found.served.max_difference or 1.0) < 1e-4
        prompt_tokens = sum(each.tokens_a - 1 for each in found.served.prompts) if planted.echoes else 0
        answers = found.served.scored_tokens - prompt_tokens
        assert TOKENS < answers <= 2 * TOKENS
    listed = " ".join(found.not_compared)
    assert all(stage.title in listed for stage in found.stages if stage.status == "not_compared")
    assert ("echo" in listed) is not planted.echoes


PLANTED = [
    (
        Planted("llama.cpp", template=WITH_SYSTEM),
        "template",
        "the server adds '<|system|>add numbers<|end|>'",
        True,
    ),
    (
        Planted("vLLM", template=WITH_SYSTEM),
        "prompt_tokens",
        "the server adds '<|system|>add numbers<|end|>'",
        True,
    ),
    (
        Planted("plain", template=WITH_SYSTEM, takes_ids=False),
        "prompt_counts",
        "such as a system prompt",
        False,
    ),
    (Planted("vLLM", adds_bos=True), "prompt_tokens", f"begin with {BOS!r} twice", True),
    (
        Planted("plain", adds_bos=True, returns_logprobs=False),
        "prompt_counts",
        "the beginning of text, twice or not at all",
        False,
    ),
    (
        Planted("plain", adds_bos=True, takes_ids=False),
        "prompt_counts",
        f"begin with {BOS!r} twice; with such prompts",
        True,
    ),
    (Planted("vLLM", shift=1), "logprobs", "shifted by one position", True),
    (Planted("llama.cpp", penalty=40.0), "answers", "a penalty on repeated tokens", True),
    (Planted("vLLM", echoes=True, rolled=1), "same_tokens", "shifted by one position", True),
    (Planted("vLLM", penalty=40.0, is_processed=True), "answers", "a penalty on repeated tokens", True),
    (Planted("vLLM", top_k=2), "answers", "does not choose the most probable tokens", False),
    (Planted("llama.cpp", top_k=6, is_processed=True), "logprobs", "for a constant of each position", True),
    (
        Planted("vLLM", template=WITH_SYSTEM.replace("{{ bos_token }}<|system|>add numbers<|end|>", "")),
        "prompt_tokens",
        f"lack {BOS!r}",
        True,
    ),
    (
        Planted("vLLM", template=WITH_SYSTEM.replace("<|assistant|>", "<|user|>")),
        "prompt_tokens",
        "in the place of",
        True,
    ),
    (Planted("llama.cpp", scale=1.2), "logprobs", "the server's logits are 1.2 times A's", False),
    (Planted("vLLM", scale=0.9), "logprobs", "the server's logits are 0.9 times A's", False),
]


@pytest.mark.parametrize(
    ("planted", "stage", "cause", "is_shown"),
    PLANTED,
    ids=[f"{each[0].kind}-{each[1]}-{each[2][:20]}" for each in PLANTED],
)
def test_planted_difference_is_found_with_its_cause(
    planted: Planted, stage: str, cause: str, is_shown: bool
) -> None:
    found, _ = compared(planted)
    assert not found.equal
    assert found.first is not None
    assert found.cause is not None
    assert (found.first.stage, found.cause.is_shown) == (stage, is_shown)
    assert cause in found.cause.text
    assert found.cause.hint


HALF = [Planted("vLLM", echoes=True, dtype="bfloat16"), Planted("llama.cpp", dtype="float16")]


@pytest.mark.parametrize("planted", HALF, ids=lambda planted: planted.dtype)
def test_server_in_half_precision_is_equal_within_what_the_model_itself_moves(planted: Planted) -> None:
    """Prompt tokens are improbable, so that half precision moves them more than those of a greedy answer."""
    found, _ = compared(planted)
    assert (found.verdict, found.cause) == ("equal", None)
    noisy, _ = compared(planted, weights="other")
    assert noisy.verdict == "different"


def test_no_cause_contradicts_log_probabilities_that_are_equal() -> None:
    for planted in (Planted("vLLM", top_k=2), Planted("llama.cpp", penalty=40.0), Planted("plain", top_k=3)):
        found, _ = compared(planted)
        assert found.cause is not None
        assert (status(found)["same_tokens"], found.verdict) == ("equal", "different")
        assert "weights" not in found.cause.text


@pytest.mark.parametrize("kind", ["llama.cpp", "vLLM", "plain"])
def test_other_weights_are_found(kind: str) -> None:
    found, _ = compared(Planted(kind, returns_logprobs=kind != "plain"), weights="other")
    assert found.first is not None
    assert found.cause is not None
    assert found.first.stage == ("answers" if kind == "plain" else "logprobs")
    assert "other weights" in found.cause.text
    assert found.served is not None
    assert found.served.scale is None


def test_server_that_does_not_stop_where_trained_answers_end(folder: Path, tmp_path: Path) -> None:
    """The fourth token of the first answer ends answers, by the generation config of the model."""
    import shutil

    own = Path(shutil.copytree(folder / "model", tmp_path / "model"))
    server = SmallServer(own, Planted())
    ids = server.prompt_of([{"role": "user", "content": PROMPTS.splitlines()[0]}])
    choice = server.completion(ids, {"max_tokens": 4, "logprobs": 1}, is_chat=True)["choices"][0]
    last = choice["logprobs"]["content"][3]["id"]
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": last}))
    stops = (EOS, "<|end|>", server.tokenizer.convert_ids_to_tokens(last))
    assert compared(Planted(ends=stops), model=str(own))[0].equal
    found, _ = compared(Planted(), model=str(own))
    assert found.first is not None
    assert (found.first.stage, found.first.a.partition(" with")[0]) == ("answers", "ends")
    assert found.cause is not None
    assert found.cause.is_shown
    assert found.cause.text.startswith("stop tokens: the server does not end its answers")
    early, _ = compared(Planted(ends=stops))
    assert early.cause is not None
    assert early.cause.text.startswith("stop tokens: the server ends answers where A goes on")
    by_text, _ = compared(Planted("plain", returns_logprobs=False), model=str(own))
    assert by_text.first is not None
    assert by_text.first.stage == "answers"


def test_texts_are_compared_without_a_template() -> None:
    found, server = compared(Planted("vLLM", echoes=True), prompts=Path("text.jsonl"))
    assert found.equal
    assert [path for path, _, _ in server.seen if "chat" in path] == []
    assert status(found)["prompt_tokens"] == "equal"


def test_tokens_given_as_text_are_identified_or_listed() -> None:
    """Tokens that are parts of a character have the same text, so that answers with them are scored up to the
    first of them."""
    found, _ = compared(Planted("llama.cpp", gives_ids=False), weights="bytes", model="bytes")
    assert found.equal
    assert found.served is not None
    unknown = [line for line in found.not_compared if "whose text is not that of a token" in line]
    assert len(unknown) == 2
    assert 0 < found.served.scored_tokens < 2 * TOKENS


def test_nothing_returned_is_not_equal() -> None:
    taken_apart = {"message": {"content": "", "reasoning_content": "hm"}, "finish_reason": "stop"}
    planted = Planted(
        "plain", answers={"/v1/chat/completions": (200, {"choices": [taken_apart]})}, takes_ids=False
    )
    found, _ = compared(planted)
    assert set(status(found).values()) == {"not_compared"}
    assert (found.equal, found.first) == (False, None)
    assert any("the server has taken it apart" in line for line in found.not_compared)


def test_logprobs_that_the_server_refuses_are_not_compared() -> None:
    planted = Planted(
        "plain", answers={"/v1/completions": (422, {"detail": "Unexpected fields"})}, returns_logprobs=False
    )
    found, _ = compared(planted)
    assert status(found)["same_tokens"] == "not_compared"
    assert any("Unexpected fields" in line for line in found.not_compared)
    assert found.equal


MISTAKES: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"key": "secret-7"}, {}, "server-key", "needs a key"),
    (
        {"key": "secret-7"},
        {"api_key_env": "WRONG_KEY"},
        "server-key",
        "refuses the key: wrong key: Bearer ***",
    ),
    ({}, {"api_key_env": "NO_SUCH_VARIABLE"}, "server-key", "the variable is not set"),
    (
        {"location": "http://127.0.0.2:1/v1/x?token=abc"},
        {},
        "server-redirect",
        "redirects to http://127.0.0.2:1/v1/x",
    ),
    ({"answers": {"/v1/models": (200, b"<html>")}}, {}, "server-response", "not a JSON object"),
    ({"answers": {"/v1/models": (500, b"<html>")}}, {}, "server-response", "(500)"),
    ({"answers": {"/v1/chat/completions": (200, {"choices": []})}}, {}, "server-response", "no `choices`"),
    (
        {"answers": {"/v1/chat/completions": (503, {"error": {"message": "Loading model"}})}},
        {},
        "server-busy",
        "Loading model",
    ),
    ({"models": ("one", "two")}, {}, "server-models", "serves 2 models: one, two"),
    ({"models": ()}, {}, "server-models", "serves 0 models"),
    ({}, {"prompts": None}, "compare-prompts", "`model` is not a run"),
    ({}, {"prompts": Path("none.txt")}, "data-not-found", "none.txt"),
]


@pytest.mark.parametrize(
    ("planted", "options", "code", "words"),
    MISTAKES,
    ids=[f"{each[2]}-{number}" for number, each in enumerate(MISTAKES)],
)
def test_server_that_answers_otherwise_is_an_error_with_a_hint(
    planted: dict[str, Any], options: dict[str, Any], code: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRONG_KEY", "secret-8")
    with pytest.raises(FsdpTuneError) as caught:
        compared(Planted(**planted), **options)
    (problem,) = caught.value.problems
    assert (problem.code, caught.value.exit_code) == (code, 2)
    assert words in problem.message
    assert problem.hint or code == "data-not-found"
    assert "secret" not in str(problem)


def test_key_is_sent_to_the_server_and_named_model_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "secret-7")
    found, server = compared(
        Planted(key="secret-7", models=("one", "two")), api_key_env="SERVER_KEY", served_model="two"
    )
    assert found.equal
    assert {headers.get("Authorization") for _, headers, _ in server.seen} == {"Bearer secret-7"}
    assert {body["model"] for path, _, body in server.seen if path.endswith("completions")} == {"two"}
    assert "secret-7" not in json.dumps(found.as_dict())


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://127.0.0.1:9/v1", "server-unreachable"),
        ("http://user:secret-7@127.0.0.1:9/v1", "server-key"),
        ("http://:8000/v1", "server-unreachable"),
        ("http://127.0.0.1:99999/v1", "server-unreachable"),
    ],
)
def test_address_without_a_server(url: str, code: str) -> None:
    with pytest.raises(FsdpTuneError) as caught:
        fsdp_tune.compare("model", url, CompareOptions(prompts=Path("prompts.txt")))
    (problem,) = caught.value.problems
    assert problem.code == code
    assert "secret-7" not in str(problem)


def test_address_without_v1_is_suggested() -> None:
    with serving(Path("model"), Planted()) as (url, _), pytest.raises(FsdpTuneError) as caught:
        fsdp_tune.compare("model", url.removesuffix("/v1"), CompareOptions(prompts=Path("prompts.txt")))
    assert caught.value.problems[0].hint == f"`{url}` is the usual address"


def test_loader_of_a_run_is_not_run_for_its_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"path": str(tmp_path), "loader": "mine"}
    recipe = Recipe.model_validate(
        {
            "model": {"from_config": {"model_type": "llama"}, "tokenizer": "builtin:arithmetic"},
            "data": {"train": [source]},
        }
    )
    called: list[object] = []
    for name, value in (("run_of", lambda path: path), ("read_resolved", lambda _run: recipe)):
        monkeypatch.setattr(job, name, value)
    monkeypatch.setattr(sources, "find_extension", lambda *given: called.append(given))
    with pytest.raises(FsdpTuneError) as caught:
        job.compare_with_server(str(tmp_path), "http://127.0.0.1:1/v1", CompareOptions(), Observer())
    (problem,) = caught.value.problems
    assert (problem.code, problem.where.key) == ("extension-not-allowed", "data.train[0].loader")
    assert called == []

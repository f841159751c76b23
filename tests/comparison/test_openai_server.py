"""Errors of a server: what it cannot answer now is not what it refuses."""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
from email.message import Message

import pytest

from fsdp_tune.comparison.openai_server import OpenAIServer
from fsdp_tune.core.errors import FsdpTuneError


class Opener:
    """Answers each request with the next status."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)

    def open(self, request: urllib.request.Request, timeout: float) -> io.BytesIO:
        if (status := self.statuses.pop(0)) != 200:
            error = io.BytesIO(b'{"error": {"message": "the reason"}}')
            raise urllib.error.HTTPError(request.full_url, status, "", Message(), error)
        return io.BytesIO(
            json.dumps({"data": [{"id": "m"}], "choices": [{"message": {"content": "4"}}]}).encode()
        )


def served(monkeypatch: pytest.MonkeyPatch, *statuses: int) -> OpenAIServer:
    opener = Opener(200, 404, 404, *statuses)  # /models, /props and /tokenize first
    monkeypatch.setattr(urllib.request, "build_opener", lambda *_: opener)
    return OpenAIServer("http://127.0.0.1:1/v1", None, None)


@pytest.mark.parametrize("status", [408, 429, 503])
def test_server_that_cannot_answer_now_does_not_refuse_logprobs(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    with pytest.raises(FsdpTuneError, match="the reason") as caught:
        served(monkeypatch, status, 200).chat([], {}, 4)
    assert caught.value.problems[0].code == "server-busy"


@pytest.mark.parametrize("before", [(), (404,)], ids=["/props", "/tokenize"])
def test_endpoint_that_cannot_answer_now_is_not_one_that_the_server_lacks(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, ...]
) -> None:
    opener = Opener(200, *before, 503)
    monkeypatch.setattr(urllib.request, "build_opener", lambda *_: opener)
    with pytest.raises(FsdpTuneError, match="cannot answer now") as caught:
        OpenAIServer("http://127.0.0.1:1/v1", None, None)
    assert caught.value.problems[0].code == "server-busy"


def test_server_that_takes_too_long_is_not_called_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    server = served(monkeypatch)

    def late(*_: object, **__: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(Opener, "open", late)
    with pytest.raises(FsdpTuneError, match=r"/v1/chat/completions` did not answer within 900 s"):
        server.chat([], {}, 4)


@pytest.mark.parametrize("status", [400, 500, 501])
def test_server_that_refuses_logprobs_answers_without_them(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    answer = served(monkeypatch, status, 200).chat([], {}, 4)
    assert (answer.text, answer.without_tokens) == ("4", "the server refuses `logprobs`: the reason")

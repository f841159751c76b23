"""A server with OpenAI's API: what it returns about prompts, and its answers with log-probabilities.

Three kinds are told apart by their other endpoints: llama.cpp (`/props`, `/apply-template`, `/tokenize` of a
text), vLLM (`/tokenize` of a chat), and any other, which has OpenAI's endpoints alone. A redirect is refused,
so that prompts and key reach no other server.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Literal

from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.core.secrets import mask_text
from fsdp_tune.core.values import as_list, as_mapping

Document = dict[str, object]
"""A JSON object that is sent or answered."""
Kind = Literal["llama.cpp", "vLLM", "OpenAI-compatible"]
CONNECT_SECONDS, ANSWER_SECONDS = 20.0, 900.0
"""The second includes the load of the model, which some servers start with the first request."""
MOST_BYTES = 64 << 20
ADDRESS = "give the address of the API, which mostly ends with `/v1`, and see the server's log"
TOP = 5
"""Most probable tokens of a position that are requested."""
_TOKEN_ID = "token_id:"
"""How vLLM writes ids in the place of texts, with `return_tokens_as_token_ids`."""
_NO_LOGPROBS = "the server returns no log-probabilities"
_BUSY = frozenset({408, 429, 502, 503, 504})
"""Statuses of a server that cannot answer now, such as while it loads the model; they say nothing about the
request."""


@dataclass(frozen=True, slots=True)
class ServedToken:
    id: int | None
    """None if the server gives the text alone."""
    text: str
    logprob: float
    """NaN where the server has none, such as at the first token of a prompt."""
    top: tuple[ServedToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    text: str | None
    """None if the server has taken it apart: reasoning, or calls of tools."""
    finish_reason: str | None
    prompt_tokens: int | None
    """Of `usage`."""
    tokens: tuple[ServedToken, ...] = ()
    without_tokens: str | None = None
    """Why `tokens` is empty."""
    prompt: tuple[ServedToken, ...] = ()
    """The prompt's tokens, if the server returns their log-probabilities."""


@dataclass(frozen=True, slots=True)
class ServedPrompt:
    """A prompt as the server reads it; None for what it does not return."""

    text: str | None
    ids: tuple[int, ...] | None


class RefusedError(Exception):
    """The server answers a request with an error. `str` is what it says."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: object, fp: object, code: object, msg: object, headers: object, newurl: object
    ) -> None:
        """Return None, so that urllib raises the redirect as an HTTPError."""


def is_url(name: str) -> bool:
    return name.lower().startswith(("http://", "https://"))


class OpenAIServer:
    """A connection to one model of a server."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        """Find out the kind of the server and its model. `model` None: the only one that it has.

        Raises: usage error if the server cannot be reached, is not one with OpenAI's API, or has several
        models.
        """
        self.url = _checked(url)
        self._root = self.url.removesuffix("/v1")
        self._key = key
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if _is_loopback(self.url):
            # a proxy cannot reach this machine's own address
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)
        self.model = self._model(model)
        self.properties: Mapping[str, object] = {}
        """Of llama.cpp: `/props`."""
        self.kind = self._kind()

    def _model(self, wanted: str | None) -> str:
        try:
            found = self._get("/models")
        except RefusedError as error:
            if error.status == 404 and not self.url.endswith("/v1"):
                hint = f"`{self.url}/v1` is the usual address"
                raise usage_error(
                    "server-response", f"`{self.url}/models` is not found on the server: {error}", hint=hint
                ) from error
            raise self._unusable("/models", str(error), error.status) from error
        names = [str(each["id"]) for each in map(as_mapping, as_list(found.get("data"))) if "id" in each]
        if wanted is not None:
            return wanted
        if len(names) != 1:
            shown = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
            message = f"`{self.url}` serves {len(names)} models{f': {shown}' if names else ''}"
            raise usage_error("server-models", message, hint="name one with `--served-model NAME`")
        return names[0]

    def _kind(self) -> Kind:
        found = self._optional("GET", "/props")
        if found is not None and ("chat_template" in found or "default_generation_settings" in found):
            self.properties = found
            return "llama.cpp"
        found = self._optional("POST", "/tokenize", {"model": self.model, "prompt": "a"})
        return "vLLM" if found is not None and _ids(found.get("tokens")) is not None else "OpenAI-compatible"

    @property
    def stored_type(self) -> str | None:
        """The type of the weights, such as `Q4_K - Medium`, if the server returns it."""
        found = self.properties.get("model_ftype")
        return str(found) if found else None

    def chat_prompt(
        self, messages: Sequence[Mapping[str, object]], extra: Mapping[str, object]
    ) -> ServedPrompt:
        """Return a conversation as the server's template renders it, with the prompt of an answer. `extra`:
        tools and such."""
        if self.kind == "llama.cpp":
            found = self._optional("POST", "/apply-template", {"messages": list(messages), **extra})
            text = found.get("prompt") if found is not None else None
            return self.text_prompt(text) if isinstance(text, str) else ServedPrompt(None, None)
        if self.kind == "vLLM":
            body: Document = {
                "model": self.model,
                "messages": list(messages),
                "add_generation_prompt": True,
                **extra,
            }
            return ServedPrompt(None, _ids((self._optional("POST", "/tokenize", body) or {}).get("tokens")))
        return ServedPrompt(None, None)

    def text_prompt(self, text: str) -> ServedPrompt:
        """Return a text as the server tokenises it: with what its tokenizer adds before every text."""
        if self.kind == "llama.cpp":  # as its /completions and /chat/completions tokenise
            found = self._optional(
                "POST", "/tokenize", {"content": text, "add_special": True, "parse_special": True}
            )
        elif self.kind == "vLLM":
            found = self._optional(
                "POST", "/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": True}
            )
        else:
            return ServedPrompt(None, None)
        return ServedPrompt(text, _ids((found or {}).get("tokens")))

    def chat(
        self, messages: Sequence[Mapping[str, object]], extra: Mapping[str, object], max_tokens: int
    ) -> ServedAnswer:
        """Return the greedy answer to a conversation. Raises: usage error if the server does not answer."""
        body: Document = {"messages": list(messages), **extra, "max_tokens": max_tokens}
        return self._answer("/chat/completions", body, {"logprobs": True, "top_logprobs": TOP}, _chat_answer)

    def complete(self, text: str, max_tokens: int) -> ServedAnswer:
        """Return the greedy continuation of a text. Raises: usage error if the server does not answer."""
        return self._answer(
            "/completions", {"prompt": text, "max_tokens": max_tokens}, {"logprobs": TOP}, _text_answer
        )

    def complete_ids(self, ids: Sequence[int], max_tokens: int) -> ServedAnswer:
        """Return the greedy continuation of given tokens, with the log-probabilities of the prompt where the
        server has `echo`.

        Raises: RefusedError if the server takes no tokens.
        """
        body: Document = {"prompt": list(ids), "max_tokens": max_tokens, "logprobs": TOP}
        if self.kind != "llama.cpp":  # it ignores `echo`
            try:
                found = _text_answer(self._post("/completions", body | {"echo": True}))
                is_echo = len(found.tokens) > len(ids) and math.isnan(found.tokens[0].logprob)
                if is_echo:
                    prompt, answer = found.tokens[: len(ids)], found.tokens[len(ids) :]
                    return ServedAnswer(
                        found.text, found.finish_reason, found.prompt_tokens, answer, None, prompt
                    )
            except RefusedError:
                pass  # without `echo` it may answer
        return _text_answer(self._post("/completions", body))

    def _answer(
        self, path: str, body: Document, logprobs: Document, read: Callable[[Document], ServedAnswer]
    ) -> ServedAnswer:
        """Return an answer, without log-probabilities if the server refuses the request for them. Raises:
        usage error."""
        try:
            return read(self._post(path, body | logprobs))
        except RefusedError as error:
            refused = error
        try:
            found = read(self._post(path, body))
        except RefusedError as error:
            raise self._unusable(path, str(error), error.status) from error
        why = f"the server refuses `logprobs`: {refused}"
        return ServedAnswer(found.text, found.finish_reason, found.prompt_tokens, (), why)

    def _get(self, path: str) -> Document:
        return self._request("GET", self.url + path, None, CONNECT_SECONDS)

    def _post(self, path: str, body: Document) -> Document:
        own = {"return_tokens_as_token_ids": True} if self.kind == "vLLM" else {}
        return self._request(
            "POST", self.url + path, {"model": self.model, "temperature": 0, **body, **own}, ANSWER_SECONDS
        )

    def _optional(self, method: str, path: str, body: Document | None = None) -> Document | None:
        """Return what an endpoint outside OpenAI's API returns; None if the server does not have it. Raises:
        usage error, also from a server that cannot answer now: that says nothing about the endpoint."""
        try:
            return self._request(method, self._root + path, body, CONNECT_SECONDS)
        except RefusedError:
            return None
        except FsdpTuneError as error:
            if error.problems[0].code in ("server-response", "server-redirect"):
                return None
            raise

    def _request(self, method: str, url: str, body: Document | None, seconds: float) -> Document:
        """Return the JSON object that is answered. Raises: RefusedError for an error of the server, usage
        error if there is none."""
        headers = {"Accept": "application/json", "User-Agent": "fsdp-tune"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=seconds) as response:
                raw = response.read(MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise self._http_error(url, error) from error
        except TimeoutError as error:  # while connecting it would be the reason of an URLError
            message = f"`{url}` did not answer within {seconds:g} s"
            raise usage_error("server-unreachable", message, hint="see the log of the server") from error
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            hint = "start the server, or correct the address: `http://HOST:PORT/v1`"
            raise usage_error(
                "server-unreachable", f"`{url}` cannot be reached: {reason}", hint=hint
            ) from error
        try:
            found = json.loads(raw) if len(raw) <= MOST_BYTES else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._unusable(url.removeprefix(self.url), "it is not a JSON object", None)
        return as_mapping(found)

    def _http_error(self, url: str, error: urllib.error.HTTPError) -> Exception:
        with error:
            words = _words(error.read(1 << 16), f"{error.code} {error.reason}")
        if 300 <= error.code < 400:
            to = mask_text(error.headers.get("Location") or "no address")
            hint = (
                "redirects are not followed, so that prompts and key go nowhere else: give the final address"
            )
            return usage_error("server-redirect", f"`{url}` redirects to {to}", hint=hint)
        if error.code in (401, 403):
            given = "refuses the key" if self._key is not None else "needs a key"
            hint = "put the key into a variable of the environment and name it: `--api-key-env NAME`"
            return usage_error("server-key", f"`{self.url}` {given}: {self._without_key(words)}", hint=hint)
        if error.code in _BUSY:
            message = f"`{url}` cannot answer now ({error.code}): {self._without_key(words)}"
            return usage_error(
                "server-busy", message, hint="try again when the log of the server shows that it is ready"
            )
        return RefusedError(error.code, self._without_key(words))

    def _without_key(self, words: str) -> str:
        return words.replace(self._key, "***") if self._key else words

    def _unusable(self, path: str, words: str, status: int | None) -> FsdpTuneError:
        message = (
            f"`{self.url}{path}` does not answer as OpenAI's API "
            f"does{f' ({status})' if status else ''}: {words}"
        )
        return usage_error(
            "server-response",
            message,
            hint="give the address of the API, which mostly ends with `/v1`; the log of the server",
        )


def _checked(url: str) -> str:
    """Return the URL without a slash at its end. Raises: usage error for one that has no host, or a
    password."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise usage_error(
            "server-unreachable", f"`{mask_text(url)}` is not an address: {error}", hint="http://HOST:PORT/v1"
        ) from error
    if not host:
        raise usage_error("server-unreachable", f"`{url}` names no host", hint="http://HOST:PORT/v1")
    if parts.username or parts.password:
        raise usage_error(
            "server-key",
            f"`{mask_text(url)}` holds a password",
            hint="name the variable that holds it: `--api-key-env NAME`",
        )
    if parts.query or parts.fragment:
        raise usage_error(
            "server-unreachable",
            f"`{mask_text(url)}` has a query, which no request keeps",
            hint="http://HOST:PORT/v1",
        )
    return url.rstrip("/")


def _is_loopback(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def key_of(name: str | None) -> str | None:
    """Return the key in a variable of the environment. Raises: usage error if it is not set."""
    if name is None:
        return None
    found = os.environ.get(name, "").strip()
    if not found or not found.isascii() or not found.isprintable():
        what = "is not set" if not found else "holds characters that a header may not have"
        raise usage_error(
            "server-key", f"`--api-key-env {name}`: the variable {what}", hint=f"`export {name}=…`"
        )
    return found


def _words(raw: bytes, otherwise: str) -> str:
    """Return the message of an error: of OpenAI (`error.message`), FastAPI (`detail`) or the first line of
    the body."""
    text = raw.decode(errors="replace").strip()
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    for name in ("error", "message", "detail"):
        found = as_mapping(found).get(name, found)
    if isinstance(found, str):
        text = found
    line = next(iter(text.splitlines()), "")
    return line[:300] if line and not line.startswith("<") else otherwise


def _ids(found: object) -> tuple[int, ...] | None:
    ids = tuple(each for each in as_list(found) if type(each) is int)
    return ids if isinstance(found, list) and len(ids) == len(as_list(found)) else None


def _choice(found: Document) -> Document:
    choices = as_list(found.get("choices"))
    if not choices or not isinstance(choices[0], dict):
        raise RefusedError(200, "the answer has no `choices`")
    return as_mapping(choices[0])


def _text_or_none(found: object) -> str | None:
    return found if isinstance(found, str) else None


def _prompt_tokens(found: Document) -> int | None:
    count = as_mapping(found.get("usage")).get("prompt_tokens")
    return count if type(count) is int else None


def _chat_answer(found: Document) -> ServedAnswer:
    choice = _choice(found)
    message = as_mapping(choice.get("message"))
    is_in_parts = any(message.get(name) for name in ("reasoning_content", "reasoning", "tool_calls"))
    text = None if is_in_parts else str(message.get("content") or "")
    tokens = _tokens(choice.get("logprobs"))
    ended = _text_or_none(choice.get("finish_reason"))
    return ServedAnswer(text, ended, _prompt_tokens(found), tokens, None if tokens else _NO_LOGPROBS)


def _text_answer(found: Document) -> ServedAnswer:
    choice = _choice(found)
    tokens = _tokens(choice.get("logprobs"))
    text, ended = _text_or_none(choice.get("text")) or "", _text_or_none(choice.get("finish_reason"))
    return ServedAnswer(text, ended, _prompt_tokens(found), tokens, None if tokens else _NO_LOGPROBS)


def _tokens(found: object) -> tuple[ServedToken, ...]:
    """Return the tokens of a chat (`content`), which llama.cpp gives for texts too, or of a text (`tokens`,
    `token_logprobs`)."""
    logprobs = as_mapping(found)
    if isinstance(logprobs.get("content"), list):
        return tuple(
            _token(as_mapping(each)) for each in as_list(logprobs["content"]) if isinstance(each, dict)
        )
    tops = as_list(logprobs.get("top_logprobs"))
    pairs = zip(as_list(logprobs.get("tokens")), as_list(logprobs.get("token_logprobs")), strict=False)
    return tuple(
        _plain(text, value, _tops(tops[at]) if at < len(tops) else ())
        for at, (text, value) in enumerate(pairs)
    )


def _tops(found: object) -> list[ServedToken]:
    """Return the most probable tokens of a position, given as log-probability by text."""
    return [_plain(*each) for each in as_mapping(found).items()]


def _token(raw: Document) -> ServedToken:
    tops = [as_mapping(each) for each in as_list(raw.get("top_logprobs")) if isinstance(each, dict)]
    found = _plain(
        raw.get("token"), raw.get("logprob"), [_token({**each, "top_logprobs": None}) for each in tops]
    )
    own = raw.get("id")
    return ServedToken(own if type(own) is int else found.id, found.text, found.logprob, found.top)


def _plain(token: object, value: object, top: Sequence[ServedToken] = ()) -> ServedToken:
    text = str(token)
    written = text.removeprefix(_TOKEN_ID) if text.startswith(_TOKEN_ID) else ""
    return ServedToken(
        int(written) if written.isdecimal() else None,
        "" if written else text,
        float(value) if isinstance(value, int | float) else math.nan,
        tuple(top),
    )

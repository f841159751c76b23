"""Answer prompts with a model, a piece of text at a time, in a process of its own:
`python -m fsdp_tune.answer.generate`.

The first line of stdin is a `ModelsRequest`, each further line a list of prompts: a row and its kind for each
of the models. SIGINT ends the answer that is being generated. Prints JSON lines:

`{"phase": "loading the model"}`, then `{"format": {…}, "device": "cpu", "notices": […]}` when prompts are
read. For each list of prompts `{"prompt": 0, "model": 0, "piece": "text"}` …,
`{"prompt": 0, "model": 0, "answer": {…}}` …, and `{"end": true}`; or, without an answer,
`{"bad": [[0, reason, hint], …]}` with every prompt that cannot be encoded. At the end of a failure
`{"problems": […], "exit_code": 2}`.

A comparison with a server sends objects instead of lists:
`{"references": [prompt, …], "max_new_tokens": 32}`, `{"scores": [{"ids", "tokens", "top"}, …]}` and
`{"decode": [ids, …]}` (`Reference`).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from fsdp_tune.answer.loaded_model import load_with_adapter
from fsdp_tune.answer.model_requests import (
    AnswerSettings,
    Identified,
    ModelsRequest,
    ReferenceAnswer,
    ReferenceTokens,
    Request,
    ScoredTokens,
    ScoreRequest,
)
from fsdp_tune.answer.reported_errors import Emit, reporting_errors
from fsdp_tune.data.prompts import EncodedPrompt, Prompt, PromptFormat
from fsdp_tune.data.read.row_files import RowError
from fsdp_tune.data.report import DataReport
from fsdp_tune.data.tokenise.tokenizer import TokenizerEncoder, load_encoder
from fsdp_tune.model.generate import end_ids_of, generate, room
from fsdp_tune.model.kernels.varlen import attention_with_masks
from fsdp_tune.recipe.schema.recipe import Recipe

REPLACEMENT = "\ufffd"
"""The character that an incomplete sequence of bytes decodes to."""


class StopFlag(StoppingCriteria):
    """Set by SIGINT: ends the answer after the token that is being computed."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> Any:  # noqa: ARG002  signature of the library
        return torch.full((input_ids.shape[0],), self.is_set, device=input_ids.device)


class PieceStreamer(BaseStreamer):
    """Emits the text of an answer as its tokens come.

    All tokens are decoded each time, so that the pieces together are the decoded answer for any tokenizer;
    transformers' TextStreamer starts over at line ends, where some tokenizers lose a space. A character whose
    bytes are not complete waits.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], end_ids: Sequence[int], emit: Callable[[str], None]
    ) -> None:
        self._decode, self._end_ids, self._emit = decode, frozenset(end_ids), emit
        self._is_prompt = True
        self.ids: list[int] = []
        self._shown = ""

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:  # `generate` puts the prompt first
            self._is_prompt = False
            return
        self.ids += value.flatten().tolist()
        self._show(self.text.rstrip(REPLACEMENT))

    def end(self) -> None:
        self._show(self.text)

    @property
    def text(self) -> str:
        return self._decode(self.ids)

    def _show(self, text: str) -> None:
        if len(text) > len(self._shown):
            self._emit(text[len(self._shown) :])
            self._shown = text


@dataclass(frozen=True, slots=True)
class Answerer:
    """A model that answers, with or without its adapter."""

    model: PreTrainedModel
    context: Callable[[], contextlib.AbstractContextManager[Any]]
    """Within it the model is the one that is meant: the base if it switches the adapter off."""
    encoder: TokenizerEncoder
    settings: AnswerSettings
    end_ids: tuple[int, ...]
    stop: StopFlag

    @torch.inference_mode()
    def answer(self, ids: Sequence[int], sample: int, emit: Callable[[str], None]) -> dict[str, Any]:
        """Generate the answer to a prompt with transformers' `generate`; `emit` gets its text in pieces.

        `sample` counts the answers to the same prompt, which draw different tokens.
        """
        emit("")  # the answer begins, and it may have no text
        streamer = PieceStreamer(self.text_of, self.end_ids, emit)
        started = time.monotonic()
        prompt = torch.tensor([list(ids)], device=self.model.device)
        torch.manual_seed(seed_of_draws(self.settings.seed, ids, sample))
        with self.context():
            generate: Any = self.model.generate
            generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=self._config(room(self.model, len(ids), self.settings.max_new_tokens)),
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([self.stop]),
            )
        is_ended = bool(streamer.ids) and streamer.ids[-1] in self.end_ids
        return {
            "prompt": self.encoder.decode(ids),
            "output": streamer.text,
            "tokens": len(streamer.ids),
            "prompt_tokens": len(ids),
            "finish_reason": "stop" if is_ended else "interrupted" if self.stop.is_set else "length",
            "seconds": round(time.monotonic() - started, 3),
        }

    def refuse_beyond_positions(self, ids: Sequence[int]) -> None:
        """Raises: RowError for a prompt that leaves no position for an answer."""
        if room(self.model, len(ids), self.settings.max_new_tokens) < 1:
            raise RowError(
                f"a prompt of {len(ids):,} tokens fills all positions of the model", hint="shorten it"
            )

    def _config(self, max_new_tokens: int) -> GenerationConfig:
        """Return what `generate` does, without what the model's generation_config.json adds: `self.model` has
        an empty one."""
        settings = self.settings
        sampling: dict[str, object] = {"do_sample": False}
        if settings.temperature > 0:
            sampling = {
                "do_sample": True,
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                "top_k": 0,
            }
        ends: dict[str, object] = {"eos_token_id": list(self.end_ids), "pad_token_id": self.encoder.pad_id}
        return GenerationConfig(max_new_tokens=max_new_tokens, **ends, **sampling)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, without the tokens that end it and other special ones unless the
        settings show them."""
        if self.settings.shows_special_tokens:
            return self.encoder.decode(ids)
        kept = [token for token in ids if token not in self.end_ids]
        text = self.encoder.tokenizer.decode(
            kept, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def seed_of_draws(seed: int, ids: Sequence[int], sample: int) -> int:
    """Return the seed of the tokens that are drawn for an answer: it depends on the prompt and on its number
    among equal ones alone.

    So an answer is the same whatever prompts come before it, and equal prompts have different answers.
    """
    text = json.dumps([seed, sample, *ids])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


@dataclass(frozen=True, slots=True)
class Answering:
    """The loaded models, and the format of their prompts."""

    format: PromptFormat
    answerers: tuple[Answerer, ...]
    stop: StopFlag
    samples: Counter[tuple[int, tuple[int, ...]]] = field(
        default_factory=Counter[tuple[int, tuple[int, ...]]]
    )
    """Answers so far, by model and prompt."""

    @classmethod
    def load(cls, request: ModelsRequest, stop: StopFlag, emit: Emit) -> Self:
        """Load tokenizer and models. Raises: FsdpTuneError."""
        emit({"phase": "loading the tokenizer"})
        encoder = load_encoder(recipe := Recipe.model_validate(request.recipe))
        prompts = PromptFormat(
            recipe, encoder, None if request.data is None else DataReport.model_validate(request.data)
        )
        loading = Request([], {}, encoder.vocabulary_size, encoder.pad_id, 1, request.device, request.dtype)
        loading.trust_remote_code = request.trust_remote_code
        found: list[Answerer] = []
        for model in request.models:
            emit({"phase": f"loading {model.name}"})
            loaded, adapted = load_with_adapter(model, loading)
            ends = tuple(sorted({*prompts.end_ids, *end_ids_of(loaded)}))
            # `generate` takes from it what it is not given, such as penalties
            loaded.generation_config = GenerationConfig()
            contexts: list[Callable[[], contextlib.AbstractContextManager[object]]] = [contextlib.nullcontext]
            if request.adapter_off and adapted is not None:
                contexts.append(adapted.disable_adapter)
            found += [
                Answerer(loaded, context, encoder, request.settings, ends, stop) for context in contexts
            ]
        described = prompts.describe(found[0].end_ids)
        emit(
            {
                "format": asdict(described),
                "notices": [notice.as_dict() for notice in (*encoder.notices, *prompts.notices)],
            }
        )
        return cls(prompts, tuple(found), stop)

    def answer(self, prompts: Sequence[Sequence[dict[str, object]]], emit: Emit) -> None:
        """Answer a list of prompts, until SIGINT: for each a `Prompt` by model, since each model continues
        its own conversation."""
        self.stop.is_set = False
        encoded: list[list[list[int]]] = []
        bad: list[tuple[int, str, str | None]] = []
        for number, of_models in enumerate(prompts):
            try:
                encoded.append(
                    [
                        self._encode(answerer, each)
                        for answerer, each in zip(self.answerers, of_models, strict=True)
                    ]
                )
            except RowError as error:
                bad.append((number, str(error), error.hint))
        if bad:
            emit({"bad": bad})
            return
        for number, of_models in enumerate(encoded):
            for which, (answerer, ids) in enumerate(zip(self.answerers, of_models, strict=True)):
                place = {"prompt": number, "model": which}
                answered = (which, tuple(ids))
                answer = answerer.answer(
                    ids, self.samples[answered], lambda piece, place=place: emit({**place, "piece": piece})
                )
                self.samples[answered] += 1
                emit({**place, "answer": answer})
                if self.stop.is_set:
                    break
        emit({"end": True})

    def _encode(self, answerer: Answerer, raw: dict[str, Any]) -> list[int]:
        ids = self.format.encode(Prompt(raw["kind"], raw["row"]), raw["system"])
        answerer.refuse_beyond_positions(ids)
        return ids


SENT_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Of a message, what OpenAI's API has."""


class Reference:
    """What the model makes of prompts and of answers of a server: tokens, log-probabilities, its own greedy
    answer."""

    def __init__(self, answering: Answering) -> None:
        self._format, self._answerer = answering.format, answering.answerers[0]
        self._encoder = self._answerer.encoder
        self._ids: dict[str, list[int]] | None = None
        """Ids by the text of the token."""

    def reply(self, request: dict[str, Any], emit: Emit) -> None:
        if "references" in request:
            self._references(request["references"], request["max_new_tokens"], emit)
        for each in request.get("scores", ()):
            emit({"score": asdict(self._score(ScoreRequest(**each)))})
        for ids in request.get("decode", ()):
            emit({"text": self._encoder.decode(ids)})
        emit({"end": True})

    def _references(self, prompts: Sequence[dict[str, Any]], max_new_tokens: int, emit: Emit) -> None:
        """Emit the special tokens, then for each prompt its ids, its text, what a server is sent, and the
        model's greedy answer."""
        encoder = self._encoder
        encoded: list[EncodedPrompt] = []
        bad: list[tuple[int, str, str | None]] = []
        for number, raw in enumerate(prompts):
            try:
                encoded.append(self._format.encoded(Prompt(raw["kind"], raw["row"])))
                self._answerer.refuse_beyond_positions(encoded[-1].ids)
            except RowError as error:
                bad.append((number, str(error), error.hint))
        if bad:
            emit({"bad": bad})
            return
        bos = None if encoder.bos_id is None else encoder.decode([encoder.bos_id])
        ends = {str(token): encoder.decode([token]) for token in self._answerer.end_ids}
        emit({"special": asdict(ReferenceTokens(bos, encoder.bos_id, encoder.eos_token, ends))})
        for each in encoded:
            emit({"reference": asdict(self._reference(each, max_new_tokens))})

    @torch.inference_mode()
    def _reference(self, prompt: EncodedPrompt, max_new_tokens: int) -> ReferenceAnswer:
        answerer, model = self._answerer, self._answerer.model
        settings: dict[str, Any] = {
            "end_ids": answerer.end_ids,
            "pad_id": self._encoder.pad_id,
            "device": model.device,
        }
        with answerer.context():
            (own,) = generate(model, [prompt.ids], max_new_tokens=max_new_tokens, **settings)
        margins = self._values([*prompt.ids, *own], len(own) + 1).topk(2, dim=-1).values
        lengths = [len(answerer.text_of(own[: count + 1])) for count in range(len(own))]
        chat = prompt.chat
        return ReferenceAnswer(
            ids=prompt.ids,
            text=prompt.text,
            messages=None if chat is None else [_openai_message(dict(message)) for message in chat.messages],
            tools=None if chat is None else chat.tools,
            variables={} if chat is None else chat.variables,
            answer_text=answerer.text_of(own),
            lengths=lengths,
            margins=(margins[:-1, 0] - margins[:-1, 1]).tolist(),
            is_ended=bool(own) and own[-1] in answerer.end_ids,
        )

    @torch.inference_mode()
    def _score(self, request: ScoreRequest) -> ScoredTokens:
        ids, known = request.ids, self._identified(request.tokens)
        every = self._values(
            [*ids, *known], len(ids) + len(known) if request.scores_prompt else len(known) + 1
        )
        values = every[-len(known) - 1 :]
        best = values.max(dim=-1)
        return ScoredTokens(
            tokens=known,
            texts=[self._encoder.decode([token]) for token in known],
            logprobs=values[range(len(known)), known].tolist() if known else [],
            best=best.indices.tolist(),
            best_texts=[self._encoder.decode([token]) for token in best.indices.tolist()],
            best_logprobs=best.values.tolist(),
            top=[
                [
                    None if (one := self._identified([each])) == [] else float(values[at, one[0]])
                    for each in of_position
                ]
                for at, of_position in enumerate(request.top[: len(known)])
            ],
            prompt_texts=[self._encoder.decode([token]) for token in ids[1:]]
            if request.scores_prompt
            else [],
            prompt=every[range(len(ids) - 1), ids[1:]].tolist() if request.scores_prompt else [],
        )

    def _values(self, ids: Sequence[int], last: int) -> torch.Tensor:
        """Return the log-probabilities after each of the last tokens, float32 [last, vocabulary]."""
        model = self._answerer.model
        row = torch.tensor([list(ids)], device=model.device)
        takes = inspect.signature(model.forward).parameters
        with self._answerer.context(), attention_with_masks(model.config):
            logits = model(
                row, use_cache=False, **({"logits_to_keep": last} if "logits_to_keep" in takes else {})
            ).logits[0, -last:]
        return torch.log_softmax(logits.float(), dim=-1)

    def _identified(self, tokens: Sequence[Identified]) -> list[int]:
        """Return the ids of tokens up to the first whose text is that of no token or of several.

        llama.cpp leaves out tokens that end within a character, and adds their bytes to the text of the next
        one: it ends there too.
        """
        found: list[int] = []
        for own, text in tokens:
            if own is None:
                self._ids = self._ids or self._ids_by_text()
                candidates = self._ids.get(text, [])
                if len(candidates) != 1:
                    break
                own = candidates[0]
            elif (
                text
                and text != self._encoder.decode([own])
                and text.strip() != self._encoder.decode([own]).strip()
            ):
                break
            if not 0 <= own < self._encoder.vocabulary_size:
                break
            found.append(own)
        return found

    def _ids_by_text(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for token in range(self._encoder.vocabulary_size):
            found.setdefault(self._encoder.decode([token]), []).append(token)
        return found


def _openai_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the form of OpenAI's API, in which the arguments of a call are text."""
    kept = {name: message[name] for name in SENT_FIELDS if message.get(name) is not None}
    calls: list[object] = []
    for number, call in enumerate(kept.get("tool_calls", ())):
        function = call.get("function", call)
        given = function.get("arguments", {})
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        calls.append(
            {
                "id": call.get("id", f"call_{number}"),
                "type": "function",
                "function": {"name": function["name"], "arguments": text},
            }
        )
    return kept | ({"tool_calls": calls} if calls else {})


_LESS_DEVICE_MEMORY = "`--dtype bf16`, a smaller `--max-new-tokens`, or `--device cpu`"
_LESS_HOST_MEMORY = "a smaller `--max-new-tokens`, or with `chat` and `generate` `--dtype bf16`"


def main() -> None:
    output = sys.stdout
    stop = StopFlag()
    signal.signal(signal.SIGINT, lambda _number, _frame: setattr(stop, "is_set", True))

    def emit(line: dict[str, object]) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()

    # libraries print; stdout must hold JSON alone
    with (
        contextlib.redirect_stdout(sys.stderr),
        reporting_errors(emit, device_hint=_LESS_DEVICE_MEMORY, host_hint=_LESS_HOST_MEMORY),
    ):
        lines = _lines()
        answering = Answering.load(ModelsRequest.from_json(next(lines)), stop, emit)
        reference: Reference | None = None
        for line in lines:
            request = json.loads(line)
            if isinstance(request, dict):
                reference = reference or Reference(answering)
                reference.reply(request, emit)
            else:
                answering.answer(request, emit)


def _lines() -> Iterator[str]:
    while line := sys.stdin.readline():
        yield line


if __name__ == "__main__":
    main()

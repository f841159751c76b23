"""What a model makes of prompts and of a server's answers, for a comparison with that server: tokens,
log-probabilities, its own greedy answers."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from fsdp_tune.answer.answering import Answering
from fsdp_tune.answer.model_requests import (
    Identified,
    ReferenceAnswer,
    ReferenceTokens,
    ScoredTokens,
    ScoreRequest,
)
from fsdp_tune.answer.reported_errors import Emit
from fsdp_tune.data.prompts import EncodedPrompt, Prompt
from fsdp_tune.data.read.row_files import RowError
from fsdp_tune.model.generate import generate
from fsdp_tune.model.kernels.varlen import attention_with_masks

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

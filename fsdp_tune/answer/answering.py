"""Models that answer prompts with transformers' `generate`, a piece of text at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from fsdp_tune.answer.loaded_model import load_with_adapter
from fsdp_tune.answer.model_requests import AnswerSettings, ModelsRequest, Request
from fsdp_tune.answer.reported_errors import Emit
from fsdp_tune.data.prompts import Prompt, PromptFormat
from fsdp_tune.data.read.row_files import RowError
from fsdp_tune.data.report import DataReport
from fsdp_tune.data.tokenise.tokenizer import TokenizerEncoder, load_encoder
from fsdp_tune.model.generate import end_ids_of, room
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

"""Answers are those of transformers' own `generate`, in pieces that make up the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from fsdp_tune.answer.answering import Answering, PieceStreamer, StopFlag
from fsdp_tune.answer.find_model import ModelToEvaluate, find_model
from fsdp_tune.answer.model_requests import AnswerSettings, ModelsRequest
from fsdp_tune.data.prompts import Prompt, question
from fsdp_tune.data.read.file_access import EOS, PAD, builtin_tokenizer
from fsdp_tune.jobs.evaluated_recipes import recipe_of_model
from fsdp_tune.jobs.options import Allowed
from tests.parity.peft_adapters import make_adapter

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTIONS = ["one plus two", "thirty seven plus four is", "é你 👍"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, whose template ends turns with <|end|> and whose generation config has a penalty, and
    `adapter` on it."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=builtin_tokenizer("builtin:arithmetic"), eos_token=EOS, pad_token=PAD
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]}
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=0.3, **sizes
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=5, repetition_penalty=5.0, do_sample=True, temperature=2.0
    )
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    make_adapter(root / "model", {"r": 4}, root / "adapter")
    return root


def answering(folder: Path, *, adapter_off: bool = False, **settings: Any) -> Answering:
    model = find_model(str(folder))
    values = {
        "max_new_tokens": 20,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 0,
        "shows_special_tokens": False,
    } | settings
    recipe = recipe_of_model(ModelToEvaluate("", str(folder.parent / "model")), Allowed()).model_dump(
        mode="json", by_alias=True
    )
    request = ModelsRequest(
        [model], adapter_off, recipe, None, AnswerSettings(**values), "cpu", "auto", trust_remote_code=False
    )
    return Answering.load(request, StopFlag(), lambda _: None)


def lines_of(found: Answering, *prompts: Prompt) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    found.answer(
        [[asdict(prompt) | {"system": None}] * len(found.answerers) for prompt in prompts], lines.append
    )
    return lines


def answers_of(found: Answering, *prompts: Prompt) -> list[dict[str, Any]]:
    return [line["answer"] for line in lines_of(found, *prompts) if "answer" in line]


def of_transformers(model: Any, tokenizer: Any, text: str, ends: Sequence[int]) -> list[int]:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model.generation_config = GenerationConfig()
    config = GenerationConfig(
        do_sample=False, max_new_tokens=20, eos_token_id=list(ends), pad_token_id=tokenizer.pad_token_id
    )
    return model.generate(**ids, generation_config=config)[0, ids["input_ids"].shape[1] :].tolist()


def test_greedy_answers_are_those_of_transformers(models: Path) -> None:
    found = answering(models / "model", shows_special_tokens=True)
    model = AutoModelForCausalLM.from_pretrained(models / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(models / "model")
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", EOS)]
    assert set(found.answerers[0].end_ids) == {*ends, 5}, (
        "of the template, the tokenizer and the generation config"
    )
    answers = answers_of(found, *map(question, QUESTIONS))
    for text, answer in zip(QUESTIONS, answers, strict=True):
        expected = of_transformers(model, tokenizer, text, [*ends, 5])
        assert answer["output"] == tokenizer.decode(expected, clean_up_tokenization_spaces=False)
        assert answer["tokens"] == len(expected)
        assert answer["prompt"] == f"<|user|>{text}<|end|><|assistant|>"
        assert answer["finish_reason"] == ("stop" if expected[-1] in (*ends, 5) else "length")


def test_adapter_on_and_off_are_the_tuned_model_and_its_base(models: Path) -> None:
    from peft import PeftModel

    found = answers_of(
        answering(models / "adapter", adapter_off=True, shows_special_tokens=True), *map(question, QUESTIONS)
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(models / "model")
    ends = [tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.eos_token_id, 5]
    base = AutoModelForCausalLM.from_pretrained(models / "model")
    of_base = [of_transformers(base, tokenizer, text, ends) for text in QUESTIONS]
    tuned = PeftModel.from_pretrained(base, models / "adapter").get_base_model()
    of_tuned = [of_transformers(tuned, tokenizer, text, ends) for text in QUESTIONS]
    assert of_base != of_tuned
    expected = [
        tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        for pair in zip(of_tuned, of_base, strict=True)
        for ids in pair
    ]
    assert [answer["output"] for answer in found] == expected


def test_pieces_make_up_the_answer_which_ends_at_the_turn(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answering(models / "model")
    tokenizer = found.answerers[0].encoder.tokenizer
    script = [
        *tokenizer("two é你👍\n\n  four").input_ids,
        tokenizer.convert_tokens_to_ids("<|user|>"),
        tokenizer.convert_tokens_to_ids("<|end|>"),
        7,
    ]
    play(found, monkeypatch, script)
    lines = lines_of(found, question("hi"))
    pieces = [line["piece"] for line in lines if "piece" in line]
    assert pieces[0] == ""
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 8
    (answer,) = [line["answer"] for line in lines if "answer" in line]
    assert "".join(pieces) == answer["output"] == "two é你👍\n\n  four"
    assert (answer["tokens"], answer["finish_reason"]) == (len(script) - 1, "stop")
    shown = answering(models / "model", shows_special_tokens=True)
    play(shown, monkeypatch, script)
    assert answers_of(shown, question("hi"))[0]["output"] == "two é你👍\n\n  four<|user|><|end|>"


def play(found: Answering, monkeypatch: pytest.MonkeyPatch, script: Sequence[int]) -> None:
    """Have the model write a text: the logits of its next tokens are replaced."""
    tokens = iter(script)
    forward = found.answerers[0].model.forward

    def scripted(*arguments: Any, **options: Any) -> Any:
        outputs = forward(*arguments, **options)
        outputs.logits[:, -1] = 0
        outputs.logits[:, -1, next(tokens)] = 1
        return outputs

    monkeypatch.setattr(found.answerers[0].model, "forward", scripted)


@pytest.mark.parametrize("text", ["plain words", "é你 👍🏽 ünï", "a\nb\n\n  c", ""])
def test_streamed_pieces_of_bytes_are_characters(text: str) -> None:
    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    pieces: list[str] = []
    streamer = PieceStreamer(decode, (), pieces.append)
    streamer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for byte in text.encode():
        streamer.put(torch.tensor([byte]))
    streamer.put(torch.tensor([0xE4]))  # cut inside a character
    streamer.end()
    assert "".join(pieces) == streamer.text == text + "\ufffd"
    assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_interrupted_answer_is_returned_and_the_base_is_not_asked(models: Path) -> None:
    found = answering(models / "adapter", adapter_off=True)
    lines: list[dict[str, Any]] = []

    def emit(line: dict[str, Any]) -> None:
        lines.append(line)
        found.stop.is_set |= bool(line.get("piece"))

    found.answer([[asdict(question("hi")) | {"system": None}] * 2], emit)
    (answer,) = [line["answer"] for line in lines if "answer" in line]
    assert answer["finish_reason"] == "interrupted"
    assert answer["tokens"] < 20
    assert len(answers_of(found, question("hi"))) == 2, "the next prompt is answered by both"


def test_drawn_answers_depend_on_the_seed_and_not_on_the_order(models: Path) -> None:
    def drawn(*texts: str, seed: int) -> list[str]:
        found = answering(models / "model", temperature=1.5, top_p=0.9, seed=seed)
        return [answer["output"] for answer in answers_of(found, *map(question, texts))]

    first, second = drawn("one", "two", seed=1)
    assert drawn("two", "one", seed=1) == [second, first]
    assert drawn("one", "two", seed=2) != [first, second]
    copies = drawn("two", "one", "one", "one", "two", seed=1)
    assert copies[:2] == [second, first], "the first sample of a prompt is the same whatever comes before it"
    assert len(set(copies)) == 5, "copies of a prompt have answers of their own"
    assert drawn("one", "one", "one", seed=1) == copies[1:4]


def test_every_prompt_that_cannot_be_answered_is_reported_before_the_first_answer(models: Path) -> None:
    found = answering(models / "model")
    lines = lines_of(found, question("one " * 80), question("hi"), Prompt("text", {"text": ""}))
    (line,) = lines
    assert [(number, reason.partition(" of ")[0]) for number, reason, _ in line["bad"]] == [
        (0, "a prompt"),
        (2, "the prompt has no token"),
    ]

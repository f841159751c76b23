"""Prompts of `training.sample`: their ids, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.tokenise import chat as chat_module
from fsdp_tune.data.tokenise.sample_prompts import sample_prompts
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.data.support import CHATML, ByteEncoder

USER = {"role": "user", "content": "hi"}


def recipe(prompts: list[Any]) -> Recipe:
    return Recipe.model_validate(
        {"data": {"max_length": 64}, "training": {"sample": {"every": 5, "prompts": prompts}}}
    )


def test_texts_get_bos_and_chats_the_generation_prompt() -> None:
    encoder = ByteEncoder(adds_bos=True, template=CHATML)
    text, chat = sample_prompts(recipe(["one", [USER]]), encoder)
    assert encoder.decode(text) == "<s>one"
    assert encoder.decode(chat) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_recipe_without_samples_has_no_prompts() -> None:
    assert sample_prompts(Recipe(), ByteEncoder()) == []


@pytest.mark.parametrize(
    ("prompts", "template", "code", "words"),
    [
        ([], CHATML, "sample-prompt", "takes 1 to 64"),
        (["a" * 64], CHATML, "sample-prompt", "has 64 tokens"),
        ([[USER, {"role": "assistant", "content": "yes"}]], CHATML, "sample-prompt", "ends with a message"),
        ([[{"role": "human", "content": "hi"}]], CHATML, "sample-prompt", "needs `role` and `content`"),
        ([[USER]], None, "no-chat-template", "has no chat template"),
        ([[USER]], "{{ raise_exception('no users') }}", "sample-prompt", "rejects the prompt: no users"),
    ],
)
def test_prompt_that_cannot_be_answered_is_refused(
    prompts: list[Any], template: str | None, code: str, words: str
) -> None:
    with pytest.raises(FsdpTuneError) as caught:
        sample_prompts(recipe(prompts), ByteEncoder(template=template))
    (problem,) = caught.value.problems
    assert problem.code == code
    assert words in problem.message
    assert str(problem.where.key).startswith("training.sample.prompts")


def test_endless_template_of_a_prompt_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "TEMPLATE_SECONDS", 0.3)
    endless = "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(FsdpTuneError, match="runs for more than"):
        sample_prompts(recipe([[USER]]), ByteEncoder(template=endless))

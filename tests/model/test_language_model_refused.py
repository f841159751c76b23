"""Models of several modalities whose text is not a causal LM of transformers by itself: each is refused by
name, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CLIPTextConfig, LlamaConfig, LlamaForCausalLM

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading.language_model import language_model_of, main

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}


class Full:
    """A model of several modalities around a LLaMA. `changes` replace its methods."""

    def __init__(self, **changes: Any) -> None:
        torch.manual_seed(0)
        self.inner = LlamaForCausalLM(
            LlamaConfig(vocab_size=16, bos_token_id=14, eos_token_id=15, **SIZES)
        ).eval()
        self.config, self.dtype = self.inner.config, torch.float32
        self.generation_config = self.inner.generation_config
        vars(self).update(changes)

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        return self.inner.get_output_embeddings()

    def get_decoder(self) -> Any:
        return self.inner.model

    def __call__(self, **inputs: Any) -> Any:
        return SimpleNamespace(logits=self.answer(self.inner(**inputs).logits))

    def answer(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def refusal_of(full: Full) -> tuple[str, str | None]:
    with pytest.raises(FsdpTuneError) as caught:
        language_model_of(full, "it")  # type: ignore[arg-type]
    problem = caught.value.problems[0]
    assert (problem.code, caught.value.exit_code) == ("model-refused", 2)
    return problem.message, problem.hint


def test_text_shares_the_weights_and_has_the_logits_of_the_full_model() -> None:
    full: Any = Full()
    found = language_model_of(full, "it")
    assert type(found) is LlamaForCausalLM
    assert found.get_decoder() is full.inner.model
    assert found.get_output_embeddings() is full.inner.get_output_embeddings()
    assert found.generation_config.eos_token_id == 15
    inner: Any = Full(get_decoder=lambda: full.inner)
    inner.inner = full.inner
    assert language_model_of(inner, "it") is full.inner, "a class may hold its causal LM"


def other_decoder() -> nn.Module:
    return nn.Linear(2, 2)


def unfilled_decoder() -> Any:
    model = Full().inner.model
    model.norm.weight = nn.Parameter(torch.empty(8, device="meta"))
    return model


def refuses_text(_logits: torch.Tensor) -> torch.Tensor:
    raise ValueError("an image is needed\nsee the documentation")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"get_decoder": other_decoder}, "its language model is a Linear, not that of LlamaForCausalLM"),
        (
            {"get_output_embeddings": lambda: None},
            "its language model is a LlamaModel, not that of LlamaForCausalLM",
        ),
        (
            {"get_decoder": unfilled_decoder},
            "LlamaForCausalLM has 1 parameters that it lacks, such as `model.norm.weight`",
        ),
        ({"answer": refuses_text}, "Full does not run on text alone: ValueError: an image is needed"),
        (
            {"answer": lambda logits: logits[:, :, :9]},
            "LlamaForCausalLM has logits [1, 8, 16], and Full [1, 8, 9]",
        ),
    ],
)
def test_model_whose_text_is_another_function_is_refused(changes: dict[str, Any], message: str) -> None:
    found, hint = refusal_of(Full(**changes))
    assert found == f"the language model of it cannot be written: {message}"
    assert hint == "name a model of text alone"


def test_difference_of_logits_is_allowed_as_far_as_rounding_explains_it() -> None:
    for factor, is_same in ((1 + 1e-6, True), (1 + 1e-4, False)):
        full: Any = Full(answer=lambda logits, factor=factor: logits * factor)
        if is_same:
            language_model_of(full, "it")
        else:
            assert "the logits of LlamaForCausalLM differ by" in refusal_of(full)[0]


def test_text_without_a_causal_lm_is_refused_without_a_command_that_would_not_help() -> None:
    message, hint = refusal_of(Full(config=CLIPTextConfig(**SIZES)))
    assert "transformers has no causal LM for CLIPTextConfig" in message
    assert hint == "it has none for its text, CLIPTextConfig, either: name a model of text alone"


def test_directory_that_exists_and_model_that_does_not_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "no model"), str(tmp_path)]) == 2
    assert f"the language model of {tmp_path} cannot be written: it exists" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty"), str(tmp_path / "text")]) == 2
    printed = capsys.readouterr().err
    assert "it cannot be loaded: " in printed
    assert "hint: name a model of the hub, or the path of its directory" in printed

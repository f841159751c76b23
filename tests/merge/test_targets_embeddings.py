"""Adapters that PEFT writes of models whose embedding or head is adapted, trained in full, resized or tied.
PEFT's logits are the truth.

PEFT stores such a weight under up to three names, or not at all (`save_embedding_layers`). A merge, an
export, an evaluation and a run that continues the adapter compute PEFT's logits, or refuse the adapter by
name.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdp_tune.answer.find_model import find_model
from fsdp_tune.answer.loaded_model import load_model
from fsdp_tune.answer.model_requests import Request
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.tensors.peft_config import WEIGHTS_FILE
from fsdp_tune.core.tensors.peft_names import PREFIX
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.model.loading.construct import build_full
from tests.model.recipes import recipe_of

ROWS, GROWN = 60, 66
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
CHOICES: dict[str, list[str]] = {
    "none": [],
    "embedding": ["embed_tokens"],
    "head": ["lm_head"],
    "both": ["embed_tokens", "lm_head"],
}


@dataclass(frozen=True)
class Case:
    target: str
    saved: str
    is_tied: bool
    is_resized: bool
    ensures_tie: bool
    saves_embeddings: Any

    def __str__(self) -> str:
        marks = [
            "tied" if self.is_tied else "untied",
            *["resized"] * self.is_resized,
            *["ensured"] * self.ensures_tie,
        ]
        return f"{'-'.join(marks)}-adapts {self.target}-trains {self.saved}-{self.saves_embeddings}"


CASES = [
    Case(*each) for each in itertools.product(CHOICES, CHOICES, *[(False, True)] * 3, ("auto", True, False))
]


def is_fast(case: Case) -> bool:
    """Select cases that together take every branch of the code and have every combination of outcomes."""
    if case.saves_embeddings is False:  # of a grown vocabulary, part is in no file
        is_ensured = case.is_tied and case.target == "none"
        return (
            case.saved == "embedding"
            and case.is_resized
            and case.target in ("none", "head")
            and case.ensures_tie is is_ensured
        )
    if case.ensures_tie:
        return (case.target, case.saved, case.is_tied, case.is_resized, case.saves_embeddings) == (
            "none",
            "both",
            True,
            True,
            True,
        )
    if case.saves_embeddings == "auto":
        return case.saved == "none" and (
            case.target == "none" or not case.is_resized or (case.is_tied and case.target == "embedding")
        )
    may_be_resized = case.saved == "none" or (case.saved == "both" and not case.is_tied)
    return case.target == "none" and (may_be_resized or not case.is_resized)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT advises on ties and on embeddings that it saves
        yield


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    found = {}
    for is_tied in (False, True):
        torch.manual_seed(1)
        sizes = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
        config = LlamaConfig(vocab_size=ROWS, tie_word_embeddings=is_tied, initializer_range=0.3, **sizes)
        found[is_tied] = tmp_path_factory.mktemp("base")
        AutoModelForCausalLM.from_config(config).save_pretrained(found[is_tied])
    return found


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(ROWS)[None]).logits


def open_base(base: Path, case: Case) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base)
    if case.is_resized:
        torch.manual_seed(5)  # rows that are in no file are at least the same in each load
        model.resize_token_embeddings(GROWN, mean_resizing=False)
    return model


def write_adapter(base: Path, case: Case, folder: Path) -> torch.Tensor:
    """Return the logits that PEFT computes with the files."""
    config = LoraConfig(
        r=2,
        lora_alpha=4,
        task_type="CAUSAL_LM",
        target_modules=["q_proj", *CHOICES[case.target]],
        modules_to_save=list(CHOICES[case.saved]) or None,
        ensure_weight_tying=case.ensures_tie,
    )
    model = get_peft_model(open_base(base, case), config)
    torch.manual_seed(7)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, save_embedding_layers=case.saves_embeddings)
    return logits(PeftModel.from_pretrained(open_base(base, case), folder))


def outcome(compute: Callable[[], torch.Tensor], wanted: torch.Tensor) -> str | None:
    """Compare logits; return the code of a refusal."""
    try:
        found = compute()
    except FsdpTuneError as error:
        (problem,) = error.problems
        assert problem.hint or problem.ways_out
        return problem.code
    torch.testing.assert_close(found, wanted[..., : found.shape[-1]], atol=1e-4, rtol=1e-4)
    return None


def is_complete(folder: Path) -> bool:
    """Return whether the adapter has both embedding and head."""
    names = load_file(folder / WEIGHTS_FILE)
    return all(
        any(f"{PREFIX}{module}{end}" in names for end in (".weight", ".base_layer.weight"))
        for module in (EMBEDDING, HEAD)
    )


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=() if is_fast(case) else pytest.mark.slow) for case in CASES],
)
def test_logits_are_those_of_peft_or_the_adapter_is_refused(
    case: Case, bases: dict[bool, Path], tmp_path: Path
) -> None:
    base, adapter = bases[case.is_tied], tmp_path / "adapter"
    try:
        wanted = write_adapter(base, case, adapter)
    except (
        TypeError
    ):  # of tied modules, by the order of its targets: "modules_to_save cannot be applied to" adapted ones
        pytest.skip("PEFT adapts no module that it trains in full")
    vocabulary = GROWN if case.is_resized else ROWS

    def merged() -> torch.Tensor:
        merge_checkpoint(adapter, MergeOptions(output=tmp_path / "merged", dtype="fp32"))
        return logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))

    def exported() -> torch.Tensor:
        merge_checkpoint(adapter, MergeOptions(output=tmp_path / "exported", adapter=True))
        return logits(PeftModel.from_pretrained(open_base(base, case), tmp_path / "exported"))

    def evaluated() -> torch.Tensor:
        return logits(
            load_model(model := find_model(str(adapter)), Request([model], {}, ROWS, 0, 1, "cpu", "fp32"))
        )

    def continued() -> torch.Tensor:
        lora = {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj", *CHOICES[case.target]],
            "modules_to_save": [*CHOICES[case.saved]],
        }
        model = {"name_or_path": str(base), "resize_embeddings": case.is_resized}
        return logits(
            build_full(recipe_of(model, lora={**lora, "adapter": str(adapter)}), vocabulary=vocabulary)
        )

    assert outcome(exported, wanted) is None
    found = outcome(merged, wanted), outcome(evaluated, wanted)
    if not case.is_resized or is_complete(adapter):
        assert found == (None, None)
    else:
        assert found in ((None, None), ("merge-adapter-base", "adapter-does-not-fit"))
    by_name = "lora-tied" if case.is_tied and case.target + case.saved != "nonenone" else "lora-new-tokens"
    is_accepted = not case.is_tied and (not case.is_resized or case.saved == "both")
    is_accepted = is_accepted or (
        case.is_tied and case.target + case.saved == "nonenone" and not case.is_resized
    )
    assert outcome(continued, wanted) == (None if is_accepted else by_name)


def test_frozen_embedding_that_differs_from_the_base_is_refused(
    bases: dict[bool, Path], tmp_path: Path
) -> None:
    """TRL initialises the rows of reserved tokens before it adds the adapter: PEFT stores and loads such an
    embedding."""
    case = Case("head", "none", is_tied=False, is_resized=False, ensures_tie=False, saves_embeddings=True)
    wanted = write_adapter(bases[False], case, tmp_path / "adapter")
    lora = {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "lm_head"],
        "adapter": str(tmp_path / "adapter"),
    }
    recipe = recipe_of({"name_or_path": str(bases[False])}, lora=lora)
    torch.testing.assert_close(logits(build_full(recipe)), wanted, atol=1e-4, rtol=1e-4)
    tensors = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    tensors[f"{PREFIX}lm_head.base_layer.weight"][3] += 1.0
    save_file(tensors, tmp_path / "adapter" / WEIGHTS_FILE)
    with pytest.raises(FsdpTuneError, match="differs from the base's"):
        build_full(recipe)
    merge_checkpoint(tmp_path / "adapter", MergeOptions(output=tmp_path / "merged", dtype="fp32"))
    changed = logits(PeftModel.from_pretrained(open_base(bases[False], case), tmp_path / "adapter"))
    assert not torch.allclose(changed, wanted)
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), changed, atol=1e-4, rtol=1e-4
    )


def test_frozen_embedding_is_compared_in_the_dtype_of_either_file(
    bases: dict[bool, Path], tmp_path: Path
) -> None:
    case = Case("none", "none", is_tied=False, is_resized=False, ensures_tie=False, saves_embeddings=True)
    write_adapter(bases[False], case, tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "adapter" / WEIGHTS_FILE
    )
    lora = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "adapter": str(tmp_path / "adapter")}
    for precision in ("no", "bf16"):
        build_full(
            recipe_of(
                {"name_or_path": str(bases[False])}, lora=lora, precision={"mixed_precision": precision}
            )
        )

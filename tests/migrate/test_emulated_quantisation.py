"""Quantisation-aware training of axolotl and torchtune."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.migrate.imports import TORCHTUNE_STEP, from_text, loaded, row, write

QAT = "{_component_: torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer, groupsize: 64}"


@pytest.mark.parametrize(
    ("qat", "fate", "expected"),
    [
        ("{activation_dtype: int8, weight_dtype: int4, group_size: 16}", "converted", ("int8-int4", 16)),
        ("{activation_dtype: int8, weight_dtype: int4}", "converted", ("int8-int4", 32)),
        ("{weight_dtype: int4, group_size: 32}", "question", None),
        ("{activation_dtype: float8_e4m3fn, weight_dtype: int4}", "question", None),
        ("{weight_dtype: nvfp4}", "question", None),
    ],
)
def test_qat_of_axolotl_is_converted_or_a_question(
    qat: str, fate: str, expected: tuple[str, int] | None, tmp_path: Path
) -> None:
    path = write(tmp_path, "axolotl")
    text = "\n".join(
        line
        for line in path.read_text().splitlines()
        if not line.startswith(("adapter", "lora_", "load_in_4bit"))
    )
    found = from_text(tmp_path, f"{text}\nqat: {qat}\nadapter: null\n")
    assert row(found, "qat.weight_dtype")[0] == fate
    section = found.recipe.quantised_training
    assert (None if section is None else (section.train, section.group_size)) == expected


@pytest.mark.parametrize(
    "qat", ["{}", "{activation_dtype: int8, group_size: 64}", "{quantize_embedding: false}"]
)
def test_default_weight_dtype_of_axolotl_is_a_question(qat: str, tmp_path: Path) -> None:
    """It is int8, and without the question the recipe would train without emulation."""
    text = write(tmp_path, "axolotl").read_text()
    found = from_text(tmp_path, f"{text}\nqat: {qat}\n")
    assert row(found, "qat")[0] == "question"
    assert found.recipe.quantised_training is None


@pytest.mark.parametrize("later", [0, 1000])
def test_quantizer_of_torchtune_is_converted(later: int, tmp_path: Path) -> None:
    text = (
        TORCHTUNE_STEP.format("torch.optim.AdamW", "")
        + f"quantizer: {QAT}\nfake_quant_after_n_steps: {later}\n"
    )
    found = from_text(tmp_path, text)
    section = loaded(found).quantised_training
    assert section is not None
    assert (section.train, section.group_size, section.load) == ("int8-int4", 64, None)
    assert row(found, "fake_quant_after_n_steps")[0] == ("question" if later else "dropped")


def test_other_quantizer_is_a_question(tmp_path: Path) -> None:
    text = (
        TORCHTUNE_STEP.format("torch.optim.AdamW", "")
        + "quantizer: {_component_: torchtune.training.quantization.Int4WeightOnlyQATQuantizer}\n"
    )
    found = from_text(tmp_path, text)
    assert row(found, "quantizer._component_")[0] == "question"
    assert found.recipe.quantization is None
